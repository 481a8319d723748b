"""Bytes and memory of a rank by formula, against what one rank of a mesh really asks for.

The group is torch's fake one: this process is rank 0, its collectives move nothing, and their
sizes are those of a real group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.config import Config, load_config
from nsa.model import TinyLM
from nsa.model.cost import parameter_counts, training_memory
from nsa.parallel.traffic import step_traffic
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.train.distributed.mesh import split_model
from nsa.train.loss import next_token_loss
from nsa.train.runtime import resolve_runtime


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Received(TorchDispatchMode):
    """Counts what a rank receives in functional collectives, all-reduces as rings."""

    num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func.__name__.partition(".")[0], getattr(next(iter(args), None), "nbytes", 0)
        out = func(*args, **(kwargs or {}))
        if name == "all_gather_into_tensor":
            self.num_bytes += out.nbytes - size
        elif name == "reduce_scatter_tensor":
            self.num_bytes += size - out.nbytes
        elif name == "all_to_all_single":
            self.num_bytes += sum(args[1][1:]) * size / max(args[0].shape[0], 1)
        elif name == "all_reduce":
            ranks = _resolve_process_group(args[2]).size()
            self.num_bytes += 2 * size * (ranks - 1) / ranks
        return out


def tiny(*overrides: str) -> Config:
    sizes = ("model.n_heads=4", "model.n_kv_groups=2", "train.seq_len=64", "runtime.precision=fp32")
    base = REPOSITORY / "configs" / "base.yaml"
    return load_config(base, [*TINY, *sizes, *overrides], environ={})


def run(config: Config) -> tuple[float, int]:
    """Forward and backward of rank 0: bytes received, and bytes kept for backward."""
    cp, tp, kept = config.runtime.cp, config.runtime.tp, dict[int, int]()
    mesh = init_device_mesh("cpu", (4 // (cp * tp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    torch.manual_seed(0)
    model = split_model(TinyLM.from_config(config, 256), mesh).train()

    def pack(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, AsyncCollectiveTensor):
            x = x.elem
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    rows = torch.randint(0, 256, (config.train.batch_size, config.train.seq_len + 1))
    with Received() as received:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found: list[torch.Tensor] = []
            loss = next_token_loss(model, rows, resolve_runtime(config.runtime), index_losses=found)
        size = sum(kept.values())
        torch.stack([loss, *found]).sum().backward()
    return received.num_bytes, size


CASES = {
    "cp": ("runtime.cp=2",),
    "cp, recomputed": ("runtime.cp=2", "runtime.gradient_checkpointing=true"),
    "cp, dense": ("runtime.cp=2", "model.attention=dense"),
    "cp, msa": ("runtime.cp=2", "model.rule=msa", "nsa.l_sel=16", "nsa.d_index=8"),
    "tp": ("runtime.tp=2",),
    "tp, recomputed": ("runtime.tp=2", "runtime.gradient_checkpointing=true"),
    "cp and tp": ("runtime.cp=2", "runtime.tp=2"),
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_bytes_and_memory_by_formula_are_those_of_a_rank(overrides: tuple[str, ...]) -> None:
    config = tiny(*overrides)
    received, kept = run(config)
    formula = step_traffic(config, config.runtime.sharing)
    expected = formula.get("tokens", 0) + formula.get("activations", 0)
    assert received == pytest.approx(expected, rel=0.001)
    memory = training_memory(config)
    estimate = sum(memory.get(part, 0) for part in ("activations", "keys of whole rows", "head"))
    if not config.runtime.gradient_checkpointing:  # those keep what arrives in the backward pass
        assert kept == pytest.approx(estimate, rel=0.15)


def test_the_busiest_rank_counts() -> None:
    """Rank 0 has the first tokens, and needs no others for their windows."""
    config = tiny("runtime.cp=4", "nsa.w=16")
    received, _ = run(config)
    assert 0.7 < received / step_traffic(config, 4)["tokens"] < 1.0


def test_weights_and_gradients_go_over_all_data_parallel_ranks() -> None:
    weights = sum(parameter_counts(tiny()).values())
    assert step_traffic(tiny(), 1) == {}
    assert step_traffic(tiny(), 4) == {"gradients": 2 * 4 * weights * 3 // 4}
    sharded = step_traffic(tiny("runtime.strategy=fsdp", "train.accumulate_grad_batches=3"), 4)
    assert sharded == {"weights": 6 * 4 * (weights * 3 // 4), "gradients": 4 * (weights * 3 // 4)}
    mixed = step_traffic(tiny("runtime.cp=2", "runtime.tp=2"), 8)
    assert mixed["gradients"] == 4 * (weights // 2 * 3 // 4), "over dp x cp"
