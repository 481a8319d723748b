"""The decode cache: preallocated, incremental, small, and exact after any prefill."""

import pytest
import torch

from nsa import TinyLM, compress
from nsa.tests.support.helpers import assert_near, make_module

MODEL = dict(vocab=50, dim=32, n_layers=3, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)


@pytest.mark.parametrize("prefilled", [1, 3, 7, 8, 30, 59])
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_language_model_decodes_what_forward_computes(prefilled, phi):
    torch.manual_seed(0)
    model = TinyLM(**MODEL, **BLOCKS, phi=phi).double().eval()
    ids = torch.randint(0, 50, (2, 60))
    with torch.no_grad():
        expected = model(ids)
    cache = model.new_cache(batch=2, max_len=64)
    outs = [model.prefill(ids[:, :prefilled], cache)]
    outs += [model.step(ids[:, t], cache)[:, None] for t in range(prefilled, 60)]
    assert_near(torch.cat(outs, dim=1), expected, 1e-10)
    assert cache.length == 60


@pytest.mark.parametrize("kind", [dict(), dict(phi="mlp", gate="sigmoid"), dict(attention="dense")])
def test_decode_under_autocast_is_forward_under_autocast(kind):
    """A cache that is made there is as narrow; one that was made outside is fp32, and serves."""
    torch.manual_seed(0)
    model = TinyLM(**MODEL, **BLOCKS, **kind).eval()
    ids = torch.randint(0, 50, (2, 40))
    for dtype, rounding in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        outside = model.new_cache(2, 40)
        with torch.autocast("cpu", dtype):
            with torch.no_grad():
                expected = model(ids)
            inside = model.new_cache(2, 40)
            for cache, tolerance in ((inside, 4 * rounding), (outside, 32 * rounding)):
                outs = [model.prefill(part, cache) for part in ids[:, :33].split([20, 12, 1], 1)]
                outs += [model.step(ids[:, t], cache)[:, None] for t in range(33, 40)]
                assert_near(torch.cat(outs, dim=1).float(), expected.float(), tolerance)
        assert (inside.layers[0].dtype, outside.layers[0].dtype) == (dtype, torch.float32)
        assert inside.nbytes() == outside.nbytes() / 2


def test_a_cache_whose_dtype_does_not_fit_is_refused_and_not_changed():
    x, ids = torch.randn(1, 3, 24), torch.zeros(1, 3, dtype=torch.int64)
    module, half = make_module().float(), make_module().bfloat16()
    dense = TinyLM(**MODEL, attention="dense")
    with torch.autocast("cpu", torch.bfloat16):
        narrow, narrow_dense = module.new_cache(1, 8), dense.new_cache(1, 8)
    wrong = "torch.float32 .* given to a cache of torch.bfloat16; make the cache with new_cache"
    with pytest.raises(ValueError, match=wrong):
        module.prefill(x, narrow)
    with pytest.raises(ValueError, match=wrong):
        module.step(x[:, :1], narrow)
    with pytest.raises(ValueError, match=wrong):
        dense.prefill(ids, narrow_dense)
    with pytest.raises(ValueError, match="torch.bfloat16 .* given to a cache of torch.float32"):
        half.prefill(x.bfloat16(), module.new_cache(1, 8))
    assert narrow.length == narrow_dense.length == 0
    module.double()
    with torch.autocast("cpu", torch.bfloat16):  # it leaves float64 alone
        assert module.new_cache(1, 8).dtype == torch.float64


def test_a_cache_is_never_cut_but_can_be_cleared():
    torch.manual_seed(0)
    module = make_module()
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    cache = module.new_cache(1, 40)
    expected = module.prefill(x, cache)
    for length in (39, 20, 0):
        with pytest.raises(ValueError, match=rf"length={length} of a cache that holds 40 tokens"):
            cache.length = length
    for length in (41, -1):
        with pytest.raises(ValueError, match=rf"length={length} of a cache for 40 tokens"):
            cache.length = length
    assert (cache.length, cache.lengths.tolist()) == (40, [40])
    cache.clear()
    assert (cache.length, cache.lengths.tolist()) == (0, [0])
    assert torch.equal(module.prefill(x, cache), expected)
    dense = TinyLM(**MODEL, attention="dense").eval()  # has no rings: it can be cut
    ids = torch.randint(0, 50, (1, 20))
    whole = dense.new_cache(1, 20)
    expected = dense.prefill(ids, whole)
    whole.layers[0].length, whole.layers[1].length, whole.layers[2].length = 5, 5, 5
    assert_near(dense.prefill(ids[:, 5:], whole), expected[:, 5:], 1e-5)


def test_buffers_are_allocated_once_and_never_replaced():
    module = make_module()
    cache = module.new_cache(1, 64)

    def addresses() -> list[int]:
        buffers = (cache.sel, cache.cmp, cache.win, cache.raw)
        return [x.data_ptr() for kv in buffers for x in (kv.k, kv.v)]

    before = addresses()
    x = torch.randn(1, 64, 24, dtype=torch.float64)
    module.prefill(x[:, :20], cache)
    for t in range(20, 64):
        module.step(x[:, t : t + 1], cache)
    assert addresses() == before


@pytest.mark.parametrize("steps", [(9,), (1,) * 9, (3, 1, 5), (20, 1, 1, 30)])
def test_compressed_stream_is_that_of_the_whole_sequence(steps):
    module = make_module()
    total = sum(steps)
    x = torch.randn(1, total, 24, dtype=torch.float64)
    cache = module.new_cache(1, total)
    for size in steps:
        module.prefill(x[:, cache.length : cache.length + size], cache)
    with torch.no_grad():
        _, k, v, _ = module._project(x, module.rope(torch.arange(total), x.dtype))
    num_cmp = module.spec.num_cmp(total)
    assert cache.num_cmp == num_cmp
    assert_near(cache.cmp.k[:, :, :num_cmp].transpose(1, 2), compress(k[0], module.spec), 1e-12)
    assert_near(cache.cmp.v[:, :, :num_cmp].transpose(1, 2), compress(v[0], module.spec), 1e-12)


def test_cache_of_a_long_sequence_is_close_to_a_dense_cache():
    module = make_module(l=32, d=16, l_sel=64, n_sel=16, w=512)
    length = 65536
    dense = length * module.num_groups * (module.d_k + module.d_v) * 8
    assert module.new_cache(1, length).nbytes() <= 1.1 * dense


def test_sequences_of_a_batch_do_not_touch_each_other():
    module = make_module()
    x = torch.randn(3, 40, 24, dtype=torch.float64)
    together = module.new_cache(3, 40)
    outs = [module.prefill(x[:, :30], together)]
    outs += [module.step(x[:, t : t + 1], together) for t in range(30, 40)]
    alone = module.new_cache(1, 40)
    expected = [module.prefill(x[1:2, :30], alone)]
    expected += [module.step(x[1:2, t : t + 1], alone) for t in range(30, 40)]
    assert_near(torch.cat(outs, dim=1)[1:2], torch.cat(expected, dim=1), 1e-12)
