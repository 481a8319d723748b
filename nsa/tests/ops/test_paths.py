"""One function, many paths: forward, prefill, chunked prefill and decode agree with the oracle."""

import pytest
import torch
import torch.nn.functional as F

from nsa.model.rope import RopeScaling, apply_rope
from nsa.tests.support.explicit import explicit_attention
from nsa.tests.support.helpers import PATHS, assert_near, make_module, torch_path

VARIANTS = {
    "avg-softmax": {},
    "mlp-sigmoid": dict(phi="mlp", gate="sigmoid"),
    "one-group": dict(n_heads=4, n_kv_groups=1),
    "no-groups": dict(n_heads=3, n_kv_groups=3),
    "wide-window": dict(w=500),
    "few-strides": dict(l=4, d=4, l_sel=12, n_sel=3, w=1),
    "long-blocks": dict(l=16, d=4, l_sel=4, n_sel=9, w=7),
    "rope-scaled": dict(rope_scale=4.0, rope_base=500.0),
    "biases-and-norms": dict(qkv_bias=True, qk_norm=True, norm_eps=1e-2),
    "mlp-norms-llama3": dict(
        phi="mlp", qk_norm=True, rope_scale=8.0, rope_scaling=RopeScaling("llama3", 40, 0.5, 6.0)
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_path_computes_the_oracle(path, variant):
    """Projections, rotation of every head, phi and gates are written out beside the oracle."""
    module = make_module(**VARIANTS[variant])
    x = torch.randn(2, 61, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = explicit_attention(module, x)
    assert_near(PATHS[path](module, x), expected, 1e-10)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_handles_the_shortest_sequences(path, length):
    module = make_module()
    x = torch.randn(1, length, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = explicit_attention(module, x)
    assert_near(PATHS[path](module, x), expected, 1e-10)


@pytest.mark.parametrize("path", ["forward", "prefill", "chunked"])
@pytest.mark.parametrize("order", ["prefix", "gather"])
def test_both_orders_and_small_chunks_compute_the_oracle(path, order, monkeypatch):
    x = torch.randn(1, 90, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = make_module(backend="reference")(x)
    with torch_path(monkeypatch, order=order, chunk=10):
        assert_near(PATHS[path](make_module(), x), expected, 1e-10)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("branch", ["sel", "win"])
def test_every_path_reproduces_dense_attention_when_all_is_selected(path, branch, monkeypatch):
    monkeypatch.setenv("NSA_FORCE_BRANCH", branch)
    module = make_module(n_sel=8, w=64)
    x = torch.randn(2, 60, 24, dtype=torch.float64)
    index = {"sel": 1, "win": 2}[branch]
    with torch.no_grad():
        q, k, v, _ = module._project(x, module.rope(torch.arange(60), x.dtype))
        heads = (y.transpose(1, 2) for y in (q, k[index], v[index]))
        dense = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        expected = module.out(dense.transpose(1, 2).flatten(2))
    assert_near(PATHS[path](module, x), expected, 1e-10)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_shift_of_all_positions_changes_nothing(backend):
    module = make_module(backend=backend)
    x = torch.randn(1, 70, 24, dtype=torch.float64)
    with torch.no_grad():
        here = module(x, rope=module.rope(torch.arange(70), x.dtype))
        there = module(x, rope=module.rope(torch.arange(1000, 1070), x.dtype))
    assert_near(there, here, 1e-9)


@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_packed_documents_equal_separate_ones(phi, backend):
    module = make_module(phi=phi, backend=backend)
    lengths = [5, 8, 30, 1, 19]
    x = torch.randn(1, sum(lengths), 24, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with torch.no_grad():
        packed = module(x, cu_seqlens=cu_seqlens)
        separate = torch.cat([module(document) for document in x.split(lengths, dim=1)], dim=1)
    assert_near(packed, separate, 1e-12)


def test_token_by_token_switch_gives_the_same_output_and_refuses_training(monkeypatch):
    module = make_module()
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 13, 40], dtype=torch.int32)
    with torch.no_grad():
        expected = module(x, cu_seqlens=cu_seqlens)
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "0")
    module = make_module()
    with torch.no_grad():
        assert_near(module(x, cu_seqlens=cu_seqlens), expected, 1e-10)
    cache = module.new_cache(1, 40)
    module.prefill(x, cache)
    assert cache.reads.sum() > 0  # it really went through decode steps
    with pytest.raises(ValueError, match="NSA_PREFILL_BATCHED=0 .* no gradient; unset it to train"):
        module(x)


def test_prefill_tile_splits_the_prompt_and_keeps_the_output(monkeypatch):
    x = torch.randn(1, 45, 24, dtype=torch.float64)
    expected = PATHS["prefill"](make_module(), x)
    monkeypatch.setenv("NSA_PREFILL_TILE", "10")
    module = make_module()
    tiles = []
    original = module._prefill_tile
    monkeypatch.setattr(
        module,
        "_prefill_tile",
        lambda part, cache: (tiles.append(part.shape[1]), original(part, cache))[1],
    )
    assert_near(PATHS["prefill"](module, x), expected, 1e-10)
    assert tiles == [10, 10, 10, 10, 5]


def test_reference_selection_switch_changes_the_plan_and_not_the_output(monkeypatch):
    from nsa.ops import plan_attention, reference

    module = make_module()
    x = torch.randn(1, 60, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = module(x)
        assert "selection: fast" in str(plan_attention())
        monkeypatch.setenv("NSA_SEL_RANGES_V2", "0")
        assert "selection: reference" in str(plan_attention())
        calls = []
        original = reference.select_blocks
        monkeypatch.setattr(
            reference, "select_blocks", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
        )
        assert_near(module(x), expected, 1e-10)
    assert calls == [1]


def test_rotation_turns_each_pair_by_its_own_angle():
    module = make_module(rope_base=100.0, rope_scale=2.0)
    x = torch.randn(1, 5, 3, 8, dtype=torch.float64)
    rotated = apply_rope(x, module.rope(torch.arange(5), x.dtype))
    as_complex = torch.complex(x[..., :4], x[..., 4:])
    angle = torch.tensor(
        [[(t / 2.0) * 100.0 ** (-2 * i / 8) for i in range(4)] for t in range(5)]
    ).double()[:, None]
    expected = as_complex * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(
        torch.complex(rotated[..., :4], rotated[..., 4:]), expected, rtol=1e-6, atol=1e-6
    )
