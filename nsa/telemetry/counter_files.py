"""k_stats.csv and fallback_counters.csv: what selection read, and what went another way.

Schema, version 1: the header and line format of csv_log. k_stats.csv: `step`, `k_mean` and `k_max`
(blocks that a query read), `rows` (queries counted), `pct_at_max` (share of queries, 0 to 1, that
read all n_sel blocks). fallback_counters.csv: `step`, then counts since the start of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa.telemetry.csv_log import CsvLog, read_rows

if TYPE_CHECKING:
    from nsa.ops.fallbacks import Fallback

K_STATS = "k_stats.csv"
FALLBACK_COUNTERS = "fallback_counters.csv"
COUNTER_OF_BRANCH = {
    "sel": "selection_triton_fails",
    "cmp": "compressed_fa2_fails",
    "win": "sliding_fa2_fails",
    "all": "selection_triton_fails",
}
"""Branch `all` means that the Triton backend as a whole does not run, and with it selection's."""


class KStatsRow(NamedTuple):
    """A line of k_stats.csv."""

    step: int
    k_mean: float
    k_max: int
    rows: int
    pct_at_max: float


class FallbackRow(NamedTuple):
    """A line of fallback_counters.csv; cuda, pack and mask are ways that do not exist here: 0."""

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
        """A run that goes on from a step keeps the lines up to it."""
        folder = Path(out_dir)
        self.k_stats = CsvLog(KStatsRow, folder / K_STATS, resumed_at)
        self.fallbacks = CsvLog(FallbackRow, folder / FALLBACK_COUNTERS, resumed_at)

    def renew(self) -> None:
        """Write both files anew."""
        self.k_stats.renew()
        self.fallbacks.renew()

    def append(self, step: int, attention: Mapping[str, Any] | None) -> None:
        """Add the lines of a logged step; `attention` is AttentionStats.summary(), if collected."""
        if attention:
            self.k_stats.append(k_stats_row(step, attention))
        self.fallbacks.append(FallbackRow(step, **fallback_counts()))


def k_stats_row(step: int, attention: Mapping[str, Any]) -> KStatsRow:
    """The selection part of AttentionStats.summary()."""
    return KStatsRow(
        step,
        attention["sel_k_mean"],
        int(attention["sel_k_max"]),
        int(attention["sel_rows"]),
        attention["sel_pct_at_max"],
    )


def fallback_counts(counts: Mapping[Fallback, int] | None = None) -> dict[str, int]:
    """Fallbacks by counter name; of this process, unless others are given."""
    from nsa.ops import fallbacks  # it loads torch, which readers of run folders do without

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
