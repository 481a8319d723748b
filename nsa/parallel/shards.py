"""Layers of which every rank has some rows or columns, and what their ranks send each other.

Each class is a layer of the model with another `forward`: the same weights under the same names,
now DTensors. TensorParallel (tensor.py) turns one into the other. Activations are plain tensors:
whole (the same on all ranks), or of this rank's heads or columns alone.

    enter    whole -> whole; the gradients of all ranks are summed: in front of layers by column
    leave    partial sums of all ranks -> whole: behind layers by row
    join     columns of this rank -> columns of all ranks
    local    a weight as this rank has it; `shared` if only its own heads give it a gradient
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from nsa.model.attention import BlockMLP
from nsa.model.rope import RMSNorm, rms_norm
from nsa.model.rules import MSARule
from nsa.parallel.exchange import all_gather


class Shards:
    """The ranks that share the weights of a model, as one of them sees it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.num_ranks = mesh.get_local_rank(), mesh.size()

    def turn(self, layer: nn.Module, kind: type, *, dim: int | None = None) -> None:
        """Make a layer one of the classes below, its own weights sharded by `dim`; None: whole."""
        for name in [name for name, _ in layer.named_parameters(recurse=False)]:
            self.distribute(layer, name, dim)
        # Another class with the same weights, as FSDP does it: all names stay.
        layer.__class__ = kind
        layer.shards = self  # type: ignore[assignment]

    def distribute(self, layer: nn.Module, name: str, dim: int | None = None) -> None:
        """Make a weight a DTensor with the values of the first rank."""
        weight = layer.get_parameter(name)
        placement = Replicate() if dim is None else Shard(dim)
        sharded = distribute_tensor(weight.detach(), self.mesh, [placement])
        layer.register_parameter(name, nn.Parameter(sharded, weight.requires_grad))

    def enter(self, x: Tensor) -> Tensor:
        whole: Tensor = _Enter.apply(x, self.group)
        return whole

    def leave(self, x: Tensor) -> Tensor:
        whole: Tensor = _Leave.apply(x, self.group)
        return whole

    def join(self, x: Tensor) -> Tensor:  # [..., columns of this rank] -> [..., columns of all]
        whole: Tensor = _Join.apply(x, self.group, self.rank, self.num_ranks)
        return whole

    def local(self, weight: Tensor, *, shared: bool = False) -> Tensor:
        held = weight.to_local() if isinstance(weight, DTensor) else weight
        return self.enter(held) if shared else held


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    """All ranks compute the same from the whole, so its gradient is the same on all: each takes its
    own columns of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, rank: int, size: int) -> Tensor:
        ctx.place = rank, x.shape[-1]
        gathered = all_gather(x[None], group)
        gathered = collectives.wait_tensor(gathered)  # [P, ..., columns of a rank]
        return gathered.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rank, width = ctx.place
        return grad.narrow(-1, rank * width, width).contiguous(), None, None, None


def _sum(x: Tensor, group: Any) -> Tensor:
    """The sum over all ranks."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


class ColumnLinear(nn.Linear):
    """This rank's rows of the matrix: the output columns of its heads. The input is whole."""

    shards: Shards

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out / P]
        bias = None if self.bias is None else self.shards.local(self.bias)
        return F.linear(x, self.shards.local(self.weight), bias)


class RowLinear(nn.Linear):
    """This rank's columns of the matrix, of the input that it has. The output is whole."""

    shards: Shards

    def forward(self, x: Tensor) -> Tensor:  # [..., in / P] -> [..., out]
        assert self.bias is None, "every rank would add it"
        return self.shards.leave(F.linear(x, self.shards.local(self.weight)))


class SharedLinear(nn.Linear):
    """The whole matrix on every rank, applied to its own heads."""

    shards: Shards

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.shards.local(self.bias, shared=True)
        return F.linear(x, self.shards.local(self.weight, shared=True), bias)


class HeadsLinear(nn.Linear):
    """The projection to queries, keys and values in one matrix: this rank computes its heads.

    The matrix is sharded by rows in their order, as any DTensor: checkpoints and FSDP know that.
    The rows of a rank's heads are not neighbours, so they travel to it in each forward pass, and
    their gradients back: at most 1 / P of the matrix for each rank.
    """

    shards: Shards
    sections: tuple[int, ...]
    """Rows of the queries, and of the keys and values of each branch; all divided by head."""
    route: tuple[list[slice], list[int], list[int]]
    """Rows to send, ordered by receiver; how many to each rank, and from each."""

    def plan(self, sections: tuple[int, ...]) -> None:
        """Who sends which rows to whom. Rows are sent in their order, and sections follow each
        other: what arrives is in order."""
        self.sections = sections
        own, size = self.shards.rank, self.shards.num_ranks
        sends = [list(self._rows(own, receiver)) for receiver in range(size)]
        arriving = [list(self._rows(sender, own)) for sender in range(size)]
        count = [[sum(r.stop - r.start for r in rows) for rows in way] for way in (sends, arriving)]
        self.route = [rows for receiver in sends for rows in receiver], count[0], count[1]

    def forward(self, x: Tensor) -> Tensor:  # [..., dim] -> [..., rows / P]
        kind, bias = x.device.type, None
        weight = self.shards.local(self.weight)
        if torch.is_autocast_enabled(kind):  # products read no more than this
            weight = weight.to(torch.get_autocast_dtype(kind))
        if self.bias is not None:
            bias = self._of_own_heads(self.shards.local(self.bias))
        return F.linear(x, self._of_own_heads(weight), bias)

    def _of_own_heads(self, held: Tensor) -> Tensor:  # [rows / P, ...] -> the same
        """The rows of this rank's heads, from those that the ranks hold."""
        sends, to_each, from_each = self.route
        sent = torch.cat([held[rows] for rows in sends])
        group = self.shards.group
        return collectives.all_to_all_single_autograd(sent, from_each, to_each, group)

    def _rows(self, sender: int, receiver: int) -> Iterator[slice]:
        """What one rank has of the heads of another, by its place there."""
        size = self.shards.num_ranks
        held = sum(self.sections) // size
        bounds = torch.tensor([0, *self.sections]).cumsum(0).tolist()
        for start, stop in pairwise(bounds):
            share = (stop - start) // size
            first = max(start + receiver * share, sender * held)
            last = min(start + (receiver + 1) * share, (sender + 1) * held)
            if first < last:
                yield slice(first - sender * held, last - sender * held)


class VocabEmbedding(nn.Embedding):
    """This rank's rows of the table; a token that others have gives 0 before the sum."""

    shards: Shards

    def forward(self, ids: Tensor) -> Tensor:  # [B, S] -> [B, S, dim]
        table = self.shards.local(self.weight)
        places = ids - self.shards.rank * table.shape[0]
        elsewhere = (places < 0) | (places >= table.shape[0])
        found = F.embedding(places.masked_fill(elsewhere, 0), table)
        return self.shards.leave(found.masked_fill(elsewhere[..., None], 0))


class WholeNorm(RMSNorm):
    """A norm of what all ranks have: all compute the same gradient."""

    shards: Shards

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shards.local(self.weight), self.eps)


class HeadNorm(RMSNorm):
    """A norm that all heads share, applied to this rank's heads."""

    shards: Shards

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shards.local(self.weight, shared=True), self.eps)


class HeadBlockMLP(BlockMLP):
    """A learned phi, which all KV heads share, applied to this rank's heads."""

    shards: Shards

    def places(self) -> Tensor:
        return self.shards.local(self.place, shared=True)


class HeadMSARule(MSARule):
    """The indexer of this rank's KV heads. All ranks have the whole projection to index keys, which
    the heads share; its gradient is the sum over them."""

    shards: Shards

    def norm_weight(self, norm: nn.RMSNorm) -> Tensor:
        return self.shards.local(norm.weight, shared=True)

    def loss(self, *given: Any, **options: Any) -> Tensor:
        """The mean over the heads of all ranks; every rank has as many."""
        own = super().loss(*given, **options)
        return self.shards.leave(own / self.shards.num_ranks)
