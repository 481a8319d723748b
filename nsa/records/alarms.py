"""alarms.jsonl (what the watchdog or the run detected and did) and gate_collapse_details.json.

Schema of alarms.jsonl, version 1 (docs/schemas/alarms.md): one JSON object per line: `schema`, `ts`
(Unix time, s), `iso` (the same, UTC), then the fields of Alarm. A line is written when an alarm
begins, at every action taken because of it, and when it clears; an ongoing alarm is not repeated.
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
ALARMS_FILE = "alarms.jsonl"
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
"""note: only logged; halt: .HALT written; dump: SIGUSR1; term: SIGTERM; kill: SIGKILL; clear: the
alarm is over."""
TAIL_BYTES = 1 << 20
"""How far back `last_alarms` reads."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One alarm with its evidence, and the action taken."""

    type: str
    """One of TYPES."""
    action: str = "note"
    """One of ACTIONS."""
    rank: int | None = None
    """The rank concerned; None for the run as a whole."""
    step: int | None = None
    """The update at which it was detected."""
    values: dict[str, Any] = field(default_factory=dict)
    """Measured values by name."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Allowed values by name."""
    file: str = ""
    """The file in the run folder that the values came from."""
    text: str = ""
    """The alarm as a sentence."""
    advice: str = ""
    """What to do."""
    ts: float = 0.0
    """When it was written; 0 before that."""

    @property
    def key(self) -> tuple[str, int | None]:
        """Two alarms with the same key are the same ongoing alarm."""
        return self.type, self.rank


def append_alarm(folder: Path | str, alarm: Alarm, now: float | None = None) -> Alarm:
    """Append a line and return the alarm with its timestamp; on a full disk, warn and continue.

    The file is reopened for each line, because a new run moves the old file away.
    """
    stamped = dataclasses.replace(alarm, ts=round(time.time() if now is None else now, 6))
    file = LineFile(Path(folder) / ALARMS_FILE)
    file.append(json.dumps(as_line(stamped), allow_nan=False))
    file.close()
    return stamped


def note_watch(folder: Path | str) -> None:
    """Create an empty file if there is none: a watchdog is active and has no alarm yet.

    Errors are ignored here; `append_alarm` warns about them when a line is lost.
    """
    with suppress(OSError):
        os.close(open_regular(Path(folder) / ALARMS_FILE, APPEND))


def as_line(alarm: Alarm) -> dict[str, Any]:
    """The JSON object of an alarm's line."""
    fields = dataclasses.asdict(alarm)
    ts = fields.pop("ts")
    return {"schema": SCHEMA, "ts": ts, "iso": iso(ts), **strict(fields)}


def last_alarms(folder: Path | str, most: int) -> list[Alarm]:
    """Up to `most` of the last alarms, oldest first; none if the file is missing."""
    path = Path(folder) / ALARMS_FILE
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
        iso(alarm.ts)  # raises if the timestamp is out of range
    except (KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a line of {ALARMS_FILE} ({error}): {text[:80]!r}; "
            "remove that line, or find out what else writes this file"
        ) from None
    if schema > SCHEMA:
        raise ValueError(
            f"{where}: schema {schema}; this program reads up to {SCHEMA}; "
            "use the program that wrote it"
        )
    return alarm


# --- gate_collapse_details.json: the gates by layer when the watchdog saw them collapse ---
# Schema, version 1 (docs/schemas/gate_collapse_details.md): one JSON object with `version`, `ts`,
# `step`, FIELDS, and `layers`: one object per layer with the layer fields of the heartbeat.

VERSION = 1
GATE_DETAILS_FILE = "gate_collapse_details.json"
FIELDS = ("entropy_mean", "max_gate_mean", "collapse_fraction", "gate_branch_shares")


def write_gate_details(folder: Path, beat: Beat) -> Path:
    """Write the gate statistics of a progress line; on a full disk, warn and continue."""
    content: dict[str, Any] = {"version": VERSION, "ts": beat.ts, "step": beat.step}
    try:
        layers = beat.layers()
    except (AttributeError, TypeError, ValueError):  # a line that this program did not write
        layers = []
    # Missing fields become null: a partial record is better than none.
    content |= {name: beat.extra.get(name) for name in FIELDS} | {"layers": layers}
    path = folder / GATE_DETAILS_FILE
    with best_effort(path):
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def read_gate_details(folder: Path) -> dict[str, Any]:
    """Read the file of a run folder."""
    content: dict[str, Any] = json.loads(read_text(folder / GATE_DETAILS_FILE))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{folder / GATE_DETAILS_FILE} has version {content.get('version')!r}; this program "
            f"reads version {VERSION}; use the program that wrote it"
        )
    return content
