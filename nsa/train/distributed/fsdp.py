"""Many ranks that share one model out: fully sharded data parallel, FSDP2.

Every rank holds a part of each weight, of its gradient and of the optimizer's state, in fp32. A
block's weights are gathered when it is needed, in the type that products are computed in, and the
gradients are summed in fp32 into the parts. What updates, skips, clips and saves is the same code
as ever; it works on parts, and the numbers that decide are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
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
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import zeros as zeros_in_parts

from nsa.config import Config, ConfigError
from nsa.model import TinyLM
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.checkpoint.file import Content
from nsa.train.distributed.ddp import Group
from nsa.train.runtime import Runtime
from nsa.train.tensors import map_tensors, whole

BY_ROWS = (Shard(0),)
"""How FSDP divides a tensor: by its first dimension, in parts as equal as they can be."""


class Fsdp(Group):
    """One of several ranks that hold a part of the model each."""

    checkpoint_name = checkpoint_folder.NAME
    gathers = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._mesh: DeviceMesh | None = None
        self._model: FSDPModule | None = None
        # Checkpoints are written beside the steps, so they must not wait in one line with them.
        timeout = timedelta(seconds=self._timeout_s)
        self._saving = dist.new_group(backend="gloo", timeout=timeout)

    def adapt(self, cfg: Config) -> Config:
        for key in ("cuda_graph", "compile"):
            if getattr(cfg.runtime, key):
                raise ConfigError(
                    f"runtime.{key}=true under FSDP: the gathering of weights would have to be "
                    "part of it; set it to false, or choose runtime.strategy=ddp",
                    key=f"runtime.{key}",
                )
        return cfg

    def bring(self, model: TinyLM, runtime: Runtime) -> TinyLM:
        """Share the model out, block by block: a device never holds more than one of them whole.

        The residual stream stays fp32, as it is without ranks: embedding, last norm and head are
        gathered in fp32, and what comes into a block is not rounded. The head's matrix is used
        after `hidden`, which the root leaves gathered until the backward pass.
        """
        self._mesh = DeviceMesh.from_group(_world(), runtime.device.type)
        wire = None if runtime.precision == "fp32" else runtime.dtype
        rounded = MixedPrecisionPolicy(
            param_dtype=wire, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.layers:
            fully_shard(block, mesh=self._mesh, mp_policy=rounded)
        exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=self._mesh, mp_policy=exact, reshard_after_forward=False)
        register_fsdp_forward_method(model, "hidden")
        assert isinstance(model, FSDPModule)
        self._model = model
        self._say(
            f"[fsdp] {len(model.layers)} blocks shared out over {self.world_size} ranks | blocks "
            f"gathered in {runtime.precision}, gradients summed in fp32"
        )
        return model

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Gradients of the micro-batches before the last are added up whole, and not exchanged."""
        assert self._model is not None, "bring() comes first"
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        yield

    @property
    def saves(self) -> bool:
        return True

    def write_checkpoint(self, folder: Path, content: Content) -> Path:
        from nsa.train.checkpoint import sharded_io  # takes a second to import

        return sharded_io.write(folder, content, self._saving)

    def load_checkpoint(self, path: Path, content: Content) -> Content:
        """From a folder each rank reads its parts alone; a file it reads whole, and keeps them."""
        from nsa.train.checkpoint import sharded_io

        if path.is_dir():
            return sharded_io.fill(path, content, self._new_part)
        parts = {k: map_tensors(content[k], self._part_of) for k in sharded_io.IN_PARTS}
        return content | parts

    def weights(self, model: TinyLM) -> dict[str, Tensor]:
        """Gathered tensor by tensor, by all ranks."""
        gathered = {}
        for name, x in model.state_dict().items():
            joined = whole(x).detach()
            if self.is_first:
                gathered[name] = joined.cpu()
        return gathered

    def whole(self, model: TinyLM, cfg: Config) -> TinyLM:
        weights = self.weights(model)
        if not self.is_first:
            return model
        with torch.device("meta"):
            fresh = TinyLM.from_config(cfg, vocab=model.vocab)
        fresh.load_state_dict(weights, strict=True, assign=True)
        return fresh

    def _new_part(self, x: Tensor) -> Tensor:
        """For a tensor of this shape, what this rank holds of it."""
        return zeros_in_parts(x.shape, dtype=x.dtype, device_mesh=self._mesh, placements=BY_ROWS)

    def _part_of(self, name: str, x: Tensor) -> Tensor:
        """What this rank holds of a tensor that all of them have; nothing is sent."""
        if x.ndim == 0:
            return x
        # The part alone: a view would keep all of the tensor in memory.
        return distribute_tensor(x, self._mesh, BY_ROWS, src_data_rank=None).clone()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "process_group.py has opened it"
    return dist.group.WORLD
