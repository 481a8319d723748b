"""Gate and selection statistics of all layers from one forward, with one host sync in the end."""

from __future__ import annotations

from itertools import chain, islice

import torch
from torch import Tensor

from nsa.model.host_copy import HostCopy
from nsa.model.selection_map import LayerMap, SelectionCounts, count_reads

COLLAPSE_ENTROPY = 0.1
"""A gate is collapsed below this entropy, in nats ..."""
COLLAPSE_MAX = 0.95
"""... if its largest branch also weighs more than this."""

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


class AttentionStats:
    """Collects one row of numbers per layer, on the device; `summary` brings them to the host.

    Pass it to `TinyLM.forward(ids, stats=...)`. A layer that runs twice, as gradient checkpointing
    makes it, overwrites its own row.
    """

    def __init__(self, *, maps: bool = False) -> None:
        """`maps`: also count which blocks are read, for `selection_maps`."""
        self._with_maps = maps
        self._counts: dict[int, SelectionCounts] = {}
        self._rows: dict[int, Tensor] = {}
        self._num_gates: dict[int, int] = {}
        self._num_rows: dict[int, int] = {}
        self._copy: HostCopy | None = None
        self._layers: list[dict[str, float]] | None = None  # on the host, once asked for

    @torch.no_grad()
    def record(
        self,
        layer: int,
        gates: Tensor,  # [B, S, Hq, 3]
        selection: Tensor,  # [B, S, Hkv, n_sel] int32
        *,
        block_tokens: int,  # l_sel
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
    ) -> None:
        """Reduce one layer's gates and selection to a row; no host sync."""
        if self._with_maps:
            self._counts[layer] = count_reads(selection, block_tokens, cu_seqlens)
        self._layers = self._copy = None
        self._rows[layer] = torch.cat([_gate_row(gates), _selection_row(selection)])
        self._num_gates[layer] = gates[..., 0].numel()
        self._num_rows[layer] = selection[..., 0].numel()

    def send(self) -> None:
        """Start to copy what was recorded, so that who asks later waits for no step after it."""
        self._sent()

    def per_layer(self) -> list[dict[str, float]]:
        """One dictionary per layer, in order (one host sync, shared with `summary`)."""
        if self._layers is None:
            names = GATE_FIELDS + SELECTION_FIELDS
            table = self._sent().wait()[0].tolist()
            self._layers = [dict(zip(names, row, strict=True)) for row in table]
        return self._layers

    def selection_maps(self) -> list[LayerMap] | None:
        """What each layer read, in order; None where it was not asked for."""
        if not self._with_maps:
            return None
        counts = iter(self._sent().wait()[1:])
        return [self._counts[layer].map_of(*islice(counts, 3)) for layer in sorted(self._counts)]

    def _sent(self) -> HostCopy:
        if not self._rows:
            raise ValueError("no layer was recorded; run model(ids, stats=stats) first")
        if self._copy is None:
            rows = torch.stack([self._rows[layer] for layer in sorted(self._rows)])
            counts = [self._counts[layer].tensors for layer in sorted(self._counts)]
            self._copy = HostCopy([rows, *chain.from_iterable(counts)])
        return self._copy

    def summary(self) -> dict[str, float | list[float]]:
        """Over all layers, heads and tokens (one host sync); every layer has equally many."""
        layers = self.per_layer()

        def over(field: str, how: str) -> float:
            values = [layer[field] for layer in layers]
            return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}[how]

        return {
            "entropy_mean": over("entropy_mean", "mean"),
            "entropy_min": over("entropy_min", "min"),
            "max_gate_mean": over("max_gate_mean", "mean"),
            "max_gate_max": over("max_gate_max", "max"),
            "collapse_fraction": over("collapse_fraction", "mean"),
            "branch_shares": [over(f"share_{name}", "mean") for name in ("cmp", "sel", "win")],
            "total_gates": float(sum(self._num_gates.values())),
            "sel_k_mean": over("sel_k_mean", "mean"),
            "sel_k_max": over("sel_k_max", "max"),
            "sel_rows": float(sum(self._num_rows.values())),
            "sel_pct_at_max": over("sel_pct_at_max", "mean"),
        }


def _gate_row(gates: Tensor) -> Tensor:
    """Entropy in nats, largest share and collapse of the normalised gates: [len(GATE_FIELDS)]."""
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
    """Blocks per query: mean, most, and the share of queries that fill all n_sel places."""
    num_chosen = (selection >= 0).sum(dim=-1).float()
    full = (num_chosen == selection.shape[-1]).float()
    return torch.stack([num_chosen.mean(), num_chosen.amax(), full.mean()])
