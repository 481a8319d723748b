"""Tables with a row per logged step: training.csv, val.csv, k_stats.csv, fallback_counters.csv and
selection.jsonl.

CSV schema, version 1: a header line, then numbers. training.csv: `step` (optimizer updates done),
`loss` (nats per token of that update), `lr` (of that update), `toks_per_s` (of all ranks, since the
line before). val.csv: `step`, `loss` (nats per token on held-out rows), `ppl` (e to the loss).

Lines are appended, not renamed into place, so that `tail -f` works; readers skip an incomplete last
line. A full disk costs lines, not the run.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_type_hints

from nsa.files import LineFile, best_effort, is_regular, read_text, write_text
from nsa.records.numbers import NUMBERS
from nsa.tail import Line, complete_lines, lines_from_end, sampled_lines

if TYPE_CHECKING:
    from nsa.model.stats import LayerMap
    from nsa.ops.fallbacks import Fallback


class TrainingRow(NamedTuple):
    """A row of training.csv."""

    step: int
    loss: float
    lr: float
    toks_per_s: float


class ValRow(NamedTuple):
    """A row of val.csv."""

    step: int
    loss: float
    ppl: float


Row = TypeVar("Row", bound=NamedTuple)
"""A named tuple of ints and floats; the first field is the step."""

TRAINING = "training.csv"
VAL = "val.csv"
TAIL_BYTES = 1 << 20
"""How far back `last_rows` reads."""
FORMATS = {number.name: number.csv for number in NUMBERS if number.csv}
"""Columns with their own format; default: ints as they are, floats with six decimals."""


class CsvLog(Generic[Row]):
    """Keeps the rows of a run in memory and, if it has a path, appends each to its file."""

    def __init__(self, kind: type[Row], path: Path | None, resumed_at: int = 0) -> None:
        """Start a new file; a run resumed at a step keeps the rows up to that step."""
        self.rows: list[Row] = []
        self.path = path
        if path is None:
            return
        # Rows after the checkpoint are dropped: the resumed run writes them again.
        if resumed_at and is_regular(path):
            self.rows = [row for row in read_rows(kind, path) if row[0] <= resumed_at]
        self._head = ",".join(kind._fields) + "\n"
        self._write(path)
        self.file = LineFile(path, self._head)

    def renew(self) -> None:
        """Rewrite the file with all rows after it was removed; the next `append` reopens it."""
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
        """Add one row; its line is in the file, in a single write, when this returns."""
        self.rows.append(row)
        if self.path is not None:
            self.file.append(_line(row))


def _line(row: NamedTuple) -> str:
    usual = ("d" if isinstance(value, int) else ".6f" for value in row)
    cells = zip(row._fields, row, usual, strict=True)
    return ",".join(format(value, FORMATS.get(name, form)) for name, value, form in cells)


def read_rows(kind: type[Row], path: Path) -> list[Row]:
    """Read all complete rows."""
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
    """Read up to `most` of the last complete rows, oldest first, in time independent of file size.

    A missing file has no rows.
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
    """All rows, or a sample if the file exceeds `most_bytes`, and an error text per invalid line.

    For displays: invalid lines are skipped. A missing file has no rows.
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
    """Parse a line of the file `path`; None for the header, ValueError if invalid."""
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
            "remove that line, or find out what else writes this file"
        ) from None


# --- k_stats.csv and fallback_counters.csv ---
# Schema, version 1. k_stats.csv: `step`, `k_mean` and `k_max` (blocks read per query), `rows`
# (queries counted), `pct_at_max` (share of queries, 0 to 1, that read all n_sel blocks).
# fallback_counters.csv: `step`, then counts since the start of the process.

K_STATS = "k_stats.csv"
FALLBACK_COUNTERS = "fallback_counters.csv"
COUNTER_OF_BRANCH = {
    "sel": "selection_triton_fails",
    "cmp": "compressed_fa2_fails",
    "win": "sliding_fa2_fails",
    "all": "selection_triton_fails",
}
"""Branch `all`: the whole Triton backend fell back; counted as a selection failure."""


class KStatsRow(NamedTuple):
    """A row of k_stats.csv."""

    step: int
    k_mean: float
    k_max: int
    rows: int
    pct_at_max: float


class FallbackRow(NamedTuple):
    """A row of fallback_counters.csv. The cuda, pack and mask paths do not exist here: always 0."""

    step: int
    selection_triton_fails: int = 0
    selection_cuda_fails: int = 0
    selection_pack_fails: int = 0
    selection_mask_fails: int = 0
    compressed_fa2_fails: int = 0
    sliding_fa2_fails: int = 0
    total_fallbacks: int = 0


class CounterFiles:
    """Appends to both files of a run."""

    def __init__(self, out_dir: Path | str, resumed_at: int = 0) -> None:
        """A run resumed at a step keeps the rows up to that step."""
        folder = Path(out_dir)
        self.k_stats = CsvLog(KStatsRow, folder / K_STATS, resumed_at)
        self.fallbacks = CsvLog(FallbackRow, folder / FALLBACK_COUNTERS, resumed_at)

    def renew(self) -> None:
        """Rewrite both files after they were removed."""
        self.k_stats.renew()
        self.fallbacks.renew()

    def append(self, step: int, attention: Mapping[str, Any] | None) -> None:
        """Add the rows of a logged step; `attention` is AttentionStats.summary(), if collected."""
        if attention:
            self.k_stats.append(k_stats_row(step, attention))
        self.fallbacks.append(FallbackRow(step, **fallback_counts()))


def k_stats_row(step: int, attention: Mapping[str, Any]) -> KStatsRow:
    """The selection part of AttentionStats.summary()."""
    cells = zip(KStatsRow._fields[1:], _types(KStatsRow)[1:], strict=True)
    return KStatsRow(step, *(cast(attention[f"sel_{name}"]) for name, cast in cells))


def fallback_counts(counts: Mapping[Fallback, int] | None = None) -> dict[str, int]:
    """Fallbacks by counter name; by default those of this process."""
    from nsa.ops import fallbacks  # imports torch, which readers of run folders must not need

    totals = dict.fromkeys(FallbackRow._fields[1:], 0)
    for fallback, number in (fallbacks.counts() if counts is None else counts).items():
        totals[COUNTER_OF_BRANCH[fallback.branch]] += number
        totals["total_fallbacks"] += number
    return totals


def read_k_stats(out_dir: Path | str) -> list[KStatsRow]:
    """Read k_stats.csv of a run folder."""
    return read_rows(KStatsRow, Path(out_dir) / K_STATS)


def read_fallback_counters(out_dir: Path | str) -> list[FallbackRow]:
    """Read fallback_counters.csv of a run folder."""
    return read_rows(FallbackRow, Path(out_dir) / FALLBACK_COUNTERS)


# --- selection.jsonl: which blocks the queries read, at some of the logged steps ---
# Schema, version 1 (docs/schemas/selection_jsonl.md): one JSON object per line. `schema`, `ts`
# (Unix time, s), `step`, `block_tokens` (l_sel), `num_blocks` (per sequence), `bins`, `edges` (the
# largest distance of each bin, in blocks), and two lists by layer and KV head. `reads_pct`: per bin
# of queries, percent of pairs read in each bin of blocks, trailing zeros omitted. `distance_pct`:
# percent of all reads in each distance bin; its last entry is the sequence's first block, which
# every query reads, where it is at least two blocks away.

SCHEMA = 1
SELECTION = "selection.jsonl"
MOST_CELLS = 4_000_000
"""Upper limit of numbers per line: a line with more was not written by this program."""


@dataclass(frozen=True, kw_only=True)
class SelectionRecord:
    """One line, parsed."""

    schema: int = SCHEMA
    ts: float
    step: int
    block_tokens: int
    num_blocks: int
    bins: int
    edges: list[int]
    reads_pct: list[list[list[list[int]]]]
    """[layer][KV head][bin of queries][bin of blocks]; trailing zeros omitted."""
    distance_pct: list[list[list[float]]]
    """[layer][KV head][bin of distance]; the last entry is the sequence's first block."""


class SelectionFile:
    """Appends the lines of a run; the file is opened at the first one."""

    def __init__(self, out_dir: Path | str) -> None:
        self.path = Path(out_dir) / SELECTION
        self._file: LineFile | None = None

    def append(self, step: int, maps: Sequence[LayerMap], now: float | None = None) -> None:
        """Add a line; `maps` is AttentionStats.selection_maps()."""
        self._file = self._file or LineFile(self.path)
        ts = round(time.time() if now is None else now, 6)
        content = {"schema": SCHEMA, "ts": ts, "step": step} | _content(maps)
        self._file.append(json.dumps(content, allow_nan=False, separators=(",", ":")))

    def renew(self) -> None:
        """Close the file after its folder was removed; the next line opens a new one."""
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
    """All records; those of steps that a resume or rollback repeated are replaced by later ones."""
    path = Path(out_dir) / SELECTION
    kept: list[SelectionRecord] = []
    for line in complete_lines(path):
        record = parse_selection(line.text, f"{path}, {line.where}")
        # After a resume or rollback the step number falls: drop the records from that step on.
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def parse_selection(text: str, where: str) -> SelectionRecord:
    """Parse a line; ValueError if it is invalid or of a newer schema."""
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
            f"{where}: not a line of {SELECTION} ({type(error).__name__}: {error}): {text[:60]!r}; "
            "remove that line, or use the program that wrote it"
        ) from None
    return record


def _check(record: SelectionRecord) -> None:
    """Check types and sizes: the file may hold anything."""
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
        raise ValueError("reads_pct and distance_pct have different layers or heads")
    if not all(type(value) in (int, float) and 0 <= value <= 100 for r in rows for value in r):
        raise ValueError("a share is not between 0 and 100")
