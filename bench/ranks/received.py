"""Bytes that ranks send each other for one attention layer: counted in real collectives on CPUs.

`count_bytes(4)` starts four gloo ranks, runs every rule forward and backward on a small row, counts
what the functional collectives move, and compares it with `nsa.parallel.received_bytes`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import nsa
from nsa.config.env import changed
from nsa.model import NSAAttention, TinyLM
from nsa.model.sparse import SparseAttention
from nsa.parallel import PARTS, ContextParallel, Split, received_bytes, shard_sequence

TIMEOUT_S = 120
LENGTH, DIM = 256, 32
SIZES: dict[str, Any] = dict(
    vocab=16, dim=DIM, n_layers=1, n_heads=4, n_kv_groups=2, d_k=16, d_v=8,
    l=8, d=4, l_sel=16, n_sel=4, w=24, num_local=2,
)  # fmt: skip


class Case(NamedTuple):
    """A layer, and how its selected keys travel."""

    name: str
    model: dict[str, Any]
    selected: str = "gather"


CASES = (
    Case("nsa", {}),
    Case("nsa", dict(n_sel=3), "chosen"),  # forced blocks alone: few are asked for
    Case("nsa, many blocks", dict(n_sel=16), "chosen"),  # all of them: the rule gathers
    Case("nsa, phi mlp", dict(phi="mlp")),
    Case("nsa, shared K and V", dict(kv="shared")),
    Case("pooled, infllm", dict(rule="pooled", d=8)),
    Case("pooled, moba", dict(rule="pooled", pool="moba", pool_block=32)),
    Case("msa", dict(rule="msa", d_index=8)),
    Case("reuse", dict(rule="msa,reuse", n_layers=2, d_index=8)),
    Case("dense", dict(attention="dense")),
)
BYTES = 4
"""Of a number: fp32."""


def count_bytes(num_ranks: int) -> list[dict[str, Any]]:
    """A row for every case and way to split: bytes by rank, and whether they are the formula's."""
    with tempfile.TemporaryDirectory(prefix="bench_parallel") as folder:
        found = _run_ranks(folder, num_ranks)
    rows = []
    for of_ranks in zip(*found, strict=True):
        row = {name: of_ranks[0][name] for name in ("rule", "selected", "parts")}
        for name in ("received", "sent", "formula", "backward"):
            row[name] = [rank[name] for rank in of_ranks]
        row["equal"] = row["received"] == row["formula"] and sum(row["sent"]) == sum(row["formula"])
        rows.append(row)
    return rows


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives from others in functional collectives, and sends."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.num_bytes = self.num_sent = 0
        self.names: set[str] = set()
        """Of the functional collectives that have run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional":
            self.names.add(name)
        if name == "all_gather_into_tensor":
            self._count(args[0].nbytes * (self.size - 1))
        elif name == "reduce_scatter_tensor":
            self._count(args[0].nbytes * (self.size - 1) // self.size)
        elif name == "all_to_all_single":
            row = math.prod(args[0].shape[1:]) * args[0].element_size()
            received, sent = (sum(rows) - rows[self.rank] for rows in args[1:3])
            self._count(received * row, sent * row)
            assert args[0].shape[0] == sum(args[2])
        return func(*args, **(kwargs or {}))

    def _count(self, received: int, sent: int | None = None) -> None:
        self.num_bytes += received
        self.num_sent += received if sent is None else sent


def _run_ranks(folder: str, num_ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank has counted."""
    environ = changed({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, folder, str(rank), str(num_ranks)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        printed = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [i for i, rank in enumerate(ranks) if rank.returncode]
    if failed:
        raise RuntimeError(f"ranks {failed} of {num_ranks} failed:\n{printed[failed[0]]}")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


# --- On a rank ---


def main(folder: Path, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))["cp"]
    found = [count(case, parts, mesh) for case in CASES for parts in PARTS]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def count(case: Case, parts: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Bytes of one layer on this rank: by the formula, forward, and backward."""
    layer, rank = _new_layer(case), mesh.get_local_rank()
    split = Split(LENGTH, mesh.size(), parts)
    torch.manual_seed(2)
    whole = torch.randn(1, LENGTH, DIM)
    wanted = None
    if case.selected == "chosen":
        wanted = _wanted(layer, whole, split)[rank]
    formula = received_bytes(layer, split, rank, number_bytes=BYTES, wanted=wanted)
    parallelize_module(layer, mesh, ContextParallel(parts=parts, selected=case.selected))
    x = shard_sequence(whole, mesh, parts=parts)
    given: dict[str, Any] = {}
    if isinstance(layer, SparseAttention) and layer.rule is None:
        given["index"] = torch.zeros(1, x.shape[1], 1, 1, dtype=torch.int32)
    with Received(mesh) as received:
        out = layer(x, **given)
        forward, sent = received.num_bytes, received.num_sent
        sum(_losses(out), torch.zeros(())).backward()
    return {
        "rule": case.name, "selected": case.selected, "parts": parts,
        "formula": formula, "received": forward, "sent": sent,
        "backward": received.num_bytes - forward,
    }  # fmt: skip


def _new_layer(case: Case) -> Any:
    """The last attention layer of a model; the same weights on every rank."""
    torch.manual_seed(1)
    return TinyLM(**SIZES | case.model).layers[-1].attn


def _losses(out: Tensor | tuple[Tensor | None, ...]) -> Iterator[Tensor]:
    """What has a gradient: the output, and the loss of an indexer."""
    for x in (out,) if isinstance(out, Tensor) else out:
        if x is not None and x.is_floating_point():
            yield x.sum()


@torch.no_grad()
def _wanted(layer: NSAAttention, x: Tensor, split: Split) -> list[int]:
    """By rank: tokens that it gets of the selected branch, from the selection of the whole row."""
    spec, tokens = layer.spec, torch.arange(LENGTH)
    q, k, v, _ = layer._project(x, layer.rope(tokens, x.dtype))
    k_cmp, _ = layer._compress(k[0], v[0], 0)
    selection = nsa.select_blocks(q, k_cmp, spec)[0]  # [S, Hkv, n_sel]
    found = []
    for rank in range(split.num_ranks):
        own = torch.cat([tokens[split.tokens(part)] for part in split.parts_of(rank)])
        read = torch.isin(tokens // spec.l_sel, selection[own])
        found.append(int(read.sum() - read[own].sum()))
    # The rule of nsa/parallel/chosen.py: chosen blocks only where nobody gets as much as by a
    # gather.
    gathered = LENGTH - LENGTH // split.num_ranks
    return found if max(found) < gathered else [gathered] * split.num_ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
