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
