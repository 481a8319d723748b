"""What training and decoding hold in memory, by part, in bytes."""

from __future__ import annotations

from nsa.config import Config, parse_layers
from nsa.model.counts import BYTES, block_spec, num_branches, parameter_counts

FP32 = 4
PART = 1 << 24
"""Logits that the loss has at a time, at most, ..."""
FUSED_PART = 1 << 27
"""... and where a kernel computes it, in one copy."""


def training_memory(config: Config) -> dict[str, int]:
    """Estimate the memory of training on one rank, at the end of a forward pass.

    What attention holds for a moment, and what the allocator adds, are not in it.
    """
    parts = parameter_counts(config)
    weights = FP32 * sum(parts.values())
    matrices = sum(parts.values()) - parts["norms"] - parts["embedding"] - parts["head"]
    num_checkpointed = _num_checkpointed(config)
    num_kept = config.model.n_layers - num_checkpointed
    stream = FP32 * _tokens(config) * config.model.dim  # the residual stream is fp32
    layer = layer_activations(config)
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

    Dense attention is taken to keep no probabilities, as every backend but the plain-math one.
    """
    model, num_kv = config.model, num_branches(config) * config.model.n_kv_groups
    size, tokens = BYTES[config.runtime.precision], _tokens(config)
    num_keys = model.n_heads + num_kv
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
    """Count the tokens that each KV head reads to decode one more, at this length."""
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
    """The larger of both ways: some rows in three copies, or more rows in one."""
    logits, size = _tokens(config) * config.data.vocab, BYTES[config.runtime.precision]
    plain = min(logits, PART) * (2 * FP32 + (size if size < FP32 else 0))
    return max(plain, min(logits, FUSED_PART) * size)


def _compressed(config: Config) -> int:
    """Numbers kept for the compressed K and V of a row in one layer; phi mlp keeps its blocks."""
    blocks = block_spec(config).num_cmp(config.train.seq_len) * config.model.n_kv_groups
    per_number = 1 if config.nsa.phi == "avg" else 1 + config.nsa.l + 2 * 2
    return blocks * (config.model.d_k + config.model.d_v) * per_number
