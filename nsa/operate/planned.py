"""A run that is planned: what the checks before its start look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nsa.config import Config
from nsa.model.counts import parameter_counts
from nsa.operate.limits import Limits
from nsa.operate.verdict import Row
from nsa.train.runtime import Runtime

CHECKPOINT_BYTES = 12
"""Of a checkpoint for each parameter, at most: the weight and the optimizer's two numbers."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run before its first step."""

    config: Config
    config_path: str
    config_named: bool
    """Whether somebody chose the config, rather than nobody."""
    ranks: int
    runtime: Runtime
    limits: Limits
    scratch: Path
    """A folder of our own on the disk of the run, empty at first, and gone at the end."""
    price_per_h: float | None = None
    """Of all devices together, in any currency."""
    max_cost: float | None = None

    @property
    def folder(self) -> Path:
        """The folder that the run will write to; nothing is written there before it starts."""
        return Path(self.config.train.out_dir)

    @property
    def num_params(self) -> int:
        return sum(parameter_counts(self.config).values())

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes on the disk, about."""
        return CHECKPOINT_BYTES * self.num_params

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        rows = self.ranks * train.batch_size * train.accumulate_grad_batches
        return rows * train.seq_len


Check = Callable[[Planned], Row | None]
"""Looks at one thing; None where the question does not arise."""
