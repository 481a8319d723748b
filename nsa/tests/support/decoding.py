"""Decode steps by one program for each segment, and by several launches, on the same caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec
from nsa.ops.eager.rows import KeyValues
from nsa.ops.triton.decode import launch
from nsa.ops.triton.decode.launch import Caches, Decoder, Token
from nsa.ops.triton.decode.tiles import SEGMENT_ROWS, Workspace
from nsa.tests.support.gpu import DEVICE, TOLERANCE


class Example(NamedTuple):
    """Blocks and heads, tokens that the caches hold, lengths of the sequences."""

    spec: BlockSpec
    Hkv: int
    G: int
    D: int
    max_len: int
    lengths: tuple[int, ...]
    made: bool = False
    """The caller gives the compressed tokens, instead of their means."""


SEGMENTS = {
    "every block read": Example(BlockSpec(w=128), 1, 16, 128, 320, (62, 318, 320)),
    "3 heads, a window of no whole tiles": Example(
        BlockSpec(n_sel=4, w=100), 2, 3, 64, 1536, (30, 1500)
    ),
    "long overlap, two tiles to a block": Example(
        BlockSpec(l=64, d=32, l_sel=128, n_sel=4, w=70), 1, 5, 64, 1024, (127, 1000)
    ),
    "no overlap, made tokens": Example(
        BlockSpec(l=16, d=16, n_sel=4, num_first=0, num_local=1), 1, 8, 128, 700, (14, 670), True
    ),
}
STEPS = 2
LARGEST_ERROR = {torch.bfloat16: TOLERANCE[torch.bfloat16], torch.float32: 1e-4}
"""Of outputs and scores, relative to the largest value."""


def random(*size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(DEVICE, torch.bfloat16)


def new_caches(example: Example) -> Caches:
    """Random tokens; NaN after the end of each sequence, where nothing may be read."""
    spec, batch = example.spec, len(example.lengths)
    num_tokens = spec.num_blocks(example.max_len) * spec.l_sel

    def kv(size: int, filled: list[int], seed: int) -> KeyValues:
        k, v = random(2, batch, example.Hkv, size, example.D, seed=seed)
        for x in (k, v):
            for i, stop in enumerate(filled):
                x[i, :, stop:] = torch.nan
        return KeyValues(k, v)

    lengths = list(example.lengths)
    window = min(spec.w, example.max_len)
    reads = torch.zeros(batch, example.Hkv, 3, dtype=torch.int64, device=DEVICE)
    return Caches(
        kv(num_tokens // spec.d, [spec.num_cmp(n) for n in lengths], 0),
        kv(num_tokens, lengths, 1),
        kv(window, lengths, 2),
        kv(spec.l, [spec.l] * batch, 3),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        *(None, reads, torch.zeros_like(reads)),
    )


def new_token(example: Example, seed: int) -> Token:
    batch, groups, heads = len(example.lengths), example.Hkv, example.Hkv * example.G
    *new, q = random(batch, 1, 8 * groups + heads, example.D, seed=9 + seed).split(
        [groups] * 8 + [heads], dim=2
    )
    gates = random(batch, 1, heads, 3, seed=99 + seed).float().softmax(dim=-1).bfloat16()
    made = (new[6].contiguous(), new[7].contiguous()) if example.made else None
    return Token(q, new[:3], new[3:6], gates, made)


def new_decoder(
    example: Example, caches: Caches, by_segment: bool, monkeypatch: pytest.MonkeyPatch
) -> Decoder:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "takes_segments", lambda *_: by_segment)
        patch.setattr(launch, "takes_gluon", lambda *_: True)
        heads = example.Hkv * example.G
        decoder = Decoder(
            caches, example.spec, example.max_len, heads, example.D**-0.5, Workspace()
        )
    assert decoder.by_segment == by_segment
    names = ("carried", "tops", "scores") if by_segment else ("part", "part_lse", "logits")
    for name in names:  # nothing is read that a step has not written
        getattr(decoder, name).fill_(torch.nan)
    return decoder


def assert_both_ways_agree(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, counts and caches are equal, outputs and scores up to their rounding."""
    found: list[list[Any]] = []
    for by_segment in (False, True):
        caches = new_caches(example)
        decoder = new_decoder(example, caches, by_segment, monkeypatch)
        found.append([*_steps(example, caches, decoder)])
    expected, mine = found
    for i, (x, y) in enumerate(zip(expected, mine, strict=True)):
        assert torch.equal(x.isnan(), y.isnan()), f"NaN in result {i}"
        if x.is_floating_point():
            error = (x.float() - y.float()).nan_to_num().abs().max()
            assert error <= LARGEST_ERROR[x.dtype] * x.float().nan_to_num().abs().max(), i
        else:
            assert torch.equal(x, y), f"result {i}"


def _steps(example: Example, caches: Caches, decoder: Decoder) -> Iterator[Tensor]:
    for step in range(STEPS):
        out = decoder.step(new_token(example, step), advance=step > 0)
        is_open = torch.tensor(example.lengths) + max(step - 1, 0) < example.max_len
        yield out[is_open.to(DEVICE)]
        yield decoder.selection[is_open.to(DEVICE)].clone()
        if not decoder.whole:
            yield _block_scores(decoder)
    yield from (caches.lengths, caches.reads, caches.last_reads)
    yield from (x for kv in caches[:4] for x in kv[:2])


def _block_scores(decoder: Decoder) -> Tensor:
    """Of all blocks up to the new token's; 0 for the others."""
    parts, spec = decoder.scores[:, :, : decoder.num_blocks], decoder.spec
    scores = parts[:, 0].clone()
    if decoder.levels > 1:
        if decoder.by_segment:
            # What is carried into the first block after each tile of 64 tokens.
            step = SEGMENT_ROWS // (spec.l_sel // spec.d)
            into = scores[:, step::step]
            into += parts[:, 1, : into.shape[1]]
        else:
            scores[:, 1:] += parts[:, 1, 1:]
    current = decoder.current.repeat_interleave(decoder.num_groups) // spec.l_sel
    blocks = torch.arange(decoder.num_blocks, device=DEVICE)
    return torch.where(blocks <= current[:, None], scores, 0.0)
