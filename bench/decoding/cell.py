"""One decode step over caches of a given length: ours, its branches, dense attention, a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention.cases import Shape
from bench.timing import first_line, graph_ms, kernel_ms, median_ms
from nsa.config import Config
from nsa.generate.decode import GraphedStep, can_capture
from nsa.model import DenseCache, ModelCache, NSACache, TinyLM
from nsa.ops import BlockSpec, compress
from nsa.ops.eager.attention import attend_cached, split_heads
from nsa.ops.eager.rows import (
    attend,
    choose_from_probs,
    compressed_keys,
    selected_keys,
    window_keys,
)

ANY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn-rows": [SDPBackend.CUDNN_ATTENTION],
    "flash-rows": [SDPBackend.FLASH_ATTENTION],
    "any-rows": ANY,
}
"""Dense attention by the kernels it may use. `rows`: the heads of a group as rows of one matrix,
which is the same function for a single token and reads each key once."""


REPLAYS = 20
"""Graph replays between two events."""
STEPS = 100
"""Tokens that a whole model decodes between two events."""


class Cell(NamedTuple):
    """What is measured: heads, block sizes, and the length with the new token."""

    shape: Shape
    spec: BlockSpec
    batch: int
    length: int
    repeats: int
    device: str
    dtype: torch.dtype

    @property
    def where(self) -> dict[str, int]:
        return {**self.shape._asdict(), "B": self.batch, "S": self.length}


class Token(NamedTuple):
    """What the projections give for one new token."""

    q: Tensor  # [B, 1, Hq, Dk]
    k: list[Tensor]  # of cmp, sel, win, each [B, 1, Hkv, Dk]
    v: list[Tensor]  # [B, 1, Hkv, Dv]
    gates: Tensor  # [B, 1, Hq, 3]


def measure_ours(cell: Cell) -> dict[str, Any]:
    """Append to the caches, compress, score, select, three branches, gates; and the reads."""
    cache, token = nsa_cache(cell), new_token(cell)
    kernels = cell.device == "cuda"
    step = _kernel_step(cell, cache, token) if kernels else _torch_step(cell, cache, token)
    row = _timed(step, cell)
    return {
        "name": "nsa",
        **cell.where,
        **row,
        **(_kernel_times(step) if kernels else _branch_times(cache, token, cell)),
        "reads": int(cache.last_reads.sum(-1).max()),
        "reads_expected": cell.spec.num_reads(cell.length),
        "cache_bytes": cache.nbytes(),
    }


def _torch_step(cell: Cell, cache: NSACache, token: Token) -> Callable[[], Tensor]:
    def step() -> Tensor:
        cache.store_raw(token.k[0], token.v[0], _mean(cell.spec))
        cache.store_selected(token.k[1], token.v[1])
        cache.store_window(token.k[2], token.v[2])
        scale = 1 / math.sqrt(cell.shape.Dk)
        out, reads = attend_cached(
            token.q, cache.branches(), token.gates, cache.length, cell.spec, scale
        )
        cache.last_reads.copy_(reads)
        return out

    return step


def _kernel_step(cell: Cell, cache: NSACache, token: Token) -> Callable[[], Tensor]:
    """By the decode kernels; the sequences stay as long as they are."""
    from nsa.ops.triton.decode import launch  # Triton exists for Linux only

    new = launch.Token(token.q, token.k, token.v, token.gates)
    return lambda: cache.decoder(cell.shape.Hq).step(new, advance=False)


def _kernel_times(step: Callable[[], Tensor]) -> dict[str, float | None]:
    """Device time of the kernels; one takes the selected branch and the window together."""
    times = kernel_ms(step)

    def of(*names: str) -> float:
        return sum(ms for key, ms in times.items() if any(name in key for name in names))

    return {
        "cmp_ms": of("attend_compressed", "score_blocks"),
        "sel_ms": of("attend_tokens"),
        "win_ms": None,  # in sel_ms
        "append_ms": of("append_token"),
        "merge_ms": of("merge_parts"),
    }


def measure_dense(cell: Cell, backend: str) -> dict[str, Any]:
    """Append to the cache, then attention to all of it."""
    shape = cell.shape
    cache = DenseCache(
        batch=cell.batch, max_len=cell.length, num_groups=shape.Hkv, d_k=shape.Dk, d_v=shape.Dv,
        dtype=cell.dtype, device=torch.device(cell.device),
    )  # fmt: skip
    cache.k.normal_()
    cache.v.normal_()
    token = new_token(cell)
    q, k, v = (x.transpose(1, 2) for x in (token.q, token.k[1], token.v[1]))
    if backend.endswith("rows"):
        q = q.reshape(cell.batch, shape.Hkv, -1, shape.Dk)  # [B, Hkv, G, Dk]
    gqa = q.shape[1] != shape.Hkv

    def step() -> Tensor:
        cache.length = cell.length - 1
        keys, values = cache.append(k, v)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=gqa)

    row: dict[str, Any] = {"name": backend, **cell.where}
    try:
        with sdpa_kernel(BACKENDS[backend]):
            row |= _timed(step, cell)
    except RuntimeError as error:  # this kernel does not take this shape, or there is no memory
        return row | {"reason": first_line(error)}
    return row | {"reads": cache.length, "cache_bytes": cache.nbytes()}


@torch.no_grad()
def measure_model(
    config: Config, batch: int, length: int, repeats: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Tokens per second of a whole model that decodes at a length, its cache full of noise."""
    torch.manual_seed(0)
    with torch.device(device):
        model = TinyLM.from_config(config, config.data.vocab).to(dtype).eval()
    cache = model.new_cache(batch, length)
    for layer in cache.layers:
        for x in _buffers(layer):
            x.normal_()
    times = _model_times(model, cache, length, repeats)
    best = min(x for x in times.values() if isinstance(x, float))
    return {
        "name": config.model.attention,
        "B": batch,
        "S": length,
        "parameters": sum(p.numel() for p in model.parameters()),
        **times,
        "tokens_per_s": 1e3 * batch / best,
    }


def _model_times(model: TinyLM, cache: ModelCache, length: int, repeats: int) -> dict[str, Any]:
    """A step at the length; as a graph, the steps that lead up to it, each a token longer."""
    device = model.embed.weight.device
    ids = torch.zeros(cache.layers[0].batch, dtype=torch.int64, device=device)

    def set_length(value: int) -> None:
        cache.clear()  # all of it is noise: any length is as good as another
        for layer in cache.layers:
            layer.length = value

    def step() -> Tensor:
        set_length(length - 1)
        return model.step(ids, cache)

    if not can_capture(model, cache):
        return _times(step, repeats, device.type)
    times: dict[str, Any] = {"eager_ms": median_ms(step, repeats, device.type)}
    num_steps = min(STEPS, length)
    set_length(length - num_steps)
    graphed = GraphedStep(model, cache)

    def up_to_length() -> None:
        set_length(length - num_steps)
        for _ in range(num_steps):
            graphed(ids)

    times["graph_ms"] = median_ms(up_to_length, repeats, device.type) / num_steps
    return times


def nsa_cache(cell: Cell) -> NSACache:
    """A cache of noise that waits for the last token of the length."""
    shape = cell.shape
    cache = NSACache(
        cell.spec, batch=cell.batch, max_len=cell.length, num_groups=shape.Hkv, d_k=shape.Dk,
        d_v=shape.Dv, dtype=cell.dtype, device=torch.device(cell.device),
    )  # fmt: skip
    for x in _buffers(cache):
        x.normal_()
    cache.length = cell.length - 1
    return cache


def new_token(cell: Cell) -> Token:
    torch.manual_seed(0)
    shape = cell.shape

    def normal(heads: int, size: int) -> Tensor:
        return torch.randn(cell.batch, 1, heads, size, device=cell.device).to(cell.dtype)

    k, v = ([normal(shape.Hkv, size) for _ in range(3)] for size in (shape.Dk, shape.Dv))
    gates = normal(shape.Hq, 3).softmax(dim=-1)
    return Token(normal(shape.Hq, shape.Dk), k, v, gates)


def _mean(spec: BlockSpec) -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]:
    def phi(k: Tensor, v: Tensor, _first_block: int) -> tuple[Tensor, Tensor]:
        return compress(k, spec, backend="torch"), compress(v, spec, backend="torch")

    return phi


def _branch_times(cache: NSACache, token: Token, cell: Cell) -> dict[str, float]:
    """Each branch by itself: compressed with the choice of blocks, selected, window."""
    spec, first, scale = cell.spec, cache.length, 1 / math.sqrt(cell.shape.Dk)
    wide = torch.float64 if cell.dtype == torch.float64 else torch.float32
    q, branches = split_heads(token.q, cell.shape.Hkv, wide), cache.branches()
    chosen: list[Tensor] = []

    def compressed() -> None:
        keys, visible = compressed_keys(branches.cmp, first, 1, spec)
        chosen[:] = [choose_from_probs(attend(q, keys, visible, scale)[2], first, spec)[0]]

    def selected() -> None:
        attend(*selected_keys(q, branches.sel, chosen[0], first, spec), scale)

    def window() -> None:
        keys, visible = window_keys(branches, first, 1, spec)
        attend(q, keys, visible, scale)

    parts = {"cmp_ms": compressed, "sel_ms": selected, "win_ms": window}
    with torch.no_grad():
        return {name: median_ms(part, cell.repeats, cell.device) for name, part in parts.items()}


def _timed(step: Callable[[], Tensor], cell: Cell) -> dict[str, Any]:
    with torch.no_grad():
        return _times(step, cell.repeats, cell.device)


def _times(step: Callable[[], Tensor], repeats: int, device: str) -> dict[str, Any]:
    """Eager, and on a GPU as a CUDA graph: milliseconds, or why it cannot be captured."""
    times: dict[str, Any] = {"eager_ms": median_ms(step, repeats, device)}
    if device == "cuda":
        times["graph_ms"] = graph_ms(step, repeats, REPLAYS)
    return times


def _buffers(cache: NSACache | DenseCache) -> list[Tensor]:
    if isinstance(cache, DenseCache):
        return [cache.k, cache.v]
    return [x for kv in (cache.sel, cache.cmp, cache.win, cache.raw) for x in (kv.k, kv.v)]


@contextmanager
def memory_given_back(device: str) -> Iterator[None]:
    """Nothing of a cell stays for the next one."""
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
