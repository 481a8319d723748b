"""Going back to the last good checkpoint after a loss spike, and on with other data.

The batches between the checkpoint and the spike are jumped over: the learning rates and the steps
are those of the schedule, the data comes from further on. How far is part of the state, so a run
that is stopped and resumed later reads what it would have read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nsa.train import shelf
from nsa.train.checkpoint import BadCheckpoint
from nsa.train.errors import LossSpike, TrainError
from nsa.train.ranks import Alone, mark_shared

MAX_ROLLBACKS = 5
"""To the same checkpoint: then the reason is not in the data."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Where to start again."""

    path: Path
    """A checkpoint from before the spike."""
    jumped: int
    """Updates whose data is left out from there on, in all."""
    spikes: int
    """Spikes that the run has met so far."""


def with_rollbacks(attempt: Callable[[Rollback | None], Result]) -> Result:
    """Try, and after a spike try again from before it; raise when that does not help."""
    back: Rollback | None = None
    num_same = 0
    while True:
        try:
            return attempt(back)
        except LossSpike as spike:
            before, back = back, spike.back
            num_same = num_same + 1 if before is not None and before.path == back.path else 1
            if num_same > MAX_ROLLBACKS:
                gave_up = TrainError(
                    f"{spike}; this is the rollback number {num_same} to {back.path.name}, and "
                    "other data has not helped: lower train.lr, or resume from an older checkpoint"
                )
                mark_shared(gave_up)
                raise gave_up from None


def find_rollback(
    ranks: Alone, folder: Path, step: int, jumped: int, spikes: int
) -> Rollback | None:
    """Where all ranks go back to; the first one looks."""
    found = ranks.from_first(lambda: str(_newest_before(folder, step) or ""))
    if not found:
        return None
    path = Path(found)
    return Rollback(path=path, jumped=jumped + step - shelf.step_of(path), spikes=spikes)


def _newest_before(folder: Path, step: int) -> Path | None:
    """The newest good checkpoint before `step`; None where there is none yet."""
    for path in shelf.paths_of(folder):
        if shelf.step_of(path) < step and _is_good(path):
            return path
    return None


def _is_good(path: Path) -> bool:
    try:
        shelf.verify(path)
    except BadCheckpoint:
        return False
    return True
