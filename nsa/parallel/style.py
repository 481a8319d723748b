"""ContextParallel: one sequence over the ranks of a mesh, for torch's `parallelize_module`.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("cp",))
    model = parallelize_module(TinyLM(...), mesh["cp"], ContextParallel())
    ids, targets = shard_sequence((ids, targets), mesh["cp"])
    loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    average_gradients(model, mesh["cp"])

Every rank holds all weights, and computes the loss of its own tokens. Its gradients are those of
the sum of all ranks' losses by its own tokens' way through the weights. They must be averaged over
the ranks before the update: by `average_gradients`, or by whoever averages over data-parallel
ranks, on a mesh that has the ranks of this one in it.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from nsa.model import TinyLM
from nsa.parallel.attention import CONTEXT_CLASSES
from nsa.parallel.exchange import SELECTED, Context, check_agreement, gather_parts
from nsa.parallel.split import PARTS, Split
from nsa.parallel.tensor import TensorLM


class ContextParallel(ParallelStyle):
    """Split the sequence: a model or attention layer takes this rank's tokens and gives theirs."""

    def __init__(self, *, parts: str = PARTS[0], selected: str = SELECTED[0]) -> None:
        """`selected` is how NSA's selected keys and values travel: `gather` sends all to all, and
        overlaps with other work; `chosen` sends the blocks that somebody reads, in layers and steps
        where that is less, at the price of a sync (chosen.py has the rule)."""
        for name, choice, known in (("parts", parts, PARTS), ("selected", selected, SELECTED)):
            if choice not in known:
                raise ValueError(f"{name}={choice!r} is not known; use one of {', '.join(known)}")
        self.parts, self.selected = parts, selected

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"a mesh of {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}; context "
                f'parallelism takes one of them: pass mesh["cp"]'
            )
        layers = _layers(module)
        check_agreement(module, device_mesh, {"parts": self.parts, "selected": self.selected})
        context = Context(device_mesh, self.parts, self.selected)
        for layer in layers:
            # Another class with the same weights, as FSDP does it: all names stay.
            layer.__class__ = CLASSES[type(layer)]
            layer.context = context  # type: ignore[assignment]
        return module


class ContextLM(TinyLM):
    """TinyLM on this rank's tokens: ids [B, T] -> logits [B, T, V]; cu_seqlens are of the row."""

    context: Context

    def positions(self, ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:  # [T]
        split = self.context.split(ids.shape[0], ids.shape[1], cu_seqlens)
        return split.positions(self.context.rank, ids.device)

    def own_tokens(self, x: Tensor) -> Tensor:  # [B, S] -> [B, T]
        split = Split(x.shape[1], self.context.num_ranks, self.context.parts)
        return split.own_tokens(x, self.context.rank)


class ContextTensorLM(ContextLM, TensorLM):
    """The same, with its weights over other ranks."""


CLASSES: dict[type, type] = CONTEXT_CLASSES | {TinyLM: ContextLM, TensorLM: ContextTensorLM}
"""What a part of the model becomes."""


def gather_sequence(
    x: Tensor,  # [B, T, ...]
    mesh: DeviceMesh,
    *,
    parts: str = PARTS[0],
) -> Tensor:  # [B, S, ...]
    """The inverse of shard_sequence, on every rank: the tokens of all ranks in their order."""
    split = Split(x.shape[1] * mesh.size(), mesh.size(), parts)
    return gather_parts(x, split, [split.part_len] * split.num_parts, mesh.get_group())()


def average_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of all weights over the ranks of a mesh, in place."""
    group = mesh.get_group()
    for weight in module.parameters():
        if weight.grad is None:
            continue
        # Of a DTensor, sharded over other ranks, its own shard.
        grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        dist.all_reduce(grad, group=group)
        grad /= mesh.size()


def _layers(module: nn.Module) -> list[nn.Module]:
    """What has to know of the split: attention layers, and the model that counts positions."""
    found = [layer for layer in module.modules() if isinstance(layer, tuple(CLASSES))]
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no attention layer of nsa to split; give a TinyLM, "
            f"NSAAttention, SparseAttention or DenseAttention, or a module with one"
        )
    for layer in found:
        if type(layer) not in CLASSES:
            raise ValueError(
                f"a {type(layer).__name__} is split or sharded already, or a class of your own; "
                f"apply ContextParallel to layers of nsa, once, and before fully_shard"
            )
    return found
