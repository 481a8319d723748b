"""Training: the loop, and its parts from the guards before it to the model file after it."""

from typing import TYPE_CHECKING

from nsa import on_first_use

if TYPE_CHECKING:
    from nsa.train.checkpoint import BadCheckpoint as BadCheckpoint
    from nsa.train.errors import Halted as Halted
    from nsa.train.errors import Interrupted as Interrupted
    from nsa.train.errors import LoaderFailed as LoaderFailed
    from nsa.train.errors import NonFiniteLoss as NonFiniteLoss
    from nsa.train.errors import OutOfMemory as OutOfMemory
    from nsa.train.errors import RunRefused as RunRefused
    from nsa.train.errors import TrainError as TrainError
    from nsa.train.feed import LoaderOptions as LoaderOptions
    from nsa.train.full_run import TrainResult as TrainResult
    from nsa.train.full_run import run as run
    from nsa.train.model_file import BadModelFile as BadModelFile
    from nsa.train.model_file import load_model as load_model
    from nsa.train.model_file import save_model as save_model

__getattr__ = on_first_use(
    __name__,
    {
        "checkpoint": ("BadCheckpoint",),
        "errors": (
            "Halted",
            "Interrupted",
            "LoaderFailed",
            "NonFiniteLoss",
            "OutOfMemory",
            "RunRefused",
            "TrainError",
        ),
        "feed": ("LoaderOptions",),
        "full_run": ("TrainResult", "run"),
        "model_file": ("BadModelFile", "load_model", "save_model"),
    },
)
