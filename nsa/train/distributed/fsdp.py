"""Fully sharded data parallel training (FSDP2).

Every rank holds a shard of each weight, its gradient and its optimizer state, in fp32. The weights
of a block are gathered when needed, in the compute dtype; gradients are reduce-scattered in fp32.
Update, skip, clipping and saving use the same code as without FSDP: it works on shards, and the
deciding numbers (loss, gradient norm) are global.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from nsa.config import Config, ConfigError
from nsa.model import TinyLM
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.checkpoint.file import BadCheckpoint, Content
from nsa.train.distributed.ddp import Group
from nsa.train.distributed.mesh import open_shards
from nsa.train.runtime import Runtime
from nsa.train.tensors import gather_tensor, local_shard, map_tensors, shard_like


class Fsdp(Group):
    """One of several ranks that hold a shard of the model each."""

    checkpoint_name = checkpoint_folder.NAME
    gathers = saves_together = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._model: FSDPModule | None = None
        self._flat: DeviceMesh | None = None  # dp x cp, where there is tp
        # A separate group: the writer thread runs collectives concurrently with training, and
        # within one group their order would differ between ranks.
        timeout = timedelta(seconds=self._timeout_s)
        self._saving = dist.new_group(backend="gloo", timeout=timeout)

    def adapt(self, cfg: Config) -> Config:
        other = "runtime.strategy=ddp" if cfg.runtime.tp == 1 else "runtime.tp=1"
        for key in ("cuda_graph", "compile"):
            if getattr(cfg.runtime, key):
                raise ConfigError(
                    f"runtime.{key}=true under FSDP: weights are gathered outside of it; "
                    f"set it to false, or choose {other}",
                    key=f"runtime.{key}",
                )
        return cfg

    def place_model(self, model: TinyLM, runtime: Runtime) -> TinyLM:
        """Shard the model block by block: a device never holds more than one full block.

        The residual stream stays fp32, as without FSDP: embedding, last norm and head are gathered
        in fp32, and the inputs of a block are not cast. The head matrix is used after `hidden`
        returns, so the root is not resharded until the backward pass.
        """
        model = self.split(model, runtime)
        mesh = self._shards(runtime.device.type)
        wire = None if runtime.precision == "fp32" else runtime.dtype
        rounded = MixedPrecisionPolicy(
            param_dtype=wire, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.layers:
            fully_shard(block, mesh=mesh, mp_policy=rounded)
        exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
        register_fsdp_forward_method(model, "hidden")
        assert isinstance(model, FSDPModule)
        self._model = model
        self._say(
            f"[fsdp] {len(model.layers)} blocks sharded over {mesh.size()} ranks | blocks "
            f"gathered in {runtime.precision}, gradients summed in fp32"
        )
        return model

    def _shards(self, device_type: str) -> DeviceMesh:
        """The ranks that share the weights: all, or those with the same share of the matrices."""
        if self.tp == 1:
            return DeviceMesh.from_group(_world(), device_type)
        if self._flat is None:
            self._flat = open_shards(self.mesh(device_type), timedelta(seconds=self._timeout_s))
        return self._flat

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Before the last micro-batch, gradients are accumulated unsharded and not reduced."""
        assert self._model is not None, "place_model() comes first"
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        yield

    @property
    def saves(self) -> bool:
        return True

    def write_checkpoint(self, folder: Path, content: Content) -> Path:
        from nsa.train.checkpoint import sharded_io  # takes a second to import

        return sharded_io.write(folder, content, self._saving)

    def load_checkpoint(self, path: Path, content: Content, like: dict[str, Tensor]) -> Content:
        """From a folder, each rank reads only its shards; a single file is read fully, then cut."""
        from nsa.train.checkpoint import sharded_io

        if path.is_dir():
            return sharded_io.fill(path, content, partial(_new_part, like))
        cut = partial(_part_of, like)
        return content | {k: map_tensors(content[k], cut, k) for k in sharded_io.IN_PARTS}

    def weights(self, model: TinyLM) -> dict[str, Tensor]:
        """Gather tensor by tensor, so that only one full tensor is on the device at a time."""
        gathered = {}
        for name, x in model.state_dict().items():
            joined = gather_tensor(x).detach()
            if self.is_first:
                gathered[name] = joined.cpu()
        return gathered

    def gather_model(self, model: TinyLM, cfg: Config) -> TinyLM:
        weights = self.weights(model)
        if not self.is_first:
            return model
        with torch.device("meta"):
            fresh = TinyLM.from_config(cfg, vocab=model.vocab)
        fresh.load_state_dict(weights, strict=True, assign=True)
        return fresh


def _new_part(like: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Allocate this rank's shard of a tensor of this shape."""
    return torch.zeros_like(_parameter(like, name, x), dtype=x.dtype)


def _part_of(like: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have; no communication."""
    if x.ndim == 0:
        return x
    part = _new_part(like, name, x)
    local_shard(part).copy_(shard_like(x, part))
    return part


def _parameter(like: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The parameter of a tensor: with its name, or, for moments, that of its state."""
    found = like.get(name, like.get(name.rpartition(".")[0]))
    if found is None or found.shape != x.shape:
        there = "absent" if found is None else list(found.shape)
        raise BadCheckpoint(
            f"{name} is {list(x.shape)} in the checkpoint, and {there} in the run that it names; "
            "it was damaged or made by another program; use an older checkpoint"
        )
    return found


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "process_group.py has opened it"
    return dist.group.WORLD
