"""One rank of several that share sequences: runs a table of cases, and writes what it found.

test_context.py starts it and reads the files. Each case is a model on whole sequences in this
process, and the same model under context parallelism on all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from bench.ranks.received import Received
from nsa.model import AttentionStats, TinyLM
from nsa.model.block import Block
from nsa.parallel import (
    ContextParallel,
    Split,
    attention,
    average_gradients,
    decided,
    gather_sequence,
    plan_exchange,
    shard_sequence,
)
from nsa.parallel.attention import ContextDense, ContextNSA, received_bytes
from nsa.parallel.exchange import all_gather, torch_all_gather
from nsa.tests.support.helpers import relative_error

SIZES: dict[str, Any] = dict(
    vocab=24, dim=16, n_layers=1, n_heads=4, n_kv_groups=2, d_k=8, d_v=4,
    l=8, d=4, l_sel=8, n_sel=4, w=10,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and the rows that it reads."""

    length: int
    model: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    docs: tuple[int, ...] = ()
    """Lengths of all documents but the last."""
    parts: str = "two_ended"
    warm_up: bool = False
    selected: str = "gather"
    compiled: bool = False

    @property
    def style(self) -> ContextParallel:
        return ContextParallel(parts=self.parts, selected=self.selected)

    @property
    def cu_seqlens(self) -> Tensor | None:
        if not self.docs:
            return None
        bounds = torch.tensor([0, *self.docs]).cumsum(0).tolist()
        return torch.tensor([*bounds, self.length], dtype=torch.int32)


TWO: dict[str, Any] = dict(n_layers=2)
MLP: dict[str, Any] = dict(phi="mlp", gate="sigmoid")
SPARSE: dict[str, Any] = dict(l_sel=16, n_sel=3, num_local=1, d_index=6)
MOBA = SPARSE | dict(rule="pooled", pool="moba", pool_block=32, n_sel=4)
REUSE = SPARSE | TWO | dict(rule="msa,reuse", grad_checkpointing=True)
MIXED = SPARSE | TWO | dict(rule="nsa,msa")
DOCS = (3, 19, 61, 5)
"""Of 104 tokens: the third is on three of four ranks and longer than their parts of 13."""
CASES = {
    "nsa": Case(96, TWO, batch=2),
    "nsa, contiguous": Case(96, parts="contiguous", batch=2),
    "nsa, odd borders": Case(104, {"qk_norm": True, "qkv_bias": True}),
    "nsa, documents": Case(104, docs=DOCS),
    "nsa, documents, contiguous": Case(104, docs=DOCS, parts="contiguous"),
    "nsa, parts shorter than the window": Case(40, dict(w=27)),
    "nsa, window of one token": Case(40, dict(w=1)),
    "nsa, no compressed token": Case(16, dict(l=32, l_sel=16)),
    "nsa, recomputed": Case(96, TWO | dict(grad_checkpointing=True)),
    "nsa, chosen blocks": Case(160, dict(n_sel=3), batch=2, selected="chosen"),
    "nsa, chosen blocks of documents": Case(
        104, dict(n_sel=3), docs=DOCS, parts="contiguous", selected="chosen"
    ),
    "nsa, all blocks are chosen": Case(104, dict(n_sel=13), selected="chosen"),
    "nsa, compiled": Case(32, dict(w=5), parts="contiguous", compiled=True),
    "dense, compiled": Case(32, dict(attention="dense"), compiled=True),
    "nsa, msa, compiled": Case(104, MIXED, docs=DOCS, compiled=True),
    "nsa, chosen blocks, compiled": Case(
        32, dict(w=5), parts="contiguous", selected="chosen", compiled=True
    ),
    "mlp": Case(96, MLP),
    "mlp, documents": Case(104, MLP, docs=DOCS),
    "mlp, parts shorter than a block": Case(24, MLP),
    "shared": Case(104, SPARSE | dict(kv="shared")),
    "infllm": Case(136, SPARSE | dict(rule="pooled"), batch=2),
    "infllm, documents": Case(104, SPARSE | dict(rule="pooled"), docs=DOCS),
    "moba": Case(136, MOBA, docs=(3, 130)),
    "msa": Case(136, SPARSE | dict(rule="msa"), batch=2),
    "msa, documents": Case(104, SPARSE | dict(rule="msa"), docs=DOCS),
    "msa, warm-up": Case(136, SPARSE | dict(rule="msa"), docs=(100,), warm_up=True),
    "reuse": Case(136, REUSE, docs=(100,)),
    "dense": Case(104, dict(attention="dense"), batch=2),
    "dense, documents": Case(104, dict(attention="dense"), docs=DOCS),
    "dense, nsa": Case(104, TWO | dict(rule="dense,nsa"), docs=DOCS),
}


ON_TWO_RANKS = (
    *("nsa", "nsa, documents", "nsa, chosen blocks", "mlp, documents", "infllm, documents"),
    *("msa, documents", "reuse", "dense, documents"),
)
WHOLE = ("nsa, compiled", "dense, compiled")
"""A layer is one graph."""
BROKEN = ("nsa, msa, compiled", "nsa, chosen blocks, compiled")
"""A layer leaves its graphs for `attend`: documents, a rule of its own, chosen blocks."""


def names_of(size: int) -> list[str]:
    """The cases for so many ranks: on two some of each kind, on four all that do not compile."""
    if size == 2:
        return [*ON_TWO_RANKS, *WHOLE, *BROKEN]
    return [name for name, case in CASES.items() if not case.compiled]


def new_model(case: Case) -> TinyLM:
    """A model in float64 with weights of ordinary size; gates are 0 at first otherwise."""
    torch.manual_seed(1)
    model = TinyLM(**SIZES | case.model).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.index_warm_up = case.warm_up
    return model


def run_model(
    model: TinyLM, ids: Tensor, targets: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits, and after backward the loss: the mean over tokens, and that of the indexers."""
    losses: list[Tensor] = []
    logits = model.head(model.hidden(ids, cu_seqlens=cu_seqlens, index_losses=losses))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = torch.stack([loss, *losses]).sum()
    loss.backward()
    return logits.detach(), loss.detach()


def compare(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    """Relative errors of logits, loss, and each gradient against one process.

    The first rank compares; after `average_gradients` all have the same.
    """
    torch.manual_seed(2)
    row = torch.randint(0, 24, (case.batch, case.length + 1))
    whole = {"ids": row[:, :-1], "targets": row[:, 1:]}
    model = new_model(case)
    names = list(model.state_dict())
    parallelize_module(model, mesh, case.style)
    assert list(model.state_dict()) == names, "names of weights have changed"
    if case.compiled:
        model.compiled = [compiled(block, case) for block in model.layers]
    own = shard_sequence(whole, mesh, parts=case.parts)
    logits, own_loss = run_model(model, **own, cu_seqlens=case.cu_seqlens)
    average_gradients(model, mesh)
    dist.all_reduce(own_loss, group=mesh.get_group())
    gathered = gather_sequence(logits, mesh, parts=case.parts)
    if mesh.get_local_rank():
        return {}
    alone = new_model(case)
    expected, loss = run_model(alone, **whole, cu_seqlens=case.cu_seqlens)
    errors = {"logits": relative_error(gathered, expected)}
    errors["loss"] = relative_error(own_loss / mesh.size(), loss)
    for name, weight in alone.named_parameters():
        found = model.get_parameter(name).grad
        assert (found is None) == (weight.grad is None), f"{name}: one has a gradient"
        if found is not None and weight.grad is not None:
            errors[name] = relative_error(found, weight.grad)
    return errors


def compiled(block: Block, case: Case) -> Any:
    """A block as the trainer compiles it; one graph where that is promised."""
    whole = block.attn.is_one_graph and not case.docs
    return torch.compile(block, fullgraph=whole, dynamic=False, backend="eager")


def compare_compiled(case: Case, mesh: DeviceMesh) -> tuple[dict[str, float], dict[str, Any]]:
    """The same of a compiled case; and the number of its graphs, and why it left them."""
    from torch._dynamo.utils import counters  # takes as long to import as torch itself

    counters.clear()
    errors = compare(case, mesh)
    left = list(counters["graph_break"])
    return errors, {"num": counters["stats"]["unique_graphs"], "left": left}


def share_weights(size: int) -> dict[str, float]:
    """Relative errors of FSDP over all ranks, with sequences over two of them, in one mesh."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    case = Case(104, MIXED, batch=size // 2)
    torch.manual_seed(3)
    row = torch.randint(0, 24, (case.batch, case.length + 1))
    alone = new_model(case)
    _, loss = run_model(alone, row[:, :-1], row[:, 1:], None)
    model = parallelize_module(new_model(case), mesh["cp"], ContextParallel())
    assert isinstance(model, TinyLM)
    # FSDP averages over all ranks, so that nobody else has to.
    everyone = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    for block in model.layers:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")
    dp = mesh["dp"].get_local_rank()
    own = shard_sequence((row[dp : dp + 1, :-1], row[dp : dp + 1, 1:]), mesh["cp"])
    _, own_loss = run_model(model, own[0], own[1], None)
    dist.all_reduce(own_loss)
    errors = {"loss": relative_error(own_loss / size, loss)}
    for name, weight in alone.named_parameters():
        found = model.get_parameter(name).grad
        assert isinstance(found, DTensor) and weight.grad is not None
        errors[name] = relative_error(found.full_tensor(), weight.grad)
    return errors


def count_statistics(mesh: DeviceMesh) -> dict[str, Any]:
    """Statistics and selection maps: of the whole row, and of the ranks together."""

    def gather(x: Tensor) -> Tensor:  # [...] -> [cp, tp, ...]
        found = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(found, x.contiguous(), group=mesh.get_group())
        return torch.stack(found)[:, None]

    case, ids = CASES["nsa, documents"], torch.arange(104)[None] % 24
    alone, own = AttentionStats(maps=True), AttentionStats(maps=True)
    new_model(case)(ids, cu_seqlens=case.cu_seqlens, stats=alone)
    model = parallelize_module(new_model(case), mesh, ContextParallel())
    with torch.no_grad():
        model(shard_sequence(ids, mesh), cu_seqlens=case.cu_seqlens, stats=own)
    own.combine(gather)
    maps = [[asdict(layer) for layer in stats.selection_maps() or []] for stats in (alone, own)]
    return {"summary": [alone.summary(), own.summary()], "maps": maps}


FEW = "nsa, chosen blocks", "nsa, chosen blocks of documents"
COUNTED = ("nsa", "nsa, documents, contiguous", "nsa, no compressed token", "msa", "dense")


def count(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """Bytes received by one layer: by the formula, forward, and backward; and by what."""
    model = new_model(case)
    layer = model.layers[0].attn
    parallelize_module(layer, mesh, case.style)
    x = torch.randn(case.batch, case.length // mesh.size(), 16, dtype=torch.float64)
    bounds = () if case.cu_seqlens is None else tuple(case.cu_seqlens.tolist())
    split = Split(case.length, mesh.size(), case.parts, bounds)
    with Received(mesh) as received:
        out = layer(x, cu_seqlens=case.cu_seqlens)
        forward = received.num_bytes
        loss = out.sum() if isinstance(out, Tensor) else out[0].sum() + out[2]
        loss.backward()
    formula = received_bytes(layer, split, mesh.get_local_rank(), batch=case.batch, number_bytes=8)
    backward = received.num_bytes - forward
    numbers: dict[str, Any] = {"formula": formula, "forward": forward, "backward": backward}
    numbers["names"] = sorted(received.names)
    if case.selected == "chosen":
        numbers |= count_plan(layer, split, case)
    return numbers


def count_plan(layer: ContextNSA, split: Split, case: Case) -> dict[str, int]:
    """The plan of a layer that has run: its bytes, what it said before, and whether it chose."""
    sizes: Any = {"batch": case.batch, "number_bytes": 8}
    after = decided(layer, split, **sizes)
    before = plan_exchange(layer, split, selected="chosen", **sizes)
    assert after.chosen_bytes is not None and before.chosen_bytes is not None
    planned = {"plan": after.chosen_bytes, "bound": before.chosen_bytes}
    return planned | {"is_chosen": int(after.way == "chosen")}


def gather_rows(mesh: DeviceMesh) -> list[list[list[float]]]:
    """Rows of all ranks and the gradient of the own ones: ours, then by torch's all-gather.

    Nothing else runs meanwhile: torch's is dangerous over gloo only beside other collectives.
    """
    group, rank, found = mesh.get_group(), mesh.get_local_rank(), []
    for gather in (all_gather, lambda x, group: torch_all_gather(x.contiguous(), 0, group)):
        held = torch.arange(6.0).view(2, 3) + 10 * rank
        own = held.T.requires_grad_()  # not contiguous
        rows = gather(own, group)
        (rows * torch.arange(rows.numel()).view_as(rows) * (rank + 1)).sum().backward()
        assert own.grad is not None
        found.append([*rows.tolist(), *own.grad.tolist()])
        dist.barrier(group)
    return found


def order(case: Case, mesh: DeviceMesh) -> list[str]:
    """What a layer does in forward, in its order: exchanges, waits, and the window branch."""
    layer = new_model(case).layers[0].attn
    parallelize_module(layer, mesh, case.style)
    log: list[str] = []
    wait, attend = AsyncCollectiveTensor.trigger_wait, attention.attend_windows

    def waited(tensor: AsyncCollectiveTensor) -> Tensor:
        log.append(f"wait for {tensor.shape[0]} rows")
        return wait(tensor)

    def attended(*given: Any) -> Tensor:
        log.append("window begins")
        out = attend(*given)
        log.append("window ends")
        return out

    with (
        patch.object(AsyncCollectiveTensor, "trigger_wait", waited),
        patch.object(attention, "attend_windows", attended),
    ):
        layer(torch.randn(case.batch, case.length // mesh.size(), 16, dtype=torch.float64))
    return log


def refuse(mesh: DeviceMesh) -> dict[str, str]:
    """What must be refused by every rank, and what it says."""
    model = new_model(CASES["nsa"])
    uneven = torch.zeros(1, 16 * mesh.size() + 1, dtype=torch.long)
    other = dict(n_layers=1 + mesh.get_local_rank())
    split = parallelize_module(new_model(CASES["nsa"]), mesh, ContextParallel())
    whole = torch.tensor([0, 8 * mesh.size()], dtype=torch.int32)
    wide = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("dp", "cp"))
    short = torch.tensor([0, 4], dtype=torch.int32)
    ids, odd = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 9, dtype=torch.long)
    trials: dict[str, Any] = {
        "length": lambda: shard_sequence(uneven, mesh),
        "other weights": lambda: parallelize_module(
            new_model(Case(8, other)), mesh, ContextParallel()
        ),
        "other parts": lambda: parallelize_module(
            model,
            mesh,
            ContextParallel(parts=("two_ended", "contiguous")[mesh.get_local_rank() % 2]),
        ),
        "two dimensions": lambda: parallelize_module(model, wide, ContextParallel()),
        "other exchange": lambda: ContextParallel(selected="some"),
        "no layer": lambda: parallelize_module(torch.nn.Linear(2, 2), mesh, ContextParallel()),
        "twice": lambda: parallelize_module(split, mesh, ContextParallel()),
        "bounds of a shard": lambda: split(ids, cu_seqlens=short),
        "documents in a batch": lambda: split(ids.expand(2, -1), cu_seqlens=whole),
        "bounds in int64": lambda: split(ids, cu_seqlens=whole.long()),
        "odd shard": lambda: split(odd),
    }
    return said_by(trials)


def said_by(trials: dict[str, Any]) -> dict[str, str]:
    """What each trial says when it refuses; one that does not is left out."""
    said = {}
    for name, trial in trials.items():
        try:
            trial()
        except ValueError as error:
            said[name] = str(error)
    return said


def meet(folder: Path) -> tuple[int, int]:
    """Open the group of all ranks; this one, and how many there are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
    return rank, size


def main(folder: Path) -> None:
    rank, size = meet(folder)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    ContextDense.mask_rows = 5  # several masks for a part
    found: dict[str, Any] = {"graphs": {}}
    for name in names_of(size):
        if CASES[name].compiled:
            found[name], found["graphs"][name] = compare_compiled(CASES[name], mesh)
        else:
            found[name] = compare(CASES[name], mesh)
    found["bytes"] = {name: count(CASES[name], mesh) for name in (*COUNTED, *FEW)}
    found["gathered"] = gather_rows(mesh)
    found["fsdp"] = share_weights(size)
    found["statistics"] = count_statistics(mesh)
    found["order"] = {name: order(CASES[name], mesh) for name in (COUNTED[0], FEW[0])}
    # Last: after a refusal all ranks must still be in step.
    found["refused"] = refuse(mesh)
    found["after"] = compare(CASES["nsa"], mesh)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
