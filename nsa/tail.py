"""Read complete lines of a file that another process is still writing: all of them, the last ones,
new ones as they arrive, or a sample of a large file. Memory stays bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nsa.files import open_binary, open_regular

BLOCK_BYTES = 65536


class Line(NamedTuple):
    """A line without its newline, and its place in the file for messages."""

    text: str
    where: str
    byte: int = 0
    """Offset of its first byte; 0 from `complete_lines`, which counts lines instead."""


def complete_lines(path: Path) -> Iterator[Line]:
    """Every line that ends in a newline, in order."""
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield Line(_text(line), f"line {number}")


def lines_from_end(path: Path, most_bytes: int) -> Iterator[Line]:
    """Complete lines within the last `most_bytes`, last line first.

    Lazy: reads one block at a time. A missing file has no lines.
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
    """Complete lines in order: all of them, or a sample if the file exceeds `most_bytes`.

    The sample is a quarter of `most_bytes` from the start of the file, half from its end, and the
    rest as evenly spaced blocks in between.
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
    """The (offset, length) of each piece of the sample of a large file."""
    quarter = most_bytes // 4
    num_blocks = quarter // BLOCK_BYTES
    between = size - 3 * quarter
    spans = [(0, quarter)]
    spans += [(quarter + i * between // num_blocks, BLOCK_BYTES) for i in range(num_blocks)]
    return [*spans, (size - 2 * quarter, 2 * quarter)]


def _whole_lines(block: bytes, start: int) -> Iterator[Line]:
    """The complete lines of a block, without the partial ones at its two edges."""
    begin = block.find(b"\n") + 1 if start else 0
    while (end := block.find(b"\n", begin)) >= 0:
        byte = start + begin
        yield Line(_text(block[begin:end]), f"the line at byte {byte}", byte)
        begin = end + 1


def _backwards(descriptor: int, most_bytes: int) -> Iterator[Line]:
    start = os.fstat(descriptor).st_size
    lowest = max(0, start - most_bytes)
    held = b""  # bytes from `start` up to the line yielded last
    while start > lowest:
        size = min(BLOCK_BYTES, start - lowest)
        start -= size
        held = os.pread(descriptor, size, start) + held
        while (end := held.rfind(b"\n")) >= 0:  # bytes after the last newline: a partial line
            before = held.rfind(b"\n", 0, end)
            if before < 0 and start > 0:
                break  # the line begins in an earlier block
            # A line number would require reading the whole file, so report the byte offset.
            byte = start + before + 1
            yield Line(_text(held[before + 1 : end]), f"the line at byte {byte}", byte)
            held = held[: before + 1]


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").removesuffix("\n")


# --- following a growing file ---
# Each line is returned once, unless the file is replaced or truncated. A large file is read from
# near its end only; `sample_lines` covers the part before.

MOST_LINE = 16 << 20
"""Bytes buffered while waiting for a newline; longer lines are skipped."""
SAMPLE_BYTES = 1 << 16
"""Bytes read at each sampled place."""


class Grown(NamedTuple):
    """Result of one read of a growing file."""

    lines: list[Line]
    anew: bool
    """The file was replaced or truncated: discard all lines returned before."""
    more: bool
    """There is more to read right now."""


class Follower:
    """Incremental reader: each call continues where the last one stopped."""

    def __init__(self, path: Path, most_back: int) -> None:
        """At first, and after a replacement, reading starts at most `most_back` bytes before the
        end."""
        self.path, self._most_back = path, most_back
        self.begun_at = 0
        """Byte offset where reading started; 0 unless the file was larger than `most_back`."""
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._held = b""
        self._skipping = False  # discard bytes up to the next newline

    def read(self, budget: int) -> Grown:
        """The complete lines within the next `budget` bytes; none if the file is missing."""
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
            self._skipping = self.begun_at > 0  # the first line is partial
        data = os.pread(descriptor, min(budget, status.st_size - self._offset), self._offset)
        start = self._offset - len(self._held)
        self._offset += len(data)
        return Grown(self._split(data, start), anew, status.st_size > self._offset)

    def _split(self, data: bytes, start: int) -> list[Line]:
        """The lines that end in `data`; the partial line after them is kept for the next read."""
        *whole, self._held = (self._held + data).split(b"\n")
        lines = []
        for line in whole:
            if not self._skipping:
                text = line.decode("utf-8", errors="replace")
                lines.append(Line(text, f"the line at byte {start}", start))
            self._skipping = False
            start += len(line) + 1
        if len(self._held) > MOST_LINE or self._skipping:
            self._held, self._skipping = b"", True
        return lines


def sample_lines(path: Path, end: int, places: int) -> Iterator[list[Line]]:
    """Complete lines of `places` evenly spaced blocks in the first `end` bytes of a file."""
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
                text = line.decode("utf-8", "replace")
                lines.append(Line(text, f"the line at byte {start}", start))
                start += len(line) + 1
            yield lines
