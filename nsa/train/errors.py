"""How a run can end other than by finishing; each error carries the exit code of the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsa.config import Config
from nsa.files import free_bytes, size
from nsa.records.sentinels import ANOMALY, HALT, read_anomaly, read_halt

if TYPE_CHECKING:
    from nsa.train.trainer import Rollback


class TrainError(RuntimeError):
    """The run did not finish."""

    exit_code = 1
    shared = False
    """Whether every rank ends like this, at the same place."""


class Halted(TrainError):
    """SIGTERM, Ctrl-C or .HALT, obeyed after a step: the run can be resumed."""

    exit_code = 0
    shared = True


class Interrupted(TrainError):
    """A second Ctrl-C, in the middle of a step: the user's wish, not a failure."""

    exit_code = 0


class OutOfMemory(TrainError):
    """The device has no room for a step; the last checkpoint is untouched."""


class RunRefused(TrainError):
    """The run was not started, because it would likely be wasted."""

    exit_code = 3


class NothingLeft(TrainError):
    """A launcher has restarted a run that is finished: its work is done."""

    exit_code = 0


class RankFailed(TrainError):
    """The first rank could not start the run, and says why."""

    shared = True

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(TrainError):
    """An exchange failed: another rank is gone, or does not come."""


class LossSpike(TrainError):
    """The loss rose far above its recent values, and the run goes back to a checkpoint."""

    def __init__(self, message: str, back: Rollback) -> None:
        super().__init__(message)
        self.back = back


BAD_DATA, NO_DATA = 2, 11
"""Exit codes: what came cannot be used; nothing came."""
STALLED = 11
"""Exit code of a rank that was ended because it, or one that it waits for, stood still."""


class LoaderFailed(TrainError):
    """The source of the data does not deliver, or not what can be read."""

    shared = True

    def __init__(
        self, message: str, *, started: bool, exit_code: int, damaged: bool = False
    ) -> None:
        """`damaged`: what came is not what was prepared, and was maybe trained on."""
        super().__init__(message)
        self.started, self.exit_code, self.damaged = started, exit_code, damaged


class NonFiniteLoss(TrainError):
    """The loss or the gradient became NaN or infinite; no model was written after that."""

    exit_code = 10
    shared = True

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


# What a run must show before it starts: long runs are expensive, so they are checked harder.

CHECKPOINT_COPIES = 2
"""Of the weights, at least, in a checkpoint: themselves, and the moments of the optimizer."""
LONG_STEPS = 5000
"""From here on a run needs checkpoints and a config that was chosen on purpose."""


def refuse_waste(cfg: Config, steps: int, *, config_path: str, config_named: bool) -> None:
    """Raise RunRefused when a long run could be lost, or is likely not the one that was meant."""
    if steps < LONG_STEPS:
        return
    if cfg.train.save_every == 0:
        raise RunRefused(
            f"{steps} steps with train.save_every=0: a run of {LONG_STEPS} steps or more without "
            "checkpoints is lost when it stops; set train.save_every, or pass --allow-long-run"
        )
    if not config_named:
        raise RunRefused(
            f"{steps} steps with {config_path}, which nobody named: a run of {LONG_STEPS} steps or "
            "more needs a config that was chosen; name it with --config or CONFIG, or pass "
            "--allow-long-run"
        )


def refuse_full_disk(folder: Path, need_bytes: int) -> None:
    """Raise where not even one checkpoint fits: the run would have nothing to go on from."""
    free = free_bytes(folder)
    if free is not None and free < need_bytes:
        raise RunRefused(
            f"disk full: need {size(need_bytes)} for a checkpoint, have {size(free)} in {folder}; "
            "make room, or name another train.out_dir"
        )


def refuse_halted(folder: Path) -> None:
    """Raise where a .HALT from before is still there: it would end the run after its first step."""
    halt = read_halt(folder)
    if halt is None:
        return
    anomaly = read_anomaly(folder)
    clear = f"look at the cause, then remove {folder / HALT}"
    if anomaly == "nan_loss":
        raise NonFiniteLoss(
            f"{folder} holds a run that ended with {anomaly}; {clear} and {folder / ANOMALY}"
        )
    reason = f" ({anomaly})" if anomaly else ""
    raise RunRefused(f"{folder} holds a .HALT from before{reason}; {clear} to start")
