"""How large the model is and what a forward pass costs, by part and by attention branch.

Every count is exact for the definition beside it: sums run over the positions and what each of
them sees, never over S * S. One multiply-add is two FLOPs; exponentials are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from nsa.config import Config
from nsa.ops.spec import BlockSpec

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Size of a number in the precision that the model computes in."""
NO_BACKWARD = ("scores",)
"""Parts without a gradient: they cost nothing in backward."""


def block_spec(config: Config) -> BlockSpec:
    """Return the block sizes of a config."""
    nsa = config.nsa
    return BlockSpec(l=nsa.l, d=nsa.d, l_sel=nsa.l_sel, n_sel=nsa.n_sel, w=nsa.w)


def parameter_counts(config: Config) -> dict[str, int]:
    """Count the parameters of TinyLM by part; a tied head has none of its own."""
    model, layers = config.model, config.model.n_layers
    gates = 0 if _is_dense(config) else 3 * model.n_heads
    return {
        "embedding": config.data.vocab * model.dim,
        "qkv": layers * model.dim * _qkv_width(config),
        "out": layers * model.n_heads * model.d_v * model.dim,
        "gate": layers * (model.dim + 1) * gates,
        "phi": layers * _phi_weights(config),
        "mlp": layers * 8 * model.dim**2,
        "norms": (2 * layers + 1) * model.dim,
        "head": 0 if model.tie_embeddings else config.data.vocab * model.dim,
    }


def forward_flops(config: Config, seq_len: int | None = None) -> dict[str, int]:
    """Count the FLOPs of one row through the whole model, by part; dense has one branch, all."""
    model = config.model
    seq_len = config.train.seq_len if seq_len is None else seq_len
    per_pair = 2 * model.n_heads * (model.d_k + model.d_v)  # q.k and p.v of all heads
    layer = {
        "projections": 2 * seq_len * model.dim * (_qkv_width(config) + model.n_heads * model.d_v),
        **({} if _is_dense(config) else _nsa_flops(config, seq_len)),
        **{name: per_pair * pairs for name, pairs in _visible_pairs(config, seq_len).items()},
        "mlp": 2 * seq_len * 8 * model.dim**2,
    }
    flops = {part: model.n_layers * count for part, count in layer.items()}
    return {**flops, "head": 2 * seq_len * model.dim * config.data.vocab}


def forward_bytes(config: Config, seq_len: int | None = None, rows: int = 1) -> dict[str, int]:
    """Count the bytes that a batch of rows moves through the whole model, by part.

    A branch reads the K and V that each query sees, as if queries shared nothing: that is what
    decode does; a kernel that shares tiles between queries reads less. A matrix is read once for
    all rows, and its inputs and outputs move once.
    """
    model, size = config.model, BYTES[config.runtime.precision]
    seq_len = config.train.seq_len if seq_len is None else seq_len
    tokens, dim = rows * seq_len, model.dim
    pair = rows * model.n_kv_groups * (model.d_k + model.d_v)
    layer = {
        "projections": _matrix(tokens, dim, _qkv_width(config))
        + _matrix(tokens, model.n_heads * model.d_v, dim),
        **({} if _is_dense(config) else _nsa_numbers(config, seq_len, rows)),
        **{name: pair * pairs for name, pairs in _visible_pairs(config, seq_len).items()},
        "mlp": _matrix(tokens, dim, 4 * dim) + _matrix(tokens, 4 * dim, dim),
    }
    moved = {part: model.n_layers * count for part, count in layer.items()}
    moved["head"] = _matrix(tokens, dim, config.data.vocab)
    return {part: size * count for part, count in moved.items()}


def training_flops(forward: dict[str, int]) -> dict[str, int]:
    """Add the backward pass, twice the forward one where there is a gradient."""
    return {part: count * (1 if part in NO_BACKWARD else 3) for part, count in forward.items()}


def step_flops(config: Config) -> dict[str, int]:
    """Count the FLOPs of an optimizer step on one rank: forward, and twice that in backward.

    Work that is done again, in checkpointed layers or inside a kernel, is not counted.
    """
    rows = config.train.batch_size * config.train.accumulate_grad_batches
    flops = training_flops(forward_flops(config))
    return {part: rows * count for part, count in flops.items()}


def step_bytes(config: Config) -> dict[str, int]:
    """Count the bytes of an optimizer step on one rank, by the same rule; without the optimizer."""
    train = config.train
    moved = forward_bytes(config, rows=train.batch_size)
    return {part: train.accumulate_grad_batches * 3 * count for part, count in moved.items()}


class Pairs(NamedTuple):
    """Keys seen by each branch, summed over the queries of one row, for one query head."""

    cmp: int
    sel: int
    win: int


def count_pairs(seq_len: int, spec: BlockSpec) -> Pairs:
    """Count what each position sees; every legal selection gives the same count."""
    ends = range(1, seq_len + 1)  # tokens up to and with the query
    return Pairs(
        cmp=sum(spec.num_cmp(end) for end in ends),
        sel=sum(spec.num_selected_tokens(end) for end in ends),
        win=sum(min(spec.w, end) for end in ends),
    )


def dense_pairs(seq_len: int) -> int:
    """Count what the queries of a row see in dense causal attention."""
    return seq_len * (seq_len + 1) // 2


def num_branches(config: Config) -> int:
    """Branches with K and V of their own."""
    return 1 if _is_dense(config) else 3


def _is_dense(config: Config) -> bool:
    return config.model.attention == "dense"


def _visible_pairs(config: Config, seq_len: int) -> dict[str, int]:
    """Keys seen by all queries of a row, by branch."""
    if _is_dense(config):
        return {"all": dense_pairs(seq_len)}
    return count_pairs(seq_len, block_spec(config))._asdict()


def _nsa_flops(config: Config, seq_len: int) -> dict[str, int]:
    """What one layer of NSA does beside its branches, for a row."""
    model, num_cmp = config.model, block_spec(config).num_cmp(seq_len)
    return {
        "gates": 2 * seq_len * 3 * model.n_heads * (model.dim + model.d_v),
        "compression": num_cmp * model.n_kv_groups * _phi_flops(config),
        "scores": _score_flops(config, seq_len),
    }


def _nsa_numbers(config: Config, seq_len: int, rows: int) -> dict[str, int]:
    """The numbers that it moves beside its branches, for all rows."""
    model, num_cmp = config.model, block_spec(config).num_cmp(seq_len)
    pair = rows * model.n_kv_groups * (model.d_k + model.d_v)
    return {
        "gates": _matrix(rows * seq_len, model.dim, 3 * model.n_heads),
        "compression": pair * (seq_len + num_cmp) + _phi_weights(config),
        "scores": 0,  # from p_cmp, which is never stored
    }


def _qkv_width(config: Config) -> int:
    """Columns of the fused projection: q, and K and V of each branch."""
    model, num_kv = config.model, num_branches(config) * config.model.n_kv_groups
    return model.n_heads * model.d_k + num_kv * (model.d_k + model.d_v)


def _matrix(rows: int, inputs: int, outputs: int) -> int:
    return rows * inputs + inputs * outputs + rows * outputs


def _score_flops(config: Config, seq_len: int) -> int:
    """Add p_cmp over the heads of a group, then spread it over the blocks that it overlaps."""
    model, spec = config.model, block_spec(config)
    overlaps, pairs = 0, 0
    for count in range(1, seq_len + 1):
        newest = spec.num_cmp(count) - 1
        if newest >= 0 and spec.num_cmp(count - 1) == newest:  # this token completed a block
            first, last = newest * spec.d, newest * spec.d + spec.l - 1
            overlaps += last // spec.l_sel - first // spec.l_sel + 1
        pairs += overlaps
    return model.n_heads * count_pairs(seq_len, spec).cmp + 2 * model.n_kv_groups * pairs


def _phi_parameters(config: Config, size: int) -> int:
    """The learned phi of heads of this size: place encoding, D*l -> 2D -> D with biases."""
    if config.nsa.phi == "avg":
        return 0
    block = config.nsa.l * size
    return block + (block + 1) * 2 * size + (2 * size + 1) * size


def _phi_weights(config: Config) -> int:
    return sum(_phi_parameters(config, size) for size in (config.model.d_k, config.model.d_v))


def _phi_flops(config: Config) -> int:
    """FLOPs of one block of one KV head, K and V: a sum of l tokens, or the learned phi."""
    block_len, total = config.nsa.l, 0
    for size in (config.model.d_k, config.model.d_v):
        total += block_len * size
        if config.nsa.phi == "mlp":
            total += 2 * (block_len * size * 2 * size + 2 * size * size)
    return total
