"""What the model costs by formula: parameters, FLOPs, bytes moved, MFU and memory, by part.

Every count is exact for the definition beside it: sums run over the positions and what each of
them sees, never over S * S. One multiply-add is two FLOPs; exponentials are not counted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from nsa.config import Config, parse_layers
from nsa.ops.spec import BlockSpec

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in the precision that the model computes in."""
NO_BACKWARD = ("scores",)
"""Parts without a gradient: they cost nothing in backward."""

# --- Parameters, FLOPs and bytes of a pass ---


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
        # fc1 and fc2, dim x 4 dim each.
        "mlp": layers * 8 * model.dim**2,
        "norms": (2 * layers + 1) * model.dim,
        "head": 0 if model.tie_embeddings else config.data.vocab * model.dim,
    }


def forward_flops(config: Config, seq_len: int | None = None) -> dict[str, int]:
    """Count the FLOPs of one row through the whole model, by part.

    Dense attention has one branch, named `all`.
    """
    model = config.model
    seq_len = config.train.seq_len if seq_len is None else seq_len
    per_pair = 2 * model.n_heads * (model.d_k + model.d_v)  # q.k and p.v of all heads
    layer = {
        # 2 FLOPs * tokens * inputs * outputs of every matrix.
        "projections": 2 * seq_len * model.dim * (_qkv_width(config) + model.n_heads * model.d_v),
        **({} if _is_dense(config) else _nsa_flops(config, seq_len)),
        **{name: per_pair * pairs for name, pairs in _visible_pairs(config, seq_len).items()},
        "mlp": 2 * seq_len * 8 * model.dim**2,
    }
    flops = {part: model.n_layers * count for part, count in layer.items()}
    return {**flops, "head": 2 * seq_len * model.dim * config.data.vocab}


def forward_bytes(config: Config, seq_len: int | None = None, rows: int = 1) -> dict[str, int]:
    """Count the bytes that a batch of rows moves through the whole model, by part.

    A branch reads the K and V that each query sees, as if queries shared nothing: true of decode; a
    kernel that shares tiles between queries reads less. A matrix is read once for all rows, and its
    inputs and outputs move once.
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
    """Add the backward pass: twice the forward, except for parts without a gradient."""
    return {part: count * (1 if part in NO_BACKWARD else 3) for part, count in forward.items()}


def step_flops(config: Config) -> dict[str, int]:
    """Count the FLOPs of an optimizer step on one rank: forward, and twice that in backward.

    Recomputation, in checkpointed layers or inside a kernel, is not counted.
    """
    rows = config.train.batch_size * config.train.accumulate_grad_batches
    flops = training_flops(forward_flops(config))
    return {part: rows * count for part, count in flops.items()}


def step_bytes(config: Config) -> dict[str, int]:
    """Count the bytes of forward and backward of a step on one rank, without the optimizer."""
    train = config.train
    moved = forward_bytes(config, rows=train.batch_size)
    return {part: train.accumulate_grad_batches * 3 * count for part, count in moved.items()}


class Pairs(NamedTuple):
    """Keys seen by each branch, summed over the queries of one row, for one query head."""

    cmp: int
    sel: int
    win: int


def count_pairs(seq_len: int, spec: BlockSpec) -> Pairs:
    """Count the keys of all positions; every legal selection gives the same count."""
    ends = range(1, seq_len + 1)  # tokens up to and with the query
    return Pairs(
        cmp=sum(spec.num_cmp(end) for end in ends),
        sel=sum(spec.num_selected_tokens(end) for end in ends),
        win=sum(min(spec.w, end) for end in ends),
    )


def dense_pairs(seq_len: int) -> int:
    """Count the keys of all queries of a row in dense causal attention."""
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
    """FLOPs of one layer of NSA beside its branches, for a row."""
    model, num_cmp = config.model, block_spec(config).num_cmp(seq_len)
    return {
        "gates": 2 * seq_len * 3 * model.n_heads * (model.dim + model.d_v),
        "compression": num_cmp * model.n_kv_groups * _phi_flops(config),
        "scores": _score_flops(config, seq_len),
    }


def _nsa_numbers(config: Config, seq_len: int, rows: int) -> dict[str, int]:
    """Numbers that one layer of NSA moves beside its branches, for all rows."""
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
    """Numbers that a matrix product moves: its input, its weight, its output."""
    return rows * inputs + inputs * outputs + rows * outputs


def _score_flops(config: Config, seq_len: int) -> int:
    """Sum p_cmp over the heads of a group, then spread it over the blocks that it overlaps."""
    # `overlaps` is the number of (compressed token, selection block) pairs that overlap so far.
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


# --- Training FLOPs per token, of the model and of its dense twin, and the MFU ---
# These are model FLOPs: forward, and twice that in backward. Recomputation is not counted, so a run
# that recomputes has a lower MFU.

TERA = 1e12
PEAKS = (
    (r"A100|A800", 312.0),
    (r"H100 PCIe", 756.0),
    (r"(H100|H200) NVL", 835.0),
    (r"GH200|H100|H200|H800", 989.0),
    (r"B200", 2250.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
)
"""NVIDIA's peak of dense 16-bit products in TFLOP/s; the first pattern that matches a whole word of
the device name counts, so special forms come before the general ones."""
HALF = ("bf16", "fp16")
"""Precisions of the peaks; bf16 and fp16 have the same one on all these devices."""


def training_flops_per_token(config: Config) -> dict[str, float]:
    """Count forward and backward by part, averaged over the tokens of a row."""
    return _per_token(config, forward_flops(config))


def dense_training_flops_per_token(config: Config) -> dict[str, float]:
    """The same for the dense twin: causal attention to every earlier key, one K and V, no gates."""
    return _per_token(config, dense_forward_flops(config))


def dense_forward_flops(config: Config, seq_len: int | None = None) -> dict[str, int]:
    """Count the FLOPs of one row through the dense twin of the model, by part."""
    return forward_flops(_dense_twin(config), seq_len)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device; None for one not in PEAKS, and for fp32."""
    if precision not in HALF:
        return None
    found = (peak for name, peak in PEAKS if re.search(rf"\b({name})\b", device_name))
    return next((TERA * peak for peak in found), None)


def utilization(
    flops_per_token: float, toks_per_s: float, peak: float | None, num_devices: int = 1
) -> float | None:
    """MFU: fraction, 0 to 1, of the peak of all devices; None if the peak is unknown."""
    return None if peak is None else flops_per_token * toks_per_s / (peak * num_devices)


def _dense_twin(config: Config) -> Config:
    model, runtime = config.model, config.runtime
    return replace(
        config,
        model=replace(model, attention="dense"),
        runtime=replace(runtime, backend="auto"),  # the twin refuses those of NSA
    )


def _per_token(config: Config, forward: dict[str, int]) -> dict[str, float]:
    seq_len = config.train.seq_len
    return {part: count / seq_len for part, count in training_flops(forward).items()}


# --- Memory of training and decoding, by part, in bytes ---

FP32 = 4
"""Bytes of an fp32 number."""
PART = 1 << 24
"""Upper bound of the logits that the loss holds at a time, in torch."""
FUSED_PART = 1 << 27
"""The same for the fused kernel, which needs one copy of them."""


def training_memory(config: Config) -> dict[str, int]:
    """Estimate the memory of training on one rank, at the end of a forward pass.

    Temporary buffers of attention and the allocator's overhead are not included.
    """
    parts = parameter_counts(config)
    weights = FP32 * sum(parts.values())
    matrices = sum(parts.values()) - parts["norms"] - parts["embedding"] - parts["head"]
    num_checkpointed = _num_checkpointed(config)
    num_kept = config.model.n_layers - num_checkpointed
    stream = FP32 * _tokens(config) * config.model.dim  # the residual stream is fp32
    layer = layer_activations(config)
    # AdamW has two moments per weight. Muon has one for the matrices of the layers.
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights - (FP32 * matrices if config.train.optimizer == "muon" else 0),
        "16-bit weights": 2 * matrices if config.runtime.precision != "fp32" else 0,
        "activations": num_kept * layer + (num_checkpointed + 2) * stream,  # 2: the last norm
        "recomputation": layer if num_checkpointed else 0,  # one layer at a time, in backward
        "head": head_activations(config),
        "logits": _logits(config),
    }


def head_activations(config: Config) -> int:
    """Count what the loss keeps: the gradients of its input and of its matrix."""
    size = BYTES[config.runtime.precision]
    return (_tokens(config) * size + config.data.vocab * FP32) * config.model.dim


def layer_activations(config: Config) -> int:
    """Count what one layer keeps for its backward pass, under the torch backend.

    Dense attention is assumed to keep no probabilities, which holds for all but the math backend.
    """
    model, num_kv = config.model, num_branches(config) * config.model.n_kv_groups
    size, tokens = BYTES[config.runtime.precision], _tokens(config)
    num_keys = model.n_heads + num_kv
    # Bytes per token: what autograd saves of the norms, the projections, attention and the MLP.
    norms = 2 * (2 * FP32 * model.dim + FP32)  # input, scaled input, 1 / rms; of both norms
    inputs = model.dim * 2  # of qkv and gate, of fc1
    attention = num_keys * model.d_k + num_kv * model.d_v  # as projected
    rotated = num_keys * model.d_k
    out = model.n_heads * model.d_v
    per_token = norms + size * (inputs + attention + rotated + out + 8 * model.dim)
    if num_branches(config) == 1:
        return tokens * (per_token + FP32 * model.n_heads)  # LSEs
    chosen = model.n_kv_groups * config.nsa.n_sel
    per_token += FP32 * (6 * model.n_heads + chosen)  # gates, LSEs, selection
    return tokens * per_token + config.train.batch_size * size * _compressed(config)


def cache_bytes(config: Config, num_tokens: int, batch: int = 1) -> dict[str, int]:
    """Count the decode cache of `num_tokens`, by what it holds."""
    if num_branches(config) == 1:
        return {"all": dense_cache_bytes(config, num_tokens, batch)}
    spec, token = block_spec(config), batch * _token_bytes(config)
    return {
        "selected": num_tokens * token,
        "compressed": spec.num_cmp(num_tokens) * token,
        "window": min(spec.w, num_tokens) * token,
        "unfinished block": spec.l * token,
    }


def dense_cache_bytes(config: Config, num_tokens: int, batch: int = 1) -> int:
    """Count the decode cache of dense attention with the same heads."""
    return num_tokens * batch * _token_bytes(config)


def decode_reads(config: Config, num_tokens: int) -> dict[str, int]:
    """Count the tokens that each KV head reads in one decode step at this length."""
    if num_branches(config) == 1:
        return {"all": num_tokens}
    spec = block_spec(config)
    return {
        "cmp": spec.num_cmp(num_tokens),
        "sel": spec.num_selected_tokens(num_tokens),
        "win": min(spec.w, num_tokens),
    }


def _token_bytes(config: Config) -> int:
    """K and V of one token in one branch, in all layers."""
    model = config.model
    pair = model.n_kv_groups * (model.d_k + model.d_v)
    return model.n_layers * pair * BYTES[config.runtime.precision]


def _tokens(config: Config) -> int:
    return config.train.batch_size * config.train.seq_len


def _num_checkpointed(config: Config) -> int:
    if not config.runtime.gradient_checkpointing:
        return 0
    if not config.runtime.gc_layers:
        return config.model.n_layers
    first, last = parse_layers(config.runtime.gc_layers)
    return last - first


def _logits(config: Config) -> int:
    """Bytes of the logits: the larger of torch's loss (up to three copies) and the fused one."""
    logits, size = _tokens(config) * config.data.vocab, BYTES[config.runtime.precision]
    plain = min(logits, PART) * (2 * FP32 + (size if size < FP32 else 0))
    return max(plain, min(logits, FUSED_PART) * size)


def _compressed(config: Config) -> int:
    """Numbers kept for the compressed K and V of a row in one layer; phi mlp keeps its blocks."""
    blocks = block_spec(config).num_cmp(config.train.seq_len) * config.model.n_kv_groups
    per_number = 1 if config.nsa.phi == "avg" else 1 + config.nsa.l + 2 * 2
    return blocks * (config.model.d_k + config.model.d_v) * per_number
