"""The plan of an exchange: how the keys of a layer travel, how many bytes that is, and why.

    print(plan_exchange(layer, Split(262144, 8), selected="chosen"))

A run can print it before its first step, and after one what the ranks decided (`decided`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from nsa.model.attention import NSAAttention
from nsa.parallel.attention import ContextNSA, received_bytes
from nsa.parallel.chosen import gathered_tokens, most_wanted
from nsa.parallel.exchange import SELECTED
from nsa.parallel.split import Split

BY_STEP = "by step"
"""Every layer decides in every step, from the blocks that were chosen."""


@dataclass(frozen=True)
class ExchangePlan:
    """How the K and V of one layer travel, and what its busiest rank receives in forward."""

    requested: str
    """What ContextParallel was asked for: one of SELECTED."""
    way: str
    """What happens: one of SELECTED, or BY_STEP."""
    reason: str
    """The rule, with its numbers."""
    gather_bytes: int
    """Received by a rank if all K and V are gathered."""
    chosen_bytes: int | None
    """Received if only chosen blocks are sent: with `wanted` exact, otherwise at most. None: the
    layer has no chosen blocks to send."""
    is_bound: bool = False
    """Whether chosen_bytes is an upper bound."""

    def __str__(self) -> str:
        sizes = f"gather {_mib(self.gather_bytes)}"
        if self.chosen_bytes is not None:
            most = "at most " if self.is_bound else ""
            sizes += f", chosen blocks {most}{_mib(self.chosen_bytes)}"
        return (
            f"keys between ranks: {self.way} (asked for: {self.requested}; {self.reason}); "
            f"received per layer and rank, forward: {sizes}"
        )


def plan_exchange(
    layer: nn.Module,  # an attention layer of nsa
    split: Split,
    *,
    selected: str = SELECTED[0],
    batch: int = 1,
    number_bytes: int = 2,
    wanted: Sequence[int] | None = None,
) -> ExchangePlan:
    """The plan of a layer under ContextParallel(selected=selected).

    `wanted` are the tokens of chosen blocks that each rank needs from others, if they are known
    (`ContextNSA.wanted`, after a step). Otherwise the plan says what they can be at most.
    """
    if selected not in SELECTED:
        raise ValueError(f"selected={selected!r} is not known; use one of {', '.join(SELECTED)}")

    def received(by_rank: Sequence[int | None]) -> int:
        sizes = {"batch": batch, "number_bytes": number_bytes}
        return max(
            received_bytes(layer, split, rank, **sizes, wanted=tokens)
            for rank, tokens in enumerate(by_rank)
        )

    whole = received([None] * split.num_ranks)
    if not isinstance(layer, NSAAttention):
        return ExchangePlan(
            selected, SELECTED[0], "a layer with one K and V gathers it", whole, None
        )
    bound = [most_wanted(split, layer.spec, batch * layer.num_groups)] * split.num_ranks
    way, reason = _decide(selected, max(wanted or bound), split, is_known=wanted is not None)
    return ExchangePlan(selected, way, reason, whole, received(wanted or bound), wanted is None)


def decided(layer: ContextNSA, split: Split, **sizes: int) -> ExchangePlan:
    """The plan of a layer that has run under ContextParallel: what its last forward pass did."""
    return plan_exchange(
        layer, split, selected=layer.context.selected, wanted=layer.wanted, **sizes
    )


def _decide(selected: str, most: int, split: Split, *, is_known: bool) -> tuple[str, str]:
    """The rule of chosen.py, as far as it can be told."""
    (gather, chosen), whole = SELECTED, gathered_tokens(split)
    wants = f"the rank that wants most wants {'' if is_known else 'up to '}{most:,} tokens"
    if selected == gather:
        return gather, f"no sync; {whole:,} tokens for each rank"
    if most < whole:
        return chosen, f"{wants} of others, a gather brings {whole:,}"
    if is_known:
        return gather, f"{wants} of others, not fewer than the {whole:,} of a gather"
    return BY_STEP, f"chosen blocks where no rank wants {whole:,} tokens of others or more"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
