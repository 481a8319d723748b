"""Loss spikes: detection on the device, and rollback to before one (train.spike_rule=rollback).

A loss is a spike if it exceeds

    median + spike_threshold * max(1.4826 MAD, 0.01 median)

of the last `spike_window` losses. MAD is the median absolute deviation; 1.4826 MAD estimates the
standard deviation of a normal distribution. Until the window is full, nothing is a spike. Spikes
enter the window too: if losses stay high, that is the new normal after half a window.

The limit is computed on the device from the mean loss over all ranks, so that an update can be
skipped without a host sync and all ranks decide alike.

A rollback resumes from the last valid checkpoint before the spike and skips the data in between;
steps and learning rates follow the schedule. The skip is part of the checkpoint, so a later resume
reads the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import BadCheckpoint
from nsa.train.distributed.strategy import Strategy, mark_shared
from nsa.train.errors import TrainError

NORMAL = 1.4826
FLOOR = 0.01
"""Smallest spread, relative to the median: identical losses have a MAD of zero."""
MAX_ROLLBACKS = 5
"""To the same checkpoint; after that, the data is not the cause."""

Result = TypeVar("Result")


# --- detection ---


class Spikes:
    """The window of recent losses, and the amount of data skipped by rollbacks."""

    def __init__(self, train: TrainConfig, device: torch.device) -> None:
        self._rule, self._threshold = train.spike_rule, train.spike_threshold
        self._recent = torch.zeros(train.spike_window, device=device)
        self._num_seen = 0
        self._never = torch.full((), math.inf, device=device)
        self.jumped = 0
        """Updates whose data is skipped: update n reads the data of update n + jumped."""

    @property
    def skips(self) -> bool:
        """Whether the update of a spike is skipped."""
        return self._rule == "skip"

    def limit(self) -> Tensor:  # [] fp32
        """Upper limit of the next loss; infinite while nothing is a spike. No host sync."""
        judges = self._rule != "off" and self._num_seen >= len(self._recent)
        return self._limit() if judges else self._never

    def remember(self, loss: Tensor) -> None:  # [] fp32
        """Add a loss to the window (a ring buffer)."""
        if self._rule != "off":
            self._recent[self._num_seen % len(self._recent)].copy_(loss.detach())
            self._num_seen += 1

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: a resumed run must make the same decisions."""
        return {
            "recent": self._recent.to("cpu", copy=True),
            "num_seen": self._num_seen,
            "jumped": self.jumped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint; a window of another length starts empty."""
        # `jumped` is restored in any case: it decides which data comes next.
        self.jumped = state["jumped"]
        if len(state["recent"]) == len(self._recent):
            self._recent.copy_(state["recent"])
            self._num_seen = state["num_seen"]

    def _limit(self) -> Tensor:
        median = _median(self._recent)
        spread = NORMAL * _median((self._recent - median).abs())
        return median + self._threshold * torch.maximum(spread, FLOOR * median.abs())


def _median(values: Tensor) -> Tensor:
    """Lower median. By sorting, because torch.median may synchronize with the device."""
    return values.sort().values[(len(values) - 1) // 2]


# --- rollback ---


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
