"""selection.jsonl: which blocks the queries read, layer by layer, at some of the logged steps.

Schema, version 1: one JSON object a line. `schema`, `ts` (Unix time, s), `step`, `block_tokens`
(l_sel), `num_blocks` (of a sequence), `bins`, `edges` (the largest distance of each bin, in
blocks), and two lists by layer and KV head. `reads_pct`: for each bin of queries the share of pairs
read in each bin of blocks, in percent, without the zeros at its end. `distance_pct`: share of all
reads in each bin of distance, in percent; after them that of the sequence's first block, which
every query reads, read from two blocks away or more. Page: docs/schemas/selection_jsonl.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.telemetry.best_effort import LineFile
from nsa.telemetry.tail import complete_lines

if TYPE_CHECKING:  # readers of run folders start without torch
    from nsa.model.selection_map import LayerMap

SCHEMA = 1
NAME = "selection.jsonl"
MOST_CELLS = 4_000_000
"""Numbers that a reader takes from a line at most: more is no line of ours."""


@dataclass(frozen=True, kw_only=True)
class SelectionRecord:
    """A line, read back."""

    schema: int = SCHEMA
    ts: float
    step: int
    block_tokens: int
    num_blocks: int
    bins: int
    edges: list[int]
    reads_pct: list[list[list[list[int]]]]
    """By layer, KV head, bin of queries, bin of blocks; zeros at the end are left out."""
    distance_pct: list[list[list[float]]]
    """By layer, KV head, bin of distance; the first block last."""


class SelectionFile:
    """Appends the lines of a run; it is opened with the first."""

    def __init__(self, out_dir: Path | str) -> None:
        self.path = Path(out_dir) / NAME
        self._file: LineFile | None = None

    def append(self, step: int, maps: Sequence[LayerMap], now: float | None = None) -> None:
        """Add a line; `maps` is AttentionStats.selection_maps()."""
        self._file = self._file or LineFile(self.path)
        ts = round(time.time() if now is None else now, 6)
        content = {"schema": SCHEMA, "ts": ts, "step": step} | _content(maps)
        self._file.append(json.dumps(content, allow_nan=False, separators=(",", ":")))

    def renew(self) -> None:
        """Go on in a new file."""
        if self._file is not None:
            self._file.close()


def _content(maps: Sequence[LayerMap]) -> dict[str, Any]:
    first = maps[0]
    return {
        "block_tokens": first.block_tokens,
        "num_blocks": first.num_blocks,
        "bins": len(first.reads[0]),
        "edges": first.edges,
        "reads_pct": [
            [[_percent_row(row) for row in group] for group in layer.reads] for layer in maps
        ],
        "distance_pct": [
            [[round(100 * share, 2) for share in group] for group in layer.distances]
            for layer in maps
        ],
    }


def _percent_row(shares: Sequence[float]) -> list[int]:
    row = [round(100 * share) for share in shares]
    while row and row[-1] == 0:
        row.pop()
    return row


def read_selection(out_dir: Path | str) -> list[SelectionRecord]:
    """All lines that still count: of a step that was done twice, and after it, the later ones."""
    path = Path(out_dir) / NAME
    kept: list[SelectionRecord] = []
    for line in complete_lines(path):
        record = parse_selection(line.text, f"{path}, {line.where}")
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def parse_selection(text: str, where: str) -> SelectionRecord:
    """Read a line; ValueError where it is none of ours, or of a newer version."""
    try:
        content = json.loads(text)
        schema = int(content["schema"])
        if schema > SCHEMA:
            raise ValueError(f"schema {schema}; this program reads up to {SCHEMA}")
        names = SelectionRecord.__dataclass_fields__
        record = SelectionRecord(**{name: content[name] for name in names})
        _check(record)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a line of {NAME} ({type(error).__name__}: {error}): {text[:60]!r}; "
            "remove that line, or use the program that wrote it"
        ) from None
    return record


def _check(record: SelectionRecord) -> None:
    """Types and sizes: a file may hold anything."""
    sizes = (record.step, record.block_tokens, record.num_blocks, record.bins)
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes):
        raise ValueError("step, block_tokens, num_blocks and bins are whole numbers")
    if type(record.ts) not in (int, float) or not all(type(e) is int for e in record.edges):
        raise ValueError("ts is a number, edges are whole numbers")
    rows: list[Sequence[float]] = [
        row for layer in record.reads_pct for group in layer for row in group
    ]
    rows += [row for layer in record.distance_pct for row in layer]
    if len(record.reads_pct) != len(record.distance_pct) or sum(map(len, rows)) > MOST_CELLS:
        raise ValueError("reads_pct and distance_pct do not fit together")
    if not all(type(value) in (int, float) and 0 <= value <= 100 for r in rows for value in r):
        raise ValueError("a share is not between 0 and 100")
