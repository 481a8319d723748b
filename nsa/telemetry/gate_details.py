"""gate_collapse_details.json: the gates, layer by layer, when a watchdog saw them collapse.

Schema, version 1: one JSON object with `version`, `ts`, `step`, `entropy_mean`, `max_gate_mean`,
`collapse_fraction`, `gate_branch_shares`, and `layers`, one object for each layer in order, with
the fields that the heartbeat has of a layer. Page: docs/schemas/gate_collapse_details.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsa.files import read_text
from nsa.telemetry.atomic import write_text
from nsa.telemetry.best_effort import best_effort
from nsa.telemetry.heartbeat import Beat

VERSION = 1
NAME = "gate_collapse_details.json"
FIELDS = ("entropy_mean", "max_gate_mean", "collapse_fraction", "gate_branch_shares")


def write_gate_details(folder: Path, beat: Beat) -> Path:
    """Write what a progress line says about the gates; a full disk costs only the file."""
    content: dict[str, Any] = {"version": VERSION, "ts": beat.ts, "step": beat.step}
    try:
        layers = beat.layers()
    except (AttributeError, TypeError, ValueError):  # a line that no run of ours wrote
        layers = []
    content |= {name: beat.extra.get(name) for name in FIELDS} | {"layers": layers}
    path = folder / NAME
    with best_effort(path):
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def read_gate_details(folder: Path) -> dict[str, Any]:
    """Read the file of a run folder."""
    content: dict[str, Any] = json.loads(read_text(folder / NAME))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{folder / NAME} has version {content.get('version')!r}; this program reads version "
            f"{VERSION}; use the program that wrote it"
        )
    return content
