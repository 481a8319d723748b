"""torch.compile for the blocks of a model: one graph, compiled once, that all layers share.

The blocks are compiled one by one and not the model as a whole: the graph is as small as a layer,
gradient checkpointing works around it, and the names of the weights stay as they are. Training
alone runs compiled. Evaluations and statistics run as written.
"""

from __future__ import annotations

import shutil

import torch

from nsa.config import ConfigError
from nsa.model import TinyLM

BACKEND = "inductor"


def compile_blocks(model: TinyLM, device: torch.device) -> None:
    """Compile at the first training step; refuse at once where that could not work."""
    if device.type == "cpu":
        _require_compiler()
    model.compiled = [
        torch.compile(block, fullgraph=True, dynamic=False, backend=BACKEND)
        for block in model.layers
    ]


def _require_compiler() -> None:
    from torch._inductor import config  # where torch.compile itself looks for the name

    wanted = config.cpp.cxx
    names = [name for name in (wanted if isinstance(wanted, tuple) else (wanted,)) if name]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"runtime.compile=true needs a C++ compiler on a CPU, and {' or '.join(names)} is not "
            "there; install one (or name it in CXX), or set runtime.compile=false",
            key="runtime.compile",
        )
