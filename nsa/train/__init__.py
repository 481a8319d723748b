"""Training: the loop, and its parts from the guards before it to the model file after it."""

from nsa.train.checkpoint import BadCheckpoint
from nsa.train.errors import (
    Halted,
    Interrupted,
    LoaderFailed,
    NonFiniteLoss,
    OutOfMemory,
    RunRefused,
    TrainError,
)
from nsa.train.feed import LoaderOptions
from nsa.train.model_file import BadModelFile, load_model, save_model
from nsa.train.run import TrainResult, run

__all__ = [
    "BadCheckpoint",
    "BadModelFile",
    "Halted",
    "Interrupted",
    "LoaderFailed",
    "LoaderOptions",
    "NonFiniteLoss",
    "OutOfMemory",
    "RunRefused",
    "TrainError",
    "TrainResult",
    "load_model",
    "run",
    "save_model",
]
