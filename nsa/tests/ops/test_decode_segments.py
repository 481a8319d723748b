"""A decode step by one program for each segment, in Gluon: where it runs, its code, its results.

test_gluon_on_cpu.py has its results on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec
from nsa.ops.machine import interpreted
from nsa.ops.triton.decode.tiles import takes_segments
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    compiling_until,
    ptxas_report,
    reused_barriers,
    shared_addresses,
    spilled_bytes,
    starting_on,
)
from nsa.tests.support.decoding import (
    SEGMENTS,
    Example,
    assert_both_ways_agree,
    new_caches,
    new_decoder,
    new_token,
)
from nsa.tests.support.gpu import DEVICE
from nsa.tests.support.hopper import marked

if interpreted():
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

WIDE, NARROW = (128, 128, torch.bfloat16), (64, 64, torch.float16)
PAPER = BlockSpec()


def takes(
    caches: Any = WIDE, heads: int = 16, spec: BlockSpec = PAPER, tokens: int = 65536,
    segments: int = 128, processors: int = 132,
) -> bool:  # fmt: skip
    return takes_segments(caches, heads, spec, tokens, segments, processors)


def test_it_runs_where_it_was_measured_to_be_faster():
    for tokens in (1024, 8192, 65536):
        assert takes(tokens=tokens) and takes(tokens=tokens, segments=64)
        assert takes(tokens=tokens, segments=256)  # nearly two for each multiprocessor
        assert takes(NARROW, 6, tokens=tokens)
        assert not takes(tokens=tokens, segments=4)
        assert not takes(tokens=tokens, segments=160)  # a second round of few
    assert [takes(NARROW, 6, tokens=n, segments=64) for n in (1024, 8192, 65536)] == [
        False, True, False
    ]  # fmt: skip
    assert takes(NARROW, 6, segments=96)


def test_what_it_cannot_take_is_left_to_the_other_kernels():
    float32 = (128, 128, torch.float32)
    for caches in (float32, (192, 128, torch.bfloat16), (64, 128, torch.bfloat16)):
        assert not takes(caches)
    assert not takes(heads=17) and not takes(tokens=65537) and not takes(processors=0)
    for changes in (dict(l_sel=32), dict(l_sel=192), dict(l=128), dict(l=128, l_sel=64)):
        assert not takes(spec=replace(PAPER, **changes)), changes
    assert takes(spec=replace(PAPER, l=64, l_sel=128))


# --- Its code ---

LONGEST = Example(PAPER, 1, 16, 128, 65536, (65535,))
SPILLED = 32
"""Bytes, at most: what a loop does not change."""


def test_it_fits_and_its_products_run_side_by_side(monkeypatch):
    """Its shared memory grows with the blocks."""
    for example in (LONGEST, SEGMENTS["3 heads, a window of no whole tiles"]):
        caches = new_caches(example)
        with compiling_until("ptx"), starting_on(90, ("step_by_segment",)) as started:
            new_decoder(example, caches, True, monkeypatch).step(new_token(example, 0))
        (one,) = started
        assert one.compiled.metadata.shared <= MAX_SHARED_BYTES[90]
        report = ptxas_report(one.compiled.asm["ptx"])
        assert "serializ" not in report, report
        assert spilled_bytes(report) <= SPILLED, report
        assert not reused_barriers(one.compiled.asm["ptx"])
        assert not shared_addresses(one.compiled)


# --- Its results ---


@pytest.mark.parametrize("name", marked(*SEGMENTS))
def test_a_step_is_that_of_several_launches(name, monkeypatch):
    assert_both_ways_agree(SEGMENTS[name], monkeypatch)


MANY = {
    "every block read": Example(PAPER, 4, 16, 128, 1024, tuple(range(1024 - 32, 1024))),
    "chosen": Example(PAPER, 4, 16, 128, 8192, tuple(range(3, 8192, 256))),
    "longest": Example(PAPER, 2, 12, 64, 65536, tuple(range(1023, 65536, 4096))),
}


@pytest.mark.parametrize("name", marked(*MANY))
def test_ten_thousand_replays_give_the_same_bits(name, monkeypatch):
    """Of a graph of 20 steps; then the sequences grow in one."""
    example = MANY[name]
    caches, token = new_caches(example), new_token(example, 0)
    decoder = new_decoder(example, caches, True, monkeypatch)
    decoder.step(token, advance=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [decoder.step(token, advance=False) for _ in range(20)]
    graph.replay()
    expected = outs[0].clone()
    assert not expected.isnan().any()
    for _ in range(500):
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs[::7])
    growing = torch.cuda.CUDAGraph()
    decoder.step(token)
    with torch.cuda.graph(growing):
        decoder.step(token)
    growing.replay()
    growing.replay()
    grown = [min(n + 3, example.max_len) for n in example.lengths]
    assert caches.lengths.tolist() == grown


@pytest.mark.parametrize("batch", marked(32, 33))
def test_a_sequence_does_not_depend_on_the_others(batch, monkeypatch):
    """More programs than the GPU holds at once, too."""
    lengths = (*range(100, 100 + 31), 700)
    example = Example(PAPER, 4, 16, 128, 2048, lengths[-batch:] + (50,) * (batch - 32))
    outs = []
    for own in (example, example._replace(lengths=example.lengths[::-1])):
        caches = new_caches(own._replace(lengths=(2048,) * batch))
        caches.lengths.copy_(torch.tensor(own.lengths).to(DEVICE))
        for kv in caches[:4]:
            for x in kv[:2]:
                x.copy_(x[:1].expand_as(x).clone())
        token = new_token(own, 0)
        same = [x[:1].expand_as(x).contiguous() for x in (token.q, token.gates)]
        k, v = ([x[:1].expand_as(x).contiguous() for x in xs] for xs in (token.k, token.v))
        decoder = new_decoder(own, caches, True, monkeypatch)
        outs.append(decoder.step(token._replace(q=same[0], gates=same[1], k=k, v=v)))
    assert torch.equal(outs[0], outs[1].flip(0))
