"""From a config and a model to the update that trains it."""

from __future__ import annotations

from nsa.config import Config
from nsa.model import TinyLM
from nsa.train.graph_step import GraphStep
from nsa.train.optimizer import build_optimizer
from nsa.train.runtime import Runtime
from nsa.train.scaler import new_scaler
from nsa.train.spikes import Spikes
from nsa.train.step import EagerStep


def build_step(
    cfg: Config, model: TinyLM, runtime: Runtime, *, share: GraphStep | None = None
) -> EagerStep:
    """The update of the config, replayed as a CUDA graph where it asks for that.

    `share` is a graph whose memory this one may use, too.
    """
    graph = cfg.runtime.cuda_graph
    optimizer = build_optimizer(model, cfg.train, capturable=graph)
    parts = (model, optimizer, runtime, cfg.train.grad_clip, new_scaler(runtime))
    spikes = Spikes(cfg.train, runtime.device)
    return GraphStep(*parts, spikes, share=share) if graph else EagerStep(*parts, spikes)
