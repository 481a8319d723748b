"""One rank of several that share the weights of a model: runs a table of cases, writes what it
found.

test_tensor.py starts it and reads the files. Each case is a model in this process, and the same
model under tensor parallelism on all ranks; on four ranks also with context parallelism.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from nsa.model import AttentionStats, TinyLM
from nsa.parallel import (
    ContextParallel,
    TensorParallel,
    average_gradients,
    gather_sequence,
    shard_sequence,
)
from nsa.tests.parallel.ranks import (
    DOCS,
    MLP,
    MOBA,
    REUSE,
    SPARSE,
    TWO,
    Case,
    compiled,
    meet,
    new_model,
    run_model,
    said_by,
)
from nsa.tests.support.helpers import relative_error

WIDE: dict[str, Any] = dict(n_heads=8, n_kv_groups=4)
HEADS: dict[str, Any] = WIDE | dict(qk_norm=True, qkv_bias=True)
GATED: dict[str, Any] = dict(mlp="gated", mlp_dim=40, tie_embeddings=True)
GC: dict[str, Any] = dict(grad_checkpointing=True)
CASES = {
    "nsa": Case(64, WIDE | TWO, batch=2),
    "nsa, documents": Case(104, HEADS | GATED | MLP, docs=DOCS),
    "nsa, recomputed": Case(64, WIDE | TWO | GATED | GC),
    "nsa, compiled": Case(32, WIDE | dict(w=5), compiled=True),
    "shared": Case(104, WIDE | SPARSE | dict(kv="shared")),
    "infllm": Case(104, HEADS | SPARSE | dict(rule="pooled"), docs=DOCS),
    "moba": Case(136, WIDE | MOBA, docs=(3, 130)),
    "msa": Case(136, HEADS | SPARSE | dict(rule="msa"), batch=2),
    "msa, warm-up": Case(136, WIDE | SPARSE | dict(rule="msa"), docs=(100,), warm_up=True),
    "reuse": Case(136, WIDE | REUSE, docs=(100,)),
    "dense": Case(64, WIDE | GATED | dict(attention="dense"), batch=2),
    "dense, documents": Case(104, HEADS | dict(attention="dense"), docs=DOCS),
    "mixed": Case(104, WIDE | SPARSE | dict(n_layers=3, rule="nsa,dense,msa") | GC),
}
WITH_CONTEXT = ("nsa, documents", "nsa, recomputed", "infllm", "msa", "reuse", "dense", "mixed")
"""Also run on a mesh of cp=2 x tp=2."""


def names_of(size: int) -> list[str]:
    """The cases for so many ranks; a compiled model costs more, and runs on two."""
    return [name for name, case in CASES.items() if size == 2 or not case.compiled]


class Selections(AttentionStats):
    """Keeps what every layer chose."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: dict[int, Tensor] = {}

    def record(self, layer: int, gates: Tensor | None, selection: Tensor, **sizes: Any) -> None:
        super().record(layer, gates, selection, **sizes)
        self.chosen[layer] = selection


def compare(case: Case, tp: DeviceMesh, cp: DeviceMesh | None = None) -> dict[str, float]:
    """Relative errors of logits, loss, each weight and each gradient against one process."""
    torch.manual_seed(2)
    row = torch.randint(0, 24, (case.batch, case.length + 1))
    given = {"ids": row[:, :-1], "targets": row[:, 1:]}
    alone = new_model(case)
    expected, loss = run_model(alone, **given, cu_seqlens=case.cu_seqlens)
    model = parallelize_module(new_model(case), tp, TensorParallel())
    assert isinstance(model, TinyLM)
    assert list(model.state_dict()) == list(alone.state_dict()), "names of weights have changed"
    if cp is not None:
        parallelize_module(model, cp, ContextParallel())
        given = shard_sequence(given, cp)
    if case.compiled:
        model.compiled = [compiled(block, case) for block in model.layers]
    logits, own_loss = run_model(model, **given, cu_seqlens=case.cu_seqlens)
    if cp is not None:
        average_gradients(model, cp)
        logits = gather_sequence(logits, cp)
        dist.all_reduce(own_loss, group=cp.get_group())
        own_loss /= cp.size()
    errors = {"logits": relative_error(logits, expected), "loss": relative_error(own_loss, loss)}
    found = dict(model.named_parameters())
    for name, weight in alone.named_parameters():
        assert isinstance(found[name], DTensor), f"{name} is not a DTensor"
        errors[f"{name}, weight"] = relative_error(_whole(found[name]), weight)
        grad = found[name].grad
        assert (grad is None) == (weight.grad is None), f"{name}: one has a gradient"
        if grad is not None and weight.grad is not None:
            errors[name] = relative_error(_whole(grad), weight.grad)
    return errors


def share_all(mesh: DeviceMesh) -> dict[str, float]:
    """Relative errors of weights after a clipped step of AdamW: FSDP over cp, together with tp.

    The loss is that of `mean_loss`, as in the trainer; some targets do not count.
    """
    case = Case(104, WIDE | SPARSE | GATED | dict(n_layers=2, rule="nsa,dense"))
    torch.manual_seed(4)
    row = torch.randint(0, 24, (1, case.length + 1))
    given, alone = (row[:, :-1], row[:, 1:].clone()), new_model(case)
    # The first part of either rank of cp: all rows of one rank of tp.
    given[1][0, :52] = -100
    _step(alone, *given)
    model = parallelize_module(new_model(case), mesh["tp"], TensorParallel())
    parallelize_module(model, mesh["cp"], ContextParallel())
    assert isinstance(model, TinyLM)
    for block in model.layers:
        fully_shard(block, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"], reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")
    _step(model, *shard_sequence(given, mesh["cp"]))
    found = dict(model.named_parameters())
    assert list(model.state_dict()) == list(alone.state_dict())
    return {name: relative_error(_whole(found[name]), x) for name, x in alone.named_parameters()}


def _step(model: TinyLM, ids: Tensor, targets: Tensor) -> None:
    model.mean_loss(model.hidden(ids).flatten(0, 1), targets.flatten(), _mean).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    # A large epsilon: a step is then as long as its gradient, and errors of the norm show.
    torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0).step()


def _mean(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def _whole(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor().detach()


def differing_choices(case: Case, mesh: DeviceMesh) -> int:
    """How many of the chosen blocks of this rank's heads differ from those of one process."""
    ids = torch.arange(case.length)[None] * 7 % 24
    alone, own = Selections(), Selections()
    with torch.no_grad():
        new_model(case)(ids, cu_seqlens=case.cu_seqlens, stats=alone)
        model = parallelize_module(new_model(case), mesh, TensorParallel())
        model(ids, cu_seqlens=case.cu_seqlens, stats=own)
    assert alone.chosen.keys() == own.chosen.keys() and alone.chosen
    differ = 0
    for layer, chosen in alone.chosen.items():
        heads = chosen.chunk(mesh.size(), dim=2)[mesh.get_local_rank()]
        differ += int((heads != own.chosen[layer]).sum())
    return differ


def refuse(mesh: DeviceMesh) -> dict[str, str]:
    """What must be refused by every rank, and what it says."""
    size = mesh.size()
    wide = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))

    def split(style: Any = None, mesh: DeviceMesh = mesh, **sizes: Any) -> Any:
        model = new_model(Case(8, WIDE | sizes))
        return parallelize_module(model, mesh, style or TensorParallel())

    trials: dict[str, Any] = {
        "too many ranks": lambda: split(n_kv_groups=size // 2),
        "groups": lambda: split(n_heads=2 * size + 2, n_kv_groups=size + 1),
        "mlp": lambda: split(mlp_dim=8 * size + 1),
        "vocab": lambda: split(vocab=25),
        "other weights": lambda: split(n_layers=1 + mesh.get_local_rank()),
        "two dimensions": lambda: split(mesh=wide),
        "no layer": lambda: parallelize_module(torch.nn.Linear(2, 2), mesh, TensorParallel()),
        "twice": lambda: parallelize_module(split(), mesh, TensorParallel()),
        "after context": lambda: parallelize_module(
            split(ContextParallel()), mesh, TensorParallel()
        ),
    }
    return said_by(trials)


def main(folder: Path) -> None:
    rank, size = meet(folder)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    found: dict[str, Any] = {name: compare(CASES[name], mesh) for name in names_of(size)}
    if size == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        for name in WITH_CONTEXT:
            found[f"{name}, cp"] = compare(CASES[name], both["tp"], both["cp"])
        found["fsdp"] = share_all(both)
    found["choices"] = {
        name: differing_choices(CASES[name], mesh)
        for name in ("nsa", "shared", "infllm", "moba", "msa")
    }
    # Last: after a refusal all ranks must still be in step.
    found["refused"] = refuse(mesh)
    found["after"] = compare(CASES["nsa"], mesh)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
