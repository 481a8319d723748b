"""Training: the loop and everything around it, from the checks before a run to the model file."""

from typing import TYPE_CHECKING

from nsa import on_first_use

if TYPE_CHECKING:
    from nsa.train.batches import LoaderOptions as LoaderOptions
    from nsa.train.checkpoint.file import BadCheckpoint as BadCheckpoint
    from nsa.train.checkpoint.model_file import BadModelFile as BadModelFile
    from nsa.train.checkpoint.model_file import load_model as load_model
    from nsa.train.checkpoint.model_file import save_model as save_model
    from nsa.train.errors import Halted as Halted
    from nsa.train.errors import Interrupted as Interrupted
    from nsa.train.errors import LoaderFailed as LoaderFailed
    from nsa.train.errors import NonFiniteLoss as NonFiniteLoss
    from nsa.train.errors import OutOfMemory as OutOfMemory
    from nsa.train.errors import RunRefused as RunRefused
    from nsa.train.errors import TrainError as TrainError
    from nsa.train.runner import TrainResult as TrainResult
    from nsa.train.runner import run as run

# Lazy: `import nsa.train` must not import torch.
__getattr__ = on_first_use(
    __name__,
    {
        "batches": ("LoaderOptions",),
        "checkpoint.file": ("BadCheckpoint",),
        "checkpoint.model_file": ("BadModelFile", "load_model", "save_model"),
        "errors": (
            "Halted",
            "Interrupted",
            "LoaderFailed",
            "NonFiniteLoss",
            "OutOfMemory",
            "RunRefused",
            "TrainError",
        ),
        "runner": ("TrainResult", "run"),
    },
)
