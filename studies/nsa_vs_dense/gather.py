"""What a run folder tells of the training: curves, gates by layer, speed. All thinned out."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nsa.records import TRAINING, VAL, TrainingRow, ValRow, read_heartbeat
from nsa.records.heartbeat import BEAT, HEARTBEAT_FILE, PROGRESS, Beat
from nsa.records.tables import SELECTION, read_rows, read_selection

MOST_POINTS = 400
MOST_GATES = 60
MOST_READS = 20
"""Points of a curve, of the gates and of the distances of every layer, that are kept at most."""

Item = TypeVar("Item")


def gather_curves(folder: Path) -> dict[str, Any]:
    """The losses of a run, and of NSA the shares of its gates and how far back it read."""
    training = thin(read_rows(TrainingRow, folder / TRAINING), MOST_POINTS)
    val = thin(read_rows(ValRow, folder / VAL), MOST_POINTS)
    return {
        "training": {"step": [r.step for r in training], "loss": [r.loss for r in training]},
        "val": {"step": [r.step for r in val], "loss": [r.loss for r in val]},
        "gates": _gates(read_heartbeat(folder / HEARTBEAT_FILE.format(rank=0))),
        "reads": _reads(folder),
    }


def steps_per_s(folder: Path) -> float | None:
    """One over the median time from an update to the next: neither the first, which compiles, nor
    pauses for logs and evaluations change it. None for a run of one step."""
    beats = read_heartbeat(folder / HEARTBEAT_FILE.format(rank=0))
    starts = [beat for beat in beats if beat.msg == BEAT and not beat.is_pause]
    times = [b.ts - a.ts for a, b in itertools.pairwise(starts) if b.step == a.step + 1]
    return 1 / statistics.median(times) if times else None


def thin(items: Sequence[Item], most: int) -> list[Item]:
    """Evenly spaced ones, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _gates(beats: Sequence[Beat]) -> dict[str, Any] | None:
    """By logged step and layer: the shares of cmp, sel and win."""
    by_step = {
        b.step: [layer["gate_branch_shares"] for layer in b.layers()]
        for b in beats
        if b.msg == PROGRESS and b.layers()
    }
    # A layer with one K and V has no gates.
    if not by_step or any(None in shares for layers in by_step.values() for shares in layers):
        return None
    kept = thin(sorted(by_step), MOST_GATES)
    shares = [[[round(x, 4) for x in layer] for layer in by_step[step]] for step in kept]
    return {"step": kept, "shares": shares}


def _reads(folder: Path) -> dict[str, Any] | None:
    """By step and layer: the share of reads at each distance, over the KV heads."""
    if not (folder / SELECTION).is_file():
        return None
    kept = thin(read_selection(folder), MOST_READS)
    return {
        "step": [record.step for record in kept],
        "edges": kept[0].edges,
        "distances": [[_mean(heads) for heads in record.distance_pct] for record in kept],
    }


def _mean(heads: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.fmean(shares) / 100, 4) for shares in zip(*heads, strict=True)]
