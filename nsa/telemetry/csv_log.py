"""training.csv and val.csv: one line for each logged step, added while the run goes on.

Schema, version 1: a header line, then numbers. training.csv: `step` (optimizer updates done),
`loss` (nats per token of that update), `lr` (of that update), `toks_per_s` (of all ranks, since
the line before). val.csv: `step`, `loss` (nats per token on held-out rows), `ppl` (e to the loss).

Lines are appended, not renamed into place, so that `tail -f` follows the file; a reader may meet a
last line that is not complete, and leaves it out. A full disk costs lines, not the run.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, get_type_hints

from nsa.files import is_regular, read_text
from nsa.telemetry.atomic import write_text
from nsa.telemetry.best_effort import LineFile, best_effort
from nsa.telemetry.tail import Line, lines_from_end, sampled_lines


class TrainingRow(NamedTuple):
    """A line of training.csv."""

    step: int
    loss: float
    lr: float
    toks_per_s: float


class ValRow(NamedTuple):
    """A line of val.csv."""

    step: int
    loss: float
    ppl: float


Row = TypeVar("Row", bound=NamedTuple)
"""A tuple of ints and floats with names; the first is the step."""

TRAINING = "training.csv"
VAL = "val.csv"
TAIL_BYTES = 1 << 20
"""As far as last_rows looks back."""
FORMATS = {"lr": ".6e", "toks_per_s": ".0f"}
"""Columns that are not written as whole numbers, or with six digits after the point."""


class CsvLog(Generic[Row]):
    """Keeps the rows of a run, and appends each to its file; without a path it only keeps them."""

    def __init__(self, kind: type[Row], path: Path | None, resumed_at: int = 0) -> None:
        """The file starts anew; a run that goes on from a step keeps its rows up to that one."""
        self.rows: list[Row] = []
        self.path = path
        if path is None:
            return
        if resumed_at and is_regular(path):
            self.rows = [row for row in read_rows(kind, path) if row[0] <= resumed_at]
        self._head = ",".join(kind._fields) + "\n"
        self._write(path)
        self.file = LineFile(path, self._head)

    def renew(self) -> None:
        """Write the file anew with all rows, where it was removed; the next row opens it."""
        if self.path is not None:
            self.file.close()
            self._write(self.path)

    def _write(self, path: Path) -> None:
        with best_effort(path):
            write_text(path, self._head + "".join(f"{_line(row)}\n" for row in self.rows))

    @property
    def num_dropped(self) -> int:
        """Lines that could not be written."""
        return 0 if self.path is None else self.file.num_dropped

    def append(self, row: Row) -> None:
        """Add one row; its line reaches the file in one piece before this returns."""
        self.rows.append(row)
        if self.path is not None:
            self.file.append(_line(row))


def _line(row: NamedTuple) -> str:
    usual = ("d" if isinstance(value, int) else ".6f" for value in row)
    cells = zip(row._fields, row, usual, strict=True)
    return ",".join(format(value, FORMATS.get(name, form)) for name, value, form in cells)


def read_rows(kind: type[Row], path: Path) -> list[Row]:
    """Read what was logged so far, without a last line that is not complete."""
    text = read_text(path, None)
    complete = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    if not complete:
        return []
    header, *lines = complete
    if tuple(header) != kind._fields:
        raise ValueError(
            f"{path}: the header is {','.join(header)!r}, not {','.join(kind._fields)!r}; "
            "the file is of another version or another program"
        )
    types = _types(kind)
    return [_row(kind, types, cells, f"{path}, line {n}") for n, cells in enumerate(lines, start=2)]


def last_rows(kind: type[Row], path: Path, most: int) -> list[Row]:
    """Read up to `most` of the last complete lines, oldest first, whatever the file's size.

    The header is not among them; a file that is not there has none.
    """
    types = _types(kind)
    found: list[Row] = []
    for line in lines_from_end(path, TAIL_BYTES):
        cells = line.text.split(",")
        if len(found) == most or tuple(cells) == kind._fields:
            break
        found.append(_row(kind, types, cells, f"{path}, {line.where}"))
    return found[::-1]


def sample_rows(kind: type[Row], path: Path, most_bytes: int) -> tuple[list[Row], list[str]]:
    """The rows of the whole file, or of a larger one a sample, and a word on those that are none.

    For a reader that shows what it can; a file that is not there has no rows.
    """
    found: list[Row] = []
    problems: list[str] = []
    try:
        lines = [*sampled_lines(path, most_bytes)]
    except FileNotFoundError:
        return [], []
    for line in lines:
        try:
            row = parse_row(kind, line, path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if row is not None:
            found.append(row)
    return found, problems


def parse_row(kind: type[Row], line: Line, path: Path) -> Row | None:
    """Read a line of the file `path`; None for its header, ValueError for any other text."""
    cells = line.text.split(",")
    if tuple(cells) == kind._fields:
        return None
    return _row(kind, _types(kind), cells, f"{path}, {line.where}")


@cache
def _types(kind: type[NamedTuple]) -> tuple[type, ...]:
    return tuple(get_type_hints(kind).values())


def _row(kind: type[Row], types: Sequence[type], cells: Sequence[str], where: str) -> Row:
    try:
        return kind._make(cast(cell) for cast, cell in zip(types, cells, strict=True))
    except ValueError as error:
        raise ValueError(
            f"{where}: {','.join(cells)!r} is not {','.join(kind._fields)} ({error}); "
            "remove that line, or look who else writes this file"
        ) from None
