"""The curves of a run, number by tag: one definition for TensorBoard and for trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsa.model.stats import GATE_FIELDS, SELECTION_FIELDS

Scalars = dict[str, float]

TRAIN_TAGS = ("train/loss", "train/toks_per_s", "train/lr", "train/grad_norm", "train/mfu")
VAL_TAGS = ("val/loss", "val/ppl")
GATES = ("entropy_mean", "entropy_min", "max_gate_mean", "max_gate_max", "collapse_fraction")
BRANCHES = ("cmp", "sel", "win")
GATE_TAGS = tuple(f"gates/{name}" for name in (*GATES, *(f"share_{x}" for x in BRANCHES)))
SELECTION_TAGS = tuple(f"selection/{name.removeprefix('sel_')}" for name in SELECTION_FIELDS)
LAYER_TAGS = tuple(f"layer_{name}" for name in (*GATE_FIELDS, *SELECTION_FIELDS))
"""A slash and the number of the layer follow: TensorBoard shows all layers of a number together."""


def train_scalars(
    *,
    loss: float,
    toks_per_s: float,
    lr: float,
    grad_norm: float | None = None,
    mfu: float | None = None,
) -> Scalars:
    """The numbers of a logged step; one that is not known has no point."""
    values = zip(TRAIN_TAGS, (loss, toks_per_s, lr, grad_norm, mfu), strict=True)
    return {tag: value for tag, value in values if value is not None}


def val_scalars(*, loss: float, ppl: float) -> Scalars:
    """The result of an evaluation."""
    return dict(zip(VAL_TAGS, (loss, ppl), strict=True))


def attention_scalars(
    attention: Mapping[str, Any] | None, layers: Sequence[Mapping[str, float]] | None
) -> Scalars:
    """Gates and selection, over all layers and by layer, if they were collected.

    `attention` is AttentionStats.summary(), `layers` is AttentionStats.per_layer().
    """
    scalars: Scalars = {}
    if attention:
        gates = (*(attention[name] for name in GATES), *attention["branch_shares"])
        scalars |= dict(zip(GATE_TAGS, gates, strict=True))
        chosen = (attention[name] for name in SELECTION_FIELDS)
        scalars |= dict(zip(SELECTION_TAGS, chosen, strict=True))
    for number, layer in enumerate(layers or ()):
        scalars |= {f"layer_{name}/{number:02d}": value for name, value in layer.items()}
    return scalars
