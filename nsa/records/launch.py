"""run.info (what was launched, and how it went) and phase.json (the verdict on a launch phase).

Schema of run.info, version 1: lines `name: value` in the order of the fields of RunInfo, one line
per item of a list, then lines `[info] {time} {text}` as events happen, and `[done] {time} {text}`
at the end. The file is replaced atomically.
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
RUN_INFO_FILE = "run.info"
INFO, DONE = "[info] ", "[done] "


@dataclass(kw_only=True)
class RunInfo:
    """Facts of one launch."""

    version: int = VERSION
    profile: str
    run_dir: str
    """Folder of this file and of the launch logs."""
    out_dir: str
    """Folder of the run itself."""
    config: str
    """The config file; `changed` lists what differs from it."""
    gpus: str
    """`N (max_mem=...MB)` and the models."""
    ranks: int
    """Processes on this node."""
    nodes: int = 1
    node_rank: int = 0
    dataset: str
    hostname: str
    commit: str
    """Commit of the code; empty outside a repository."""
    altered: list[str] = field(default_factory=list)
    """Files that differ from the commit, as `git status --porcelain` lists them."""
    changed: list[str] = field(default_factory=list)
    """Overridden config keys: `key: value of the file -> value`."""
    environment: list[str] = field(default_factory=list)
    """NAME=value pairs set for the run."""
    exit_code: int | None = None
    """Exit code of the launcher; absent while it runs."""
    notes: list[str] = field(default_factory=list)
    """The `[info]` and `[done]` lines."""

    def note(self, text: str) -> None:
        """Add an event."""
        self.notes.append(f"{INFO}{_now()} {_line(text)}")

    def done(self, text: str, exit_code: int) -> None:
        """Add the final line and the exit code."""
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
    """Read a run.info, given the file or the folder of a launch."""
    path = path / RUN_INFO_FILE if path.is_dir() else path
    found: dict[str, Any] = {}
    kinds = get_type_hints(RunInfo)
    for line in read_text(path).splitlines():
        if line.startswith((INFO, DONE)):
            found.setdefault("notes", []).append(line)
            continue
        name, colon, value = line.partition(": ")
        if not colon or name not in kinds:
            raise ValueError(
                f"{path}: {line[:80]!r} is not a line of a run.info of version {VERSION}; the "
                "file is damaged, or written by another program"
            )
        # A list field has one line per item.
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
    # Fields without a default are required.
    needed = [
        item.name
        for item in dataclasses.fields(RunInfo)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in found]:
        raise ValueError(
            f"{path} has no line {missing[0]!r}; it is damaged; read it as text instead"
        )
    return RunInfo(**found)


def _number(text: str, name: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{path}: {name}: {text[:40]!r} is not a whole number") from None


def _now() -> str:
    return iso(time.time())


def _line(text: str) -> str:
    """Collapse all whitespace: an entry must stay on one line."""
    return " ".join(text.split())


# --- phase.json: the verdict on a launch phase, so that the next launch can skip the phase ---
# Schema, version 1: the fields of PhaseVerdict as one JSON object, in the run folder of the phase.

PHASE_VERSION = 1
PHASE_FILE = "phase.json"


@dataclass(frozen=True, kw_only=True)
class PhaseVerdict:
    """The verdict on a phase, and what was judged."""

    version: int = PHASE_VERSION
    phase: str
    judged: str
    """The criteria, as in `nsa report --at`."""
    go: bool
    time: str
    """UTC."""
    launched: dict[str, str] = field(default_factory=dict)
    """Code, config and environment. The verdict is reused only if all of them are the same."""


def write_verdict(folder: Path, verdict: PhaseVerdict) -> Path:
    """Replace phase.json in the folder."""
    write_text(folder / PHASE_FILE, json.dumps(dataclasses.asdict(verdict), indent=2) + "\n")
    return folder / PHASE_FILE


def read_verdict(folder: Path) -> PhaseVerdict | None:
    """The verdict in the folder; None if it is missing or invalid, so the phase runs again."""
    try:
        content = json.loads(read_text(folder / PHASE_FILE))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("version") != PHASE_VERSION:
        return None
    names = {item.name for item in dataclasses.fields(PhaseVerdict)}
    return PhaseVerdict(**content) if content.keys() == names else None
