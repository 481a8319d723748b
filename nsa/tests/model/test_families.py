"""What pretrained families have (gated MLP, biases, QK-norm, scaled positions), with all attention.

nsa/tests/hf compares with transformers; here all paths of a model agree with its own forward pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import TinyLM
from nsa.model.rope import RopeScaling, rope_tables
from nsa.train import build

LENGTH = 90
SIZES: dict[str, Any] = {
    **{"vocab": 31, "dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 6},
    **{"l": 8, "d": 4, "l_sel": 16, "n_sel": 3, "w": 16, "d_index": 4, "pool_block": 16},
}
FAMILY: dict[str, Any] = {
    **{"mlp": "gated", "mlp_dim": 40, "norm_eps": 1e-4, "qkv_bias": True, "qk_norm": True},
    **{"rope_scaling": "llama3", "rope_scale": 8.0, "rope_original_len": 64, "rope_high_freq": 5.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "nsa": {"num_local": 1},
    "nsa, learned phi": {"phi": "mlp", "rope_scaling": "yarn", "rope_high_freq": 32.0},
    "one K and V": {"kv": "shared"},
    "infllm": {"rule": "pooled,reuse"},
    "moba": {"rule": "pooled", "pool": "moba"},
    "msa": {"rule": "msa"},
    "dense before msa": {"rule": "dense,msa"},
    "nsa before dense": {"rule": "nsa,dense"},
}


def new_model(kind: str) -> TinyLM:
    """Biases and norms too are random: their defaults would hide a missing one."""
    torch.manual_seed(2)
    model = TinyLM(**SIZES, **{**FAMILY, **KINDS[kind]}).double()
    for name, weight in model.named_parameters():
        if name.endswith(("qkv.bias", "_norm.weight")):
            torch.nn.init.normal_(weight, mean=0.7, std=0.3)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_equal_the_forward_pass(kind: str) -> None:
    model = new_model(kind).eval()
    ids = torch.randint(31, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = model(ids)
    cache = model.new_cache(2, LENGTH)
    parts = [model.prefill(ids[:, :40], cache), model.prefill(ids[:, 40:75], cache)]
    parts += [model.step(ids[:, t], cache)[:, None] for t in range(75, LENGTH)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["nsa", "dense before msa"])
def test_packed_documents_equal_separate_ones(kind: str) -> None:
    model = new_model(kind).eval()
    ids = torch.randint(31, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 13, 60, LENGTH], dtype=torch.int32)
    apart = torch.cat([model(part) for part in ids.split([13, 47, 30], dim=1)], dim=1)
    torch.testing.assert_close(model(ids, cu_seqlens=bounds), apart, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's tracer ...
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # ... warns about itself
@pytest.mark.parametrize("kind", ["nsa", "dense before msa"])
def test_every_weight_learns_and_compiled_blocks_agree(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BACKEND", "eager")  # test_compile.py has the compiler
    ids = torch.randint(31, (1, 64), generator=torch.Generator().manual_seed(1))
    grads = []
    for compiled in (False, True):
        model = new_model(kind).float().train()
        if compiled:
            build.compile_blocks(model, torch.device("cpu"))
        losses: list[torch.Tensor] = []
        hidden = model.hidden(ids, index_losses=losses)
        (model.head(hidden).square().mean() + sum(losses)).backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None and grad.abs().max() > 0, name
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-5)


def test_defaults_are_the_model_of_before() -> None:
    """The same names, the same draws: no new argument changes a model that does not ask for it."""
    torch.manual_seed(0)
    weights = TinyLM(**SIZES).state_dict()
    assert not [name for name in weights if name.endswith(("mlp.gate.weight", "qkv.bias", "_norm"))]
    drawn = sum(weight.double().abs().sum() for weight in weights.values())
    assert drawn.item() == pytest.approx(DRAWN, rel=1e-6)


DRAWN = 1114.258026827823
"""Sum of the absolute values of all weights, before these arguments existed."""


def test_llama3_keeps_fast_pairs_and_slows_others() -> None:
    """At a position of one original context, by the number of turns of a pair."""
    scaling = RopeScaling("llama3", original_len=8192, low_freq=1.0, high_freq=4.0)
    places = torch.tensor([1])
    tables = (
        rope_tables(places, 64, base=5e5, scale=8.0, scaling=scaling, dtype=torch.float64),
        rope_tables(places, 64, base=5e5, scale=1.0, dtype=torch.float64),
    )
    made, plain = (torch.atan2(rope.sin, rope.cos)[0] for rope in tables)
    turns = 8192 * plain / (2 * torch.pi)
    torch.testing.assert_close(made[turns > 4], plain[turns > 4])
    torch.testing.assert_close(made[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (made < plain)[between].all() and (made > plain / 8)[between].all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mlp": "swiglu"}, "mlp='swiglu' is not known; use one of plain, gated"),
        ({"rope_scaling": "dynamic"}, "rope_scaling='dynamic'.*linear, llama3, yarn"),
        ({"rope_low_freq": 4.0}, "rope_high_freq=4.0.*more than model.rope_low_freq=4"),
        ({"norm_eps": 0.0}, "norm_eps=0.0.*> 0"),
        ({"rope_original_len": 0}, "rope_original_len=0.*>= 1"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyLM(**SIZES, **given)
