"""Rollback after a loss spike (train.spike_rule=rollback).

Training resumes from the last valid checkpoint before the spike and skips the data in between;
steps and learning rates follow the schedule. The skip is part of the checkpoint, so a later resume
reads the same data. Detection is in spikes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import BadCheckpoint
from nsa.train.distributed.strategy import Strategy, mark_shared
from nsa.train.errors import TrainError

MAX_ROLLBACKS = 5
"""To the same checkpoint; after that, the data is not the cause."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Where to resume after a spike."""

    path: Path
    """A checkpoint from before the spike."""
    jumped: int
    """Total number of updates whose data is skipped from there on."""
    spikes: int
    """Spikes of the run so far."""


class LossSpike(TrainError):
    """The loss spiked; `with_rollbacks` starts again from the checkpoint in `back`."""

    def __init__(self, message: str, back: Rollback) -> None:
        super().__init__(message)
        self.back = back


def with_rollbacks(attempt: Callable[[Rollback | None], Result]) -> Result:
    """Retry from before the spike; give up after MAX_ROLLBACKS to the same checkpoint."""
    back: Rollback | None = None
    num_same = 0
    while True:
        try:
            return attempt(back)
        except LossSpike as spike:
            before, back = back, spike.back
            # All ranks count alike, so all give up at the same rollback.
            num_same = num_same + 1 if before is not None and before.path == back.path else 1
            if num_same > MAX_ROLLBACKS:
                gave_up = TrainError(
                    f"{spike}; this is the rollback number {num_same} to {back.path.name}, and "
                    "other data has not helped: lower train.lr, or resume from an older checkpoint"
                )
                mark_shared(gave_up)
                raise gave_up from None


def find_rollback(
    ranks: Strategy, folder: Path, step: int, jumped: int, spikes: int
) -> Rollback | None:
    """The rollback for all ranks; rank 0 chooses it."""
    found = ranks.from_rank_0(lambda: str(_newest_before(folder, step) or ""))
    if not found:
        return None
    path = Path(found)
    return Rollback(path=path, jumped=jumped + step - find.step_of(path), spikes=spikes)


def _newest_before(folder: Path, step: int) -> Path | None:
    """The newest checkpoint before `step` that matches its manifest, or None."""
    for path in find.paths_of(folder):
        if find.step_of(path) < step and _is_good(path):
            return path
    return None


def _is_good(path: Path) -> bool:
    try:
        find.verify(path)
    except BadCheckpoint:
        return False
    return True
