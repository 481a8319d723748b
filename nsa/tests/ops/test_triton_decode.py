"""The decode kernels against the torch path in float64: on a GPU, or in Triton's interpreter.

test_triton_on_cpu.py runs this file with TRITON_INTERPRET=1, with the tiny shapes alone.
"""

import copy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, NSAAttention, TinyLM, compress
from nsa.generate.decode import GraphedStep, can_capture
from nsa.generate.rows import GenerationCache
from nsa.model import NSACache
from nsa.model.paged import OutOfPages
from nsa.model.rope import RopeScaling
from nsa.ops.eager import attention
from nsa.ops.eager.attention import attend_cached, split_heads
from nsa.ops.eager.rows import forward_rows
from nsa.ops.triton.choice import best
from nsa.ops.triton.decode.launch import Token
from nsa.ops.triton.replay import calls as replayed
from nsa.tests.support.gpu import DEVICE, TOLERANCE, on_gpu
from nsa.tests.support.helpers import assert_near

pytestmark = pytest.mark.gpu

SMALL = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
PAPER = BlockSpec()
DTYPES = ["float32"] if DEVICE == "cpu" else ["float32", "float16", "bfloat16"]


class Heads(NamedTuple):
    """Blocks, heads, and the lengths at which a token is appended."""

    spec: BlockSpec
    Hkv: int
    G: int
    Dk: int
    Dv: int
    lengths: tuple[int, ...]


TINY_HEADS = {
    "small": Heads(SMALL, 2, 3, 8, 8, (0, 1, 7, 8, 11, 51)),
    "odd heads": Heads(SMALL, 1, 2, 24, 20, (0, 11, 40)),
    "many blocks": Heads(BlockSpec(l=16, d=8, l_sel=16, n_sel=12, w=11), 2, 2, 8, 8, (0, 31, 199)),
    "three strides": Heads(BlockSpec(l=12, d=4, l_sel=12, n_sel=3, w=5), 1, 2, 8, 8, (23, 100)),
    "two first": Heads(
        BlockSpec(8, 4, 8, 6, 11, num_first=2, num_local=3), 1, 2, 8, 8, (0, 31, 99)
    ),
    "own alone": Heads(
        BlockSpec(8, 4, 8, 3, 11, num_first=0, num_local=1), 1, 2, 8, 8, (0, 31, 99)
    ),
    "long overlap": Heads(BlockSpec(l=16, d=4, l_sel=8, n_sel=3, w=5), 1, 2, 8, 8, (31, 99)),
}
LARGE_HEADS = {
    "125M": Heads(PAPER, 2, 6, 64, 64, (0, 2047, 8191, 65535)),
    "G16": Heads(PAPER, 4, 16, 128, 128, (31, 5000, 65535)),
    "Dk192": Heads(PAPER, 1, 16, 192, 128, (3000, 20000)),
    "G64": Heads(PAPER, 1, 64, 32, 16, (3000, 20000)),
    "G1 D256": Heads(PAPER, 2, 1, 256, 256, (3000, 20000)),
    "G64 D256": Heads(PAPER, 1, 64, 256, 256, (3000, 20000)),
    "odd": Heads(BlockSpec(w=77), 1, 5, 20, 12, (77, 1500)),
    "large blocks": Heads(BlockSpec(l_sel=128, n_sel=64), 1, 4, 64, 64, (20000,)),
}
CASES = [
    *(pytest.param(heads, id=f"tiny-{name}") for name, heads in TINY_HEADS.items()),
    *(pytest.param(heads, id=f"large-{name}", marks=on_gpu) for name, heads in LARGE_HEADS.items()),
]


def noise(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator)


def filled_cache(heads: Heads, batch: int, dtype: torch.dtype) -> NSACache:
    cache = NSACache(
        heads.spec, batch=batch, max_len=max(heads.lengths) + 1, num_groups=heads.Hkv,
        d_k=heads.Dk, d_v=heads.Dv, dtype=dtype, device=torch.device(DEVICE),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for kv in (cache.cmp, cache.sel, cache.win, cache.raw):
        for x in (kv.k, kv.v):
            x.copy_(noise(generator, *x.shape))
    return cache


def widened(cache: NSACache) -> NSACache:
    """The same cache in float64."""
    wide = copy.copy(cache)
    for name in ("cmp", "sel", "win", "raw"):
        kv = getattr(cache, name)
        setattr(wide, name, kv._replace(k=kv.k.double(), v=kv.v.double()))
    return wide


def new_token(heads: Heads, batch: int, dtype: torch.dtype) -> Token:
    generator = torch.Generator().manual_seed(2)

    def of(num: int, size: int) -> Tensor:
        return noise(generator, batch, 1, num, size).to(DEVICE, dtype)

    k, v = ([of(heads.Hkv, size) for _ in range(3)] for size in (heads.Dk, heads.Dv))
    gates = of(heads.Hkv * heads.G, 3).float().softmax(dim=-1).to(dtype)
    return Token(of(heads.Hkv * heads.G, heads.Dk), k, v, gates)


def mean(k: Tensor, v: Tensor, _first: int, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    return compress(k, spec, backend="torch"), compress(v, spec, backend="torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", CASES)
def test_a_step_is_that_of_the_torch_path_under_its_own_fair_selection(heads, dtype):
    dtype = getattr(torch, dtype)
    cache, token = filled_cache(heads, 2, dtype), new_token(heads, 2, dtype)
    scale = heads.Dk**-0.5
    for length in heads.lengths:
        cache.length = length
        wide = widened(cache)
        out = cache.decoder(heads.Hkv * heads.G).step(token, advance=False)
        selection = cache.decoder(heads.Hkv * heads.G).selection[:, :, None]
        assert cache.lengths.tolist() == [length, length]

        phi = partial(mean, spec=heads.spec)
        wide.store_raw(token.k[0].double(), token.v[0].double(), phi)
        wide.store_selected(token.k[1].double(), token.v[1].double())
        wide.store_window(token.k[2].double(), token.v[2].double())
        for name in ("cmp", "sel", "win", "raw"):  # the token was appended
            mine, theirs = getattr(cache, name), getattr(wide, name)
            assert_near(mine.k, theirs.k, TOLERANCE[dtype])
            assert_near(mine.v, theirs.v, TOLERANCE[dtype])
        q = split_heads(token.q.double(), heads.Hkv, torch.float64)
        rows = forward_rows(q, wide.branches(), length, heads.spec, scale, selection)
        gates = split_heads(token.gates.double(), heads.Hkv, torch.float64)
        expected = sum(rows.outs[i] * gates[..., i : i + 1] for i in range(3))
        assert_near(out, expected.reshape(out.shape), 2 * TOLERANCE[dtype])
        _, reads = attend_cached(
            token.q.double(), wide.branches(), token.gates.double(), length, heads.spec, scale
        )
        assert torch.equal(cache.last_reads, reads)
        assert_fair(heads, wide, q, length, selection)


def assert_fair(heads: Heads, wide: NSACache, q: Tensor, length: int, selection: Tensor) -> None:
    """By the scores of the compressed tokens that lie in the cache: [B, Hkv, 1, n_sel]."""
    spec = heads.spec
    num_cmp, num_blocks = spec.num_cmp(length + 1), spec.num_blocks(length + 1)
    logits = torch.einsum("bhtgd,bhnd->bhgn", q, wide.cmp.k[:, :, :num_cmp]) * heads.Dk**-0.5
    probs = logits.softmax(dim=-1).sum(dim=2)  # [B, Hkv, N]
    strides = torch.zeros(*probs.shape[:2], num_blocks * (spec.l_sel // spec.d) + spec.l // spec.d)
    strides = strides.double().to(DEVICE)
    for reach in range(spec.l // spec.d):
        strides[..., reach : reach + num_cmp] += probs
    whole = strides[..., : num_blocks * (spec.l_sel // spec.d)]
    scores = whole.unflatten(-1, (num_blocks, -1)).sum(dim=-1)
    block = torch.arange(num_blocks, device=DEVICE)
    current = length // spec.l_sel
    forced = (block < spec.num_first) | (block > current - spec.num_local)
    num_chosen = min(spec.n_sel, num_blocks)
    used = selection[:, :, 0, :num_chosen].long()
    assert (selection[:, :, 0, num_chosen:] == -1).all()
    assert (used[..., 1:] > used[..., :-1]).all(), "ids do not ascend"
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, used, True)
    assert chosen[..., forced].all(), "a forced block is missing"
    num_ranked = num_chosen - int(forced.sum())
    if num_ranked > 0:
        free = scores.masked_fill(forced, -1.0)
        s_n = free.topk(num_ranked, dim=-1).values[..., -1:]
        eps = 1e-5 * s_n + 2.0**-100
        assert not (chosen & ~forced & (scores < s_n - eps)).any(), "a chosen block scores too low"
        assert not (~chosen & (free > s_n + eps)).any(), "a better block was left out"


def test_a_token_that_ends_here_is_scored_in_the_same_step():
    """l > l_sel: the newest compressed token reaches back into a block that is not forced.

    That token has by far the largest weight, so the one free place belongs to that block; the next
    best is block 4.
    """
    heads = Heads(BlockSpec(l=16, d=4, l_sel=8, n_sel=4, w=5), 1, 2, 8, 8, (99,))
    cache, token = filled_cache(heads, 1, torch.float32), new_token(heads, 1, torch.float32)
    cache.length = 99  # the block of tokens 84 .. 99 ends; 80 .. 87 are selection block 10
    for x in (cache.raw.k, token.k[0], token.q):
        x.fill_(1.0)
    cache.cmp.k.zero_()
    cache.cmp.k[:, :, 8].fill_(0.1)  # tokens 32 .. 47
    cache.decoder(2).step(token, advance=False)
    assert cache.decoder(2).selection.tolist() == [[[0, 10, 11, 12]]]


TINY = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=11)
MODULES = {
    "avg": (TINY, 37, 30),  # into the fifth block: four are chosen
    "mlp": (TINY | dict(phi="mlp", gate="sigmoid"), 17, 0),
    "family": (
        TINY
        | dict(qkv_bias=True, qk_norm=True, rope_scale=4.0)
        | dict(rope_scaling=RopeScaling("yarn", 8, 0.5, 2.0)),
        17,
        0,
    ),
}
LARGE_MODULES = {
    "avg": (dict(dim=64, n_heads=12, n_kv_groups=2, d_k=64, d_v=64), 2200, 2050),
    "mlp": (dict(dim=64, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, phi="mlp"), 300, 0),
}


@pytest.mark.parametrize(
    ("shape", "total", "prefilled"),
    [
        *(pytest.param(*case, id=f"tiny-{name}") for name, case in MODULES.items()),
        *(pytest.param(*c, id=f"large-{name}", marks=on_gpu) for name, c in LARGE_MODULES.items()),
    ],
)
def test_a_module_decodes_what_the_torch_path_does(shape: dict[str, Any], total, prefilled):
    torch.manual_seed(0)
    module = NSAAttention(**shape, backend="torch").to(DEVICE)
    torch.nn.init.normal_(module.gate.weight, std=0.5)
    for name, weight in module.named_parameters():
        if name == "qkv.bias" or name.endswith("_norm.weight"):
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    wide = copy.deepcopy(module).double()
    x = torch.randn(2, total, shape["dim"], device=DEVICE)
    cache, wide_cache = module.new_cache(2, total), wide.new_cache(2, total)
    if prefilled:
        module.prefill(x[:, :prefilled], cache)
        wide.prefill(x[:, :prefilled].double(), wide_cache)
    module.backend = "triton"
    assert module.decodes_by_kernels(cache)
    for t in range(prefilled, total):
        out = module.step(x[:, t : t + 1], cache)
        assert_near(out, wide.step(x[:, t : t + 1].double(), wide_cache), 1e-4)
    assert torch.equal(cache.reads, wide_cache.reads)
    assert torch.equal(cache.last_reads, wide_cache.last_reads)
    assert (cache.length, cache.lengths.tolist()) == (total, [total, total])


@pytest.mark.parametrize("phi", ["avg", pytest.param("mlp", marks=on_gpu)])
def test_kernels_under_autocast_do_what_the_torch_path_does(phi):
    """fp32 weights; caches that were made there, narrow, and outside, fp32."""
    torch.manual_seed(0)
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter has no bf16
    module = NSAAttention(**TINY, phi=phi, backend="triton").to(DEVICE).eval()
    x = torch.randn(1, 24, TINY["dim"], device=DEVICE)
    outside = module.new_cache(1, 24)
    with torch.autocast(DEVICE, dtype):
        module.backend = "torch"
        with torch.no_grad():
            expected = module(x)
        module.backend = "triton"
        for cache in (module.new_cache(1, 24), outside):
            outs = [module.prefill(part, cache) for part in x[:, :22].split([12, 10], dim=1)]
            outs += [module.step(x[:, t : t + 1], cache) for t in range(22, 24)]
            assert_near(torch.cat(outs, dim=1), expected, 8 * TOLERANCE[dtype])
            assert cache.length == 24
        assert cache.dtype == torch.float32
    wrong = "given to a cache of torch.float32"
    with torch.autocast(DEVICE, enabled=False), pytest.raises(ValueError, match=wrong):
        module.to(dtype).step(x[:, :1].to(dtype), NSAAttention(**TINY).to(DEVICE).new_cache(1, 24))


def test_a_step_reads_nothing_that_it_does_not_count():
    """Everything else is NaN, also what is to be overwritten."""
    heads = TINY_HEADS["small"]
    cache, token = filled_cache(heads, 1, torch.float32), new_token(heads, 1, torch.float32)
    cache.length = length = 50
    clean = filled_cache(heads, 1, torch.float32)
    clean.length = length
    expected = clean.decoder(6).step(token, advance=False)
    spec = heads.spec
    read = torch.zeros(heads.Hkv, cache.max_len, dtype=torch.bool)
    for head, ids in enumerate(clean.decoder(6).selection[0].tolist()):
        for block in ids:
            read[head, block * spec.l_sel : (block + 1) * spec.l_sel] = block >= 0
    read[:, length:] = False
    for x in (cache.sel.k, cache.sel.v):
        x[0][~read.to(DEVICE)] = torch.nan
    for ring, size in ((cache.win, spec.w), (cache.raw, spec.l)):
        ring.k[:, :, length % size], ring.v[:, :, length % size] = torch.nan, torch.nan
    num_cmp = spec.num_cmp(length)
    cache.cmp.k[:, :, num_cmp:], cache.cmp.v[:, :, num_cmp:] = torch.nan, torch.nan
    for name in ("part", "part_lse", "logits", "scores"):
        getattr(cache.decoder(6), name).fill_(torch.nan)
    assert torch.equal(cache.decoder(6).step(token, advance=False), expected)


def test_a_full_cache_is_left_alone():
    """The host refuses such a step; a graph that is replayed too often changes nothing."""
    heads = TINY_HEADS["odd heads"]
    cache, token = filled_cache(heads, 2, torch.float32), new_token(heads, 2, torch.float32)
    cache.length = cache.max_len
    before = [x.clone() for kv in (cache.cmp, cache.sel, cache.win, cache.raw) for x in kv[:2]]
    cache.decoder(2).step(token)
    after = [x for kv in (cache.cmp, cache.sel, cache.win, cache.raw) for x in kv[:2]]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert cache.lengths.tolist() == [cache.max_len] * 2


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        pytest.param(TINY, (20, 1, 14, 5), id="tiny"),
        pytest.param(TINY | dict(phi="mlp", d_k=20, d_v=12), (3, 19, 15), id="tiny-mlp"),
        *(
            pytest.param(shape, sizes, id=f"large-{name}", marks=on_gpu)
            for name, shape, sizes in (
                ("125M", LARGE_MODULES["avg"][0], (1000, 2500, 1, 1500)),
                ("G16", dict(dim=64, n_heads=16, n_kv_groups=1, d_k=192, d_v=128), (2000, 3000)),
                ("D256", dict(dim=64, n_heads=2, n_kv_groups=1, d_k=256, d_v=256), (700, 3000)),
            )
        ),
    ],
)
def test_chunked_prefill_by_kernels_is_that_of_the_torch_path(shape, sizes, monkeypatch):
    """Under the selection of the kernels: scores that fp32 cannot tell apart may change a row's."""
    torch.manual_seed(0)
    module = NSAAttention(**shape, backend="triton").to(DEVICE)
    torch.nn.init.normal_(module.gate.weight, std=0.5)
    wide = copy.deepcopy(module).double()
    wide.backend = "torch"
    x = torch.randn(2, sum(sizes), shape["dim"], device=DEVICE)
    cache, wide_cache = module.new_cache(2, sum(sizes)), wide.new_cache(2, sum(sizes))
    chosen: list[Tensor] = []  # [B, T, Hkv, n_sel] each
    choose = best.choose

    def recording(*given, **rest):
        chosen.append((made := choose(*given, **rest)).ids)
        return made

    monkeypatch.setattr(best, "choose", recording)
    monkeypatch.setattr(replayed, "_compile_once", lambda *_, **__: None)  # recorded, too
    outs = []
    for part in x.split(sizes, dim=1):
        outs.append(module.prefill(part, cache))
        if part.shape[1] == 1:  # a step of the decode kernels
            chosen.append(cache.decoder(module.num_heads).selection.clone()[:, None])
    ids = torch.cat(chosen, dim=1).transpose(1, 2)
    assert ids.shape[2] == sum(sizes)

    def given_rows(q, branches, first, spec, scale, _, flags):
        rows = ids[:, :, first : first + q.shape[2]]
        return forward_rows(q, branches, first, spec, scale, rows, flags)

    monkeypatch.setattr(attention, "forward_rows", given_rows)
    assert_near(torch.cat(outs, dim=1), wide.prefill(x.double(), wide_cache), 1e-4)
    for name in ("sel", "win", "raw"):
        assert_near(getattr(cache, name).k, getattr(wide_cache, name).k, 1e-4)
    num_cmp = cache.num_cmp
    assert_near(cache.cmp.v[:, :, :num_cmp], wide_cache.cmp.v[:, :, :num_cmp], 1e-4)


@on_gpu
def test_a_graph_decodes_what_eager_steps_do_and_leaves_nothing_behind():
    torch.manual_seed(0)
    sizes = dict(vocab=64, dim=64, n_layers=3, n_heads=6, n_kv_groups=1, d_k=32, d_v=32)
    model = TinyLM(**sizes, l=8, d=4, l_sel=16, n_sel=4, w=40).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(0, 64, (3, 300), device=DEVICE)
    cache, eager_cache = (model.new_cache(3, 300) for _ in range(2))
    for each in (cache, eager_cache):
        model.prefill(ids[:, :100], each)
    assert can_capture(model, cache)
    step = GraphedStep(model, cache)
    assert cache.length == 100 and cache.layers[0].reads.sum() == 0
    for t in range(100, 300):
        assert torch.equal(step(ids[:, t]), model.step(ids[:, t], eager_cache)), f"at {t}"
    assert cache.length == eager_cache.length == 300
    for mine, theirs in zip(cache.layers, eager_cache.layers, strict=True):
        assert torch.equal(mine.reads, theirs.reads)
        assert mine.lengths.tolist() == [300] * 3
    with pytest.raises(ValueError, match="do not fit"):
        step(ids[:, 0])


MODEL = dict(vocab=50, dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)


@pytest.mark.parametrize("phi", ["avg", pytest.param("mlp", marks=on_gpu)])
def test_sequences_in_pages_decode_as_each_would_alone(phi):
    """Two sequences of different lengths; one is closed, and a third takes its pages."""
    torch.manual_seed(0)
    model = TinyLM(**MODEL, **BLOCKS, phi=phi, backend="triton").to(DEVICE).eval()
    paged = model.new_paged_cache(num_places=3, max_len=64, num_pages=9)
    ids = torch.randint(0, 50, (3, 40), device=DEVICE)
    prompts = {0: 21, 2: 6}

    def fresh(row: int, length: int):
        cache = model.new_cache(1, 64)
        model.prefill(ids[row : row + 1, :length], cache)
        return cache

    alone = {place: fresh(place, length) for place, length in prompts.items()}
    for place, cache in alone.items():
        paged.open(place, copy.deepcopy(cache).layers)
    assert paged.pages.num_free == 9 - 3 - 1

    def steps(number: int) -> None:
        for _ in range(number):
            token = torch.zeros(3, dtype=torch.int64, device=DEVICE)
            for place, cache in alone.items():
                token[place] = ids[place, cache.length]
            logits = model.step(token, paged)
            for place, cache in alone.items():
                expected = model.step(token[place : place + 1], cache)[0]
                assert_near(logits[place], expected, 1e-5)

    steps(3)
    assert paged.layers[1].open_lengths == {0: 24, 2: 9}
    assert paged.layers[0].lengths.tolist() == [24, 64, 9]
    paged.close(0)
    del alone[0]
    alone[1] = fresh(1, 33)
    paged.open(1, copy.deepcopy(alone[1]).layers)
    steps(2)
    assert sorted(paged.pages.held(1) + paged.pages.held(2)) == sorted(
        set(paged.pages.held(1)) | set(paged.pages.held(2))
    )
    with pytest.raises(OutOfPages, match="close a sequence"):
        paged.open(0, fresh(0, 40).layers)


def test_rows_of_a_padded_batch_take_their_steps_together_in_pages():
    """Rows of 12 and 5 tokens, in a cache that is made again after 13."""
    torch.manual_seed(0)
    model = TinyLM(**MODEL, **BLOCKS, backend="triton").to(DEVICE).eval()
    oracle = TinyLM(**MODEL, **BLOCKS, backend="torch").to(DEVICE).eval()
    oracle.load_state_dict(model.state_dict())
    ids = torch.randint(0, 50, (2, 15), device=DEVICE)
    real = torch.ones(2, 12, dtype=torch.bool, device=DEVICE)
    real[1, :7] = False
    cache = GenerationCache(13)
    cache.append(model, ids[:, :12], real)
    for column in range(12, 15):
        hidden = cache.append(model, ids[:, column : column + 1], None)
        assert (cache.pages is None) == (column == 13), "made again: a cache for each length"
        for row, first in enumerate((0, 7)):
            whole = oracle.hidden(ids[row : row + 1, first : column + 1])
            assert_near(hidden[row, 0], whole[0, -1], 1e-5)
    assert cache.lengths == [15, 8]


def test_a_paged_cache_says_what_it_cannot_do():
    model = TinyLM(**MODEL, **BLOCKS, backend="torch").to(DEVICE).eval()
    paged = model.new_paged_cache(num_places=1, max_len=16, num_pages=2)
    with pytest.raises(ValueError, match="only the decode kernels read pages"):
        model.step(torch.zeros(1, dtype=torch.int64, device=DEVICE), paged)
    with pytest.raises(ValueError, match="give one for each place"):
        model.step(torch.zeros(2, dtype=torch.int64, device=DEVICE), paged)
    with pytest.raises(ValueError, match="at least one of each"):
        model.new_paged_cache(num_places=0, max_len=16, num_pages=2)
    dense = TinyLM(**MODEL, attention="dense")
    with pytest.raises(ValueError, match="only layers with the branches of NSA have a paged cache"):
        dense.new_paged_cache(num_places=1, max_len=16, num_pages=2)
