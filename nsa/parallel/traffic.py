"""What a rank receives from others in one optimizer step, by formula: for `nsa info` and preflight.

    tokens        keys and values of other parts of a row (runtime.cp): received_bytes of each layer
    activations   sums over the ranks that share matrices (runtime.tp), and rows of matrices
    weights       FSDP gathers them for forward and backward
    gradients     DDP's all-reduce, or FSDP's reduce-scatter

An all-reduce over P ranks counts as a ring: a rank receives 2 (P - 1) / P of its bytes. What is the
same for all heads (QK-norm, phi, index keys) is small and left out.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa.config import Config
from nsa.model import TinyLM
from nsa.model.cost import (
    BRANCHES,
    BYTES,
    FP32,
    Kind,
    checkpointed_layers,
    layer_kinds,
    parameter_counts,
    share_of_rank,
)
from nsa.parallel.attention import received_bytes
from nsa.parallel.plan import plan_exchange
from nsa.parallel.split import Split


def step_traffic(config: Config, num_ranks: int) -> dict[str, int]:
    """Bytes that a rank receives in a step of a run on `num_ranks` ranks; parts with any."""
    found = {
        "tokens": _tokens_of_step(config),
        "activations": _activations(config),
        **_exchanged_weights(config, num_ranks),
    }
    return {part: count for part, count in found.items() if count}


def describe_exchange(config: Config) -> str:
    """How the keys of the first layer travel between the ranks of a row (plan.py)."""
    model, split, sizes = _row(config)
    return str(plan_exchange(model.layers[0].attn, split, **sizes))


def _tokens_of_step(config: Config) -> int:
    """Forward, as much backward, and once more where layers recompute; the busiest rank."""
    if config.runtime.cp == 1:
        return 0
    model, split, sizes = _row(config)
    by_rank = [
        sum(
            (3 if i in model.checkpointed else 2) * received_bytes(block.attn, split, rank, **sizes)
            for i, block in enumerate(model.layers)
        )
        for rank in range(split.num_ranks)
    ]
    return config.train.accumulate_grad_batches * max(by_rank)


def _row(config: Config) -> tuple[TinyLM, Split, dict[str, Any]]:
    """The model with the KV heads of a rank, without values, and how a row is split."""
    train, own = config.train, share_of_rank(config)
    with torch.device("meta"):
        model = TinyLM.from_config(own, vocab=1)
    # Documents are packed into one row; its borders are not known here.
    packed = config.data.respect_documents
    rows, tokens = (1, train.batch_size) if packed else (train.batch_size, 1)
    split = Split(tokens * train.seq_len, config.runtime.cp)
    return model, split, {"batch": rows, "number_bytes": BYTES[config.runtime.precision]}


def _activations(config: Config) -> int:
    """Attention and MLP of each layer end in a sum, and begin with one in backward; recomputation
    stops before the last. Beside them the rows of `qkv` for the heads of a rank, and the loss: the
    head matrix and its gradient, and the sum of the gradient of its input."""
    tp, own, model = config.runtime.tp, share_of_rank(config), config.model
    if tp == 1:
        return 0
    size, again = BYTES[config.runtime.precision], len(checkpointed_layers(config))
    stream = own.train.batch_size * own.train.seq_len * model.dim
    sums = ((4 * model.n_layers + again + 1) * size + FP32) * stream
    head = 2 * FP32 * config.data.vocab * model.dim
    rows = sum(
        (3 if layer in checkpointed_layers(config) else 2) * _rows_of_heads(config, kind)
        for layer, kind in enumerate(layer_kinds(config))
    )
    total = (2 * sums + head) * (tp - 1) // tp + size * rows * (model.dim + model.qkv_bias)
    return config.train.accumulate_grad_batches * total


def _rows_of_heads(config: Config, kind: Kind) -> int:
    """Rows of `qkv` that belong to a rank's heads and are held by others, on the busiest rank."""
    model, tp = config.model, config.runtime.tp
    branches = 3 if kind.name == BRANCHES else 1
    keys, values = ([model.n_kv_groups * d] * branches for d in (model.d_k, model.d_v))
    sections = [model.n_heads * model.d_k, *keys, *values]
    held, most = sum(sections) // tp, 0
    for rank in range(tp):
        own, start = 0, 0
        for rows in sections:
            first, share = start + rank * rows // tp, rows // tp
            own += max(0, min(first + share, (rank + 1) * held) - max(first, rank * held))
            start += rows
        most = max(most, held - own)
    return most


def _exchanged_weights(config: Config, num_ranks: int) -> dict[str, int]:
    """Data parallel ranks exchange all gradients; under FSDP, weights in each micro-batch too."""
    runtime, count = config.runtime, sum(parameter_counts(config).values())
    size = BYTES[runtime.precision]
    if runtime.strategy != "fsdp" and runtime.tp == 1:
        return {"gradients": 2 * size * count * (num_ranks - 1) // num_ranks}
    ranks = max(num_ranks // runtime.tp, 1)
    own = count // runtime.tp * (ranks - 1) // ranks
    passes = 2 * config.train.accumulate_grad_batches
    return {"weights": passes * size * own, "gradients": FP32 * own}
