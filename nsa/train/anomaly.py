"""What a run that met a number that is not finite leaves for those who look into it.

anomaly_step{N}.pt, a dict that loads with `weights_only=True`: `step`, `batch` (the token rows of
that update, [rows, S+1]), `state_dict` (the weights, without that update) and `cfg`. Every rank
leaves its own rows; those above 0 in anomaly_step{N}_rank{r}.pt, without the weights, which are
the same.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nsa.config import to_container
from nsa.telemetry.atomic import replacing
from nsa.telemetry.best_effort import best_effort
from nsa.telemetry.sentinels import write_anomaly, write_halt
from nsa.train.loop import Trainer

KIND = "nan_loss"


def record_anomaly(trainer: Trainer, step: int) -> Path:
    """Write the two files that keep a restart from repeating it, then the batch and the weights."""
    ranks, size = trainer.ranks, trainer.cfg.train.batch_size
    ranks.on_first(write_anomaly, trainer.folder, KIND)
    ranks.on_first(write_halt, trainer.folder, KIND)
    batches = [trainer.data.train.batch(first, size) for first in trainer.positions(step)]
    content = {
        "step": step,
        "batch": torch.cat(batches),
        "state_dict": ranks.weights(trainer.model),
        "cfg": to_container(trainer.cfg),
    }
    suffix = "" if ranks.is_first else f"_rank{ranks.rank}"
    path = trainer.folder / f"anomaly_step{step}{suffix}.pt"
    with best_effort(path), replacing(path) as temporary:
        torch.save(content, temporary)
    return path
