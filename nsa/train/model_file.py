"""model.pt: the weights of a model with the config that builds it.

Schema: a dict of `state_dict` (fp32 tensors on the CPU) and `cfg` (the resolved config as plain
dicts). A checkpoint (checkpoint.py) has both, too, so a model can be loaded from either. All of it
loads with `torch.load(..., weights_only=True)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nsa.config import Config, Setting, build, to_container
from nsa.model import TinyLM
from nsa.telemetry.atomic import replacing


def save_model(path: Path, model: TinyLM, cfg: Config) -> Path:
    """Write the model; the name holds either the old file or the whole new one."""
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        torch.save({"state_dict": weights, "cfg": to_container(cfg)}, temporary)
    return path


def load_model(path: Path) -> tuple[TinyLM, Config]:
    """Build the model of a file on the CPU, in evaluation mode, with its config."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    cfg = build(
        [
            Setting(f"{group}.{key}", value, str(path))
            for group, values in content["cfg"].items()
            for key, value in values.items()
        ]
    )
    model = TinyLM.from_config(cfg, vocab=len(content["state_dict"]["embed.weight"]))
    model.load_state_dict(content["state_dict"], strict=True)
    return model.eval(), cfg
