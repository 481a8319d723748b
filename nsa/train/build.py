"""From a config to the model and the update that trains it."""

from __future__ import annotations

import torch

from nsa.config import Config, ConfigError
from nsa.model import TinyLM
from nsa.train.compiler import compile_blocks
from nsa.train.graph_step import GraphStep
from nsa.train.optimizer import build_optimizer
from nsa.train.ranks import Alone
from nsa.train.runtime import Runtime
from nsa.train.scaler import new_scaler
from nsa.train.spikes import Spikes
from nsa.train.step import EagerStep


def build_model(cfg: Config, vocab: int, runtime: Runtime, ranks: Alone | None = None) -> TinyLM:
    """The model with its first weights, on its device, compiled where the config asks for that."""
    torch.manual_seed(cfg.train.seed)
    model = (ranks or Alone()).bring(TinyLM.from_config(cfg, vocab), runtime)
    if cfg.runtime.compile:
        compile_blocks(model, runtime.device)
    return model


def build_step(
    cfg: Config,
    model: TinyLM,
    runtime: Runtime,
    *,
    ranks: Alone | None = None,
    share: GraphStep | None = None,
) -> EagerStep:
    """The update of the config, replayed as a CUDA graph where it asks for that.

    `share` is a graph whose memory this one may use, too.
    """
    graph = cfg.runtime.cuda_graph
    if graph and runtime.device.type != "cuda":
        raise ConfigError(
            f"runtime.cuda_graph=true on {runtime.device}; a CUDA graph needs a CUDA device: set "
            "it to false, or choose runtime.device=cuda",
            key="runtime.cuda_graph",
        )
    optimizer = build_optimizer(model, cfg.train, capturable=graph)
    parts = (model, optimizer, runtime, cfg.train.grad_clip, new_scaler(runtime))
    spikes = Spikes(cfg.train, runtime.device)
    return GraphStep(*parts, spikes, share=share) if graph else EagerStep(*parts, spikes, ranks)
