"""run.info: what was launched, from which code, with which changes, and how it went.

Schema, version 1: lines `name: value` in the order of the fields of RunInfo, a line for each item
of a list, then lines `[info] {time} {text}` as things happen, and `[done] {time} {text}` at the
end. The file is replaced as a whole, so it is never half written.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from nsa.files import read_text, write_text
from nsa.records.heartbeat import iso

VERSION = 1
NAME = "run.info"
INFO, DONE = "[info] ", "[done] "


@dataclass(kw_only=True)
class RunInfo:
    """A launch."""

    version: int = VERSION
    profile: str
    run_dir: str
    """Where this file and the logs of the launch are."""
    out_dir: str
    """Where the run itself is."""
    config: str
    """The file; `changed` has what differs from it."""
    gpus: str
    """`N (max_mem=...MB)` and the models."""
    ranks: int
    """Processes on this node."""
    nodes: int = 1
    node_rank: int = 0
    dataset: str
    hostname: str
    commit: str
    """Of the code; empty outside a repository."""
    altered: list[str] = field(default_factory=list)
    """Files that differ from the commit, as git lists them: letters, and the path."""
    changed: list[str] = field(default_factory=list)
    """Config keys that do not have the value of the file: `key: value of the file -> value`."""
    environment: list[str] = field(default_factory=list)
    """NAME=value that the run starts with."""
    exit_code: int | None = None
    """Of the launcher; missing while it is at work."""
    notes: list[str] = field(default_factory=list)
    """The lines `[info]` and `[done]`."""

    def note(self, text: str) -> None:
        """Add what has happened."""
        self.notes.append(f"{INFO}{_now()} {_line(text)}")

    def done(self, text: str, exit_code: int) -> None:
        """Add how it ended."""
        self.exit_code = exit_code
        self.notes.append(f"{DONE}{_now()} {_line(text)}")


def write_run_info(path: Path, info: RunInfo) -> Path:
    """Replace the file."""
    lines: list[str] = []
    for item in dataclasses.fields(info):
        value = getattr(info, item.name)
        if item.name == "notes":
            lines += value
        elif isinstance(value, list):
            lines += [f"{item.name}: {_line(entry)}" for entry in value]
        elif value is not None:
            lines.append(f"{item.name}: {_line(str(value))}")
    write_text(path, "\n".join(lines) + "\n")
    return path


def read_run_info(path: Path) -> RunInfo:
    """Read the file, or that of the folder of a launch."""
    path = path / NAME if path.is_dir() else path
    found: dict[str, Any] = {}
    kinds = get_type_hints(RunInfo)
    for line in read_text(path).splitlines():
        if line.startswith((INFO, DONE)):
            found.setdefault("notes", []).append(line)
            continue
        name, colon, value = line.partition(": ")
        if not colon or name not in kinds:
            raise ValueError(
                f"{path}: {line[:80]!r} is no line of a run.info of version {VERSION}; the file is "
                "damaged, or of another program"
            )
        if kinds[name] == list[str]:
            found.setdefault(name, []).append(value)
        else:
            found[name] = value if kinds[name] is str else _number(value, name, path)
    return _checked(found, path)


def _checked(found: dict[str, Any], path: Path) -> RunInfo:
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {found.get('version')!r}; this program reads version {VERSION}; "
            "use the program that wrote it"
        )
    needed = [
        item.name
        for item in dataclasses.fields(RunInfo)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{path} has no line {missing[0]!r}; it is damaged; look at it by eye")
    return RunInfo(**found)


def _number(text: str, name: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{path}: {name}: {text[:40]!r} is not a whole number") from None


def _now() -> str:
    return iso(time.time())


def _line(text: str) -> str:
    """On one line, whatever the text holds."""
    return " ".join(text.split())


# phase.json: the verdict on a phase of a launch, so that the next launch need not repeat it.
#
# Schema, version 1: the fields of PhaseVerdict, as one JSON object, in the folder of the phase's
# run.

PHASE_VERSION = 1
PHASE_NAME = "phase.json"


@dataclass(frozen=True, kw_only=True)
class PhaseVerdict:
    """How a phase was judged, and of what."""

    version: int = PHASE_VERSION
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
    write_text(folder / PHASE_NAME, json.dumps(dataclasses.asdict(verdict), indent=2) + "\n")
    return folder / PHASE_NAME


def read_verdict(folder: Path) -> PhaseVerdict | None:
    """The verdict on the run in the folder; None where there is none that can be read."""
    try:
        content = json.loads(read_text(folder / PHASE_NAME))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("version") != PHASE_VERSION:
        return None
    names = {item.name for item in dataclasses.fields(PhaseVerdict)}
    return PhaseVerdict(**content) if content.keys() == names else None
