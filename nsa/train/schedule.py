"""The learning rate as a function of the step alone."""

from __future__ import annotations

import math

from nsa.config import TrainConfig


def lr_at(step: int, train: TrainConfig) -> float:
    """Return the rate of update `step`, counted from 1: linear warm-up, then the schedule.

    The horizon of the cosine is train.steps, also when a run ends earlier. It reaches zero one step
    after the last update, so that no update is done with a rate of zero.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    if train.lr_schedule == "wsd":
        falling = train.decay_steps or min(train.steps // 5, train.steps - train.warmup_steps)
        return train.lr * min((train.steps + 1 - step) / (falling + 1), 1.0)
    done = (step - train.warmup_steps) / (train.steps - train.warmup_steps + 1)
    return train.lr * 0.5 * (1.0 + math.cos(math.pi * done))
