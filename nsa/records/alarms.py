"""alarms.jsonl: what a watchdog, or the run, saw in a run folder and did, one JSON object a line.

Schema, version 1: the fields of Alarm, with `schema`, `ts` (Unix time, s) and `iso` (the same, UTC)
before them. A line is written when an alarm begins, at every step that is taken because of it, and
when it is over; nothing is repeated while an alarm lasts. Page: docs/schemas/alarms.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.files import APPEND, LineFile, best_effort, open_regular, read_text, write_text
from nsa.records.heartbeat import Beat, iso, strict
from nsa.tail import lines_from_end

SCHEMA = 1
NAME = "alarms.jsonl"
TYPES = (
    "heartbeat_stall",
    "throughput_flatline",
    "gate_collapse",
    "zero_grad",
    "nan_loss",
    "loss_spike",
    "loss_plateau",
    "memory_creep",
    "fallbacks_rising",
    "disk_full",
    "folder_removed",
)
ACTIONS = ("note", "halt", "dump", "term", "kill", "clear")
"""What was done: said; asked to stop; SIGUSR1; SIGTERM; SIGKILL; or: the alarm is over."""
TAIL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A verdict with its evidence, and what was done about it."""

    type: str
    """One word of TYPES."""
    action: str = "note"
    """One word of ACTIONS."""
    rank: int | None = None
    """The rank that it is about; None for the run as a whole."""
    step: int | None = None
    """The update that it was seen at."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was measured, by name."""
    limits: dict[str, Any] = field(default_factory=dict)
    """What is allowed, by name."""
    file: str = ""
    """Where the values were read, within the run folder."""
    text: str = ""
    """The verdict as a sentence."""
    advice: str = ""
    """What to do."""
    ts: float = 0.0
    """When it was written; 0 before that."""

    @property
    def key(self) -> tuple[str, int | None]:
        """What makes it the same alarm in the next judgement."""
        return self.type, self.rank


def append_alarm(folder: Path | str, alarm: Alarm, now: float | None = None) -> Alarm:
    """Write a line and return the alarm with its time; a full disk costs the line.

    The file is opened for each: a run that starts anew moves the old one away.
    """
    stamped = dataclasses.replace(alarm, ts=round(time.time() if now is None else now, 6))
    file = LineFile(Path(folder) / NAME)
    file.append(json.dumps(as_line(stamped), allow_nan=False))
    file.close()
    return stamped


def note_watch(folder: Path | str) -> None:
    """Leave an empty file where there is none: somebody watches, and nothing has rung.

    A folder that takes no file is watched all the same; a line that is lost there says so.
    """
    with suppress(OSError):
        os.close(open_regular(Path(folder) / NAME, APPEND))


def as_line(alarm: Alarm) -> dict[str, Any]:
    """The object that stands in the file."""
    fields = dataclasses.asdict(alarm)
    ts = fields.pop("ts")
    return {"schema": SCHEMA, "ts": ts, "iso": iso(ts), **strict(fields)}


def last_alarms(folder: Path | str, most: int) -> list[Alarm]:
    """Up to `most` of the last lines, oldest first; none without the file."""
    path = Path(folder) / NAME
    found: list[Alarm] = []
    for line in lines_from_end(path, TAIL_BYTES):
        if len(found) == most:
            break
        found.append(_parse(line.text, f"{path}, {line.where}"))
    return found[::-1]


def _parse(text: str, where: str) -> Alarm:
    names = {known.name for known in dataclasses.fields(Alarm)}
    try:
        content = json.loads(text)
        schema = int(content["schema"])
        alarm = Alarm(**{name: content[name] for name in names if name in content})
        if not all(isinstance(x, str) for x in (alarm.type, alarm.action, alarm.text)):
            raise ValueError("type, action and text are texts")
        iso(alarm.ts)  # a time that there is
    except (KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a line of {NAME} ({error}): {text[:80]!r}; "
            "remove that line, or look who else writes this file"
        ) from None
    if schema > SCHEMA:
        raise ValueError(
            f"{where}: schema {schema}; this program reads up to {SCHEMA}; "
            "use the program that wrote it"
        )
    return alarm


# gate_collapse_details.json: the gates, layer by layer, when a watchdog saw them collapse.
#
# Schema, version 1: one JSON object with `version`, `ts`, `step`, `entropy_mean`, `max_gate_mean`,
# `collapse_fraction`, `gate_branch_shares`, and `layers`, one object for each layer in order, with
# the fields that the heartbeat has of a layer. Page: docs/schemas/gate_collapse_details.md.

VERSION = 1
GATE_DETAILS_NAME = "gate_collapse_details.json"
FIELDS = ("entropy_mean", "max_gate_mean", "collapse_fraction", "gate_branch_shares")


def write_gate_details(folder: Path, beat: Beat) -> Path:
    """Write what a progress line says about the gates; a full disk costs only the file."""
    content: dict[str, Any] = {"version": VERSION, "ts": beat.ts, "step": beat.step}
    try:
        layers = beat.layers()
    except (AttributeError, TypeError, ValueError):  # a line that no run of ours wrote
        layers = []
    content |= {name: beat.extra.get(name) for name in FIELDS} | {"layers": layers}
    path = folder / GATE_DETAILS_NAME
    with best_effort(path):
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def read_gate_details(folder: Path) -> dict[str, Any]:
    """Read the file of a run folder."""
    content: dict[str, Any] = json.loads(read_text(folder / GATE_DETAILS_NAME))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{folder / GATE_DETAILS_NAME} has version {content.get('version')!r}; this program "
            f"reads version {VERSION}; use the program that wrote it"
        )
    return content
