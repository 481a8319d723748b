"""A needle in a long text: found through the selected branch, and by no other way.

The weights are written, not trained. Every token of the haystack carries a value; one token, the
needle, also carries a mark. The last token asks for the mark: its query meets the needle's key in
the compressed scores (a 1/l share of it) and in the selected branch, and the value it reads there
is the model's answer. The compressed branch has no values at all, the window does not reach back to
the needle, and no other token carries the needle's value: without the selected branch there is no
answer to be had.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa import TinyLM
from nsa.model.block import Block
from nsa.tests.support.gpu import needs_gpu

NUM_VALUES = 60
DIM, D_HEAD, HEADS, GROUPS = 64, 64, 4, 2
MARK, QUESTION, FIRST_VALUE = 0, 1, 2
"""Places in the embedding: the mark, the question, then one for each value."""
ASK = 2 * NUM_VALUES
"""Tokens: plain values, marked values, and the question."""
GAIN = 6.0
"""Of the query and of the key: a logit of hundreds for the needle itself, of ten for its block."""
PLACES = {
    "cpu": pytest.param("cpu", 4096, torch.float32, id="cpu-4096"),
    "cuda": pytest.param("cuda", 65536, torch.bfloat16, id="cuda-65536", marks=needs_gpu),
}
DEPTHS = (0.1, 0.5, 0.85)


@torch.no_grad()
def retrieval_model(device: str, dtype: torch.dtype) -> TinyLM:
    """One layer of the paper's block sizes that answers with the value beside the mark."""
    model = TinyLM(
        *(2 * NUM_VALUES + 1, DIM, 1, HEADS, GROUPS, D_HEAD, D_HEAD), rope_base=1e6, rope_scale=8.0
    )
    for weight in model.parameters():
        weight.zero_()
    block = model.layers[0]
    for norm in (block.norm1, block.norm2, model.norm):
        norm.weight.fill_(1.0)
    values = torch.arange(NUM_VALUES)
    model.embed.weight[values, FIRST_VALUE + values] = 1.0
    model.embed.weight[NUM_VALUES + values, FIRST_VALUE + values] = 1.0
    model.embed.weight[NUM_VALUES + values, MARK] = 1.0
    model.embed.weight[ASK, QUESTION] = 1.0
    _write_attention(block)
    assert model.lm_head is not None
    model.lm_head.weight[values, FIRST_VALUE + values] = 1.0
    return model.to(device=device, dtype=dtype).eval()


def _write_attention(block: Block) -> None:
    # Half-split rotary pairs: the last of the first half turns slowest, so that it can compare
    # tokens at any distance.
    slowest = D_HEAD // 2 - 1
    values = torch.arange(NUM_VALUES)
    keys, vals = block.attn.qkv.weight.split(
        [(HEADS + 3 * GROUPS) * D_HEAD, 3 * GROUPS * D_HEAD], dim=0
    )
    q, k_sel, _k_win, k_cmp = keys.unflatten(0, (-1, D_HEAD)).split(
        [HEADS, GROUPS, GROUPS, GROUPS], dim=0
    )
    q[:, slowest, QUESTION] = GAIN
    k_sel[:, slowest, MARK] = GAIN
    k_cmp[:, slowest, MARK] = GAIN
    _v_cmp, v_sel, v_win = vals.unflatten(0, (3, GROUPS, D_HEAD))
    v_sel[:, values, FIRST_VALUE + values] = 1.0
    v_win[:, values, FIRST_VALUE + values] = 1.0
    out = block.attn.out.weight.unflatten(1, (HEADS, D_HEAD))
    out[FIRST_VALUE + values, :, values] = 1.0 / HEADS


def haystack(length: int, depth: float) -> tuple[Tensor, int]:
    """Tokens [1, length] that end with the question, and the value that is the answer."""
    generator = torch.Generator().manual_seed(int(100 * depth))
    answer = int(torch.randint(NUM_VALUES, (), generator=generator))
    others = torch.randint(NUM_VALUES - 1, (length,), generator=generator)
    ids = others + (others >= answer)  # every value but the answer
    ids[int(depth * length)] = NUM_VALUES + answer
    ids[-1] = ASK
    return ids[None], answer


def through_forward(model: TinyLM, ids: Tensor) -> Tensor:  # [1, V]
    with torch.no_grad():
        return model.head(model.hidden(ids)[:, -1])


def through_decode(model: TinyLM, ids: Tensor) -> Tensor:  # [1, V]
    """Everything but the question by prefill in tiles, the question by a decode step."""
    cache = model.new_cache(batch=1, max_len=ids.shape[1])
    model.prefill_last(ids[:, :-1], cache)
    logits = model.step(ids[:, -1], cache)
    (layer,) = cache.layers
    assert layer.last_reads.sum(-1).unique().tolist() == [layer.spec.num_reads(ids.shape[1])]
    return logits


PATHS: dict[str, Callable[[TinyLM, Tensor], Tensor]] = {
    "forward": through_forward,
    "prefill+decode": through_decode,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("device", "length", "dtype"), PLACES.values())
def test_long_context_needle(device: str, length: int, dtype: torch.dtype, path: str) -> None:
    model = retrieval_model(device, dtype)
    for depth in DEPTHS:
        ids, answer = haystack(length, depth)
        logits = PATHS[path](model, ids.to(device)).float()[0]
        assert int(logits.argmax()) == answer, f"needle at {depth:.0%}"
        others = torch.cat([logits[:answer], logits[answer + 1 :]])
        assert logits[answer] > 5 * others.max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("device", "length", "dtype"), PLACES.values())
def test_long_context_needle_is_lost_without_the_selected_branch(
    device: str, length: int, dtype: torch.dtype, path: str
) -> None:
    model = retrieval_model(device, dtype)
    with torch.no_grad():
        gates = model.layers[0].attn.gate.bias.view(HEADS, 3)  # logits of cmp, sel, win
        gates[:, 1] = -1e4
    for depth in DEPTHS:
        ids, answer = haystack(length, depth)
        logits = PATHS[path](model, ids.to(device)).float()[0]
        assert int(logits.argmax()) != answer
        assert logits[answer].abs() < 1e-6
