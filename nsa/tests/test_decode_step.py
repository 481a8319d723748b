"""The decode cache: preallocated, incremental, small, and exact after any prefill."""

import pytest
import torch

from nsa import TinyLM, compress
from nsa.tests.helpers import assert_near, make_module

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
