"""A decode step as a CUDA graph: the launches of a whole model at the price of one."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.model import ModelCache, NSACache, TinyLM

WARM_UP = 2
"""Steps before the capture: the first compiles kernels and allocates their memory."""


def can_capture(model: TinyLM, cache: ModelCache) -> bool:
    """Whether a step can be captured: the decode kernels read where sequences end on the device,
    the other ways of decoding know it on the host alone."""
    weight = model.embed.weight
    if not weight.is_cuda or not all(isinstance(layer, NSACache) for layer in cache.layers):
        return False
    like = weight[:1]
    pairs = zip(model.layers, cache.layers, strict=True)
    return all(block.attn.decodes_by_kernels(like, layer) for block, layer in pairs)


class GraphedStep:
    """`model.step` for one cache; the logits of a call are overwritten by the next."""

    def __init__(self, model: TinyLM, cache: ModelCache) -> None:
        self.cache = cache
        self.graph = torch.cuda.CUDAGraph()
        batch, device = cache.layers[0].batch, model.embed.weight.device
        self._ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self._capture(model)

    def __call__(self, ids: Tensor) -> Tensor:  # [B] -> [B, V]
        """Append one token per sequence; logits of the next one."""
        for layer in self.cache.layers:
            layer.check(ids[:, None])
        self._ids.copy_(ids)
        self.graph.replay()
        for layer in self.cache.layers:
            layer.advanced()
        return self.logits

    def _capture(self, model: TinyLM) -> None:
        """Steps before and during the capture leave nothing behind: what they append lies where the
        next token goes, and lengths and counters are put back."""
        layers, length = self.cache.layers, self.cache.length
        counters = [(layer.reads.clone(), layer.last_reads.clone()) for layer in layers]

        def step() -> Tensor:
            for layer in layers:
                layer.length = length
            return model.step(self._ids, self.cache)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
            for layer in layers:
                layer.length = length
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.logits = model.step(self._ids, self.cache)
        for layer, (reads, last_reads) in zip(layers, counters, strict=True):
            layer.length = length
            layer.reads.copy_(reads)
            layer.last_reads.copy_(last_reads)
