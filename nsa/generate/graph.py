"""A decode step as a CUDA graph: the launches of a whole model at the price of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa.model import ModelCache, NSACache, TinyLM

WARM_UP = 2
"""Steps before the capture: the first compiles kernels and allocates their memory."""


def can_capture(model: TinyLM, cache: ModelCache) -> bool:
    """Whether a step can be captured: the decode kernels read where sequences end on the device,
    the other ways of decoding know it on the host alone."""
    if not model.embed.weight.is_cuda:
        return False
    pairs = zip(model.layers, cache.layers, strict=True)
    return all(
        isinstance(layer, NSACache) and block.attn.decodes_by_kernels(layer)
        for block, layer in pairs
    )


class GraphedStep:
    """`model.step` for one cache; the logits of a call are overwritten by the next."""

    def __init__(self, model: TinyLM, cache: ModelCache) -> None:
        self.cache = cache
        self.graph = torch.cuda.CUDAGraph()
        batch, device = cache.layers[0].batch, model.embed.weight.device
        self._ids = torch.zeros(batch, dtype=torch.int64, device=device)
        with torch.cuda.device(device), _no_autocast_cache():
            self._capture(model, torch.cuda.Stream(device))

    def __call__(self, ids: Tensor) -> Tensor:  # [B] -> [B, V]
        """Append one token per sequence; logits of the next one."""
        for layer in self.cache.layers:
            layer.check(ids[:, None])
        self._ids.copy_(ids)
        self.graph.replay()
        for layer in self.cache.layers:
            layer.advanced()
        return self.logits

    def _capture(self, model: TinyLM, side: torch.cuda.Stream) -> None:
        """Steps before and during the capture leave nothing behind: what they append lies where the
        next token goes, and lengths and counters are put back."""
        layers, length = self.cache.layers, self.cache.length
        counters = [(layer.reads.clone(), layer.last_reads.clone()) for layer in layers]

        def put_back() -> None:
            self.cache.clear()
            for layer in layers:
                layer.length = length

        current = torch.cuda.current_stream(side.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                model.step(self._ids, self.cache)
                put_back()
        current.wait_stream(side)
        with torch.cuda.graph(self.graph, stream=side):
            self.logits = model.step(self._ids, self.cache)
        put_back()
        for layer, (reads, last_reads) in zip(layers, counters, strict=True):
            layer.reads.copy_(reads)
            layer.last_reads.copy_(last_reads)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Rounded copies of the weights that autocast keeps are freed when it ends: a graph that read
    them would read whatever lies there by then. Without them it makes its own."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
