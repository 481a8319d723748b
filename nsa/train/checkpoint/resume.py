"""Decide whether a run resumes, and from which checkpoint.

auto (default): resume from the newest valid checkpoint in the folder if it belongs to the same,
unfinished run. Otherwise start over and move the old files to previous/<time>/; but only if the old
run is finished, has no checkpoint, or has trained for less than SHORT_S. Else refuse, and name the
two possible commands.

latest: there must be a checkpoint. A path: it must be that checkpoint. none: always start over. A
restart by a launcher never moves files, whatever --resume says: it resumes from the newest
checkpoint, or from step 0 if there is none, and exits if the run is finished.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from nsa.config import Config
from nsa.config.env import read
from nsa.records import Metrics, read_config, read_metrics
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import BadCheckpoint, Content, named_by_user
from nsa.train.checkpoint.identity import Fit, Identity, fit
from nsa.train.distributed.strategy import Strategy
from nsa.train.errors import NothingLeft, RunRefused
from nsa.train.progress import clock

AUTO, LATEST, NONE = "auto", "latest", "none"
SHORT_S = 600.0
"""A run with less training time than this may be moved aside without --resume none."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RequestedRun:
    """The run that was requested."""

    folder: Path
    wanted: str
    """auto, latest, none, or a checkpoint."""
    cfg: Config
    identity: Identity
    steps: int
    """Last step: train.steps, or earlier with --steps."""
    world_size: int = 1
    restarted: bool = False
    """Whether a launcher restarted it after a failure."""


class Start(NamedTuple):
    """A checkpoint to resume from; `content` is what find.peek returns."""

    path: Path
    content: Content
    fit: Fit


class Beginning(NamedTuple):
    """How a run begins."""

    start: Start | None
    """None: start at step 0."""
    keeps: bool
    """Whether it keeps the files in its folder; otherwise they are moved aside."""

    def adapt(self, cfg: Config) -> Config:
        """The config with the accumulation that preserves the global batch."""
        if self.start is None:
            return cfg
        train = dataclasses.replace(cfg.train, accumulate_grad_batches=self.start.fit.accumulate)
        return dataclasses.replace(cfg, train=train)


def was_restarted() -> bool:
    """Whether torchrun or our launcher restarted this process after a failure."""
    return bool(read("TORCHELASTIC_RESTART_COUNT") or read("NSA_RESTART_COUNT"))


def agree_on_start(ranks: Strategy, asked: RequestedRun, say: Say) -> Beginning:
    """`find_start` on rank 0; the other ranks read the checkpoint that it chose."""
    found = Beginning(None, False)

    def look() -> str:
        nonlocal found
        found = find_start(asked, say)
        return json.dumps([str(found.start.path) if found.start else "", found.keeps])

    path, keeps = json.loads(ranks.from_rank_0(look))
    if ranks.is_first or not path:
        return Beginning(found.start, keeps)
    return Beginning(_start(Path(path), find.peek(Path(path), verified=True), asked), keeps)


def find_start(asked: RequestedRun, say: Say) -> Beginning:
    """Where to begin; raise RunRefused if a run worth keeping would be moved aside."""
    wanted = asked.wanted
    if asked.restarted:
        say("[resume] restart: resuming from the newest checkpoint; no files are moved aside")
        # A restart repeats the original command: its `none` must not discard the progress.
        wanted = AUTO if wanted in (NONE, LATEST) else wanted
    if wanted == NONE:
        return Beginning(None, keeps=False)
    # A named checkpoint needs no search of the folder, except after a restart.
    newest = None if wanted not in (AUTO, LATEST) and not asked.restarted else _newest(asked, say)
    if wanted not in (AUTO, LATEST):
        start = _named(Path(wanted), newest, asked)
        if asked.restarted and not _is_in(start, asked.folder):
            _refuse_restart(newest, _read_previous(asked.folder, newest), asked)
        return _resume_from(start, asked, say)
    if wanted == LATEST:
        if newest is None:
            raise BadCheckpoint(
                f"--resume latest: {asked.folder} has no usable checkpoint; name one "
                "with --resume PATH, or start over with --resume none"
            )
        _refuse(newest, asked)
        return _resume_from(newest, asked, say)
    past = _read_previous(asked.folder, newest)
    if newest is not None and not newest.fit.changed and not _is_done(newest, past, asked.steps):
        return _resume_from(newest, asked, say)
    return _start_over(newest, past, asked, say)


def _newest(asked: RequestedRun, say: Say) -> Start | None:
    """The newest valid checkpoint in the folder; invalid ones are skipped with a warning."""
    for path in find.paths_of(asked.folder):
        try:
            return _start(path, find.peek(path), asked)
        except BadCheckpoint as error:
            say(f"[resume] skipped: {error}")
    return None


def _named(path: Path, newest: Start | None, asked: RequestedRun) -> Start:
    """The checkpoint that was named; after a restart, a later one of the same run if any."""
    path = named_by_user(path)
    fits = newest is not None and not newest.fit.changed
    if newest is not None and fits and newest.content["step"] > find.step_of(path):
        return newest
    start = _start(path, find.peek(path), asked)
    _refuse(start, asked)
    return start


def _start(path: Path, content: Content, asked: RequestedRun) -> Start:
    try:
        fits = fit(content, asked.cfg, asked.identity, asked.world_size)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise BadCheckpoint(
            f"{path}: its settings are not those of a run ({type(error).__name__}: {error}); use "
            "an older checkpoint"
        ) from None
    return Start(path, content, fits)


def _refuse(start: Start, asked: RequestedRun) -> None:
    """Raise BadCheckpoint if a requested checkpoint is of another run or leaves nothing to do."""
    path, step = start.path, start.content["step"]
    if start.fit.changed:
        raise BadCheckpoint(
            f"{path} is of another run ({_list(start.fit.changed)}); resume with the settings it "
            "was written with, or start over with --resume none"
        )
    is_unfinished = (
        _is_in(start, asked.folder) and not _read_previous(asked.folder, start).is_finished
    )
    if step > asked.steps or (step == asked.steps and not is_unfinished):
        raise BadCheckpoint(
            f"{path} is at step {step}, and the run ends at step {asked.steps}: nothing is left "
            "to do"
        )


def _resume_from(start: Start, asked: RequestedRun, say: Say) -> Beginning:
    for note in start.fit.notes:
        say(f"[resume] {note}")
    return Beginning(start, keeps=_is_in(start, asked.folder) or asked.restarted)


def _is_in(start: Start, folder: Path) -> bool:
    return start.path.parent.resolve() == folder.resolve()


class _PreviousRun(NamedTuple):
    """What the files in the folder say about the run that wrote them."""

    metrics: Metrics | None
    train_s: float | None
    """Seconds of training over all resumes; None if unknown."""

    @property
    def is_finished(self) -> bool:
        """Whether it reached its own last step, which --steps may have lowered."""
        return self.metrics is not None and self.metrics.status == "finished"


def _read_previous(folder: Path, newest: Start | None) -> _PreviousRun:
    try:
        metrics = read_metrics(folder)
    except (OSError, ValueError, TypeError, AttributeError):  # missing, damaged or other version
        metrics = None
    # metrics.json may be older or newer than the checkpoint: take the larger time.
    counted = [metrics.train_s] if metrics else []
    if newest is not None and "train_s" in newest.content["metrics"]:
        counted.append(newest.content["metrics"]["train_s"])
    return _PreviousRun(metrics, max(counted, default=None))


def _is_done(newest: Start, past: _PreviousRun, steps: int) -> bool:
    """Whether the previous run has already reached `steps`, with all its files.

    A run that was killed between its last checkpoint and model.pt is not done: resuming it trains
    no further step and writes the files of the end.
    """
    # A finished run may have no checkpoint at its last step.
    if not past.is_finished:
        return newest.content["step"] > steps
    return max(past.metrics.steps if past.metrics else 0, newest.content["step"]) >= steps


def _start_over(
    newest: Start | None, past: _PreviousRun, asked: RequestedRun, say: Say
) -> Beginning:
    """Start at step 0 if that loses nothing; else raise RunRefused."""
    has_checkpoints = bool(find.paths_of(asked.folder))
    if asked.restarted:
        _refuse_restart(newest, past, asked)
        return Beginning(None, keeps=True)
    if has_checkpoints:
        # An unknown training time counts as long: do not move what may be valuable.
        short = past.train_s is not None and past.train_s < SHORT_S
        why = _why(newest, past, asked)
        if not past.is_finished and not short:
            _refuse_to_start_over(newest, past, asked, why)
        say(f"[resume] not from {newest.path if newest else asked.folder}: {why}")
    return Beginning(None, keeps=False)


def _refuse_restart(newest: Start | None, past: _PreviousRun, asked: RequestedRun) -> None:
    """Raise if the folder holds another run, or this one finished: a restart moves no files."""
    if newest is None and not find.paths_of(asked.folder):
        # No checkpoint yet: config.yaml says whose folder this is.
        theirs = _config_in(asked.folder)
        is_ours = theirs in (None, asked.cfg)
        why = "the files of another run"
    else:
        is_ours = newest is not None and not newest.fit.changed
        why = _why(newest, past, asked)
    if is_ours and past.is_finished:
        raise NothingLeft(f"the run in {asked.folder} is finished; nothing is left to do")
    if not is_ours or newest is not None:
        raise RunRefused(
            f"{asked.folder} has a run that this restart cannot resume ({why}); a restart "
            "moves no files aside: run the command again by hand"
        )


def _config_in(folder: Path) -> Config | None:
    try:
        return read_config(folder)
    except (OSError, ValueError):
        return None


def _why(newest: Start | None, past: _PreviousRun, asked: RequestedRun) -> str:
    """Why the run in the folder is not resumed."""
    if newest is None:
        return "none of its checkpoints is intact"
    if newest.fit.changed:
        return f"it is another run ({_list(newest.fit.changed)})"
    if past.is_finished:
        return "that run is finished"
    return (
        f"its newest checkpoint is at step {newest.content['step']}, and this command ends at "
        f"step {asked.steps}"
    )


def _refuse_to_start_over(
    newest: Start | None, past: _PreviousRun, asked: RequestedRun, why: str
) -> NoReturn:
    """Raise RunRefused with both commands: the one that resumes and the one that starts over."""
    metrics = past.metrics
    step = newest.content["step"] if newest else metrics.step if metrics else None
    at = "an unfinished run" if step is None else f"an unfinished run at step {step}"
    spent = "" if past.train_s is None else f", after {clock(past.train_s)} of training"
    raise RunRefused(
        f"{asked.folder} has {at}{spent}, and this command would move it aside: {why}. "
        f"Choose one of two:\n"
        f"  to resume it:      {_how_to_resume(newest, asked)}\n"
        f"  to start over:     the same command with --resume none (the old files move to "
        f"{asked.folder}/previous/)"
    )


def _how_to_resume(newest: Start | None, asked: RequestedRun) -> str:
    if newest is None:  # no valid checkpoint here: look for one in the backup folder
        backup = Path(asked.cfg.train.backup_dir) if asked.cfg.train.backup_dir else None
        for path in find.paths_of(backup) if backup else []:
            if find.is_complete(path):
                return f"the same command with --resume {path}"
        return (
            f"copy an intact checkpoint and its manifest into {asked.folder}, then the same "
            f"command; `nsa checkpoint verify {asked.folder}` lists the problems of those there"
        )
    if not newest.fit.changed:
        return f"the same command with --steps or train.steps above {newest.content['step']}"
    if newest.fit.resumes:
        return f"the same command with {' '.join(newest.fit.resumes)}"
    return "the same command with the data and the weights that it was started with"


def _list(changed: list[str], most: int = 5) -> str:
    rest = f", and {len(changed) - most} more" if len(changed) > most else ""
    return "; ".join(changed[:most]) + rest
