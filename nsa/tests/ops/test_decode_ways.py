"""However a decode step is cut, it is the same: on a GPU, or interpreted.

test_triton_on_cpu.py runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec
from nsa.ops.eager.rows import KeyValues
from nsa.ops.triton.decode import launch
from nsa.ops.triton.decode.launch import Caches, Decoder, Token
from nsa.ops.triton.decode.tiles import DecodeTiles, Workspace, decode_tiles
from nsa.tests.support.gpu import DEVICE, on_gpu

pytestmark = pytest.mark.gpu

SPECS = {
    "small": BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=20),
    "three strides": BlockSpec(l=12, d=4, l_sel=12, n_sel=3, w=20),
    "long overlap": BlockSpec(l=16, d=4, l_sel=8, n_sel=3, w=20),
}
LENGTHS = (6, 93, 128)
"""Of three sequences; the last is full."""
MAX_LEN, HKV, G, D, TILE, STEPS = 128, 2, 3, 16, 16, 2
PLAIN: dict[str, Any] = dict(
    BN=TILE, TOKENS=TILE, CMP_PART=TILE, WIN_PART=TILE, PER_PART=2, BLOCKS=8, SUMS=False
)
WAYS: dict[str, dict[str, Any]] = {
    "sums": dict(SUMS=True),
    "long parts": dict(CMP_PART=3 * TILE, WIN_PART=2 * TILE, PER_PART=3, BLOCKS=16),
    "sums of long parts": dict(SUMS=True, CMP_PART=3 * TILE, WIN_PART=2 * TILE, PER_PART=1),
    "large tiles": dict(BN=2 * TILE, CMP_PART=2 * TILE, BLOCKS=16, SUMS=True),
    "one launch": dict(programs=3, PER_PART=1),
    "one launch of many": dict(programs=9, WIN_PART=2 * TILE),
}
"""In the interpreter, one launch is one for each of its phases (resident.py)."""


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def new_caches(spec: BlockSpec, max_len: int = MAX_LEN, filled: Sequence[int] = LENGTHS) -> Caches:
    """Random tokens; NaN after the end of each sequence, where nothing may be read."""

    def kv(num_tokens: int, stops: Sequence[int], seed: int) -> KeyValues:
        k, v = random(2, len(LENGTHS), HKV, num_tokens, D, seed=seed)
        for x in (k, v):
            for i, stop in enumerate(stops):
                x[i, :, stop:] = torch.nan
        return KeyValues(k, v)

    num_tokens, rings = spec.num_blocks(max_len) * spec.l_sel, [spec.w] * len(LENGTHS)
    reads = torch.zeros(len(LENGTHS), HKV, 3, dtype=torch.int64, device=DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    return Caches(
        kv(num_tokens // spec.d, [spec.num_cmp(n) for n in filled], 0),
        kv(num_tokens, filled, 1),
        kv(spec.w, rings, 2),
        kv(spec.l, rings, 3),
        lengths,
        None,
        reads,
        torch.zeros_like(reads),
    )


def in_pages(caches: Caches, spec: BlockSpec) -> Caches:
    """The same, with the compressed and the selected tokens in pages that lie in no order."""
    num_blocks = spec.num_blocks(MAX_LEN)
    num_pages = num_blocks * len(LENGTHS)
    page = torch.randperm(num_pages, generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def paged(x: Tensor) -> Tensor:  # [B, Hkv, tokens, D] -> [pages, Hkv, tokens of a page, D]
        pages = x.unflatten(2, (num_blocks, -1)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(pages).index_copy_(0, page, pages)

    table = page.to(torch.int32).view(len(LENGTHS), num_blocks)
    cmp, sel = (KeyValues(paged(kv.k), paged(kv.v)) for kv in (caches.cmp, caches.sel))
    return caches._replace(cmp=cmp, sel=sel, table=table)


def new_decoder(
    spec: BlockSpec, caches: Caches, way: dict[str, Any], monkeypatch, max_len: int = MAX_LEN
) -> Decoder:
    def cut(*given: Any, **named: Any) -> DecodeTiles:
        return decode_tiles(*given, **named)._replace(**(PLAIN | way))

    with monkeypatch.context() as patch:
        patch.setattr(launch, "decode_tiles", cut)
        decoder = Decoder(caches, spec, max_len, HKV * G, D**-0.5, Workspace())
    for x in (decoder.part, decoder.part_lse, decoder.logits, decoder.tops, decoder.scores):
        x.fill_(torch.nan)  # nothing is read that a step has not written
    return decoder


def new_token(seed: int) -> Token:
    heads = random(len(LENGTHS), 1, 6 * HKV + HKV * G, D, seed=5 + seed)
    *new, q = heads.split([HKV] * 6 + [HKV * G], dim=2)
    gates = random(len(LENGTHS), 1, HKV * G, 3, seed=99 + seed).softmax(dim=-1)
    return Token(q, new[:3], new[3:], gates)


def steps(
    spec: BlockSpec, caches: Caches, way: dict[str, Any], monkeypatch, max_len: int = MAX_LEN
) -> list[Tensor]:
    """Outputs and choices of the first steps, what was read, and the lengths after them."""
    decoder = new_decoder(spec, caches, way, monkeypatch, max_len)
    found = []
    for step in range(STEPS):
        out = decoder.step(new_token(step))
        is_open = torch.tensor(LENGTHS) + step < MAX_LEN
        found += [out[is_open.to(DEVICE)], decoder.selection[is_open.to(DEVICE)]]
    return [x.clone() for x in (*found, caches.reads, caches.last_reads, caches.lengths)]


@pytest.mark.parametrize("name", SPECS)
def test_a_step_is_the_same_however_it_is_cut(name, monkeypatch):
    """Choices, counts and lengths are equal, outputs up to the rounding of another compilation.

    Sequences have different lengths, one of them is full; several steps in a row.
    """
    spec = SPECS[name]
    expected = steps(spec, new_caches(spec), PLAIN, monkeypatch)
    assert expected[-1].tolist() == [min(n + STEPS, MAX_LEN) for n in LENGTHS]
    for way, fields in WAYS.items():
        if name == "long overlap" and "SUMS" not in fields:
            continue  # the overlap is of sums
        if fields.keys() & {"SUMS", "programs"} and TILE % (spec.l_sel // spec.d):
            continue  # tiles do not hold whole blocks
        for paged in (False, True) if way == "sums of long parts" else (False,):
            caches = in_pages(new_caches(spec), spec) if paged else new_caches(spec)
            found = steps(spec, caches, fields, monkeypatch)
            for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                what = f"{way}, {'paged' if paged else 'in order'}, result {i}"
                if mine.is_floating_point():
                    assert (mine - theirs).abs().max() <= 1e-6, what
                else:
                    assert torch.equal(mine, theirs), what


def test_where_every_block_is_read_nothing_is_scored(monkeypatch):
    """Caches of n_sel blocks against longer ones with the same tokens, whose blocks are scored."""
    spec = BlockSpec(l=8, d=4, l_sel=8, n_sel=16, w=20)
    assert spec.num_blocks(MAX_LEN) == spec.n_sel
    expected = steps(spec, new_caches(spec, 2 * MAX_LEN), {}, monkeypatch, 2 * MAX_LEN)
    for paged in (False, True):
        caches = new_caches(spec, 2 * MAX_LEN)
        cmp, sel = (
            KeyValues(*(x[:, :, : x.shape[2] // 2].contiguous() for x in kv[:2]))
            for kv in (caches.cmp, caches.sel)
        )
        caches = caches._replace(cmp=cmp, sel=sel)
        caches = in_pages(caches, spec) if paged else caches
        found = steps(spec, caches, dict(PER_PART=3), monkeypatch)
        assert found[1].max() > 0 and found[-1].tolist()[:2] == [n + STEPS for n in LENGTHS[:2]]
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            what = f"{'paged' if paged else 'in order'}, result {i}"
            # The third sequence is full in the short caches only.
            if mine.is_floating_point():
                assert (mine[:2] - theirs[:2]).abs().max() <= 1e-6, what
            else:
                assert torch.equal(mine[:2], theirs[:2]), what


@on_gpu
def test_a_graph_of_one_launch_can_be_replayed_ten_thousand_times(monkeypatch):
    """Counters only grow; between replays the sequences get other lengths."""
    spec, lengths = SPECS["small"], ((6, 93, 100), (31, 7, 128), (127, 0, 64))
    caches, token = new_caches(spec, filled=[MAX_LEN] * 3), new_token(0)
    one, four = (
        new_decoder(spec, caches, WAYS["one launch"] | dict(programs=n), monkeypatch)
        for n in (3, 0)
    )
    one.step(token, advance=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [one.step(token, advance=False) for _ in range(20)]
    for each in lengths * 2:
        caches.lengths.copy_(torch.tensor(each))
        expected = four.step(token, advance=False)
        is_open = torch.tensor(each).to(DEVICE) < MAX_LEN
        for _ in range(84):
            graph.replay()
        for out in outs:
            assert torch.equal(out[is_open], outs[0][is_open])
        assert (outs[0] - expected)[is_open].abs().max() <= 1e-6
        assert torch.equal(one.selection[is_open], four.selection[is_open])
        assert caches.lengths.tolist() == list(each)


@on_gpu
def test_more_programs_than_the_gpu_holds_are_several_launches(monkeypatch):
    spec = SPECS["small"]
    expected = steps(spec, new_caches(spec), PLAIN, monkeypatch)
    found = steps(spec, new_caches(spec), dict(programs=1 << 14), monkeypatch)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
