"""Whether a run goes on from a checkpoint, and from which one.

Without being told, a run goes on from the newest good checkpoint in its folder if what decides its
numbers has not changed and it has not finished. Told `latest`, it must find one; told a file, it
must be that one. Told `none`, it starts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsa.config import Config, to_container
from nsa.data import Data
from nsa.telemetry.metrics import NAME as METRICS
from nsa.telemetry.metrics import read_metrics
from nsa.train import shelf
from nsa.train.checkpoint import BadCheckpoint, Content, named_by_user
from nsa.train.ranks import Alone
from nsa.train.spikes import ACTING

DECIDING = (
    *("steps", "seq_len", "lr", "lr_schedule", "warmup_steps", "weight_decay", "grad_clip"),
    "seed",
)
"""Keys of the train group that change the numbers; the global batch stands for its parts."""
YOUNGER = (
    *("train.decay_steps", "train.optimizer", "data.respect_documents"),
    "model.embed_std",
)
"""More keys that change the numbers, left out at their defaults."""
INITIAL = "initial weights"
"""Their sha256, where a run does not start from random ones (init_from.py)."""
UNKNOWN = "unknown"
"""In place of it, where the file is gone: then those of the checkpoint are taken to be meant."""
AUTO, LATEST, NONE = "auto", "latest", "none"

Identity = dict[str, str]


class Start(NamedTuple):
    """A checkpoint to go on from; shelf.peek says what of its content is there already."""

    path: Path
    content: Content


def identity_of(cfg: Config, data: Data, world_size: int = 1) -> Identity:
    """All that decides the numbers of a run, as text by name."""
    groups = to_container(cfg)
    found = {
        f"{group}.{key}": value
        for group in ("model", "nsa")
        for key, value in groups[group].items()
    }
    found |= {f"train.{key}": groups["train"][key] for key in DECIDING}
    found["global batch"] = global_batch(cfg, world_size)
    found["runtime.precision"] = cfg.runtime.precision
    # Younger settings count only where they are chosen: checkpoints from before them go on.
    usual = to_container(Config())
    for name in YOUNGER:
        group, key = name.split(".")
        found.pop(name, None)
        if groups[group][key] != usual[group][key]:
            found[name] = groups[group][key]
    if cfg.train.spike_rule in ACTING:
        keys = ("spike_rule", "spike_threshold", "spike_window")
        found |= {f"train.{key}": groups["train"][key] for key in keys}
    found |= {"data (train)": data.train.fingerprint(), "data (val)": data.val.fingerprint()}
    return {name: str(value) for name, value in found.items()}


def global_batch(cfg: Config, world_size: int) -> int:
    """Rows in an update, over all ranks."""
    return world_size * cfg.train.batch_size * cfg.train.accumulate_grad_batches


def find_start_together(
    ranks: Alone,
    folder: Path,
    wanted: str,
    identity: Identity,
    steps: int,
    say: Callable[[str], None],
) -> Start | None:
    """The same on every rank: the first looks, and the others read what it has found."""
    found: Start | None = None

    def look() -> str:
        nonlocal found
        found = find_start(folder, wanted, identity, steps, say)
        return str(found.path) if found else ""

    path = ranks.from_first(look)
    if ranks.is_first or not path:
        return found
    return Start(Path(path), shelf.peek(Path(path), verified=True))


def find_start(
    folder: Path, wanted: str, identity: Identity, steps: int, say: Callable[[str], None]
) -> Start | None:
    """The checkpoint to go on from; None starts anew."""
    if wanted == NONE:
        return None
    if wanted not in (AUTO, LATEST):
        return _named(Path(wanted), identity, steps)
    start = _newest_good(folder, say)
    if start is None:
        if wanted == LATEST:
            raise BadCheckpoint(
                f"--resume latest: {folder} has no checkpoint that can be used; name one with "
                "--resume PATH, or start anew with --resume none"
            )
        return None
    changed = _differences(start.content["identity"], identity)
    if wanted == LATEST:
        _refuse(start.path, changed, start.content["step"], steps)
        return start
    if changed:
        say(f"[resume] not from {start.path}: the run is another one ({_list(changed)})")
        return None
    if start.content["step"] >= steps or _finished(folder, steps):
        return None
    return start


def _named(path: Path, identity: Identity, steps: int) -> Start:
    path = named_by_user(path)
    content = shelf.peek(path)
    _refuse(path, _differences(content["identity"], identity), content["step"], steps)
    return Start(path, content)


def _newest_good(folder: Path, say: Callable[[str], None]) -> Start | None:
    for path in shelf.paths_of(folder):
        try:
            return Start(path, shelf.peek(path))
        except BadCheckpoint as error:
            say(f"[resume] passed over: {error}")
    return None


def _refuse(path: Path, changed: list[str], step: int, steps: int) -> None:
    if changed:
        raise BadCheckpoint(
            f"{path} is of another run ({_list(changed)}); resume with the settings it was written "
            "with, or start anew with --resume none"
        )
    if step >= steps:
        raise BadCheckpoint(
            f"{path} is at step {step}, and the run ends at step {steps}: nothing is left to do"
        )


def _differences(stored: Identity, wanted: Identity) -> list[str]:
    if wanted.get(INITIAL) == UNKNOWN and INITIAL in stored:
        wanted = wanted | {INITIAL: stored[INITIAL]}
    names = sorted(stored.keys() | wanted.keys())
    return [
        f"{name}: {stored.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
        for name in names
        if stored.get(name) != wanted.get(name)
    ]


def _list(changed: list[str], most: int = 5) -> str:
    rest = f", and {len(changed) - most} more" if len(changed) > most else ""
    return "; ".join(changed[:most]) + rest


def _finished(folder: Path, steps: int) -> bool:
    if not (folder / METRICS).is_file():
        return False
    metrics = read_metrics(folder)
    return metrics.status == "finished" and metrics.steps >= steps
