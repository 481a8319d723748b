"""phase.json: the verdict on a phase of a launch, so that the next launch need not repeat it.

Schema, version 1: the fields of PhaseVerdict, as one JSON object, in the folder of the phase's run.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from nsa.files import read_text
from nsa.telemetry.atomic import write_text

VERSION = 1
NAME = "phase.json"


@dataclass(frozen=True, kw_only=True)
class PhaseVerdict:
    """How a phase was judged, and of what."""

    version: int = VERSION
    phase: str
    judged: str
    """What it was held to, as in `nsa report --at`."""
    go: bool
    time: str
    """UTC."""
    launched: dict[str, str] = field(default_factory=dict)
    """Code, config and environment; the verdict stands for a launch with the same."""


def write_verdict(folder: Path, verdict: PhaseVerdict) -> Path:
    """Replace phase.json in the folder."""
    write_text(folder / NAME, json.dumps(dataclasses.asdict(verdict), indent=2) + "\n")
    return folder / NAME


def read_verdict(folder: Path) -> PhaseVerdict | None:
    """The verdict on the run in the folder; None where there is none that can be read."""
    try:
        content = json.loads(read_text(folder / NAME))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return None
    names = {item.name for item in dataclasses.fields(PhaseVerdict)}
    return PhaseVerdict(**content) if content.keys() == names else None
