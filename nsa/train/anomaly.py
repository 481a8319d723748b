"""What a run that met a number that is not finite leaves for those who look into it.

anomaly_step{N}.pt, a dict that loads with `weights_only=True`: `step`, `batch` (the token rows of
that update, [rows, S+1]), `state_dict` (the weights, without that update) and `cfg`.
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
    write_anomaly(trainer.folder, KIND)
    write_halt(trainer.folder, KIND)
    train = trainer.cfg.train
    first = trainer.position(step)
    positions = [first + n * train.batch_size for n in range(train.accumulate_grad_batches)]
    batches = [trainer.data.train.batch(position, train.batch_size) for position in positions]
    weights = {name: x.detach().cpu() for name, x in trainer.model.state_dict().items()}
    content = {
        "step": step,
        "batch": torch.cat(batches),
        "state_dict": weights,
        "cfg": to_container(trainer.cfg),
    }
    path = trainer.folder / f"anomaly_step{step}.pt"
    with best_effort(path), replacing(path) as temporary:
        torch.save(content, temporary)
    return path
