"""The ways in which a run can end early, each with its exit code, and the checks that refuse to
start a run that would likely be wasted.
"""

from __future__ import annotations

from pathlib import Path

from nsa.config import Config
from nsa.files import free_bytes, size
from nsa.records.sentinels import ANOMALY, HALT, read_anomaly, read_halt


class TrainError(RuntimeError):
    """The run did not finish."""

    exit_code = 1
    shared = False
    """Whether all ranks raise this error at the same place."""


class Halted(TrainError):
    """Stopped after a step by SIGTERM, Ctrl-C or .HALT; the run can be resumed."""

    exit_code = 0
    shared = True


class Interrupted(TrainError):
    """Stopped in the middle of a step by a second Ctrl-C; requested, so not a failure."""

    exit_code = 0


class OutOfMemory(TrainError):
    """A step does not fit into device memory; the last checkpoint is intact."""


class RunRefused(TrainError):
    """The run was not started, because its work would likely be lost."""

    exit_code = 3


class NothingLeft(TrainError):
    """A launcher restarted a run that is already finished."""

    exit_code = 0


class RankFailed(TrainError):
    """Rank 0 could not start the run; the message is its reason."""

    shared = True

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(TrainError):
    """A collective failed: another rank died or did not arrive in time."""


BAD_DATA, NO_DATA = 2, 11
"""Exit codes: the data is invalid; the data did not arrive."""
STALLED = 11
"""Exit code of a rank that was killed because it, or a rank it waits for, hangs."""


class LoaderFailed(TrainError):
    """The data source delivers nothing, or something invalid."""

    shared = True

    def __init__(
        self, message: str, *, started: bool, exit_code: int, damaged: bool = False
    ) -> None:
        """`damaged`: a shard does not match its hash and may have been trained on already."""
        super().__init__(message)
        self.started, self.exit_code, self.damaged = started, exit_code, damaged


class NonFiniteLoss(TrainError):
    """The loss or the gradient became NaN or infinite; nothing was saved after that."""

    exit_code = 10
    shared = True

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


# --- checks before a run starts ---

CHECKPOINT_COPIES = 2
"""Size of a checkpoint in units of the weights, at least: weights and optimizer moments."""
LONG_STEPS = 5000
"""From here on, a run needs checkpoints and an explicitly named config."""


def refuse_waste(cfg: Config, steps: int, *, config_path: str, config_named: bool) -> None:
    """Raise RunRefused for a long run without checkpoints or with a default config."""
    if steps < LONG_STEPS:
        return
    if cfg.train.save_every == 0:
        raise RunRefused(
            f"{steps} steps with train.save_every=0: a run of {LONG_STEPS} steps or more without "
            "checkpoints is lost when it stops; set train.save_every, or pass --allow-long-run"
        )
    if not config_named:
        raise RunRefused(
            f"{steps} steps with {config_path}, which is only the default: a run of {LONG_STEPS} "
            "steps or more needs an explicit config; name it with --config or CONFIG, or pass "
            "--allow-long-run"
        )


def refuse_full_disk(folder: Path, need_bytes: int) -> None:
    """Raise RunRefused if not even one checkpoint fits on the disk."""
    free = free_bytes(folder)  # None: unknown, so do not refuse
    if free is not None and free < need_bytes:
        raise RunRefused(
            f"disk full: need {size(need_bytes)} for a checkpoint, have {size(free)} in {folder}; "
            "free some space, or use another train.out_dir"
        )


def refuse_halted(folder: Path) -> None:
    """Raise if an old .HALT is still there: it would stop the run after its first step."""
    halt = read_halt(folder)
    if halt is None:
        return
    anomaly = read_anomaly(folder)
    clear = f"check the cause, then remove {folder / HALT}"
    # The same exit code as the run that failed.
    if anomaly == "nan_loss":
        raise NonFiniteLoss(
            f"{folder} has a run that ended with {anomaly}; {clear} and {folder / ANOMALY}"
        )
    reason = f" ({anomaly})" if anomaly else ""
    raise RunRefused(f"{folder} has an old .HALT{reason}; {clear} to start")
