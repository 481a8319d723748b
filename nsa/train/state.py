"""The state of a trainer as plain containers, and back: what checkpoints hold."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from nsa.config import to_container
from nsa.train.checkpoint import BadCheckpoint, Content
from nsa.train.optimizer import load_optimizer

if TYPE_CHECKING:
    from nsa.train.loop import Trainer
    from nsa.train.resume import Start

CARRIED = (
    *("loss_first", "loss_last", "val_loss", "val_ppl", "val_bits_per_byte"),
    *("train_s", "eval_and_save_s", "spikes"),
)
"""Fields of metrics.json that a resumed run goes on from."""


def capture(trainer: Trainer, step: int) -> Content:
    """Copy everything that changes in training to the CPU; later steps leave the copy alone, the
    next capture does not: what was captured before must have been written."""
    tensors = trainer.saver.memory.copy(large_state(trainer))
    metrics = dataclasses.asdict(trainer.log.metrics)
    return {
        "step": step,
        "state_dict": tensors["state_dict"],
        "cfg": to_container(trainer.cfg),
        "identity": dict(trainer.identity),
        "batch": {"world_size": trainer.ranks.world_size, "rows_of_rank": trainer.rows_asked},
        "optimizer": tensors["optimizer"],
        "scaler": trainer.scaler.state_dict(),
        "rng": _rng_states(),
        "spikes": trainer.spikes.state_dict(),
        "data": _data_state(trainer, step),
        "tokens_seen": step * trainer.log.metrics.tokens_per_step,
        "metrics": {name: metrics[name] for name in CARRIED},
    }


def restore(trainer: Trainer, start: Start) -> None:
    """Put a trainer that was built from the same config into a captured state."""
    content = trainer.ranks.load_checkpoint(start.path, start.content)
    try:
        _put_back(trainer, content)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadCheckpoint(
            f"{start.path} does not fit the run that it names ({type(error).__name__}: {reason}); "
            "it was damaged or made by another program; use an older checkpoint"
        ) from None


def _put_back(trainer: Trainer, content: Content) -> None:
    trainer.model.load_state_dict(content["state_dict"], strict=True)
    load_optimizer(trainer.optimizer, content["optimizer"])
    if content["scaler"]:
        trainer.scaler.load_state_dict(content["scaler"])
    if "spikes" in content:  # checkpoints from before the rule have none
        trainer.spikes.load_state_dict(content["spikes"])
    trainer.data.train.resume(content["data"]["source"])
    torch.set_rng_state(content["rng"]["cpu"])
    states = content["rng"]["cuda"]
    if states and len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)
    metrics = trainer.log.metrics
    metrics.step = content["step"]
    for name in CARRIED:
        setattr(metrics, name, content["metrics"].get(name, getattr(metrics, name)))


def large_state(trainer: Trainer) -> dict[str, Any]:
    """The tensors of a checkpoint that are as large as the model."""
    return {
        "state_dict": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }


def _data_state(trainer: Trainer, step: int) -> dict[str, Any]:
    """Where the next step begins to read; what waits in a queue has not been read."""
    position = trainer.position(step + 1)
    return {"position": position, "source": trainer.data.train.state(position)}


def _rng_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}
