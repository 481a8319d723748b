"""TensorParallel: the weights of a model over the ranks of a mesh, by KV head.

    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
    model = parallelize_module(TinyLM(...), mesh["tp"], TensorParallel())
    loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()

All ranks take the same ids and give the same logits; each attends with its own KV heads, and the
query heads that read them. So it chooses blocks as one process does, and keys never travel. The
gradients need nothing after backward: those of sharded weights are of this rank's shard, those of
whole weights are the same on all ranks.

    what                                    weights                 activations sent
    embedding, output head                  by rows: token ids      sum of outputs; logits joined
    queries, keys, values (`qkv`)           by rows, then by head   sum of the input's gradient
    gates of NSA, index queries of MSA      by rows: heads
    output of attention (`out`)             by columns: heads       sum of outputs
    MLP: `fc1`, `gate`                      by rows                 sum of the input's gradient
    MLP: `fc2`                              by columns              sum of outputs
    norms of the residual stream            whole
    what heads share: QK-norm, phi,         whole                   sum of the weight's gradient
    index keys and norms of MSA

Weights become DTensors under their old names. With ContextParallel and fully_shard, this style is
applied first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from nsa.model import TinyLM
from nsa.model.attention import BlockMLP, NSAAttention
from nsa.model.block import MLP
from nsa.model.dense import DenseAttention
from nsa.model.rope import RMSNorm
from nsa.model.rules import MSARule
from nsa.model.sparse import SparseAttention
from nsa.parallel.exchange import all_gather, check_agreement
from nsa.parallel.shards import (
    ColumnLinear,
    HeadBlockMLP,
    HeadMSARule,
    HeadNorm,
    HeadsLinear,
    RowLinear,
    Shards,
    SharedLinear,
    VocabEmbedding,
    WholeNorm,
)


class TensorParallel(ParallelStyle):
    """Split the weights: a model, attention layer or MLP takes and gives what one process does."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"a mesh of {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}; tensor "
                f'parallelism takes one of them: pass mesh["tp"]'
            )
        parts = _parts(module)
        check_agreement(module, device_mesh, {})
        for part in parts:
            _check_sizes(part, device_mesh.size())
        shards = Shards(device_mesh)
        for part in parts:
            SPLIT[type(part)](part, shards)
        _keep_whole(module, shards)
        return module


class TensorLM(TinyLM):
    """TinyLM of which this rank has some heads, MLP columns and token ids."""

    shards: Shards

    def head(self, hidden: Tensor) -> Tensor:  # [..., dim] -> [..., V]
        own = F.linear(self.shards.enter(hidden), self.shards.local(self._sharded_head))
        return self.shards.join(own)

    @property
    def head_weight(self) -> Tensor:  # [V, dim]
        """The whole matrix, gathered: for what all ranks compute alike from all of it."""
        held = self.shards.local(self._sharded_head)  # [V / P, dim]
        return self.shards.join(held.T).T

    def mean_loss(
        self, hidden: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The ranks share the rows: each has the loss of some of them, by the whole matrix."""
        size, rank = self.shards.num_ranks, self.shards.rank
        rows = self.shards.enter(hidden).tensor_split(size)[rank]
        own = targets.tensor_split(size)[rank]
        # Gradients of the matrix are summed as they are sharded.
        weight = all_gather(self.shards.local(self._sharded_head), self.shards.group)
        mean, num_own = loss(rows, weight, own), (own >= 0).sum()
        total = torch.where(num_own > 0, mean * num_own, 0.0)  # a mean of nothing is NaN
        return self.shards.leave(total) / (targets >= 0).sum()

    @property
    def _sharded_head(self) -> Tensor:  # [V, dim] DTensor
        return self.embed.weight if self.lm_head is None else self.lm_head.weight


def _split_attention(layer: Any, shards: Shards) -> None:
    """Any of the attention layers: from here on it has this rank's heads."""
    branches = 3 if isinstance(layer, NSAAttention) else 1
    key, value = layer.num_groups * layer.d_k, layer.num_groups * layer.d_v
    shards.turn(layer.qkv, HeadsLinear, dim=0)
    layer.qkv.plan((layer.num_heads * layer.d_k, *[key] * branches, *[value] * branches))
    shards.turn(layer.out, RowLinear, dim=1)
    if layer.qk_norm:
        shards.turn(layer.q_norm, HeadNorm)
        shards.turn(layer.k_norm, HeadNorm)
    if isinstance(layer, NSAAttention):
        shards.turn(layer.gate, ColumnLinear, dim=0)
    for part in layer.modules():
        if isinstance(part, BlockMLP):
            shards.turn(part, HeadBlockMLP)
            shards.turn(part.fc1, SharedLinear)
            shards.turn(part.fc2, SharedLinear)
        elif isinstance(part, MSARule):
            _split_indexer(part, shards)
    layer.num_heads //= shards.num_ranks
    layer.num_groups //= shards.num_ranks
    _sum_input_gradients(layer, shards)


def _split_indexer(rule: MSARule, shards: Shards) -> None:
    shards.turn(rule, HeadMSARule)
    shards.turn(rule.proj_q, ColumnLinear, dim=0)
    shards.turn(rule.proj_k, SharedLinear)
    for norm in (rule.norm_q, rule.norm_k):
        shards.distribute(norm, "weight")
    rule.num_groups //= shards.num_ranks


def _split_mlp(layer: MLP, shards: Shards) -> None:
    shards.turn(layer.fc1, ColumnLinear, dim=0)
    shards.turn(layer.fc2, RowLinear, dim=1)
    if layer.gate is not None:
        shards.turn(layer.gate, ColumnLinear, dim=0)
    _sum_input_gradients(layer, shards)


def _split_model(model: TinyLM, shards: Shards) -> None:
    """What is not in a block."""
    shards.turn(model.embed, VocabEmbedding, dim=0)
    if model.lm_head is not None:
        shards.distribute(model.lm_head, "weight", 0)
    model.__class__ = TensorLM
    model.shards = shards  # type: ignore[assignment]


SPLIT: dict[type, Callable[[Any, Shards], None]] = {
    NSAAttention: _split_attention,
    DenseAttention: _split_attention,
    SparseAttention: _split_attention,
    MLP: _split_mlp,
    TinyLM: _split_model,
}
"""The parts of a model that are split, and who does it."""


def _sum_input_gradients(layer: nn.Module, shards: Shards) -> None:
    """One sum for all the matrices that read a layer's input, and none where nothing is trained."""

    def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (shards.enter(given[0]), *given[1:])

    layer.register_forward_pre_hook(enter)


def _keep_whole(module: nn.Module, shards: Shards) -> None:
    """All other weights, as DTensors too: optimizers and clipping take one kind at a time."""
    for layer in module.modules():
        if type(layer) is RMSNorm:
            shards.turn(layer, WholeNorm)
    plain = [name for name, x in module.named_parameters() if not isinstance(x, DTensor)]
    if plain:
        raise ValueError(
            f"{type(module).__name__} has weights outside of nsa's layers: {', '.join(plain[:4])}; "
            f"apply TensorParallel to the TinyLM in it, and distribute these by yourself"
        )


def _parts(module: nn.Module) -> list[nn.Module]:
    """What is split: attention layers, MLPs, and the model with embedding and head."""
    found = [part for part in module.modules() if isinstance(part, tuple(SPLIT))]
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no layer of nsa to split; give a TinyLM, NSAAttention, "
            f"SparseAttention, DenseAttention or MLP, or a module with one"
        )
    for part in found:
        if type(part) not in SPLIT or isinstance(next(part.parameters()), DTensor):
            raise ValueError(
                f"a {type(part).__name__} is split or sharded already, or a class of your own; "
                f"apply TensorParallel to layers of nsa, once, before ContextParallel and "
                f"fully_shard"
            )
    return found


def _check_sizes(part: Any, num_ranks: int) -> None:
    """Refuse sizes that the ranks do not divide."""
    if isinstance(part, TinyLM):
        sizes = {"vocab": part.vocab}
    elif isinstance(part, MLP):
        sizes = {"mlp_dim": part.fc1.out_features}
    else:
        sizes = {"n_kv_groups": part.num_groups}
        if num_ranks > part.num_groups:
            raise ValueError(
                f"{num_ranks} ranks with n_kv_groups={part.num_groups}; tensor parallelism goes by "
                f"KV head, at least one for each rank: use at most {part.num_groups} ranks, and "
                f"the others for data or context parallelism"
            )
    for name, size in sizes.items():
        if size % num_ranks:
            lower = size // num_ranks * num_ranks
            near = f"{lower} or {lower + num_ranks}" if lower else f"{num_ranks}"
            raise ValueError(
                f"{name}={size} cannot be divided by {num_ranks} ranks; use a multiple of "
                f"{num_ranks}, such as {near}, or another number of ranks"
            )
