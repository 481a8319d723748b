"""Loss spikes: when a loss is one, and what has been done about those so far.

A loss is a spike where it lies above

    median + spike_threshold * max(1.4826 MAD, 0.01 median)

of the last `spike_window` losses; MAD is their median distance from the median, and 1.4826 of it
is the standard deviation of a normal distribution. Until the window is full, nothing is a spike.
Spikes enter the window, too: when losses stay high, half a window later that is the usual.

All of it happens on the device, from the loss of the whole update, so that an update can be left
out without waiting for it, and so that ranks that share their loss decide alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nsa.config import TrainConfig

NORMAL = 1.4826
FLOOR = 0.01
"""Share of the median below which no spread counts: identical losses have none."""
ACTING = ("skip", "rollback")
"""Rules that change what is learned."""


class Spikes:
    """The last losses, and how many updates' worth of data a rollback has jumped over."""

    def __init__(self, train: TrainConfig, device: torch.device) -> None:
        self._rule, self._threshold = train.spike_rule, train.spike_threshold
        self._recent = torch.zeros(train.spike_window, device=device)
        self._num_seen = 0
        self._never = torch.full((), math.inf, device=device)
        self.jumped = 0
        """Updates whose data is left out: update n reads what n + jumped would have read."""

    @property
    def skips(self) -> bool:
        """Whether the update of a spike is left out."""
        return self._rule == "skip"

    def limit(self) -> Tensor:  # [] fp32
        """What the next loss must not exceed. No host sync."""
        judges = self._rule != "off" and self._num_seen >= len(self._recent)
        return self._limit() if judges else self._never

    def remember(self, loss: Tensor) -> None:  # [] fp32
        """Let a loss enter the window."""
        if self._rule != "off":
            self._recent[self._num_seen % len(self._recent)].copy_(loss.detach())
            self._num_seen += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run must judge as this one would."""
        return {
            "recent": self._recent.to("cpu", copy=True),
            "num_seen": self._num_seen,
            "jumped": self.jumped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; a window of another length starts empty."""
        self.jumped = state["jumped"]
        if len(state["recent"]) == len(self._recent):
            self._recent.copy_(state["recent"])
            self._num_seen = state["num_seen"]

    def _limit(self) -> Tensor:
        median = _median(self._recent)
        spread = NORMAL * _median((self._recent - median).abs())
        return median + self._threshold * torch.maximum(spread, FLOOR * median.abs())


def _median(values: Tensor) -> Tensor:
    """The middle one, the lower of two; a sort, because torch's median may wait for the device."""
    return values.sort().values[(len(values) - 1) // 2]
