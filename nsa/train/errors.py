"""How a run can end other than by finishing; each error carries the exit code of the command."""

from __future__ import annotations


class TrainError(RuntimeError):
    """The run did not finish."""

    exit_code = 1


class Interrupted(TrainError):
    """Ctrl-C: the user's wish, not a failure."""

    exit_code = 0


class RunRefused(TrainError):
    """The run was not started, because it would likely be wasted."""

    exit_code = 3


class NonFiniteLoss(TrainError):
    """The loss or the gradient became NaN or infinite; no model was written after that."""

    exit_code = 10
