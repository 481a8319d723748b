"""MiniMax-M3 of transformers, with its own indexer and our operator, is itself.

transformers reads the chosen blocks through a dense mask. `nsa.sparse_attention` takes the same
block ids and reads only those blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nsa

transformers = pytest.importorskip("transformers", reason="the extra hf installs it")

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (  # noqa: E402
    MiniMaxM3VLTextConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (  # noqa: E402
    MiniMaxM3VLForCausalLM,
)

NAME = "nsa-blocks"
BLOCK = 16


def read_blocks(
    module: Any,
    query: Tensor,  # [B, Hq, Sq, D]
    key: Tensor,  # [B, Hkv, Sk, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    block_indices: Tensor | None = None,  # [B, Hkv, Sq, n]
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers; a layer without an indexer reads every block."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if block_indices is None:
        every = torch.arange(-(-k.shape[1] // BLOCK), dtype=torch.int32)
        index = every.expand(*q.shape[:2], 1, -1)
    else:
        index = block_indices.transpose(1, 2).int()
    first = k.shape[1] - q.shape[1]
    out = nsa.sparse_attention(q, k, v, index, block=BLOCK, q_offset=first, scale=scaling)
    return out, None


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The model as it is, and the same weights with our operator."""
    AttentionInterface.register(NAME, read_blocks)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
        "dense_intermediate_size": 48, "shared_intermediate_size": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": BLOCK, "index_topk_blocks": 3, "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    own, ours = (
        MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**sizes | {"attn_implementation": name}))
        for name in ("eager", NAME)
    )
    ours.load_state_dict(own.state_dict())
    return own, ours


def test_logits_and_gradients_are_those_of_the_dense_mask(models: tuple[Any, Any]) -> None:
    ids = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(1))
    found = []
    for model in models:
        model.train().zero_grad()
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((logits.detach(), grads))
    (own, own_grads), (ours, our_grads) = found
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
    assert own_grads.keys() == our_grads.keys() and len(own_grads) > 20
    for name, grad in own_grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=0, atol=1e-6, msg=name)


def test_cached_generation_continues_alike(models: tuple[Any, Any]) -> None:
    """Prefill and single tokens: the operator's q_offset."""
    prompt = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(2))
    texts = [
        model.eval().generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
        for model in models
    ]
    assert texts[0].shape[1] > 72
    assert torch.equal(texts[0], texts[1])
