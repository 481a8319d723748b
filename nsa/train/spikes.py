"""Detection of loss spikes, on the device.

A loss is a spike if it exceeds

    median + spike_threshold * max(1.4826 MAD, 0.01 median)

of the last `spike_window` losses. MAD is the median absolute deviation; 1.4826 MAD estimates the
standard deviation of a normal distribution. Until the window is full, nothing is a spike. Spikes
enter the window too: if losses stay high, that is the new normal after half a window.

The limit is computed on the device from the mean loss over all ranks, so that an update can be
skipped without a host sync and all ranks decide alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nsa.config import TrainConfig

NORMAL = 1.4826
FLOOR = 0.01
"""Smallest spread, relative to the median: identical losses have a MAD of zero."""
ACTING = ("skip", "rollback")
"""Rules that change the weights, so they are part of the identity of a run."""


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
