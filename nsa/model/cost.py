"""What the model costs by formula: parameters, FLOPs, bytes moved, MFU and memory, by part.

Every count is exact for the definition beside it: sums run over the positions and what each of
them sees, never over S * S. One multiply-add is two FLOPs; exponentials are not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

from nsa.config import Config, parse_layers
from nsa.ops.spec import BlockSpec

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in the precision that the model computes in."""
NO_BACKWARD = ("scores",)
"""Parts without a gradient: they cost nothing in backward."""

# --- Parameters, FLOPs and bytes of a pass ---
# A layer is of one kind: dense, branches (NSA with K and V for each branch), or a rule of rules.py
# with one K and V. A layer that reuses an index has the kind of the layer that made it, and no
# scores.

DENSE, BRANCHES = "dense", "branches"


class Kind(NamedTuple):
    """What the attention of a layer is, as far as its cost is concerned."""

    name: str
    """dense, branches, nsa, infllm, moba or msa."""
    scores: bool = True
    """Whether the layer chooses its blocks itself."""


def layer_kinds(config: Config) -> list[Kind]:
    """The kind of every layer."""
    model = config.model
    kinds: list[Kind] = []
    if model.attention == "dense":
        return [Kind(DENSE)] * model.n_layers
    pairs = cycle(zip(model.rules, model.branched, strict=True))
    for rule, branched in islice(pairs, model.n_layers):
        if rule == "dense":
            kinds.append(Kind(DENSE))
        elif rule == "reuse":
            kinds.append(Kind(kinds[-1].name, scores=False))
        else:
            name = config.nsa.pool if rule == "pooled" else rule
            kinds.append(Kind(BRANCHES if branched else name))
    return kinds


def block_spec(config: Config) -> BlockSpec:
    """Return the block sizes of a config."""
    nsa = config.nsa
    return BlockSpec(nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w, nsa.num_first, nsa.num_local)


def parameter_counts(config: Config) -> dict[str, int]:
    """Count the parameters of TinyLM by part; a tied head has none of its own."""
    model, layers, kinds = config.model, config.model.n_layers, layer_kinds(config)
    branched = sum(kind.name == BRANCHES for kind in kinds)
    index = sum(_index_parameters(config, kind) for kind in kinds)
    return {
        "embedding": config.data.vocab * model.dim,
        "qkv": sum((model.dim + model.qkv_bias) * _qkv_width(config, kind) for kind in kinds),
        "out": layers * model.n_heads * model.d_v * model.dim,
        "gate": branched * (model.dim + 1) * 3 * model.n_heads,
        "phi": branched * _phi_weights(config),
        **({"index": index} if index else {}),
        "mlp": layers * _num_mlp(config) * model.dim * model.mlp_width,
        "norms": (2 * layers + 1) * model.dim + 2 * layers * model.qk_norm * model.d_k,
        "head": 0 if model.tie_embeddings else config.data.vocab * model.dim,
    }


def forward_flops(config: Config, seq_len: int | None = None) -> dict[str, int]:
    """Count the FLOPs of one row through the whole model, by part.

    Dense attention has one branch, named `all`; a rule with one K and V has the branch `sel`.
    """
    model = config.model
    seq_len = config.train.seq_len if seq_len is None else seq_len
    per_pair = 2 * model.n_heads * (model.d_k + model.d_v)  # q.k and p.v of all heads

    def layer(kind: Kind) -> dict[str, int]:
        width = _qkv_width(config, kind) + model.n_heads * model.d_v
        pairs = _visible_pairs(config, seq_len, kind)
        return {
            # 2 FLOPs * tokens * inputs * outputs of every matrix.
            "projections": 2 * seq_len * model.dim * width,
            **_choice_flops(config, seq_len, kind),
            **{name: per_pair * count for name, count in pairs.items()},
            "mlp": 2 * seq_len * _num_mlp(config) * model.dim * model.mlp_width,
        }

    flops = _sum_layers(config, layer)
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

    def layer(kind: Kind) -> dict[str, int]:
        pairs = _visible_pairs(config, seq_len, kind)
        return {
            "projections": _matrix(tokens, dim, _qkv_width(config, kind))
            + _matrix(tokens, model.n_heads * model.d_v, dim),
            **_choice_numbers(config, seq_len, rows, kind),
            **{name: pair * count for name, count in pairs.items()},
            "mlp": (_num_mlp(config) - 1) * _matrix(tokens, dim, model.mlp_width)
            + _matrix(tokens, model.mlp_width, dim),
        }

    moved = _sum_layers(config, layer)
    moved["head"] = _matrix(tokens, dim, config.data.vocab)
    return {part: size * count for part, count in moved.items()}


def _sum_layers(config: Config, layer: Callable[[Kind], dict[str, int]]) -> dict[str, int]:
    """Add up the parts of all layers; equal layers are counted once and multiplied."""
    total: dict[str, int] = {}
    for kind, count in Counter(layer_kinds(config)).items():
        for part, value in layer(kind).items():
            total[part] = total.get(part, 0) + count * value
    return total


def training_flops(forward: dict[str, int]) -> dict[str, int]:
    """Add the backward pass: twice the forward, except for parts without a gradient."""
    return {part: count * (1 if part in NO_BACKWARD else 3) for part, count in forward.items()}


def index_loss_flops(config: Config) -> dict[str, int]:
    """Count the KL loss of the indexers for one row, forward and backward; empty without one.

    Its two attentions read the tokens that were read: one has index keys and keys as values, the
    other compares index heads.
    """
    model, d_index = config.model, config.nsa.d_index
    layers = sum(kind == Kind("msa") for kind in layer_kinds(config))
    if not layers:
        return {}
    pairs = _visible_pairs(config, config.train.seq_len, Kind("msa"))["sel"]
    taught = 2 * model.n_heads * (2 * model.d_k + d_index)
    return {"index loss": 3 * layers * pairs * (taught + 4 * model.n_kv_groups * d_index)}


def step_flops(config: Config) -> dict[str, int]:
    """Count the FLOPs of an optimizer step on one rank: forward, and twice that in backward.

    Recomputation, in checkpointed layers or inside a kernel, is not counted.
    """
    rows = config.train.batch_size * config.train.accumulate_grad_batches
    flops = training_flops(forward_flops(config)) | index_loss_flops(config)
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


def _read_spec(config: Config, kind: Kind) -> BlockSpec:
    """The blocks that queries of a layer read: large ones with moba."""
    if kind.name != "moba":
        return block_spec(config)
    size, read = config.nsa.pool_block, config.nsa.n_sel * config.nsa.l_sel
    return BlockSpec(size, size, size, read // size, num_first=0, num_local=1)


def _visible_pairs(config: Config, seq_len: int, kind: Kind) -> dict[str, int]:
    """Keys seen by all queries of a row in a layer, by branch."""
    if kind.name == DENSE:
        return {"all": dense_pairs(seq_len)}
    pairs = count_pairs(seq_len, _read_spec(config, kind))
    return pairs._asdict() if kind.name == BRANCHES else {"sel": pairs.sel}


def _choice_flops(config: Config, seq_len: int, kind: Kind) -> dict[str, int]:
    """FLOPs of one layer beside its projections and branches, for a row."""
    model, num_cmp = config.model, block_spec(config).num_cmp(seq_len)
    if kind.name == BRANCHES:
        return {
            "gates": 2 * seq_len * 3 * model.n_heads * (model.dim + model.d_v),
            "compression": num_cmp * model.n_kv_groups * _phi_flops(config),
            "scores": _score_flops(config, seq_len),
        }
    if kind.name == DENSE or not kind.scores:
        return {}
    if kind.name == "msa":
        heads = model.n_kv_groups * config.nsa.d_index
        return {
            "index": 2 * seq_len * model.dim * (heads + config.nsa.d_index),
            "scores": 2 * heads * dense_pairs(seq_len),
        }
    # Means of keys, and queries times means.
    spec = _read_spec(config, kind)
    means = spec.num_cmp(seq_len) * spec.l * model.n_kv_groups * model.d_k
    pairs = count_pairs(seq_len, spec).cmp
    if kind.name == "moba":  # only blocks before the own one are compared
        pairs = sum((end - 1) // spec.l_sel for end in range(1, seq_len + 1))
    extra = {"nsa": _score_flops(config, seq_len), "infllm": model.n_heads * pairs}
    scores = 2 * model.n_heads * model.d_k * pairs + extra.get(kind.name, 0)
    return {"compression": means, "scores": scores}


def _choice_numbers(config: Config, seq_len: int, rows: int, kind: Kind) -> dict[str, int]:
    """Numbers that one layer moves beside its projections and branches, for all rows."""
    model, num_cmp = config.model, block_spec(config).num_cmp(seq_len)
    groups, tokens = rows * model.n_kv_groups, rows * seq_len
    if kind.name == BRANCHES:
        pair = groups * (model.d_k + model.d_v)
        return {
            "gates": _matrix(tokens, model.dim, 3 * model.n_heads),
            "compression": pair * (seq_len + num_cmp) + _phi_weights(config),
            "scores": 0,  # from p_cmp, which is never stored
        }
    if kind.name == DENSE or not kind.scores:
        return {}
    if kind.name == "msa":
        size = config.nsa.d_index
        return {
            "index": _matrix(tokens, model.dim, (model.n_kv_groups + 1) * size),
            "scores": rows * size * dense_pairs(seq_len),
        }
    spec = _read_spec(config, kind)
    return {
        "compression": groups * model.d_k * (seq_len + spec.num_cmp(seq_len)),
        "scores": groups * model.d_k * count_pairs(seq_len, spec).cmp,
    }


def _qkv_width(config: Config, kind: Kind) -> int:
    """Columns of the fused projection: q, and K and V of each branch."""
    model, num_kv = config.model, _num_kv(config, kind)
    return model.n_heads * model.d_k + num_kv * (model.d_k + model.d_v)


def _num_kv(config: Config, kind: Kind) -> int:
    """KV heads of all branches of a layer."""
    return (3 if kind.name == BRANCHES else 1) * config.model.n_kv_groups


def _num_mlp(config: Config) -> int:
    """Matrices of an MLP: fc1 and fc2, and the gate."""
    return 3 if config.model.mlp == "gated" else 2


def _index_parameters(config: Config, kind: Kind) -> int:
    """The indexer of a layer: two projections and two norms."""
    if kind != Kind("msa"):
        return 0
    size = config.nsa.d_index
    return config.model.dim * (config.model.n_kv_groups + 1) * size + 2 * size


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
    loss = {part: count / config.train.seq_len for part, count in index_loss_flops(config).items()}
    return _per_token(config, forward_flops(config)) | loss


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

    Temporary buffers of attention and the allocator's overhead are not included. Under FSDP, data
    parallel ranks share the weights further.
    """
    own, runtime = share_of_rank(config), config.runtime
    parts = parameter_counts(own)
    parts |= {name: parts[name] // runtime.tp for name in ("embedding", "head")}
    # FSDP shards over the ranks that share a row, too.
    shards = runtime.cp if runtime.tp > 1 or runtime.strategy == "fsdp" else 1
    weights = FP32 * sum(parts.values()) // shards
    matrices = (sum(parts.values()) - parts["norms"] - parts["embedding"] - parts["head"]) // shards
    kinds = layer_kinds(config)
    kept = [layer_activations(own, kind) for kind in kinds]
    checkpointed = checkpointed_layers(config)
    again = [kept[i] for i in checkpointed]
    arrived = [row_keys(config, kind) for kind in kinds]
    stream = FP32 * _tokens(own) * config.model.dim  # the residual stream is fp32
    # AdamW has two moments per weight. Muon has one for the matrices of the layers.
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights - (FP32 * matrices if config.train.optimizer == "muon" else 0),
        "16-bit weights": 2 * matrices if config.runtime.precision != "fp32" else 0,
        # Two more streams: of the last norm.
        "activations": sum(kept) - sum(again) + (len(again) + 2) * stream,
        "recomputation": max(again, default=0),  # one layer at a time, in backward
        **_keys_kept(arrived, checkpointed),
        "head": head_activations(own) + _gathered_head(config),
        "logits": _logits(own),
    }


def share_of_rank(config: Config) -> Config:
    """What one of the ranks that share rows computes, as if that were a run: its tokens of a row,
    its heads and its columns of the MLP. Token ids stay whole."""
    model, train, runtime = config.model, config.train, config.runtime
    if runtime.sharing == 1:
        return config
    return replace(
        config,
        model=replace(
            model,
            n_heads=model.n_heads // runtime.tp,
            n_kv_groups=model.n_kv_groups // runtime.tp,
            mlp_dim=max(model.mlp_width // runtime.tp, 1),
        ),
        train=replace(train, seq_len=train.seq_len // runtime.cp),
        runtime=replace(runtime, cp=1, tp=1),
    )


def row_keys(config: Config, kind: Kind) -> int:
    """Count the K and V, and index keys, of a whole row that a rank with a part of it keeps.

    NSA keeps those of the selected branch and the compressed ones; a window's few are left out.
    """
    if config.runtime.cp == 1:
        return 0
    model, num_tokens = config.model, config.train.seq_len
    width = model.n_kv_groups // config.runtime.tp * (model.d_k + model.d_v)
    width += config.nsa.d_index if kind == Kind("msa") else 0
    if kind.name == BRANCHES:
        num_tokens += block_spec(config).num_cmp(num_tokens)
    return config.train.batch_size * BYTES[config.runtime.precision] * num_tokens * width


def _keys_kept(arrived: list[int], checkpointed: range) -> dict[str, int]:
    """Those that all layers keep for backward; layers that recompute get theirs again, in turn."""
    again = [arrived[i] for i in checkpointed]
    if not any(arrived):
        return {}
    return {"keys of whole rows": sum(arrived) - sum(again) + max(again, default=0)}


def _gathered_head(config: Config) -> int:
    """The matrix of the head, which every rank gathers whole."""
    return FP32 * config.data.vocab * config.model.dim if config.runtime.tp > 1 else 0


def head_activations(config: Config) -> int:
    """Count what the loss keeps: the gradients of its input and of its matrix."""
    size = BYTES[config.runtime.precision]
    return (_tokens(config) * size + config.data.vocab * FP32) * config.model.dim


def layer_activations(config: Config, kind: Kind) -> int:
    """Count what one layer keeps for its backward pass, under the torch backend.

    Dense attention is assumed to keep no probabilities, which holds for all but the math backend.
    """
    model, num_kv = config.model, _num_kv(config, kind)
    size, tokens = BYTES[config.runtime.precision], _tokens(config)
    num_keys = model.n_heads + num_kv
    # Bytes per token: what autograd saves of the norms, the projections, attention and the MLP.
    norms = 2 * (2 * FP32 * model.dim + FP32)  # input, scaled input, 1 / rms; of both norms
    if model.qk_norm:  # the same; in fp32 their input is what was projected
        norms += num_keys * ((1 if size == FP32 else 2) * FP32 * model.d_k + FP32)
    hidden = 4 if model.mlp == "gated" else 2  # before and after silu; gate and fc1, and product
    inputs = model.dim * 2  # of qkv and gate, of fc1
    attention = num_keys * model.d_k + num_kv * model.d_v  # as projected
    rotated = num_keys * model.d_k
    out = model.n_heads * model.d_v
    per_token = norms + size * (inputs + attention + rotated + out + hidden * model.mlp_width)
    if kind.name == DENSE:
        return tokens * (per_token + FP32 * model.n_heads)  # LSEs
    chosen = model.n_kv_groups * config.nsa.n_sel
    if kind.name != BRANCHES:
        heads = model.n_heads if kind.name == "moba" else model.n_kv_groups
        # LSEs, the index as given and as int64 ids, for each KV head or each query head.
        per_token += FP32 * model.n_heads + (FP32 + 8) * heads * config.nsa.n_sel
        if kind == Kind("msa"):  # index heads before and after norm and RoPE, and as values
            width = (model.n_kv_groups + 1) * config.nsa.d_index
            values = model.n_kv_groups * (config.nsa.d_index + model.d_k)
            per_token += size * (3 * width + values) + FP32 * model.n_heads
        return tokens * per_token
    per_token += FP32 * (6 * model.n_heads + chosen)  # gates, LSEs, selection
    return tokens * per_token + config.train.batch_size * size * _compressed(config)


def cache_bytes(config: Config, num_tokens: int, batch: int = 1) -> dict[str, int]:
    """Count the decode cache of `num_tokens` in all layers, by what it holds."""
    spec, token = block_spec(config), batch * _token_bytes(config)

    def layer(kind: Kind) -> dict[str, int]:
        if kind.name == BRANCHES:
            return {
                "selected": num_tokens * token,
                "compressed": spec.num_cmp(num_tokens) * token,
                "window": min(spec.w, num_tokens) * token,
                "unfinished block": spec.l * token,
            }
        summaries = batch * _summary_numbers(config, num_tokens, kind)
        more = {"summaries": summaries * BYTES[config.runtime.precision]}
        return {"all": num_tokens * token} | ({} if kind.name == DENSE else more)

    return _sum_layers(config, layer)


def _summary_numbers(config: Config, num_tokens: int, kind: Kind) -> int:
    """Numbers that a rule keeps of so many tokens."""
    if kind.name in (DENSE, BRANCHES) or not kind.scores:
        return 0
    if kind.name == "msa":
        return num_tokens * config.nsa.d_index
    num = _read_spec(config, kind).num_cmp(num_tokens)
    return num * config.model.n_kv_groups * config.model.d_k


def dense_cache_bytes(config: Config, num_tokens: int, batch: int = 1) -> int:
    """Count the decode cache of dense attention with the same heads."""
    return config.model.n_layers * num_tokens * batch * _token_bytes(config)


def decode_reads(config: Config, num_tokens: int) -> dict[str, int]:
    """Count the tokens that each KV head reads in one decode step at this length, in the first
    layer."""
    kind = layer_kinds(config)[0]
    if kind.name == DENSE:
        return {"all": num_tokens}
    spec = _read_spec(config, kind)
    if kind.name != BRANCHES:
        return {"sel": spec.num_selected_tokens(num_tokens)}
    return {
        "cmp": spec.num_cmp(num_tokens),
        "sel": spec.num_selected_tokens(num_tokens),
        "win": min(spec.w, num_tokens),
    }


def _token_bytes(config: Config) -> int:
    """K and V of one token in one branch of one layer."""
    model = config.model
    return model.n_kv_groups * (model.d_k + model.d_v) * BYTES[config.runtime.precision]


def _tokens(config: Config) -> int:
    return config.train.batch_size * config.train.seq_len


def checkpointed_layers(config: Config) -> range:
    """Layers that recompute in backward."""
    if not config.runtime.gradient_checkpointing:
        return range(0)
    if not config.runtime.gc_layers:
        return range(config.model.n_layers)
    return range(*parse_layers(config.runtime.gc_layers))


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
