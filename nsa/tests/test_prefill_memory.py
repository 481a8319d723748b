"""What prefill and the caches hold: tiles bound the one, rings and one stream the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa import NSAAttention, TinyLM
from nsa.config import Config
from nsa.model import DenseAttention, ModelCache
from nsa.model.cost import cache_bytes, dense_cache_bytes
from nsa.tests.helpers import assert_near, torch_path

VOCAB, TILE = 1024, 128


def peak_bytes(function: Callable[[], object]) -> int:
    """Most memory that torch held at once during a call, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def small_model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(VOCAB, 32, 1, 4, 2, 16, 16, l=16, d=16, l_sel=16, n_sel=3, w=32).eval()


def filled(model: TinyLM, ids: Tensor, max_len: int) -> tuple[Tensor, ModelCache]:
    cache = model.new_cache(batch=len(ids), max_len=max_len)
    return model.prefill_last(ids, cache), cache


def test_a_prompt_twice_as_long_takes_no_more_memory_than_its_cache(monkeypatch):
    """bf16, where a copy of the past for the products would be twice the cache."""
    monkeypatch.setenv("NSA_PREFILL_TILE", str(TILE))
    model = small_model().bfloat16()
    peaks = {}
    for length in (1024, 2048):
        ids, cache = torch.randint(0, VOCAB, (1, length)), model.new_cache(1, length)
        with torch_path(monkeypatch, chunk=32):
            peaks[length] = peak_bytes(lambda i=ids, c=cache: model.prefill_last(i, c))
    assert peaks[2048] <= 1.02 * peaks[1024]
    cache, ids = model.new_cache(1, 1024), torch.randint(0, VOCAB, (1, 1024))
    monkeypatch.setenv("NSA_PREFILL_TILE", "0")
    model = small_model().bfloat16()
    with torch_path(monkeypatch, chunk=32):
        whole = peak_bytes(lambda: model.prefill(ids, cache))
    assert peaks[1024] < whole / 2


@pytest.mark.parametrize("tile", [1, 63, 64, 200, 1000])
@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_tiles_fill_the_cache_as_one_piece_does(tile, phi, attention, monkeypatch):
    sizes = dict(vocab=50, dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
    blocks = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)

    def new_model() -> TinyLM:
        torch.manual_seed(0)
        return TinyLM(**sizes, **blocks, phi=phi, attention=attention).double().eval()

    ids, new = torch.randint(0, 50, (2, 200)), torch.randint(0, 50, (2,))
    expected, whole = filled(new_model(), ids, 201)
    monkeypatch.setenv("NSA_PREFILL_TILE", str(tile))
    model = new_model()
    logits, cache = filled(model, ids, 201)
    assert_near(logits, expected, 1e-10)
    with torch.no_grad():
        assert_near(logits, model(ids)[:, -1], 1e-10)
    assert cache.length == 200
    assert_near(model.step(new, cache), model.step(new, whole), 1e-10)


@pytest.mark.parametrize("length", [1, 31, 512, 8192, 65536])
def test_a_cache_holds_the_selected_stream_two_rings_and_a_sixteenth(length):
    sizes = (768, 12, 2, 64, 64)
    with torch.device("meta"):
        ours = NSAAttention(*sizes).bfloat16().new_cache(3, length)
        dense = DenseAttention(*sizes).bfloat16().new_cache(3, length)
    token = 3 * 2 * (64 + 64) * 2  # batch, KV heads, K and V, bytes
    num_cmp = 0 if length < 32 else (length - 32) // 16 + 1
    assert dense.nbytes() == length * token
    assert ours.nbytes() == (length + num_cmp + min(512, length) + 32) * token
    if length == 65536:
        assert ours.nbytes() <= 1.08 * dense.nbytes()
    held = {name for name, x in vars(ours).items() if isinstance(x, Tensor)}
    assert held == {"lengths", "reads", "last_reads"}  # numbers per sequence, not per token


def test_the_formula_of_nsa_info_is_what_a_model_allocates(tiny_config: Callable[..., Config]):
    for attention, formula in (
        ("nsa", lambda cfg: sum(cache_bytes(cfg, 100, batch=2).values())),
        ("dense", lambda cfg: dense_cache_bytes(cfg, 100, batch=2)),
    ):
        cfg = tiny_config(f"model.attention={attention}")
        assert TinyLM.from_config(cfg, 256).new_cache(2, 100).nbytes() == formula(cfg)
