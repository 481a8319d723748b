"""One rank of several that read prompts together; test_prefill_ranks.py starts it.

Each case is a model that reads prompts in this process alone, and over all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nsa.generate import Sampling, next_tokens
from nsa.generate.ranks import RankPrefill
from nsa.model import ModelCache, NSACache, TinyLM
from nsa.model.sparse import SparseCache
from nsa.tests.support.helpers import relative_error

SIZES: dict[str, Any] = dict(
    vocab=40, dim=16, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=4,
    l=8, d=4, l_sel=16, n_sel=3, w=20, num_local=1, d_index=6,
)  # fmt: skip
NUM_NEW, BATCH = 6, 2
CASES: dict[str, tuple[dict[str, Any], int]] = {  # settings, tokens of a prompt
    "nsa": ({}, 150),
    "nsa, equal parts": ({}, 128),
    "nsa, a part shorter than the window": (dict(w=40), 67),
    "nsa, too short to share": ({}, 60),
    "mlp": (dict(phi="mlp", gate="sigmoid"), 131),
    "infllm": (dict(rule="pooled", d=4), 150),
    "moba": (dict(rule="pooled", pool="moba", pool_block=32, n_sel=4), 150),
    "msa, reuse": (dict(rule="msa,reuse"), 150),
    "dense, nsa": (dict(rule="dense,nsa"), 130),
}


def new_model(settings: dict[str, Any]) -> TinyLM:
    """In float64, with weights of ordinary size: gates and scores differ from 0."""
    torch.manual_seed(1)
    model = TinyLM(**SIZES | settings).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def buffers(cache: ModelCache, length: int) -> dict[str, Tensor]:
    """What the decode steps after a prefill read."""
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, NSACache):
            num_cmp, kinds = layer.spec.num_cmp(length), ("sel", "cmp", "win", "raw")
            for kind, stop in zip(kinds, (length, num_cmp, None, None), strict=True):
                kv = getattr(layer, kind)
                found |= {f"{i} {kind} {n}": x[:, :, :stop] for n, x in (("k", kv.k), ("v", kv.v))}
            continue
        found |= {f"{i} k": layer.k[:, :, :length], f"{i} v": layer.v[:, :, :length]}
        if isinstance(layer, SparseCache) and layer.rule is not None:
            found[f"{i} summary"] = layer.summary[:, : layer.rule.num_summaries(length)]
    return found


def compare(settings: dict[str, Any], num_tokens: int, mesh: DeviceMesh) -> dict[str, Any]:
    """On rank 0: errors of logits and caches against one process, and the tokens of both."""
    model = new_model(settings)
    prefill = RankPrefill(model, mesh)
    if mesh.get_local_rank():
        return {"prompts": prefill.follow()}
    ids = torch.randint(0, 40, (BATCH, num_tokens), generator=torch.Generator().manual_seed(2))
    alone, shared = (model.new_cache(BATCH, num_tokens + NUM_NEW) for _ in range(2))
    wanted, logits = model.prefill_last(ids, alone), prefill(ids, shared)
    errors = {"logits": relative_error(logits, wanted)}
    found = buffers(shared, num_tokens)
    for name, buffer in buffers(alone, num_tokens).items():
        errors[name] = relative_error(found[name], buffer)
    greedy = Sampling(temperature=0)
    texts = [
        torch.stack(list(next_tokens(model, ids, NUM_NEW, greedy, way))).tolist()
        for way in (None, prefill)
    ]
    prefill.dismiss()
    return {"errors": errors, "texts": texts, "lengths": [alone.length, shared.length]}


def refuse(mesh: DeviceMesh) -> str:
    """What every rank says before any prompt."""
    os.environ["NSA_PREFILL_BATCHED"] = "0"
    try:
        RankPrefill(new_model({}), mesh)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["NSA_PREFILL_BATCHED"]
    return "nothing"


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    found: dict[str, Any] = {name: compare(*case, mesh) for name, case in CASES.items()}
    found["refused"] = refuse(mesh)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
