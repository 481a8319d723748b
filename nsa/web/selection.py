"""selection.jsonl as an index: where the map of each step lies; it is read when asked for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from nsa.files import open_binary
from nsa.telemetry.follow import Follower
from nsa.telemetry.selection_file import NAME, parse_selection

MOST_BACK = 64 << 20
MOST_MAPS = 512
PLACE = re.compile(r"the line at byte (\d+)")


class _Entry(NamedTuple):
    step: int
    offset: int
    num_bytes: int


class SelectionIndex:
    """The steps that have a map, by rising step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.problems: list[str] = []
        self._follower = Follower(self.path, MOST_BACK)
        self._entries: list[_Entry] = []

    @property
    def steps(self) -> list[int]:
        """Those that can be asked for."""
        return [entry.step for entry in self._entries]

    def read(self, budget: int) -> tuple[bool, bool]:
        """Follow the file; say whether it grew, and whether there is more."""
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
        """The map of a step, or of the last one before it; None without any."""
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
            self.problems = [f"{where}: not a line of {NAME} ({error})"]
            return
        while self._entries and self._entries[-1].step >= step:
            self._entries.pop()
        self._entries.append(_Entry(step, offset, len(text.encode())))
        del self._entries[:-MOST_MAPS]
