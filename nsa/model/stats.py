"""Gate and selection statistics of all layers from one forward pass, with one host sync at the end.

AttentionStats first; below it the counts of which blocks are read, and the copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor

from nsa.model.rope import document_positions

COLLAPSE_ENTROPY = 0.1
"""A gate is collapsed if its entropy is below this, in nats ..."""
COLLAPSE_MAX = 0.95
"""... and its largest branch has more than this share."""

GATE_FIELDS = (
    "entropy_mean",
    "entropy_min",
    "max_gate_mean",
    "max_gate_max",
    "collapse_fraction",
    "share_cmp",
    "share_sel",
    "share_win",
)
SELECTION_FIELDS = ("sel_k_mean", "sel_k_max", "sel_pct_at_max")
FIELDS = GATE_FIELDS + SELECTION_FIELDS
EXTREMES = {"entropy_min": torch.amin, "max_gate_max": torch.amax, "sel_k_max": torch.amax}
"""Fields that are not means."""


Gather = Callable[[Tensor], Tensor]
"""[...] -> [cp, tp, ...]: the tensor of each rank that shares the rows of this one."""
Where = tuple[Tensor, int]
"""Positions in their documents [S] of the tokens of this process, and the tokens of the row."""


class AttentionStats:
    """Collects one row of numbers per layer on the device; `summary` copies them to the host.

    Pass it to `TinyLM.forward(ids, stats=...)`. A layer that runs twice, as under gradient
    checkpointing, overwrites its own row.
    """

    def __init__(self, *, maps: bool = False) -> None:
        """`maps`: also count which blocks are read, for `selection_maps`."""
        self.with_maps = maps
        self._counts: dict[int, SelectionCounts] = {}
        self._rows: dict[int, Tensor] = {}
        self._num_gates: dict[int, int] = {}
        self._num_rows: dict[int, int] = {}
        self._copy: HostCopy | None = None
        self._layers: list[dict[str, float | None]] | None = (
            None  # on the host, after the first request
        )

    @torch.no_grad()
    def record(
        self,
        layer: int,
        gates: Tensor | None,  # [B, S, Hq, 3]; None for a layer without branches
        selection: Tensor,  # [B, S, H, n_sel] int32
        *,
        block_tokens: int,  # l_sel
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        where: Where | None = None,
    ) -> None:
        """Reduce one layer's gates and selection to a row; no host sync.

        `where` is for a process that has some tokens of a row: see `combine`.
        """
        if self.with_maps:
            self._counts[layer] = count_reads(selection, block_tokens, cu_seqlens, where)
        # A new record makes an earlier copy stale.
        self._layers = self._copy = None
        chosen = _selection_row(selection)
        gate_row = chosen.new_zeros(len(GATE_FIELDS)) if gates is None else _gate_row(gates)
        self._rows[layer] = torch.cat([gate_row, chosen])
        self._num_gates[layer] = 0 if gates is None else gates[..., 0].numel()
        self._num_rows[layer] = selection[..., 0].numel()

    @torch.no_grad()
    def combine(self, gather: Gather) -> None:
        """Make the numbers of this rank's tokens and heads those of all ranks that share its rows.

        Each has as many tokens and heads. Collective, if `gather` is.
        """
        layers = sorted(self._rows)
        table = gather(torch.stack([self._rows[layer] for layer in layers])).flatten(0, 1)
        combined = table.mean(dim=0)  # [layers, len(FIELDS)]
        for place, name in enumerate(FIELDS):
            if extreme := EXTREMES.get(name):
                combined[:, place] = extreme(table[..., place], dim=0)
        for layer, row in zip(layers, combined, strict=True):
            self._rows[layer] = row
            self._num_gates[layer] *= len(table)
            self._num_rows[layer] *= len(table)
        self._counts = {n: counts.combine(gather) for n, counts in sorted(self._counts.items())}
        self._layers = self._copy = None

    def send(self) -> None:
        """Start the copy to the host now; a later request then does not wait for newer steps."""
        self._host_copy()

    def per_layer(self) -> list[dict[str, float | None]]:
        """One dictionary per layer, in order (one host sync, shared with `summary`); what a layer
        does not have is None."""
        if self._layers is None:
            table = self._host_copy().wait()[0].tolist()
            self._layers = [dict(zip(FIELDS, row, strict=True)) for row in table]
            for number, row in zip(sorted(self._rows), self._layers, strict=True):
                if not self._num_gates[number]:
                    row.update(dict.fromkeys(GATE_FIELDS))
        return self._layers

    def selection_maps(self) -> list[LayerMap] | None:
        """What each layer read, in order; None unless `maps` was set."""
        if not self.with_maps:
            return None
        counts = iter(self._host_copy().wait()[1:])
        return [self._counts[layer].map_of(*islice(counts, 3)) for layer in sorted(self._counts)]

    def _host_copy(self) -> HostCopy:
        """The copy of everything recorded; one for all requests."""
        if not self._rows:
            raise ValueError("no layer was recorded; run model(ids, stats=stats) first")
        if self._copy is None:
            rows = torch.stack([self._rows[layer] for layer in sorted(self._rows)])
            counts = [self._counts[layer].tensors for layer in sorted(self._counts)]
            self._copy = HostCopy([rows, *chain.from_iterable(counts)])
        return self._copy

    def summary(self) -> dict[str, float | list[float] | None]:
        """Statistics over all layers, heads and tokens (one host sync); None where there are none.

        Every layer with gates has as many, and every layer as many queries: means of means are
        exact.
        """
        layers = self.per_layer()

        def over(field: str, how: str) -> float | None:
            values = [value for layer in layers if (value := layer[field]) is not None]
            if not values:
                return None
            return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}[how]

        shares = [over(f"share_{name}", "mean") for name in ("cmp", "sel", "win")]

        return {
            "entropy_mean": over("entropy_mean", "mean"),
            "entropy_min": over("entropy_min", "min"),
            "max_gate_mean": over("max_gate_mean", "mean"),
            "max_gate_max": over("max_gate_max", "max"),
            "collapse_fraction": over("collapse_fraction", "mean"),
            "branch_shares": None if None in shares else [x for x in shares if x is not None],
            "total_gates": float(sum(self._num_gates.values())),
            "sel_k_mean": over("sel_k_mean", "mean"),
            "sel_k_max": over("sel_k_max", "max"),
            "sel_rows": float(sum(self._num_rows.values())),
            "sel_pct_at_max": over("sel_pct_at_max", "mean"),
        }


def _gate_row(gates: Tensor) -> Tensor:
    """Entropy in nats, largest share and collapse of the normalised gates: [len(GATE_FIELDS)]."""
    # Sigmoid gates do not sum to 1: normalised first.
    shares = gates.float() / gates.float().sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(dim=-1)
    largest = shares.amax(dim=-1)
    collapsed = (entropy < COLLAPSE_ENTROPY) & (largest > COLLAPSE_MAX)
    numbers = [
        entropy.mean(),
        entropy.amin(),
        largest.mean(),
        largest.amax(),
        collapsed.float().mean(),
    ]
    return torch.cat([torch.stack(numbers), shares.flatten(0, -2).mean(dim=0)])


def _selection_row(selection: Tensor) -> Tensor:
    """Blocks per query: mean, maximum, and the share of queries that fill all n_sel places."""
    num_chosen = (selection >= 0).sum(dim=-1).float()
    full = (num_chosen == selection.shape[-1]).float()
    return torch.stack([num_chosen.mean(), num_chosen.amax(), full.mean()])


# --- Which blocks a layer reads, counted on the device: a small map, and distances ---
# Both axes of the map are the blocks of a sequence, in at most BINS bins of neighbours. A distance
# is in blocks, from the query's own block back to the block that it reads.

BINS = 32
"""Upper bound of the bins along each axis."""


@dataclass(frozen=True)
class SelectionCounts:
    """What one layer read, as counts on the device."""

    block_tokens: int
    num_blocks: int
    """Blocks of the sequence; those of a packed document count from its start."""
    queries: Tensor  # [bins] int64, queries in each bin, for one KV head
    reads: Tensor  # [Hkv, bins of queries, bins of blocks] int64
    distances: Tensor  # [Hkv, len(distance_edges) + 1] int64; the last: block 0 from beyond 1

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `map_of` needs on the host."""
        return self.queries, self.reads, self.distances

    def combine(self, gather: Gather) -> SelectionCounts:
        """The sums over the ranks of a row, and the KV heads of all ranks; collective."""
        queries = gather(self.queries)[:, 0].sum(dim=0)
        reads, distances = (
            gather(x).sum(dim=0).flatten(0, 1) for x in (self.reads, self.distances)
        )
        return replace(self, queries=queries, reads=reads, distances=distances)

    def map_of(self, queries: Tensor, reads: Tensor, distances: Tensor) -> LayerMap:
        """Counts as shares, from copies of `tensors` on the host."""
        # Blocks in each bin: they differ by one where bins do not divide the blocks.
        blocks = torch.bincount(_bins(torch.arange(self.num_blocks), self.num_blocks))
        places = queries[:, None] * blocks  # (query, block) pairs in each cell
        totals = distances.sum(dim=-1, keepdim=True)
        return LayerMap(
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            edges=distance_edges(self.num_blocks),
            reads=(reads.double() / places.clamp(min=1)).tolist(),
            distances=(distances.double() / totals.clamp(min=1)).tolist(),
        )


@dataclass(frozen=True)
class LayerMap:
    """What one layer read, as shares."""

    block_tokens: int
    num_blocks: int
    edges: list[int]
    """The largest distance of each bin (distance_edges)."""
    reads: list[list[list[float]]]
    """By KV head, bin of queries, bin of blocks: the share of pairs that were read, 0 to 1."""
    distances: list[list[float]]
    """By KV head: the share of all reads in each bin of distance; the shares sum to 1."""


def distance_edges(num_blocks: int) -> list[int]:
    """The largest distance of each bin: 0, 1, 2, 4, 8 ... up to the length of the sequence."""
    return [0] + [1 << i for i in range(max(1, (num_blocks - 1).bit_length() + 1))]


@torch.no_grad()
def count_reads(
    selection: Tensor,  # [B, S, Hkv, n_sel] int32, -1 where nothing is read
    block_tokens: int,
    cu_seqlens: Tensor | None = None,  # [docs + 1] int32
    where: Where | None = None,
) -> SelectionCounts:
    """Count what a selection reads; no host sync."""
    batch, seq_len, num_groups, _ = selection.shape
    device = selection.device
    positions, num_tokens = where or (document_positions(seq_len, cu_seqlens, device), seq_len)
    own, num_blocks = positions // block_tokens, -(-num_tokens // block_tokens)
    bins, edges = min(BINS, num_blocks), len(distance_edges(num_blocks))
    queries = _count(_bins(own, num_blocks), torch.ones_like(own), bins) * batch

    ids = selection.long()
    is_read = (ids >= 0).long()
    group = torch.arange(num_groups, device=device)[:, None]
    # Flat index of (KV head, bin of the query, bin of the block): [B, S, Hkv, n_sel].
    cell = (group * bins + _bins(own, num_blocks)[:, None, None]) * bins + _bins(
        ids.clamp(min=0), num_blocks
    )
    # Bin of the distance. Block 0 is forced, so its reads from afar get a bin of their own.
    away = own[:, None, None] - ids
    place = torch.bucketize(away, _edges_on(device, edges))
    place = torch.where((ids == 0) & (away > 1), edges, place.clamp(max=edges - 1))
    place = group * (edges + 1) + place
    return SelectionCounts(
        block_tokens,
        num_blocks,
        queries,
        _count(cell, is_read, num_groups * bins * bins).view(num_groups, bins, bins),
        _count(place, is_read, num_groups * (edges + 1)).view(num_groups, edges + 1),
    )


def _bins(blocks: Tensor, num_blocks: int) -> Tensor:
    return blocks * min(BINS, num_blocks) // num_blocks


def _edges_on(device: torch.device, count: int) -> Tensor:
    """distance_edges, built on the device: copying a list there would be a host sync."""
    edges = 2 ** (torch.arange(count, device=device) - 1).clamp(min=0)
    return torch.where(torch.arange(count, device=device) == 0, 0, edges)


def _count(index: Tensor, weight: Tensor, size: int) -> Tensor:  # [size] int64
    """Sum the weights at each index; integers, so the order of the atomics does not matter."""
    zeros = torch.zeros(size, dtype=torch.int64, device=index.device)
    return zeros.scatter_add_(0, index.flatten(), weight.flatten())


# --- Copy to the host ---


class HostCopy:
    """Asynchronous device-to-host copy; `wait()` blocks only until this copy has finished."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        on_gpu = any(x.is_cuda for x in tensors)
        self._tensors = [_start(x.detach()) for x in tensors]
        self._arrival = torch.cuda.Event() if on_gpu else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._tensors


def _start(tensor: Tensor) -> Tensor:
    # Only a copy to pinned memory is asynchronous.
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
