"""How a run can end other than by finishing; each error carries the exit code of the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa.train.rollback import Rollback


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
