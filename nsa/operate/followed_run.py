"""Follow the growing files of a run folder: each line is read once, as it arrives.

Heartbeats and CSV tables are parsed and handed to a listener; selection.jsonl is indexed by byte
offset and parsed on request. Of a large file the end is read, and the part before it is sampled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nsa.files import open_binary
from nsa.operate.run_files import heartbeat_files
from nsa.records import TRAINING, VAL, Beat, TrainingRow, ValRow
from nsa.records.heartbeat import BOOT, PROGRESS, BrokenHeartbeat, parse_beat, parse_head
from nsa.records.tables import SELECTION, parse_row, parse_selection
from nsa.tail import Follower, Line, sample_lines

# --- heartbeats and CSV tables ---

HISTORY_BYTES = 64 << 20
"""Read from the end of the first rank's heartbeat: all of a run of 50,000 steps."""
RANK_BYTES = 32 << 20
"""For other ranks, where only the times of beats matter; less when there are many ranks."""
ALL_RANKS_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
PLACES = 512
"""Sample positions in the part before that."""
MOST_RANKS = 64
TABLES = {VAL: (ValRow, RANK_BYTES), TRAINING: (TrainingRow, HISTORY_BYTES)}
"""CSV tables that are followed, and how much of their end is read."""


class Listener(Protocol):
    """Gets what was read. `restart_*`: the file was replaced; forget what came from it."""

    def restart_table(self, name: str) -> None: ...
    def add_row(self, name: str, row: TrainingRow | ValRow) -> None: ...
    def restart_rank(self, rank: int) -> None: ...
    def add_beat(self, rank: int, beat: Beat) -> None: ...
    def restart_progress(self) -> None: ...
    def add_progress(self, beat: Beat) -> None: ...
    def resume_at(self, step: int) -> None:
        """A process of the first rank booted at this step: later points are undone."""


class FollowedRun:
    """Reads the files of one run folder in bounded pieces, for one listener."""

    def __init__(self, folder: Path, listener: Listener) -> None:
        self.folder, self._listener = folder, listener
        self.selection = SelectionIndex(folder)
        self.version = 0
        """Increases with every update."""
        self._problems: dict[str, str] = {}  # the last problem of each kind
        self._bad_lines: dict[str, int] = {}
        self._notes: dict[str, str] = {}
        self._pid: int | None = None  # the current writer; lines of other pids are left out
        self._foreign = 0
        self._beats: dict[int, Follower] = {}
        self._tables = {name: Follower(folder / name, most) for name, (_, most) in TABLES.items()}

    def read(self, patience_s: float = 0.1) -> bool:
        """Read for about this many seconds; returns whether more is left."""
        until = time.monotonic() + patience_s
        grew, more = self.selection.read(CHUNK_BYTES)
        self.version += grew
        for name in TABLES:
            more |= self._read_table(name, until)
        self._find_ranks()
        for rank in sorted(self._beats):
            more |= self._read_rank(rank, until)
        return more

    def problems(self) -> list[str]:
        """What could not be read or was left out, as sentences."""
        found = [*self._problems.values(), *self._notes.values(), *self.selection.problems]
        for path, count in self._bad_lines.items():
            found.append(f"{path}: {count} lines were skipped")
        if self._foreign:
            found.append(
                f"{self.folder}: {self._foreign} lines are from another process than the one that "
                "started last, and not in the curves"
            )
        return found

    def _read_table(self, name: str, until: float) -> bool:
        follower, more = self._tables[name], True
        while more and time.monotonic() < until:
            try:
                lines, anew, more = follower.read(CHUNK_BYTES)
            except OSError as error:
                self._problems[name] = f"{follower.path}: {error.strerror or error}"
                return False
            self._problems.pop(name, None)
            if anew:
                self._listener.restart_table(name)
                self._forget_bad(follower.path)
            for line in lines:
                self._add_row(name, follower.path, line)
            self.version += anew or bool(lines)
        return more

    def _add_row(self, name: str, path: Path, line: Line) -> None:
        kind: Any = TABLES[name][0]
        try:
            row = parse_row(kind, line, path)
        except ValueError as error:
            self._note_bad(path, error)
            return
        if row is not None:
            self._listener.add_row(name, row)

    def _find_ranks(self) -> None:
        try:
            found = heartbeat_files(self.folder)
        except OSError as error:
            self._problems["folder"] = f"{self.folder}: {error.strerror or error}"
            return
        self._problems.pop("folder", None)
        if len(found) > MOST_RANKS:
            self._notes["ranks"] = f"{self.folder}: {len(found)} ranks; {MOST_RANKS} are followed"
        for rank, path in found[:MOST_RANKS]:
            if rank not in self._beats:
                is_first = rank == found[0][0]
                most = HISTORY_BYTES if is_first else min(RANK_BYTES, ALL_RANKS_BYTES // len(found))
                self._beats[rank] = Follower(path, most)
                self._listener.restart_rank(rank)

    def _read_rank(self, rank: int, until: float) -> bool:
        follower, more = self._beats[rank], True
        is_first = rank == min(self._beats)
        while more and time.monotonic() < until:
            try:
                lines, anew, more = follower.read(CHUNK_BYTES)
                if anew:
                    self._forget_bad(follower.path)
                    self._listener.restart_rank(rank)
                    if is_first:
                        self._restart_progress(follower)
            except OSError as error:
                self._problems[f"rank {rank}"] = f"{follower.path}: {error.strerror or error}"
                return False
            self._problems.pop(f"rank {rank}", None)
            for line in lines:
                self._add_beat(rank, is_first, follower.path, line)
            self.version += anew or bool(lines)
        return more

    def _restart_progress(self, follower: Follower) -> None:
        self._listener.restart_progress()
        self._pid, self._foreign = None, 0
        if follower.begun_at:
            self._notes["sampled"] = (
                f"{follower.path}: {(follower.begun_at >> 20) + (HISTORY_BYTES >> 20):,} MiB; the "
                f"last {HISTORY_BYTES >> 20} MiB are read, and the part before them is sampled at "
                f"{PLACES} places"
            )
            for lines in sample_lines(follower.path, follower.begun_at, PLACES):
                self._add_sample(follower.path, lines)

    def _add_sample(self, path: Path, lines: list[Line]) -> None:
        """Use the first progress line of a sampled block."""
        for line in lines:
            if '"progress"' in line.text:
                try:
                    beat = parse_beat(path, line)
                except BrokenHeartbeat:
                    continue  # a damaged file is reported when its end is read
                if beat.msg == PROGRESS:
                    self._listener.add_progress(beat)
                    return

    def _add_beat(self, rank: int, is_first: bool, path: Path, line: Line) -> None:
        try:
            beat = parse_beat(path, line) if is_first else parse_head(path, line)
        except BrokenHeartbeat as error:
            self._note_bad(path, error)
            return
        self._listener.add_beat(rank, beat)
        if not is_first:
            return
        if beat.msg == BOOT:
            self._pid = beat.pid
            self._listener.resume_at(beat.step)
        elif self._pid is None:
            self._pid = beat.pid
        elif beat.pid is not None and beat.pid != self._pid:
            self._foreign += 1
            return
        if beat.msg == PROGRESS:
            self._listener.add_progress(beat)

    def _forget_bad(self, path: Path) -> None:
        self._bad_lines.pop(str(path), None)
        self._problems.pop(f"line {path.name}", None)

    def _note_bad(self, path: Path, error: ValueError) -> None:
        self._bad_lines[str(path)] = self._bad_lines.get(str(path), 0) + 1
        self._problems[f"line {path.name}"] = str(error)


# --- selection.jsonl: an index of byte offsets ---

MOST_BACK = 64 << 20
MOST_MAPS = 512
PLACE = re.compile(r"the line at byte (\d+)")


class _Entry(NamedTuple):
    step: int
    offset: int
    num_bytes: int


class SelectionIndex:
    """Byte offsets of the selection maps, by rising step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SELECTION
        self.problems: list[str] = []
        self._follower = Follower(self.path, MOST_BACK)
        self._entries: list[_Entry] = []

    @property
    def steps(self) -> list[int]:
        """Steps that have a map."""
        return [entry.step for entry in self._entries]

    def read(self, budget: int) -> tuple[bool, bool]:
        """Read new lines; returns whether the file grew, and whether more is left."""
        try:
            lines, anew, more = self._follower.read(budget)
        except OSError as error:
            self.problems = [f"{self.path}: {error.strerror or error}"]
            return False, False
        if anew:
            self._entries, self.problems = [], []
        for line in lines:
            match = PLACE.fullmatch(line.where)
            assert match is not None
            self._add(line.text, int(match[1]))
        return anew or bool(lines), more

    def load(self, step: int) -> dict[str, Any] | None:
        """The map of a step, or the last one before it; None if there is none."""
        entries = [entry for entry in self._entries if entry.step <= step] or self._entries[:1]
        if not entries:
            return None
        entry = entries[-1]
        with open_binary(self.path) as file:
            content = os.pread(file.fileno(), entry.num_bytes, entry.offset)
        text = content.decode("utf-8", "replace")
        where = f"{self.path}, the line at byte {entry.offset}"
        return dataclasses.asdict(parse_selection(text, where)) | {"steps": self.steps}

    def _add(self, text: str, offset: int) -> None:
        where = f"{self.path}, the line at byte {offset}"
        try:
            content = json.loads(text)
            step = content.get("step") if isinstance(content, dict) else None
            if type(step) is not int:
                raise ValueError("it has no step")
        except (ValueError, RecursionError) as error:
            self.problems = [f"{where}: not a line of {SELECTION} ({error})"]
            return
        while self._entries and self._entries[-1].step >= step:
            self._entries.pop()
        # A rollback or resume repeats steps: the newer line replaces the older ones.
        self._entries.append(_Entry(step, offset, len(text.encode())))
        del self._entries[:-MOST_MAPS]
