"""`nsa sparsify`: a dense model, pretrained or our own, becomes a sparse one.

The layers keep their weights and get a rule that chooses the blocks they read: with all blocks
chosen, the model computes what it did before. An indexer (rule msa) has new, random weights and
learns when training continues. The result is a model folder with a config for `nsa train`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from nsa.config import Config, ConfigError, Setting, build, to_container
from nsa.config.check import FILE_NAME, count_ids
from nsa.config.load import parse_override
from nsa.config.schema import VOCABULARIES
from nsa.files import is_regular
from nsa.model import TinyLM
from nsa.model.block import SparseBlock
from nsa.model.folder import RUNTIME, BadFolder, check_free, is_folder, save_folder
from nsa.model.pretrained import read_folder
from nsa.model.rules import MSARule
from nsa.train.checkpoint.commands import tokenizer_files_of
from nsa.train.checkpoint.model_file import (
    BadModelFile,
    config_of,
    find_model,
    load_model,
    meta_model,
    tokenizer_of,
)

RULES = ("pooled", "msa", "nsa")
"""Rules with one K and V, as a dense model has them."""
CONFIG = "train.yaml"
"""The settings with which `nsa train` continues, in the folder of the result."""
WARM_UP_STEPS = 100
"""Updates in which a new indexer learns alone, in that config."""
INDEX_LR = 1e-3
"""Its learning rate there: at one that suits trained weights it would stay as random as it is."""
TOKENIZER_FILES = (
    *(FILE_NAME, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Entries of the source's config.json that the result has, too."""


class Dense(NamedTuple):
    """The model to convert."""

    cfg: Config
    """Its shape, and its tokenizer."""
    vocab: int
    weights: dict[str, Tensor]
    files: dict[str, bytes]
    """Of its tokenizer."""
    extra: dict[str, Any]
    """KEPT."""


def sparsify(
    source: Path,
    target: Path,
    *,
    rule: str,
    layers: str = "",
    overrides: Sequence[str] = (),
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Path:
    """Convert the dense model of a folder or a model.pt into a new folder.

    `layers` names those that become sparse, as 2,5:8; the others stay dense, and empty means all.
    `overrides` are keys of group nsa, and `seed` draws the weights of indexers.
    """
    check_free(target)
    dense = _fit_tokenizer(read_dense(source, say), source, say)
    cfg = _sparse_config(dense, rule, layers, overrides)
    model = _with_rules(dense, cfg, seed)
    arguments = TinyLM.arguments(cfg, dense.vocab)
    settings = {name: value for name, value in arguments.items() if name not in RUNTIME}
    files = dense.files | {CONFIG: _train_config(cfg, target, dense).encode()}
    save_folder(model, settings, target, files=files, extra=dense.extra)
    say(f"[sparsify] {source} -> {target}: {_describe(cfg, model)}")
    say(f"[sparsify] train on with: nsa train --config {target / CONFIG} data.dataset=...")
    return target


# --- the source ---


def read_dense(source: Path, say: Callable[[str], None]) -> Dense:
    """The model of a folder or a file; refuses one that is not dense."""
    dense = _from_folder(source) if is_folder(source) else _from_file(source, say)
    if (kind := dense.cfg.model.attention_kind) != "dense":
        raise BadModelFile(
            f"{source} has attention {kind!r}; only a dense model can be converted: give one with "
            "model.attention=dense, or use train.init_from to change the rule of a sparse one"
        )
    return dense


def _from_folder(source: Path) -> Dense:
    found = read_folder(source)
    vocab: int = found.settings["vocab"]
    cfg = config_of(found.settings, tokenizer_of(source, vocab), str(source))
    names = [name for name in TOKENIZER_FILES if is_regular(source / name)]
    files = {name: (source / name).read_bytes() for name in names}
    extra = {key: found.config[key] for key in KEPT if found.config.get(key) is not None}
    return Dense(cfg, vocab, found.weights, files, extra)


def _from_file(source: Path, say: Callable[[str], None]) -> Dense:
    """Of a model.pt, a checkpoint or a run folder."""
    path = find_model(source)
    if source.is_dir() and not path.exists():
        raise BadFolder(
            f"{source} has no config.json, no model.pt and no checkpoint; give a model folder, a "
            "run folder or a model.pt"
        )
    model, cfg = load_model(path)
    files, missing = tokenizer_files_of(cfg.data, model.vocab)
    if missing:
        say(f"[sparsify] no tokenizer: {missing}")
    extra = {"index_loss": cfg.train.index_loss}
    return Dense(cfg, model.vocab, model.state_dict(), files, extra)


def _fit_tokenizer(dense: Dense, source: Path, say: Callable[[str], None]) -> Dense:
    """Cut the rows of the embedding for which the tokenizer has no ids: they are padding."""
    if FILE_NAME not in dense.files or not is_folder(source):
        return dense
    num_ids = count_ids(source / FILE_NAME)
    if num_ids > dense.vocab:
        raise BadFolder(
            f"{source / FILE_NAME} has ids up to {num_ids - 1}, the embedding has {dense.vocab} "
            "rows; a tokenizer has at most as many: use the tokenizer of this model"
        )
    if num_ids == dense.vocab:
        return dense
    say(
        f"[sparsify] the embedding has {dense.vocab} rows, {FILE_NAME} has {num_ids} ids; the "
        "other rows are left out"
    )
    names = ("embed.weight", "lm_head.weight")
    cut = {name: dense.weights[name][:num_ids].clone() for name in names if name in dense.weights}
    return dense._replace(vocab=num_ids, weights=dense.weights | cut)


# --- the result ---


def _sparse_config(dense: Dense, rule: str, layers: str, overrides: Sequence[str]) -> Config:
    """The config of the source with the rule and the blocks of the result, all of it checked."""
    if rule not in RULES:
        raise ConfigError(f"rule={rule!r} is not known; it must be {' | '.join(RULES)}; use one")
    given = [parse_override(text, "command line") for text in overrides]
    for setting in given:
        if not setting.key.startswith("nsa."):
            raise ConfigError(
                f"{setting.key}={setting.value} is no setting of sparse layers; only keys of group "
                "nsa can be given: the model's own come from the source"
            )
    sparse = parse_layer_list(layers, dense.cfg.model.n_layers)
    rules = [rule if i in sparse else "dense" for i in range(dense.cfg.model.n_layers)]
    groups = to_container(dense.cfg)
    before = [
        Setting(f"{group}.{key}", value, "source")
        for group in ("model", "nsa", "data")
        for key, value in groups[group].items()
    ]
    names = rule if len(sparse) == len(rules) else ",".join(rules)
    chosen = {"model.attention": "nsa", "model.rule": names, "model.kv": "shared"}
    return build(before + [Setting(key, value, "rule") for key, value in chosen.items()] + given)


def parse_layer_list(text: str, n_layers: int) -> set[int]:
    """The numbers of `2,5:8` (8 is not one of them); empty text means all."""
    found: set[int] = set()
    for part in text.split(",") if text else [f"0:{n_layers}"]:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else first + 1
        if not match or not first < last <= n_layers:
            raise ConfigError(
                f"layers={text!r} is not allowed; it must be numbers from 0 to {n_layers - 1} or "
                f"ranges A:B with A < B <= {n_layers}; write for example 0,2:{n_layers}"
            )
        found |= set(range(first, last))
    return found


def _with_rules(dense: Dense, cfg: Config, seed: int) -> TinyLM:
    """The sparse model: the weights of the dense one, and new indexers in their dtype."""
    model = meta_model(cfg, dense.vocab)
    missing, unexpected = model.load_state_dict(dense.weights, strict=False, assign=True)
    assert not unexpected, "a layer with one K and V has the weights of a dense one"
    dtype = dense.weights["embed.weight"].dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in model.layers:
            rule = block.attn.rule if isinstance(block, SparseBlock) else None
            if isinstance(rule, MSARule):
                rule.to_empty(device="cpu").reset_parameters()
                rule.to(dtype)
    assert all(".attn.rule." in name for name in missing), "and those of its indexer"
    return model.eval()


def _train_config(cfg: Config, target: Path, dense: Dense) -> str:
    """The text of CONFIG: what differs from base.yaml."""
    ours, usual = to_container(cfg), to_container(Config())
    groups = {
        group: {key: x for key, x in ours[group].items() if x != usual[group][key]}
        for group in ("model", "nsa")
    }
    if cfg.data.tokenizer in VOCABULARIES:
        groups["data"] = {"tokenizer": cfg.data.tokenizer}
    elif FILE_NAME in dense.files:
        groups["data"] = {"tokenizer": str(target / FILE_NAME), "eos": cfg.data.eos}
    train: dict[str, Any] = {"init_from": str(target), "out_dir": f"{target}-trained"}
    if cfg.model.learns_index:
        train |= {
            "index_warmup": "frozen",
            "index_warmup_steps": WARM_UP_STEPS,
            "index_lr": INDEX_LR,
        }
    content = {"inherits": "base.yaml", **groups, "train": train}
    head = "# Settings of this model; give steps, data and a learning rate on the command line.\n"
    return head + yaml.safe_dump(content, sort_keys=False)


def _describe(cfg: Config, model: TinyLM) -> str:
    sparse = sum(isinstance(block, SparseBlock) for block in model.layers)
    fresh = sum(p.numel() for p in model.indexer_parameters())
    total = sum(p.numel() for p in model.parameters())
    kind = next(rule for rule in cfg.model.rules if rule != "dense")
    more = f", {fresh:,} of them new" if fresh else ""
    return f"{sparse} of {len(model.layers)} layers have rule {kind}; {total:,} weights{more}"
