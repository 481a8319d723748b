"""Recall of the dense top blocks: does a rule read the blocks that dense attention would look at?

For a query, dense attention over its layer's own queries and keys puts some mass on every block:
the softmax over all tokens up to the query, summed over the tokens of a block, as the mean of the
query heads that share a choice. The forced blocks (the first `num_first`, the last `num_local`) are
left out, because every rule but MoBA reads them anyway. Of the others, the n_sel - num_forced with
the largest mass are the top blocks, and `recall` is the share of them that the rule has read. Of
all mass, `read_mass` is what lies in the blocks that it has read, and `best_mass` what the forced
and the top blocks have: no choice with these forced blocks has more.

Only queries with more blocks before them than they may read count. NSA has keys for each branch;
those of the selected branch are taken. A dense model has no rule: there the rules without weights
choose by its queries and keys, as if they were put into the trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa import BlockSpec
from nsa.config import Config
from nsa.model import TinyLM
from nsa.model.cost import block_spec
from nsa.model.rules import InfLLMRule, MoBARule, NSARule, Rule
from studies.nsa_vs_dense.selection_stats import chance, first_choosing, forced, membership
from studies.recorder import Look, View

QUERIES = 128
"""Of a row, evenly spaced among those that choose."""


class Shares(NamedTuple):
    """Means over queries and heads of one row and layer, between 0 and 1."""

    recall: float
    read_mass: float
    best_mass: float


Recall = dict[str, list[list[float]]]
"""By rule and layer: recall, read_mass, best_mass."""


@torch.no_grad()
def measure_recall(
    model: TinyLM, cfg: Config, rows: Iterable[Tensor]
) -> Recall:  # each [S], one at a time
    """Means over the rows. The only rule of a model that has one is `own`."""
    spec = block_spec(cfg)
    untrained = {"nsa": NSARule(spec), "infllm": InfLLMRule(spec)}
    rules: dict[str, Rule] = {**untrained, "moba": MoBARule(spec, cfg.nsa.pool_block)}
    found: dict[str, list[list[Shares]]] = {}
    for row in rows:
        by_layer: dict[str, list[Shares]] = {}
        for view in Look(model, row[None]).views():
            for name, selection in _selections(view, rules).items():
                shares = share_of(view.q, view.k, selection, spec)
                by_layer.setdefault(name, []).append(shares)
        for name, layers in by_layer.items():
            found.setdefault(name, []).append(layers)
    return {
        name: [_mean(layer) for layer in zip(*by_row, strict=True)]
        for name, by_row in found.items()
    }


def share_of(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, S, Hkv, Dk]
    selection: Tensor,  # [B, S, H, n_sel] int32
    spec: BlockSpec,
) -> Shares:
    """How much of what dense attention looks at is read."""
    seq_len, device = q.shape[1], q.device
    first = first_choosing(spec)
    if seq_len <= first or spec.n_sel <= spec.num_forced:
        raise ValueError(
            f"rows of {seq_len} tokens with n_sel={spec.n_sel} leave nothing to choose; rows of "
            f"more than {first} tokens and more than {spec.num_forced} blocks are needed"
        )
    places = torch.linspace(first, seq_len - 1, min(QUERIES, seq_len - first)).long().to(device)
    mass = block_mass(q, k, places, spec.l_sel)
    heads = selection.shape[2]
    mass = mass.unflatten(2, (heads, -1)).mean(3)  # [B, P, H, blocks]
    read = membership(selection, spec)[:, places]
    always = forced(seq_len, spec).to(device)[places][:, None]  # [P, 1, blocks]
    top = _top_blocks(mass.masked_fill(always, -1.0), spec.n_sel - spec.num_forced)
    return Shares(
        recall=((read & top).sum(-1) / (spec.n_sel - spec.num_forced)).mean().item(),
        read_mass=(mass * read).sum(-1).mean().item(),
        best_mass=(mass * (top | always)).sum(-1).mean().item(),
    )


def block_mass(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, S, Hkv, Dk]
    places: Tensor,  # [P]
    block: int,
) -> Tensor:  # [B, P, Hq, blocks] fp32
    """What dense causal attention of the queries at `places` puts on each block."""
    seq_len, groups = k.shape[1], k.shape[2]
    asked = q[:, places].float().unflatten(2, (groups, -1))
    with torch.autocast(q.device.type, enabled=False):
        logits = torch.einsum("bphgd,bshd->bphgs", asked, k.float()) / math.sqrt(q.shape[-1])
    future = torch.arange(seq_len, device=q.device) > places[:, None]  # [P, S]
    probs = logits.masked_fill(future[:, None, None], -math.inf).softmax(-1).flatten(2, 3)
    padded = F.pad(probs, (0, -seq_len % block))
    return padded.unflatten(-1, (-1, block)).sum(-1)


def chance_recall(seq_len: int, spec: BlockSpec) -> float:
    """The recall of blocks that are drawn at random, besides the forced ones."""
    free = ~forced(seq_len, spec) & (chance(seq_len, spec) > 0)
    likely = chance(seq_len, spec)[first_choosing(spec) :]
    free = free[first_choosing(spec) :]
    return ((likely * free).sum(-1) / free.sum(-1)).mean().item()


def _top_blocks(scores: Tensor, count: int) -> Tensor:
    """The best `count` of the last dimension, as a mask."""
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _selections(view: View, rules: dict[str, Rule]) -> dict[str, Tensor]:
    if view.selection is not None:
        return {"own": view.selection}
    return {name: rule.index(view.q, view.k, view.x) for name, rule in rules.items()}


def _mean(layer: tuple[Shares, ...]) -> list[float]:
    return [round(sum(column) / len(layer), 5) for column in zip(*layer, strict=True)]
