"""training.csv and val.csv: one line for each logged step, added while the run goes on.

Schema, version 1: a header line, then numbers. training.csv: `step` (optimizer updates done),
`loss` (nats per token of that update), `lr` (of that update), `toks_per_s` (of all ranks, since
the line before). val.csv: `step`, `loss` (nats per token on held-out rows), `ppl` (e to the loss).

Lines are appended, not renamed into place, so that `tail -f` follows the file; a reader may meet a
last line that is not complete, and leaves it out.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar


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


Row = TypeVar("Row", TrainingRow, ValRow)

TRAINING = "training.csv"
VAL = "val.csv"
FORMATS = {"step": "d", "loss": ".6f", "lr": ".6e", "toks_per_s": ".0f", "ppl": ".6f"}


class CsvLog(Generic[Row]):
    """Keeps the rows of a run, and appends each to its file; without a path it only keeps them."""

    def __init__(self, kind: type[Row], path: Path | None) -> None:
        self.rows: list[Row] = []
        self.path = path
        if path is not None:
            path.write_text(",".join(kind._fields) + "\n", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Add one row; its line reaches the file in one piece before this returns."""
        self.rows.append(row)
        if self.path is None:
            return
        cells = (format(v, FORMATS[k]) for k, v in zip(row._fields, row, strict=True))
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(",".join(cells) + "\n")


def read_rows(kind: type[Row], path: Path) -> list[Row]:
    """Read what was logged so far, without a last line that is not complete."""
    text = path.read_text(encoding="utf-8")
    complete = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    if not complete:
        return []
    header, *lines = complete
    if tuple(header) != kind._fields:
        raise ValueError(
            f"{path}: the header is {','.join(header)!r}, not {','.join(kind._fields)!r}; "
            "the file is of another version or another program"
        )
    return [kind(int(line[0]), *map(float, line[1:])) for line in lines]
