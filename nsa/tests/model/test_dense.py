"""The dense twin: its mathematics, its cache, and a whole run with it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.config import Config
from nsa.generate import generate
from nsa.model import DenseAttention, TinyLM
from nsa.model.cost import cache_bytes, decode_reads, forward_flops
from nsa.model.rope import apply_rope
from nsa.records import read_metrics
from nsa.records.numbers import ATTENTION
from nsa.tests.support.helpers import assert_near
from nsa.train import TrainResult, load_model, run

SIZES = dict(vocab=64, dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)


def make_attention(**options: Any) -> DenseAttention:
    torch.manual_seed(0)
    sizes = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=4)
    return DenseAttention(**{**sizes, **options}).double()


def make_model(**options: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**{**SIZES, "attention": "dense", **options})


def explicit(module: DenseAttention, x: Tensor) -> Tensor:
    """The same attention head by head, with a mask and a softmax written out."""
    heads, groups, seq_len = module.num_heads, module.num_groups, x.shape[1]
    rope = module.rope(torch.arange(seq_len), x.dtype)
    sizes = [heads * module.d_k, groups * module.d_k, groups * module.d_v]
    q, k, v = (x @ module.qkv.weight.T).split(sizes, dim=-1)
    q = apply_rope(q.unflatten(-1, (heads, -1)), rope)
    k = apply_rope(k.unflatten(-1, (groups, -1)), rope)
    v = v.unflatten(-1, (groups, -1))
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    outs = []
    for h in range(heads):
        g = h // (heads // groups)
        scores = q[:, :, h] @ k[:, :, g].mT / math.sqrt(module.d_k)
        outs.append(scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v[:, :, g])
    return torch.cat(outs, dim=-1) @ module.out.weight.T


@pytest.mark.parametrize("options", [{}, dict(n_kv_groups=6), dict(n_kv_groups=1, d_v=8)], ids=str)
def test_forward_and_gradients_equal_an_explicit_softmax(options: dict[str, int]) -> None:
    module = make_attention(**options)
    x = torch.randn(2, 33, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 33, 24, dtype=torch.float64)
    leaves = (x, *module.parameters())
    found, wanted = module(x), explicit(module, x)
    assert_near(found, wanted, 1e-12)
    grads = (torch.autograd.grad(out, leaves, weight) for out in (found, wanted))
    for grad, expected in zip(*grads, strict=True):
        assert_near(grad, expected, 1e-10, "gradient")


def test_later_tokens_change_nothing_before_them() -> None:
    module = make_attention()
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    changed = torch.cat([x[:, :25], torch.randn(1, 15, 24, dtype=torch.float64)], dim=1)
    before, after = module(x), module(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


@pytest.mark.parametrize("prefilled", [0, 1, 13, 30])
@pytest.mark.parametrize("tile", [0, 4])
def test_decode_equals_forward(prefilled: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_PREFILL_TILE", str(tile))
    model = make_model().double().eval()
    ids = torch.randint(64, (2, 30))
    cache = model.new_cache(batch=2, max_len=30)
    parts = [model.prefill(ids[:, :prefilled], cache)] if prefilled else []
    parts += [model.step(token, cache)[:, None] for token in ids[:, prefilled:].unbind(dim=1)]
    with torch.no_grad():
        assert_near(torch.cat(parts, dim=1), model(ids), 1e-12)
    assert cache.length == cache.max_len == 30


def test_packed_documents_equal_separate_ones() -> None:
    model = make_model().double().eval()
    ids = torch.randint(64, (1, 60))
    cu_seqlens = torch.tensor([0, 9, 40, 60], dtype=torch.int32)
    with torch.no_grad():
        packed = model(ids, cu_seqlens=cu_seqlens)
        separate = torch.cat([model(part) for part in ids.split([9, 31, 20], dim=1)], dim=1)
    assert_near(packed, separate, 1e-12)


def test_the_twin_starts_as_wide_blocks_do() -> None:
    """NSA whose window sees all, with the twin's weights, is the twin."""
    dense = make_model().double()
    sparse = make_model(attention="nsa", l=8, d=4, l_sel=8, n_sel=4, w=64).double()
    width = 4 * 8 + 2 * 8
    with torch.no_grad():
        sparse.embed.load_state_dict(dense.embed.state_dict())
        sparse.norm.load_state_dict(dense.norm.state_dict())
        sparse.head_weight.copy_(dense.head_weight)
        for wide, narrow in zip(sparse.layers, dense.layers, strict=True):
            wide.mlp.load_state_dict(narrow.mlp.state_dict())
            wide.attn.out.load_state_dict(narrow.attn.out.state_dict())
            wide.attn.gate.bias.view(4, 3)[:, 2] = 1000.0  # the window has all the weight
            weight = wide.attn.qkv.weight  # columns: q, k_sel, k_win, k_cmp, v_cmp, v_sel, v_win
            weight[: 4 * 8] = narrow.attn.qkv.weight[: 4 * 8]
            weight[6 * 8 : 8 * 8] = narrow.attn.qkv.weight[4 * 8 : width]
            weight[14 * 8 : 16 * 8] = narrow.attn.qkv.weight[width:]
        ids = torch.randint(64, (2, 50))
        assert_near(sparse(ids), dense(ids), 1e-10)


def test_a_model_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    model = make_model()
    ids = torch.randint(64, (1, 20))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_near(compiled(ids), model(ids), 1e-6)


@pytest.mark.parametrize(
    ("variable", "flash"), [("NSA_SDPA_NO_FLASH", False), ("NSA_SDPA_FLASH_ONLY", True)]
)
def test_the_switches_choose_the_backends_of_sdpa(
    variable: str, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    seen = []
    real = F.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> Tensor:
        cuda = torch.backends.cuda
        seen.append((cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    make_model()(torch.randint(64, (1, 16)))
    assert seen == [(flash, not flash)] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(batch=2, tokens=3), "2 sequences given to a cache for 1"),
        (dict(batch=1, tokens=9), r"0 \+ 9 tokens do not fit a cache for 8"),
    ],
    ids=["batch", "length"],
)
def test_tokens_that_do_not_fit_the_cache_are_refused(given: dict[str, int], said: str) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=said):
        ids = torch.zeros(given["batch"], given["tokens"], dtype=torch.long)
        model.prefill(ids, model.new_cache(batch=1, max_len=8))


def test_an_unknown_kind_of_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attention='sparse' is not known; use one of nsa, dense"):
        make_model(attention="sparse")


def train(cfg: Config, **options: Any) -> tuple[TrainResult, str]:
    out = io.StringIO()
    return run(cfg, config_path="configs/tiny.yaml", out=out, **options), out.getvalue()


def test_a_run_trains_saves_resumes_and_generates(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    settings = ("model.attention=dense", "train.steps=4", "train.save_every=2")
    whole, printed = train(tiny_config(*settings, f"train.out_dir={tmp_path / 'whole'}"))
    cfg = tiny_config(*settings, f"train.out_dir={tmp_path / 'parts'}")
    train(cfg, stop_after=2)
    resumed, said = train(cfg)

    assert "attention: dense, scaled_dot_product_attention" in printed
    assert "[resume] from" in said
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    model, _ = load_model(whole.folder / "model.pt")
    assert isinstance(model.layers[0].attn, DenseAttention)
    assert generate(model, torch.tensor([[1, 2, 3]]), 5).shape == (1, 8)


def test_gate_and_selection_fields_of_a_run_are_null_not_wrong(
    tiny_config: Callable[..., Config],
) -> None:
    result, _ = train(tiny_config("model.attention=dense"))
    lines = (result.folder / "heartbeat_rank0.jsonl").read_text().splitlines()
    progress = [line for line in map(json.loads, lines) if line["msg"] == "progress"]
    assert len(progress) == 3
    for line in progress:
        assert line["loss"] > 0
        assert {line[number.name] for number in ATTENTION} == {None}
    assert read_metrics(result.folder).attention_stats == {}
    assert len((result.folder / "k_stats.csv").read_text().splitlines()) == 1  # the header
    assert "gate" not in "".join(result.model.state_dict())


def test_counts_are_those_of_dense_attention(tiny_config: Callable[..., Config]) -> None:
    cfg = tiny_config("model.attention=dense", "model.n_heads=4")
    flops, model = forward_flops(cfg), cfg.model
    pairs = sum(range(1, cfg.train.seq_len + 1))
    assert flops["all"] == model.n_layers * pairs * 2 * model.n_heads * (model.d_k + model.d_v)
    assert set(flops) == {"projections", "all", "mlp", "head"}
    real = TinyLM.from_config(cfg, 256).new_cache(batch=3, max_len=20)
    assert cache_bytes(cfg, 20, batch=3) == {"all": real.nbytes()}
    assert decode_reads(cfg, 20) == {"all": 20}
