"""Tiny models of every kind of layer, as models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = dict(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=16,
    n_sel=3, w=16, num_local=1,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "nsa": {},
    "tied": {"tie_embeddings": True},
    "dense": {"attention": "dense"},
    "pooled": {"rule": "pooled"},
    "msa": {"rule": "msa", "d_index": 8},
    "reuse": {"rule": "msa,reuse", "d_index": 8},
}


def new_model(kind: str, **settings: Any) -> Any:
    """A model with random weights, in evaluation mode; large ones, so that choices are clear."""
    hf = pytest.importorskip("nsa.hf", reason="the extra hf installs transformers")
    torch.manual_seed(0)
    sizes = SIZES | {"embed_std": 1.0} | KINDS[kind] | settings
    return hf.NSAForCausalLM(hf.NSAConfig(**sizes)).eval()


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    """One model of each kind; nobody changes them."""
    return {kind: new_model(kind) for kind in KINDS}
