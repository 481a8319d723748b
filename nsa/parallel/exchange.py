"""What ranks send each other for the attention of one layer, with gradients, and its bytes.

Two exchanges, both torch's functional collectives. `gather_parts` gives every rank the rows of all
parts (backward: reduce-scatter; for both, all_gather says what a CPU does). `extend_parts` gives
every part the rows on its left (backward: the same way back, and a sum). Both start at once and are
waited for by the call of what they return, so that work between the two overlaps with them.

All ranks must call the same exchanges in the same order, forward and backward. So results always
depend on what was received, even where it is empty: a rank that left an exchange out of its graph
would never join its backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from nsa.ops.checks import check_documents
from nsa.parallel.split import Split, plan_halo

# Newer versions of torch have renamed it, and warn of the old name.
_NAMES = ("all_gather_single_autograd", "all_gather_tensor_autograd")
torch_all_gather: Any = next(
    getattr(collectives, name) for name in _NAMES if hasattr(collectives, name)
)
"""(x, 0, group): as all_gather, on devices that are no CPU."""

SELECTED = ("gather", "chosen")
"""How NSA's selected keys and values travel: all of them, or chosen blocks where that is less."""
_split = lru_cache(maxsize=8)(Split)


class Context:
    """The ranks that share a sequence, as one of them sees it."""

    def __init__(self, mesh: DeviceMesh, parts: str, selected: str = SELECTED[0]) -> None:
        self.group, self.parts, self.selected = mesh.get_group(), parts, selected
        self.rank, self.num_ranks = mesh.get_local_rank(), mesh.size()
        self.is_traced = True
        """Whether a compiled layer takes its exchanges into its graph."""
        self._bounds: tuple[Tensor, int, tuple[int, ...]] | None = None
        self.keep: Callable[[Any, tuple[Any, ...]], None] | None = None
        """Called by every layer with itself and the keys and values that a cache would hold, in
        the order of its `fill`: of the row, and of NSA's rings those of this rank's last part."""

    def split(self, batch: int, num_own: int, cu_seqlens: Tensor | None) -> Split:
        """The rows of which every rank has `num_own` tokens; with documents there is one."""
        num_tokens = num_own * self.num_ranks
        bounds = () if cu_seqlens is None else self._read(cu_seqlens, batch, num_tokens)
        if torch.compiler.is_compiling():  # the cache is no function that Dynamo knows
            return Split(num_tokens, self.num_ranks, self.parts, bounds)
        return _split(num_tokens, self.num_ranks, self.parts, bounds)

    def _read(self, cu_seqlens: Tensor, batch: int, num_tokens: int) -> tuple[int, ...]:
        """Bounds as numbers of the host, read once for all layers: on a GPU this is a sync."""
        if self._bounds is not None and batch == 1:
            known, version, bounds = self._bounds
            if known is cu_seqlens and version == cu_seqlens._version:
                return bounds
        bounds = tuple(cu_seqlens.tolist())
        # First for its message: most likely somebody has given the bounds of a shard.
        _split(num_tokens, self.num_ranks, self.parts, bounds)
        check_documents(cu_seqlens, batch, num_tokens, cu_seqlens.device)
        self._bounds = cu_seqlens, cu_seqlens._version, bounds
        return bounds

    def gather(
        self, split: Split, *tensors: Tensor, counts: Sequence[int] | None = None
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Rows [B, rows of this rank, H, D] -> those of all parts, from left to right.

        `counts` are the rows of each part; tokens, if it is not given. D may differ between
        tensors: they travel together.
        """
        counts = [split.part_len] * split.num_parts if counts is None else counts
        done = gather_parts(torch.cat(tensors, dim=-1), split, counts, self.group)
        sizes = [x.shape[-1] for x in tensors]
        return lambda: done().split(sizes, dim=-1)

    def extend(
        self, split: Split, starts: tuple[int, ...], *tensors: Tensor
    ) -> Callable[[], list[tuple[Tensor, ...]]]:
        """Tokens [B, tokens of this rank, H, D] -> for each own part, those from its start on."""
        done = extend_parts(torch.cat(tensors, dim=-1), split, self.rank, starts, self.group)
        sizes = [x.shape[-1] for x in tensors]
        return lambda: [part.split(sizes, dim=-1) for part in done()]


def all_gather(x: Tensor, group: Any) -> Tensor:  # [rows, ...] -> [P * rows, ...]
    """The rows of all ranks, one after another, with gradients.

    On a CPU by an all-to-all, because torch's all-gather damages the heap there (torch 2.13). A
    gloo group has two threads. After each collective a thread writes its name into a string of
    the group, without a lock. "ALLGATHER_COALESCED" is too long to be stored in the string object.
    Two threads then free the same memory. All other names that are used here are short.
    """
    if not x.is_cpu:
        return torch_all_gather(x.contiguous(), 0, group)
    num_ranks = dist.get_world_size(group)
    each = [x.shape[0]] * num_ranks
    return collectives.all_to_all_single_autograd(torch.cat([x] * num_ranks), each, each, group)


def gather_parts(
    x: Tensor,  # [B, rows of this rank, ...]
    split: Split,
    counts: Sequence[int],  # rows of each part
    group: Any,
) -> Callable[[], Tensor]:  # [B, rows of all parts, ...]
    """The rows of all parts, in the order of the parts."""
    largest = max(rows_of_ranks(split, tuple(counts)))
    if not largest:
        return lambda: x
    rows = x.transpose(0, 1)
    # Collectives take as many rows from every rank.
    missing = largest - rows.shape[0]
    if missing:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    gathered = all_gather(rows, group)

    return lambda: in_order(gathered, split, counts)


def in_order(
    gathered: Tensor,  # [rows of all ranks, B, ...], as many of each
    split: Split,
    counts: Sequence[int],
) -> Tensor:  # [B, rows of all parts, ...]
    """From the order of ranks to that of parts, without what fills up a rank's rows."""
    each, sizes = gathered.shape[0] // split.num_ranks, []
    for rank in range(split.num_ranks):
        own = [counts[part] for part in split.parts_of(rank)]
        sizes += [*own, each - sum(own)]
    runs, per_rank = gathered.split(sizes), len(split.parts_of(0)) + 1
    owners = [split.owner(part) for part in range(split.num_parts)]
    return torch.cat([runs[rank * per_rank + place] for rank, place in owners]).transpose(0, 1)


def extend_parts(
    x: Tensor,  # [B, tokens of this rank, ...]
    split: Split,
    rank: int,
    starts: tuple[int, ...],  # of every part: the first token that it needs
    group: Any,
) -> Callable[[], list[Tensor]]:  # of each own part: [B, tokens from its start to its end, ...]
    """The tokens of each part, and before them those that it needs from the left."""
    parts = x.split(split.part_len, dim=1)
    if not any(halo_rows(split, starts)):
        return lambda: list(parts)
    halo, rows = plan_halo(split, rank, starts), x.transpose(0, 1)
    sent = torch.cat([rows[:0], *(rows[run] for run in halo.sends)])
    received = collectives.all_to_all_single_autograd(sent, halo.from_each, halo.to_each, group)

    def continued() -> list[Tensor]:
        runs, whole = received.split(halo.lengths or [0]), []
        for part, before in zip(parts, halo.runs, strict=True):
            # An empty run too: the backward pass needs every rank.
            pieces = [runs[0][:0], *(runs[i] for i in before), part.transpose(0, 1)]
            whole.append(torch.cat(pieces).transpose(0, 1))
        return whole

    return continued


# --- How much is sent ---


@lru_cache(maxsize=64)
def rows_of_ranks(split: Split, counts: tuple[int, ...]) -> list[int]:
    """Rows of each rank, from the rows of each part."""
    return [sum(counts[part] for part in split.parts_of(r)) for r in range(split.num_ranks)]


@lru_cache(maxsize=64)
def halo_rows(split: Split, starts: tuple[int, ...]) -> list[int]:
    """Tokens that each part needs from its left."""
    return [split.tokens(part).start - first for part, first in enumerate(starts)]


def received_rows_of_gather(split: Split, counts: Sequence[int]) -> int:
    """Rows that any rank receives from others in `gather_parts`, padding included."""
    return (split.num_ranks - 1) * max(rows_of_ranks(split, tuple(counts)))


def received_rows_of_halo(split: Split, rank: int, starts: tuple[int, ...]) -> int:
    """Rows that a rank receives from others in `extend_parts`."""
    rows, own = 0, [split.tokens(part) for part in split.parts_of(rank)]
    for part, tokens in zip(split.parts_of(rank), own, strict=True):
        rows += tokens.start - starts[part]
        # A part of the same rank may be on its left.
        held = (min(tokens.start, x.stop) - max(starts[part], x.start) for x in own)
        rows -= sum(max(count, 0) for count in held)
    return rows


# --- Before the first exchange ---


def check_agreement(module: nn.Module, mesh: DeviceMesh, said: dict[str, str]) -> None:
    """Refuse ranks with other weights, or another way to split; all of them refuse together."""
    shapes = [(name, tuple(weight.shape)) for name, weight in module.named_parameters()]
    said = said | {"ranks": str(mesh.mesh.tolist()), "weights": str(shapes)}
    codes = [zlib.crc32(text.encode()) for text in said.values()]
    own = torch.tensor(codes, dtype=torch.int64, device=mesh.device_type)
    found = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(found, own, group=mesh.get_group())
    for name, column in zip(said, torch.stack(found).T.tolist(), strict=True):
        others = [rank for rank, code in enumerate(column) if code != column[0]]
        if others:
            raise ValueError(
                f"ranks {others} of {mesh.size()} have other {name} than rank 0 (here: "
                f"{said[name][:200]}); build the same model and mesh on every rank"
            )
