"""selection.jsonl: which blocks were read is counted right, written, and read back."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa.config import Config
from nsa.model.stats import BINS, LayerMap, count_reads, distance_edges
from nsa.records.tables import SELECTION, SelectionFile, read_selection
from nsa.train import run

BuildConfig = Callable[..., Config]


def naive(
    selection: torch.Tensor, block_tokens: int, starts: list[int]
) -> tuple[Counter[tuple[int, int, int]], Counter[tuple[int, int]]]:
    """The same counts by loops: (group, query bin, block bin), and (group, distance bin)."""
    batch, seq_len, num_groups, _ = selection.shape
    num_blocks = -(-seq_len // block_tokens)
    bins, edges = min(BINS, num_blocks), distance_edges(num_blocks)
    reads: Counter[tuple[int, int, int]] = Counter()
    distances: Counter[tuple[int, int]] = Counter()
    for b in range(batch):
        for t in range(seq_len):
            own = (t - max(start for start in starts if start <= t)) // block_tokens
            for g in range(num_groups):
                for block in selection[b, t, g].tolist():
                    if block < 0:
                        continue
                    reads[g, own * bins // num_blocks, block * bins // num_blocks] += 1
                    away = own - block
                    place = next(i for i, edge in enumerate(edges) if away <= edge)
                    is_first = block == 0 and away > 1
                    distances[g, len(edges) if is_first else place] += 1
    return reads, distances


def causal_selection(own: torch.Tensor, num_groups: int, n_sel: int) -> torch.Tensor:
    """Random blocks up to each query's own; -1 where there are too few."""
    rows = []
    for block in own.tolist():
        for _ in range(num_groups):
            chosen = torch.randperm(block + 1)[:n_sel].sort().values
            rows.append(torch.cat([chosen, -torch.ones(n_sel - len(chosen), dtype=torch.long)]))
    return torch.stack(rows).view(1, len(own), num_groups, n_sel).int()


@pytest.mark.parametrize(
    ("seq_len", "block_tokens", "starts"),
    [(64, 8, [0]), (300, 4, [0]), (60, 8, [0, 17, 40]), (5, 8, [0])],
)
def test_counts_are_those_of_plain_loops(
    seq_len: int, block_tokens: int, starts: list[int]
) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([*starts, seq_len], dtype=torch.int32)
    own = torch.cat([torch.arange(n) // block_tokens for n in bounds.diff().tolist()])
    selection = causal_selection(own, 2, 4)
    found = count_reads(selection, block_tokens, bounds if len(starts) > 1 else None)
    reads, distances = naive(selection, block_tokens, starts)
    for index, count in reads.items():
        assert found.reads[index] == count
    assert found.reads.sum() == (selection >= 0).sum() == found.distances.sum()
    for place, count in distances.items():
        assert found.distances[place] == count
    assert found.queries.sum() == seq_len


def test_a_run_writes_maps_and_a_reader_gets_them_back(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    run(cfg, config_path="tiny", out=io.StringIO())
    records = read_selection(cfg.train.out_dir)
    assert [record.step for record in records] == [1, 2, 3]
    record = records[-1]
    assert (record.block_tokens, record.num_blocks, record.bins) == (8, 4, 4)
    assert record.edges == [0, 1, 2, 4]
    for layer in record.reads_pct:
        (group,) = layer
        # Blocks 0, c - 1 and c are all that n_sel=3 leaves room for.
        assert group == [[100], [100, 100], [100, 100, 100], [100, 0, 100, 100]]
    for layer_distances in record.distance_pct:
        assert layer_distances == [pytest.approx([44.44, 33.33, 0, 0, 22.22], abs=0.02)]


@pytest.mark.parametrize("switch", ["NSA_DISABLE_AUX_STATS", "dense"])
def test_no_statistics_no_file(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    cfg = tiny_config("model.attention=dense") if switch == "dense" else tiny_config()
    if switch != "dense":
        monkeypatch.setenv(switch, "1")
    run(cfg, config_path="tiny", out=io.StringIO())
    assert not (Path(cfg.train.out_dir) / SELECTION).exists()


def layer_map(share: float) -> LayerMap:
    return LayerMap(8, 2, [0, 1, 2], [[[1.0, 0.0], [share, 1.0]]], [[0.5, 0.25, 0.25, 0.0]])


def test_steps_that_were_done_again_count_once_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    file = SelectionFile(tmp_path)
    for step, share in ((1, 0.1), (5, 0.2), (9, 0.3), (5, 0.4)):
        file.append(step, [layer_map(share)])
    with file.path.open("a") as out:
        out.write('{"schema": 1, "st')
    assert [(r.step, r.reads_pct[0][0][1][0]) for r in read_selection(tmp_path)] == [
        (1, 10),
        (5, 40),
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema 2; this program reads up to 1"),
        ({"reads_pct": [[[["x"]]]]}, "not between 0 and 100"),
        ({"bins": -1}, "whole numbers"),
        ({"reads_pct": None}, "not a line of selection.jsonl"),
    ],
    ids=["newer", "text", "negative", "none"],
)
def test_a_line_of_another_kind_is_named(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    file = SelectionFile(tmp_path)
    file.append(1, [layer_map(0.5)])
    content = json.loads(file.path.read_text()) | change
    file.path.write_text(json.dumps(content) + "\n")
    with pytest.raises(ValueError, match=says):
        read_selection(tmp_path)
