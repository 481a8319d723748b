"""train.init_from: a new run that starts from the weights of another one, to fine-tune its model.

Everything else is new: the step, the optimizer, the schedule, the place in the data. The sha256 of
the weights is part of what identifies the run, the path is not. A run that was stopped goes on from
its own checkpoints, which hold all that it needs, so the file may be gone by then.

The first rank alone reads the file; the others are told which weights it holds, and get them from
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from nsa.config import Config, DataConfig, to_container
from nsa.config.schema import VOCABULARIES
from nsa.model import TinyLM
from nsa.train.checkpoint.file import UNREADABLE
from nsa.train.checkpoint.identity import INITIAL, UNKNOWN, Identity
from nsa.train.checkpoint.model_file import BadModelFile, find_model, load_model, weights_sha256
from nsa.train.checkpoint.resume import Start
from nsa.train.distributed.strategy import Strategy

SHAPE = (
    *("model.dim", "model.n_layers", "model.n_heads", "model.n_kv_groups", "model.d_k"),
    *("model.d_v", "model.attention", "model.tie_embeddings"),
)
"""Keys that must be those of the model in the file; `_shape_keys` adds those of NSA."""
WITHOUT_EFFECT = ("model.embed_std",)
"""Keys of a model that say nothing about one whose weights are given."""


@dataclass(kw_only=True)
class Origin:
    """Where the first weights of a run come from; without a path they are random."""

    path: str = ""
    sha256: str = ""
    """Of the weights; empty where they cannot be read."""
    problem: str = ""
    """Why no new run can start from there."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """On the first rank, until the model has them."""
    notes: list[str] = field(default_factory=list)
    """What is not as it was in the file, a line each."""

    @property
    def identity(self) -> Identity:
        """Its part of what identifies the run."""
        return {INITIAL: self.sha256 or UNKNOWN} if self.path else {}

    def require(self, ranks: Strategy, start: Start | None) -> None:
        """Raise on all ranks where a new run needs weights that are not there."""

        def check() -> None:
            if self.problem and start is None:
                raise BadModelFile(self.problem)

        ranks.from_first(check)

    def begin(self, model: TinyLM, ranks: Strategy, say: Callable[[str], None]) -> None:
        """Give the model of a new run the weights, on all ranks."""
        if not self.path:
            return
        ranks.spread(self.weights, model)
        self.weights.clear()
        say(
            f"[init] weights from {self.path} (sha256 {self.sha256[:12]}); the optimizer, the "
            "schedule and the place in the data are new"
        )
        for note in self.notes:
            say(f"[init] {note}")

    def stand_back(self, start: Start, say: Callable[[str], None]) -> None:
        """A checkpoint of the run itself wins."""
        self.weights.clear()
        if self.path:
            gone = f" (and could not be: {self.problem})" if self.problem else ""
            say(f"[init] {self.path} is not needed{gone}: the run goes on from {start.path}")


def find_origin(ranks: Strategy, cfg: Config, vocab: int) -> Origin:
    """Read train.init_from on the first rank, and tell the others what it found."""
    found: Origin | None = None

    def look() -> str:
        nonlocal found
        found = read_origin(cfg, vocab) if cfg.train.init_from else Origin()
        return json.dumps([found.path, found.sha256, found.problem])

    path, sha256, problem = json.loads(ranks.from_first(look))
    return found or Origin(path=path, sha256=sha256, problem=problem)


def read_origin(cfg: Config, vocab: int) -> Origin:
    """The weights that the config names, held to its shape; what is wrong is in `problem`."""
    path = find_model(Path(cfg.train.init_from))
    try:
        model, theirs = load_model(path)
    except UNREADABLE as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Origin(path=str(path), problem=f"train.init_from: {reason}")
    origin = Origin(path=str(path), weights=model.state_dict())
    origin.sha256 = weights_sha256(origin.weights)
    changed = _changed(cfg, theirs, _shape_keys(cfg))
    if model.vocab != vocab:
        changed.append(f"ids of data.tokenizer: {model.vocab} there, {vocab} here")
    if changed:
        origin.problem = (
            f"train.init_from: {path} holds a model of another shape ({'; '.join(changed)}); set "
            "these keys as they are there, or name a model of the shape of this config"
        )
    origin.notes = _notes(cfg, theirs)
    return origin


def _shape_keys(cfg: Config) -> list[str]:
    keys = [*SHAPE]
    if cfg.model.attention == "nsa":
        keys += ["nsa.phi", "nsa.gate"]
        keys += ["nsa.l"] if cfg.nsa.phi == "mlp" else []  # it reads so many tokens
    return keys


def _changed(cfg: Config, theirs: Config, keys: list[str]) -> list[str]:
    ours, before = _flat(cfg), _flat(theirs)
    return [
        f"{key}: {before[key]} there, {ours[key]} here" for key in keys if before[key] != ours[key]
    ]


def _notes(cfg: Config, theirs: Config) -> list[str]:
    """What may differ, and should not do so unnoticed."""
    groups = ("model.", "nsa.") if cfg.model.attention == "nsa" else ("model.",)
    keys = [key for key in _flat(cfg) if key.startswith(groups) and key not in WITHOUT_EFFECT]
    changed = _changed(cfg, theirs, [*keys, "train.seq_len", "data.respect_documents"])
    notes = [f"other settings than it was trained with: {'; '.join(changed)}"] if changed else []
    before, ours = _tokenizer(theirs.data), _tokenizer(cfg.data)
    if before != ours:
        notes.append(
            f"WARNING: it was trained with the tokenizer {before}, and this run has {ours} of as "
            "many ids; unless they are the same, no id means what the model has learned"
        )
    return notes


def _tokenizer(data: DataConfig) -> str:
    return data.tokenizer if data.tokenizer in VOCABULARIES else str(data.tokenizer_file)


def _flat(cfg: Config) -> dict[str, object]:
    groups = to_container(cfg).items()
    return {f"{group}.{key}": value for group, keys in groups for key, value in keys.items()}
