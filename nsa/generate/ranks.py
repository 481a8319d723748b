"""Prefill of long prompts over ranks: all of them read a part of each prompt, rank 0 decodes.

Under torchrun every rank holds the whole model. Rank 0 sends a prompt, all ranks compute their two
parts of it (nsa/parallel), and while the layers run, rank 0 fills its cache with the keys and
values of all. It holds the last part, so it also has the logits of the next token. The others wait
for the next prompt, or for the message that there is none.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from nsa.config.env import read
from nsa.model import ModelCache, TinyLM
from nsa.parallel import ContextParallel, Split, shard_sequence
from nsa.parallel.style import ContextLM

LEAST_PART = 16
"""Tokens of a part; rank 0 reads shorter prompts alone, which is faster than any exchange."""


class RankPrefill:
    """The prefill of a model over the ranks of a mesh; on rank 0 a `Prefill` of decode.py."""

    def __init__(self, model: TinyLM, mesh: DeviceMesh) -> None:
        """Called by all ranks, with the same weights."""
        if not read("NSA_PREFILL_BATCHED"):
            raise ValueError(
                f"NSA_PREFILL_BATCHED=0 on {mesh.size()} ranks: it steps through whole prompts; "
                f"unset it, or start one process"
            )
        self.model, self.mesh = model, mesh
        self.split: Any = parallelize_module(_sharing_weights(model), mesh, ContextParallel())
        assert isinstance(self.split, ContextLM)
        self.split.eval()
        self.num_parts = Split(2 * mesh.size(), mesh.size()).num_parts
        self._first = dist.get_global_rank(mesh.get_group(), 0)
        self._device = model.embed.weight.device

    def __call__(self, ids: Tensor, cache: ModelCache) -> Tensor:  # [B, T] -> [B, V]
        """Rank 0: fill an empty cache with a prompt; the logits of the next token.

        Parts are equal, so that up to `num_parts - 1` tokens are left over: rank 0 appends them.
        """
        shared = ids.shape[1] // self.num_parts * self.num_parts
        if shared < LEAST_PART * self.num_parts:
            return self.model.prefill_last(ids, cache)
        if ids.shape[1] > cache.max_len:
            raise ValueError(
                f"{ids.shape[1]} tokens do not fit a cache for {cache.max_len}; make it with "
                f"max_len >= {ids.shape[1]}"
            )
        self._tell(ids.shape[0], shared)
        self._share(ids[:, :shared].contiguous())
        hidden = self._read(ids[:, :shared], cache)
        if shared < ids.shape[1]:
            return self.model.prefill_last(ids[:, shared:], cache)
        return self.model.head(hidden[:, -1])

    def follow(self) -> int:
        """The other ranks: read their parts of prompts until rank 0 has no more; how many."""
        count = 0
        while True:
            batch, num_tokens = self._tell(0, 0)
            if not batch:
                return count
            ids = torch.empty(batch, num_tokens, dtype=torch.int64, device=self._device)
            self._read(self._share(ids), None)
            count += 1

    def dismiss(self) -> None:
        """Rank 0: tell the others that there are no more prompts."""
        self._tell(0, 0)

    def _tell(self, batch: int, num_tokens: int) -> list[int]:
        """What rank 0 says about the next prompt."""
        header = torch.tensor([batch, num_tokens], device=self._device)
        return self._share(header).tolist()

    def _share(self, x: Tensor) -> Tensor:
        dist.broadcast(x, self._first, group=self.mesh.get_group())
        return x

    @torch.no_grad()
    def _read(self, ids: Tensor, cache: ModelCache | None) -> Tensor:  # [B, S] -> [B, T, dim]
        """The hidden states of this rank's tokens; fills a cache, if there is one."""
        layers = [block.attn for block in self.split.layers]
        caches = dict(zip(layers, cache.layers, strict=True)) if cache else {}

        def keep(layer: Any, kept: tuple[Any, ...]) -> None:
            if layer in caches:
                caches[layer].fill(*kept)

        self.split.context.keep = keep
        try:
            return self.split.hidden(shard_sequence(ids, self.mesh))
        finally:
            self.split.context.keep = None


def _sharing_weights(model: TinyLM) -> TinyLM:
    """A second model with the weights of the first: the same memory."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
