"""Complete lines of a file that another process is still writing: all, the last, or a sample."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nsa.files import open_binary, open_regular

BLOCK_BYTES = 65536


class Line(NamedTuple):
    """A line without its end, and where it stands, for messages."""

    text: str
    where: str


def complete_lines(path: Path) -> Iterator[Line]:
    """Every line that has its end, in order."""
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield Line(_text(line), f"line {number}")


def lines_from_end(path: Path, most_bytes: int) -> Iterator[Line]:
    """Lines that have their end, the last one first, looking at the last `most_bytes` only.

    It reads as it is asked, a block at a time. A file that is not there has no lines.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return
    try:
        yield from _backwards(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def sampled_lines(path: Path, most_bytes: int) -> Iterator[Line]:
    """Lines that have their end, in order: all of them, or of a larger file a sample.

    A quarter of `most_bytes` is its start, a half its end, and the rest blocks evenly between.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size <= most_bytes:
            yield from complete_lines(path)
            return
        for start, length in _spans(size, most_bytes):
            yield from _whole_lines(os.pread(descriptor, length, start), start)
    finally:
        os.close(descriptor)


def _spans(size: int, most_bytes: int) -> list[tuple[int, int]]:
    """Where the sample of a large file lies: the first byte and the length of each piece."""
    quarter = most_bytes // 4
    num_blocks = quarter // BLOCK_BYTES
    between = size - 3 * quarter
    spans = [(0, quarter)]
    spans += [(quarter + i * between // num_blocks, BLOCK_BYTES) for i in range(num_blocks)]
    return [*spans, (size - 2 * quarter, 2 * quarter)]


def _whole_lines(block: bytes, start: int) -> Iterator[Line]:
    """The lines of a piece of a file without the two that its edges cut."""
    begin = block.find(b"\n") + 1 if start else 0
    while (end := block.find(b"\n", begin)) >= 0:
        yield Line(_text(block[begin:end]), f"the line at byte {start + begin}")
        begin = end + 1


def _backwards(descriptor: int, most_bytes: int) -> Iterator[Line]:
    start = os.fstat(descriptor).st_size
    lowest = max(0, start - most_bytes)
    held = b""  # the file from `start` to the line that was given last
    while start > lowest:
        size = min(BLOCK_BYTES, start - lowest)
        start -= size
        held = os.pread(descriptor, size, start) + held
        while (end := held.rfind(b"\n")) >= 0:  # what follows the last line end is a cut line
            before = held.rfind(b"\n", 0, end)
            if before < 0 and start > 0:
                break  # the line begins further to the left
            # Its number would cost reading the whole file, so it is named by its place.
            yield Line(_text(held[before + 1 : end]), f"the line at byte {start + before + 1}")
            held = held[: before + 1]


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").removesuffix("\n")


# The lines of a file as it grows: each is given once, and memory stays bounded.
#
# A file that was replaced or cut is read anew; a file that is large is read from somewhere near its
# end, and its earlier part can be sampled.

MOST_LINE = 16 << 20
"""Bytes of a line that are held while its end is waited for; a longer line is passed over."""
SAMPLE_BYTES = 1 << 16


class Grown(NamedTuple):
    """What a file had to give."""

    lines: list[Line]
    anew: bool
    """Whether everything that was given before is void: this is another file now."""
    more: bool
    """Whether there is more to read already."""


class Follower:
    """Reads a file from where it stopped the last time."""

    def __init__(self, path: Path, most_back: int) -> None:
        """At first, and after a replacement, it begins at most so many bytes before the end."""
        self.path, self._most_back = path, most_back
        self.begun_at = 0
        """The byte that reading began at; 0 unless the file was larger than `most_back`."""
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._held = b""
        self._skipping = False  # until the end of a line that is not wanted

    def read(self, budget: int) -> Grown:
        """The complete lines within the next `budget` bytes. A file that is not there has none."""
        try:
            with open_binary(self.path) as file:
                return self._read(file.fileno(), budget)
        except FileNotFoundError:
            anew, self._file = self._file is not None, None
            return Grown([], anew, False)

    def _read(self, descriptor: int, budget: int) -> Grown:
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        anew = file != self._file or status.st_size < self._offset
        if anew:
            self._file, self._held = file, b""
            self.begun_at = self._offset = max(0, status.st_size - self._most_back)
            self._skipping = self.begun_at > 0
        data = os.pread(descriptor, min(budget, status.st_size - self._offset), self._offset)
        start = self._offset - len(self._held)
        self._offset += len(data)
        return Grown(self._split(data, start), anew, status.st_size > self._offset)

    def _split(self, data: bytes, start: int) -> list[Line]:
        """The lines that end in the data; what follows the last end is held."""
        *whole, self._held = (self._held + data).split(b"\n")
        lines = []
        for line in whole:
            if not self._skipping:
                text = line.decode("utf-8", errors="replace")
                lines.append(Line(text, f"the line at byte {start}"))
            self._skipping = False
            start += len(line) + 1
        if len(self._held) > MOST_LINE or self._skipping:
            self._held, self._skipping = b"", True
        return lines


def sample_lines(path: Path, end: int, places: int) -> Iterator[list[Line]]:
    """The complete lines in blocks that lie evenly in the first `end` bytes of a file."""
    with open_binary(path) as file:
        for place in range(places):
            start = end * place // places
            data = os.pread(file.fileno(), SAMPLE_BYTES, start)
            if start:
                cut, _, data = data.partition(b"\n")
                start += len(cut) + 1
            *whole, _ = data.split(b"\n")
            lines = []
            for line in whole:
                lines.append(Line(line.decode("utf-8", "replace"), f"the line at byte {start}"))
                start += len(line) + 1
            yield lines
