"""Pretrained models of the Llama family, read from Hugging Face folders as a dense TinyLM.

Known are Llama (and what has its architecture, such as SmolLM2), Qwen2 and Qwen3. Settings that
TinyLM does not have are refused by name, never ignored. Nothing here needs transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.model.folder import (
    CONFIG,
    MODEL_TYPE,
    BadFolder,
    load_folder,
    open_weights,
    read_config,
    tensor_files,
)
from nsa.model.lm import TinyLM

FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
"""By model_type: what is not in the config, because all models of the family have it."""


class Loaded(NamedTuple):
    """A model of a folder."""

    settings: dict[str, Any]
    """TinyLM's arguments."""
    weights: dict[str, Tensor]
    """TinyLM's state dict, on the CPU, of one dtype."""
    config: dict[str, Any]
    """The content of config.json."""


def read_folder(folder: Path) -> Loaded:
    """The model of a folder: one of ours, or a pretrained one of FAMILIES as a dense TinyLM."""
    config = read_config(folder)
    if config.get("model_type") == MODEL_TYPE:
        settings, weights = load_folder(folder)
    else:
        settings = read_settings(config, folder / CONFIG)
        weights = _read_weights(folder, settings)
    return Loaded(settings, _of_one_dtype(weights), config)


# --- the config ---

SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), (False, None)),
    **dict.fromkeys(("use_bidirectional_attention", "use_qk_norm"), (False, None)),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), (0, None)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, None)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,)),
    **dict.fromkeys(("quantization_config", "no_rope_layers", "no_rope_layer_interval"), (None,)),
    **dict.fromkeys(("partial_rotary_factor", "embedding_multiplier"), (1, None)),
    **dict.fromkeys(("attention_multiplier", "residual_multiplier", "logits_scaling"), (1, None)),
    **dict.fromkeys(("logit_scale", "query_pre_attn_scalar"), (1, None)),
    "is_causal": (True, None),
    "hidden_act": ("silu", "swish"),
}
"""Keys that change what a model computes, with the values under which TinyLM computes the same."""
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast"),
)
"""Settings of positions that are read, or that their kind does not use."""
ROPE_DEFAULTS = {"partial_rotary_factor": 1, "truncate": True}
"""Further settings, with the values that change nothing."""


def read_settings(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """TinyLM's arguments for the dense model of a config.json."""
    kind = _family(config, where)
    for key, harmless in SWITCHED_OFF.items():
        if key in config and config[key] not in harmless:
            _refuse(where, key, config[key], f"{harmless[0]!r} or absent")
    layers = config.get("layer_types") or []
    if other := [name for name in layers if name != "full_attention"]:
        _refuse(where, "layer_types", other[0], "'full_attention' for all layers")
    if kind == "llama" and config.get("sliding_window") is not None:
        _refuse(where, "sliding_window", config["sliding_window"], "null or absent")
    dim, heads = (_count(config, key, where) for key in ("hidden_size", "num_attention_heads"))
    size = _count(config, "head_dim", where, dim // heads)
    return {
        "vocab": _count(config, "vocab_size", where),
        "dim": dim,
        "n_layers": _count(config, "num_hidden_layers", where),
        "n_heads": heads,
        "n_kv_groups": _count(config, "num_key_value_heads", where, heads),
        "d_k": size,
        "d_v": size,
        "mlp_dim": _count(config, "intermediate_size", where),
        "mlp": "gated",
        "norm_eps": _number(config, "rms_norm_eps", where, 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention": "dense",
        **FAMILIES[kind],
        **_positions(config, where),
    }


def _family(config: Mapping[str, Any], where: Path) -> str:
    kind, made = config.get("model_type"), config.get("architectures") or []
    if kind not in FAMILIES:
        _refuse(where, "model_type", kind, f"one of {', '.join((*FAMILIES, MODEL_TYPE))}")
    known = f"{str(kind).capitalize()}ForCausalLM"
    if made and made != [known]:
        _refuse(where, "architectures", made, f"[{known!r}]")
    return str(kind)


def _positions(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """RoPE: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of before."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        _refuse(where, "rope_parameters", given, "an object of settings")
    given = dict(given)
    given.setdefault("rope_type", given.get("type") or "default")
    given.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    kind = given["rope_type"]
    if kind not in ROPE_KINDS:
        _refuse(where, "rope_type", kind, f"one of {', '.join(ROPE_KINDS)}")
    for key, value in given.items():
        if key not in ROPE_KEYS and value not in (ROPE_DEFAULTS.get(key), None):
            _refuse(where, f"{key} of its positions", value, "absent")
    found = {"rope_base": _number(given, "rope_theta", where)}
    if kind == "default":
        return found
    found |= {"rope_scaling": kind, "rope_scale": _number(given, "factor", where)}
    if kind == "linear":
        return found
    length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    limits = ("low_freq_factor", "high_freq_factor", 1.0, 4.0)
    low, high, *usual = limits if kind == "llama3" else ("beta_slow", "beta_fast", 1.0, 32.0)
    return found | {
        "rope_original_len": _count(given, "original_max_position_embeddings", where, length),
        "rope_low_freq": _number(given, low, where, usual[0]),
        "rope_high_freq": _number(given, high, where, usual[1]),
    }


def _count(config: Mapping[str, Any], key: str, where: Path, default: Any = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        _refuse(where, key, value, "a whole number >= 1")
    return int(value)


def _number(config: Mapping[str, Any], key: str, where: Path, default: Any = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        _refuse(where, key, value, "a number > 0")
    return float(value)


def _refuse(where: Path, key: str, given: object, allowed: str) -> None:
    raise BadFolder(
        f"{where}: {key} is {given!r}; in a model that can be converted it is {allowed}: use "
        "another model"
    )


# --- the weights ---

PARTS = {
    "embed.weight": ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
    "norm1.weight": ("input_layernorm.weight",),
    "norm2.weight": ("post_attention_layernorm.weight",),
    **{
        f"attn.qkv.{what}": tuple(f"self_attn.{one}_proj.{what}" for one in "qkv")
        for what in ("weight", "bias")
    },
    "attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "attn.out.weight": ("self_attn.o_proj.weight",),
    "mlp.gate.weight": ("mlp.gate_proj.weight",),
    "mlp.fc1.weight": ("mlp.up_proj.weight",),
    "mlp.fc2.weight": ("mlp.down_proj.weight",),
}
"""The tensors that make one of TinyLM's, row after row."""
DTYPES = ("F64", "F32", "BF16", "F16")
COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of older files that the config determines."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _read_weights(folder: Path, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """TinyLM's tensors. Names and shapes of all are compared before the first one is read."""
    files = tensor_files(folder)
    expected = _expected(settings, files, folder)
    needed = {name: shape for parts in expected.values() for name, shape in parts.items()}
    extra = {name for name in files.keys() - needed.keys() if not COMPUTED.fullmatch(name)}
    copied_head = settings["tie_embeddings"] and HEAD in extra
    for what, names in (
        ("has no", needed.keys() - files.keys()),
        ("has an unknown", extra - ({HEAD} if copied_head else set())),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise BadFolder(
                f"{folder} {what} tensor {min(names)}{more}; its config describes a model of "
                f"{len(needed)} tensors with other names: use the weights of this config"
            )
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(open_weights(folder / file)) for file in {*files.values()}
        }
        for name, shape in needed.items():
            _check_tensor(opened[files[name]], name, shape, folder / files[name])
        weights = {
            ours: torch.cat([opened[files[name]].get_tensor(name) for name in parts])
            for ours, parts in expected.items()
        }
        if copied_head:
            head = opened[files[HEAD]].get_tensor(HEAD)
            if not torch.equal(head, weights["embed.weight"]):
                raise BadFolder(
                    f"{folder} has a {HEAD} of its own, but tie_word_embeddings is true, so that "
                    f"it must equal {EMBEDDING}: set tie_word_embeddings to false in {CONFIG}"
                )
    return weights


def _expected(
    settings: Mapping[str, Any], files: Mapping[str, str], folder: Path
) -> dict[str, dict[str, list[int]]]:
    """For each of TinyLM's tensors, the names and shapes of its parts."""
    layers = {name.split(".")[2] for name in files if name.startswith("model.layers.")}
    # Before the model is built: a small file must not make us build a million layers.
    if len(layers) != settings["n_layers"]:
        raise BadFolder(
            f"{folder} has weights of {len(layers)} layers, its config says "
            f"{settings['n_layers']}: they are not of one model; use another copy"
        )
    with torch.device("meta"):
        tensors = TinyLM(**settings).state_dict()
    heads = [settings["n_heads"], settings["n_kv_groups"], settings["n_kv_groups"]]
    expected = {}
    for name, tensor in tensors.items():
        place, _, layer_part = name.removeprefix("blocks.").partition(".")
        in_layer = name.startswith("blocks.")
        parts = PARTS[layer_part if in_layer else name]
        rows = [len(tensor)] if len(parts) == 1 else [h * settings["d_k"] for h in heads]
        prefix = f"model.layers.{place}." if in_layer else ""
        expected[name] = {
            prefix + part: [size, *tensor.shape[1:]] for part, size in zip(parts, rows, strict=True)
        }
    return expected


def _check_tensor(file: Any, name: str, shape: list[int], path: Path) -> None:
    if name not in file.keys():  # noqa: SIM118  (not a dict)
        raise BadFolder(f"{path} has no tensor {name}; the index names it: copy both again")
    found = file.get_slice(name)
    if found.get_shape() != shape or found.get_dtype() not in DTYPES:
        raise BadFolder(
            f"{path}: {name} is {found.get_shape()} of {found.get_dtype()}, its config needs "
            f"{shape} of {', '.join(DTYPES)}; use the weights of this config"
        )


def _of_one_dtype(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in the widest dtype of any: nothing is rounded."""
    kind = reduce(torch.promote_types, (tensor.dtype for tensor in weights.values()))
    return {name: tensor.to(kind) for name, tensor in weights.items()}
