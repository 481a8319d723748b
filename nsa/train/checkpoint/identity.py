"""The identity of a run (settings and data that determine its losses), and whether a checkpoint
belongs to the requested run.

Two differences are allowed, because they do not affect the updates done so far: the number of ranks
(accumulation is adjusted to preserve the global batch), and a schedule that gives those updates the
same learning rates (a longer run with a constant rate, or with wsd before its decay).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from nsa.config import Config, ConfigError, TrainConfig, to_container
from nsa.data import Data
from nsa.train.checkpoint.file import Content
from nsa.train.optimizer import lr_at

DECIDING = (
    *("steps", "seq_len", "lr", "lr_schedule", "warmup_steps", "weight_decay", "grad_clip"),
    "seed",
)
"""Keys of the train group that affect the losses; batch keys are covered by the global batch."""
YOUNGER = (
    *("train.decay_steps", "train.optimizer", "data.respect_documents"),
    *("model.embed_std", "model.mlp_dim", "model.rule", "model.kv", "model.mlp"),
    *("model.norm_eps", "model.qkv_bias", "model.qk_norm", "model.rope_scaling"),
    *("model.rope_original_len", "model.rope_low_freq", "model.rope_high_freq"),
    *("nsa.num_first", "nsa.num_local", "nsa.pool", "nsa.pool_block", "nsa.d_index"),
    *("train.index_loss", "train.index_lr", "train.index_warmup_steps", "train.index_warmup"),
)
"""Keys added later: part of the identity only if not at their defaults."""
SCHEDULE = ("steps", "lr", "lr_schedule", "warmup_steps", "decay_steps")
"""Keys of the train group that affect only the learning rates."""
BATCH, DATA = "global batch", "data (train)"
SPIKE_RULES_THAT_ACT = ("skip", "rollback")
"""Values of train.spike_rule that change the weights."""
INITIAL = "initial weights"
"""sha256 of the weights of train.init_from, if set (init_from.py)."""
UNKNOWN = "unknown"
"""In place of the hash if that file is gone: then the checkpoint's value is accepted."""

Identity = dict[str, str]


def identity_of(cfg: Config, data: Data, world_size: int = 1) -> Identity:
    """Everything that determines the losses of a run, as text by name."""
    groups = to_container(cfg)
    found = {
        f"{group}.{key}": value
        for group in ("model", "nsa")
        for key, value in groups[group].items()
    }
    found |= {f"train.{key}": groups["train"][key] for key in DECIDING}
    found[BATCH] = global_batch(cfg, world_size)
    found["runtime.precision"] = cfg.runtime.precision
    # Defaults are left out, so that checkpoints written before these keys existed still match.
    usual = to_container(Config())
    for name in YOUNGER:
        group, key = name.split(".")
        found.pop(name, None)
        if groups[group][key] != usual[group][key]:
            found[name] = groups[group][key]
    if cfg.train.spike_rule in SPIKE_RULES_THAT_ACT:
        keys = ("spike_rule", "spike_threshold", "spike_window")
        found |= {f"train.{key}": groups["train"][key] for key in keys}
    found |= {DATA: data.train.fingerprint(), "data (val)": data.val.fingerprint()}
    return {name: str(value) for name, value in found.items()}


def global_batch(cfg: Config, world_size: int) -> int:
    """Rows per update, over all ranks."""
    return world_size * rows_of_rank(cfg.train)


def rows_of_rank(train: TrainConfig) -> int:
    """Rows per update on one rank."""
    return train.batch_size * train.accumulate_grad_batches


class Fit(NamedTuple):
    """How a checkpoint matches the requested run."""

    changed: list[str]
    """Differences that make it another run, one text each; empty if it is the same run."""
    resumes: list[str]
    """Overrides that would turn this command into the run of the checkpoint."""
    identity: Identity
    """Identity of the resumed run."""
    accumulate: int
    """train.accumulate_grad_batches that preserves the global batch."""
    notes: list[str]
    """Allowed differences, for the log."""


def fit(content: Content, cfg: Config, identity: Identity, world_size: int) -> Fit:
    """Compare a checkpoint with a config and its identity."""
    stored: Identity = content["identity"]
    accumulate, notes = cfg.train.accumulate_grad_batches, []
    # The file of train.init_from is gone: accept the hash in the checkpoint.
    if identity.get(INITIAL) == UNKNOWN and INITIAL in stored:
        identity = identity | {INITIAL: stored[INITIAL]}
    # Allowed difference 1: another number of ranks.
    if stored.get(BATCH) != identity[BATCH]:
        kept = _rescaled(content, cfg.train, world_size)
        if kept is not None:
            notes.append(
                f"the global batch stays at {stored[BATCH]} rows on {world_size} "
                f"rank{'s' * (world_size != 1)}: train.accumulate_grad_batches is {kept}, "
                f"not {accumulate}"
            )
            accumulate, identity = kept, identity | {BATCH: stored[BATCH]}
    names = sorted(n for n in stored.keys() | identity.keys() if stored.get(n) != identity.get(n))
    # Allowed difference 2: another schedule with the same rates so far.
    rates = [name for name in names if name in {f"train.{key}" for key in SCHEDULE}]
    if rates and _same_rates(content, cfg.train):
        notes.append(
            f"{'; '.join(_differences(rates, stored, identity))}: the {content['step']} updates "
            "done had the same learning rates"
        )
        names = [name for name in names if name not in rates]
    return Fit(
        _differences(names, stored, identity),
        [*_overrides(names, content, cfg, world_size)],
        identity,
        accumulate,
        notes,
    )


def _differences(names: list[str], stored: Identity, wanted: Identity) -> list[str]:
    return [
        f"{name}: {stored.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
        for name in names
    ]


def _rescaled(content: Content, train: TrainConfig, world_size: int) -> int | None:
    """The accumulation that preserves the global batch; None if the number of ranks is not the
    cause of the difference, or does not divide the batch.

    On the same number of ranks as last time, the same command must ask for the same rows per rank.
    The checkpoint stores the rows that were asked for, not those after an adjustment.
    """
    total, stored = int(content["identity"][BATCH]), content["cfg"]["train"]
    used = stored["batch_size"] * stored["accumulate_grad_batches"]
    # Older checkpoints have no `batch`: derive it from their config.
    asked = content.get("batch", {"world_size": total // used, "rows_of_rank": used})
    if world_size == asked["world_size"] and rows_of_rank(train) != asked["rows_of_rank"]:
        return None
    rows = world_size * train.batch_size
    return total // rows if total % rows == 0 else None


def _same_rates(content: Content, train: TrainConfig) -> bool:
    """Whether this schedule gives all updates done so far the learning rates that they had."""
    stored = content["cfg"]["train"]
    try:
        before = TrainConfig(**{key: stored[key] for key in SCHEDULE if key in stored})
    except (ConfigError, TypeError):  # written by a version with other settings
        return False
    return all(lr_at(s, before) == lr_at(s, train) for s in range(1, content["step"] + 1))


def _overrides(names: list[str], content: Content, cfg: Config, world_size: int) -> Iterator[str]:
    """Overrides that make a command match the run of a checkpoint, as far as settings can."""
    stored, ours = content["cfg"], to_container(cfg)
    for name in names:
        group, _, key = name.partition(".")
        if key and key in stored.get(group, {}):
            yield _override(group, key, stored[group][key])
        elif name == DATA:
            for key, value in stored["data"].items():
                if ours["data"].get(key) != value:
                    yield _override("data", key, value)
        elif name == INITIAL:
            yield _override("train", "init_from", stored["train"].get("init_from", ""))
        elif name == BATCH:
            rows = world_size * cfg.train.batch_size
            total = int(content["identity"][BATCH])
            if total % rows == 0:
                yield _override("train", "accumulate_grad_batches", total // rows)
            elif total % world_size == 0:
                yield _override("train", "batch_size", total // world_size)
                yield _override("train", "accumulate_grad_batches", 1)


def _override(group: str, key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return shlex.quote(f"{group}.{key}={text}")
