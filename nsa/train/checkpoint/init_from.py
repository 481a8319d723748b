"""train.init_from: start a new run from the weights of another one (fine-tuning).

Step, optimizer, schedule and data position start fresh. The sha256 of the weights is part of the
identity of the run; the path is not. A stopped run resumes from its own checkpoints, so the file
may be gone by then.

Only rank 0 reads the file; the others get its hash, and the weights by broadcast.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from nsa.config import Config, DataConfig, to_container
from nsa.config.check import find_tokenizer_json, token_ids
from nsa.config.schema import VOCABULARIES
from nsa.model import TinyLM
from nsa.model.folder import is_folder
from nsa.train.checkpoint.file import UNREADABLE
from nsa.train.checkpoint.identity import INITIAL, UNKNOWN, Identity
from nsa.train.checkpoint.model_file import (
    BadModelFile,
    find_model,
    load_model,
    meta_model,
    weights_sha256,
)
from nsa.train.checkpoint.resume import Start
from nsa.train.distributed.strategy import Strategy

SHAPE = (
    *("model.dim", "model.n_layers", "model.n_heads", "model.n_kv_groups", "model.d_k"),
    *("model.d_v", "model.mlp_dim", "model.mlp", "model.qkv_bias", "model.qk_norm"),
    "model.tie_embeddings",
)
"""Keys that must equal those of the model in the file; `_shape_keys` adds those of attention."""
WITHOUT_EFFECT = ("model.embed_std",)
"""Keys that only affect random initialization."""


@dataclass(kw_only=True)
class Origin:
    """Source of the initial weights; without a path they are random."""

    path: str = ""
    sha256: str = ""
    """Hash of the weights; empty if they cannot be read."""
    problem: str = ""
    """Why a new run cannot start from this file."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """On rank 0, until they are loaded into the model."""
    fresh: list[str] = field(default_factory=list)
    """Weights of indexers that the file does not have: they stay random."""
    notes: list[str] = field(default_factory=list)
    """Settings that differ from the file, one line each."""

    @property
    def identity(self) -> Identity:
        """Its entry in the identity of the run."""
        return {INITIAL: self.sha256 or UNKNOWN} if self.path else {}

    def require(self, ranks: Strategy, start: Start | None) -> None:
        """Raise on all ranks if a new run needs the weights and they cannot be used."""

        def check() -> None:
            if self.problem and start is None:
                raise BadModelFile(self.problem)

        ranks.from_rank_0(check)

    def load_into(self, model: TinyLM, ranks: Strategy, say: Callable[[str], None]) -> None:
        """Load the weights into the model of a new run, on all ranks."""
        if not self.path:
            return
        ranks.broadcast_weights(self.weights, model, skipped=frozenset(self.fresh))
        self.weights.clear()  # free the host copy
        say(
            f"[init] weights from {self.path} (sha256 {self.sha256[:12]}); the optimizer, the "
            "schedule and the position in the data start fresh"
        )
        for note in self.notes:
            say(f"[init] {note}")

    def discard_weights(self, start: Start, say: Callable[[str], None]) -> None:
        """Discard the weights: the run resumes from its own checkpoint."""
        self.weights.clear()
        if self.path:
            gone = f" (and could not be: {self.problem})" if self.problem else ""
            say(f"[init] {self.path} is not used{gone}: the run resumes from {start.path}")


def find_origin(ranks: Strategy, cfg: Config, vocab: int) -> Origin:
    """Read train.init_from on rank 0, and send path, hash and problem to the others."""
    found: Origin | None = None

    def look() -> str:
        nonlocal found
        found = read_origin(cfg, vocab) if cfg.train.init_from else Origin()
        return json.dumps([found.path, found.sha256, found.problem, found.fresh])

    path, sha256, problem, fresh = json.loads(ranks.from_rank_0(look))
    return found or Origin(path=path, sha256=sha256, problem=problem, fresh=fresh)


def read_origin(cfg: Config, vocab: int) -> Origin:
    """The weights that the config names, compared with its shape; errors go to `problem`."""
    # Not raised here: a run that resumes from its own checkpoint does not need the file.
    path = find_model(Path(cfg.train.init_from))
    try:
        model, theirs = load_model(path)
    except UNREADABLE as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Origin(path=str(path), problem=f"train.init_from: {reason}")
    origin = Origin(path=str(path), weights=model.state_dict())
    origin.sha256 = weights_sha256(origin.weights)
    changed = _changed(cfg, theirs, _shape_keys(cfg, theirs))
    if model.vocab != vocab:
        changed.append(f"ids of data.tokenizer: {model.vocab} there, {vocab} here")
    if is_folder(path):
        changed += _other_tokenizer(cfg.data, theirs.data)
        theirs = replace(cfg, model=theirs.model, nsa=theirs.nsa)  # a folder has no more than that
    if changed:
        origin.problem = (
            f"train.init_from: {path} has a model of another shape ({'; '.join(changed)}); set "
            "these keys to match it, or use a model with the shape of this config"
        )
        return origin
    origin.notes = _notes(cfg, theirs) + _match_indexers(origin, cfg, vocab)
    return origin


def _match_indexers(origin: Origin, cfg: Config, vocab: int) -> list[str]:
    """Drop the indexers that the model of the config has not, name those that the file has not."""
    names = meta_model(cfg, vocab).state_dict().keys()
    origin.fresh = [name for name in names if name not in origin.weights]
    dropped = origin.weights.keys() - names
    origin.weights = {name: x for name, x in origin.weights.items() if name in names}
    counts = (
        ("start from random weights", {name.split(".")[1] for name in origin.fresh}),
        ("of the file are left out", {name.split(".")[1] for name in dropped}),
    )
    return [f"the indexers of {len(layers)} layers {what}" for what, layers in counts if layers]


def _other_tokenizer(ours: DataConfig, theirs: DataConfig) -> list[str]:
    """What differs, if both tokenizers are files that give other ids to the same tokens."""
    files = [data.tokenizer_file for data in (theirs, ours) if data.tokenizer not in VOCABULARIES]
    if len(files) < 2:
        return []
    before, now = (find_tokenizer_json(file) for file in files)
    if token_ids(before) == token_ids(now):
        return []
    return [f"ids of the tokens: those of {before} there, of {now} here"]


def _shape_keys(cfg: Config, theirs: Config) -> list[str]:
    keys = [*SHAPE]
    # Layers with one K and V have the same weights, whatever they read; indexers aside.
    if any(cfg.model.branched) or any(theirs.model.branched):
        keys += ["model.attention", "model.rule", "model.kv"]
    if cfg.model.learns_index and theirs.model.learns_index:
        keys += ["nsa.d_index"]
    if any(cfg.model.branched):
        keys += ["nsa.phi", "nsa.gate"]
        keys += ["nsa.l"] if cfg.nsa.phi == "mlp" else []  # the MLP's input is l tokens wide
    return keys


def _changed(cfg: Config, theirs: Config, keys: list[str]) -> list[str]:
    ours, before = _flat(cfg), _flat(theirs)
    return [
        f"{key}: {before[key]} there, {ours[key]} here" for key in keys if before[key] != ours[key]
    ]


def _notes(cfg: Config, theirs: Config) -> list[str]:
    """Differences that are allowed but should be logged."""
    groups = ("model.", "nsa.") if cfg.model.attention == "nsa" else ("model.",)
    keys = [key for key in _flat(cfg) if key.startswith(groups) and key not in WITHOUT_EFFECT]
    changed = _changed(cfg, theirs, [*keys, "train.seq_len", "data.respect_documents"])
    notes = (
        [f"settings differ from those it was trained with: {'; '.join(changed)}"] if changed else []
    )
    before, ours = _tokenizer(theirs.data), _tokenizer(cfg.data)
    if before != ours:
        notes.append(
            f"WARNING: it was trained with the tokenizer {before}, but this run uses {ours} with "
            "as "
            "many ids; unless both are the same, the ids have other meanings than the model learned"
        )
    return notes


def _tokenizer(data: DataConfig) -> str:
    return data.tokenizer if data.tokenizer in VOCABULARIES else str(data.tokenizer_file)


def _flat(cfg: Config) -> dict[str, object]:
    groups = to_container(cfg).items()
    return {f"{group}.{key}": value for group, keys in groups for key, value in keys.items()}
