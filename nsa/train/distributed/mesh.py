"""The mesh of a run: dp x cp x tp ranks, what is refused before they start, and the split model.

    dp    data parallel: ranks with rows of their own
    cp    context parallel (runtime.cp): ranks with parts of the tokens of the same rows
    tp    tensor parallel (runtime.tp): ranks with KV heads, and columns, of the same matrices

Rank (dp * num_cp + cp) * num_tp + tp has these places: ranks that exchange most are neighbours, on
one machine where they fit. FSDP shards over dp and cp together, so that it averages gradients over
all tokens; DDP does so over all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store, _set_pg_timeout

from nsa.config import ConfigError, RuntimeConfig
from nsa.model import TinyLM
from nsa.train.distributed.strategy import mark_shared
from nsa.train.errors import RunRefused

NAMES = ("dp", "cp", "tp")


# --- refused before the first step, by all ranks ---


def check_degrees(runtime: RuntimeConfig, world_size: int) -> None:
    """Raise ConfigError unless the ranks can be divided into groups that share rows."""
    if world_size % runtime.sharing:
        said = f"runtime.cp={runtime.cp} x runtime.tp={runtime.tp}"
        ranks = f"{world_size} rank{'s' * (world_size != 1)}"
        raise ConfigError(
            f"{said} on {ranks}: {runtime.sharing} share each row, so their number must be a "
            f"multiple of {runtime.sharing}; use torchrun --nproc_per_node={runtime.sharing}, or "
            "other degrees",
            key="runtime.cp" if runtime.cp > 1 else "runtime.tp",
        )


def agree_on_mesh(store: Store, rank: int, world_size: int, runtime: RuntimeConfig) -> None:
    """Raise RunRefused on all ranks if one of them would build another mesh.

    Through the store: a mesh, and the strategy, already need collectives of all ranks.
    """
    mine = {key: getattr(runtime, key) for key in ("strategy", "cp", "tp")}
    store.set(f"mesh/{rank}", json.dumps(mine))
    said = [json.loads(store.get(f"mesh/{other}")) for other in range(world_size)]
    others = [other for other in range(world_size) if said[other] != said[0]]
    if others:
        store.set(f"mesh/read/{rank}", "")
        if rank == 0:  # it may hold the store: who has not read yet would lose it
            with contextlib.suppress(dist.DistStoreError):  # a rank has died meanwhile
                store.wait([f"mesh/read/{other}" for other in range(world_size)])
        refused = RunRefused(
            f"rank {others[0]} has {_text(said[others[0]])}, but rank 0 has {_text(said[0])}; all "
            "ranks must build the same mesh: start them with one config"
        )
        mark_shared(refused)
        raise refused


def _text(settings: dict[str, object]) -> str:
    return ", ".join(f"runtime.{key}={value}" for key, value in settings.items())


def require_collectives(mesh: DeviceMesh) -> None:
    """Raise ConfigError if the backend lacks an exchange of context parallelism on its device.

    Backends refuse what they lack before they send anything, so all ranks fail alike.
    """
    from torch.distributed import _functional_collectives as collectives

    from nsa.parallel.exchange import all_gather

    group, size = mesh.get_group(), mesh.size()
    x = torch.zeros(size, device=mesh.device_type, requires_grad=True)
    one_each = [1] * size
    try:
        moved = collectives.all_to_all_single_autograd(x, one_each, one_each, group)
        all_gather(moved, group).sum().backward()  # on GPUs a reduce-scatter
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if any(word in str(error) for word in ("Connection", "imed out", "imeout")):
            raise  # the loss of a rank
        raise ConfigError(
            f"runtime.cp={size} on the backend {dist.get_backend(group)}, which lacks a collective "
            f"on {mesh.device_type} ({str(error).splitlines()[0]}); it needs all-gather, "
            "reduce-scatter and all-to-all; use nccl on GPUs, gloo on CPUs (TORCH_BACKEND), or "
            "runtime.cp=1",
            key="runtime.cp",
        ) from None


# --- the mesh, and the model on it ---


def open_mesh(
    device_type: str, world_size: int, cp: int, tp: int, timeout: timedelta
) -> DeviceMesh:
    """The mesh of all ranks; collective. Its groups have the timeout of the run."""
    mesh = init_device_mesh(device_type, (world_size // (cp * tp), cp, tp), mesh_dim_names=NAMES)
    for name in NAMES:
        _set_pg_timeout(timeout, mesh.get_group(name))
    if cp > 1:
        require_collectives(mesh["cp"])
    return mesh


def open_shards(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """The ranks of a mesh with the same share of the matrices, over which FSDP shards it."""
    shards = mesh["dp", "cp"]._flatten("dp_cp")
    _set_pg_timeout(timeout, shards.get_group())
    # It advises another mesh for gathering whole weights, which we do only at the end of a run.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return shards


def split_model(model: TinyLM, mesh: DeviceMesh) -> TinyLM:
    """This rank's share of the matrices and of the tokens, under the same names; collective."""
    from torch.distributed.tensor.parallel import parallelize_module

    from nsa.parallel import ContextParallel, TensorParallel

    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], TensorParallel())
    if mesh["cp"].size() > 1:
        parallelize_module(model, mesh["cp"], ContextParallel())
    return model


def gather_over(mesh: DeviceMesh, x: Tensor) -> Tensor:  # [...] -> [cp, tp, ...]
    """The tensors of all ranks that share rows with this one; collective, no host sync."""
    for name in ("tp", "cp"):
        found = [torch.empty_like(x) for _ in range(mesh[name].size())]
        dist.all_gather(found, x.contiguous(), group=mesh.get_group(name))
        x = torch.stack(found)
    return x
