"""Block arithmetic, scores and the choice of blocks against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa import BlockSpec
from nsa.ops.eager.rows import choose_blocks, score_blocks

SPECS = [
    BlockSpec(),
    BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11),
    BlockSpec(l=16, d=4, l_sel=4, n_sel=3, w=2),
    BlockSpec(l=4, d=4, l_sel=12, n_sel=5, w=1),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_counts_equal_counting(spec):
    for length in range(0, 5 * spec.l_sel + 3):
        blocks = [i for i in range(length + 1) if i * spec.d + spec.l <= length]
        assert spec.num_cmp(length) == len(blocks)
        assert spec.num_blocks(length) == len({t // spec.l_sel for t in range(length)})
        if length:
            assert spec.num_reads(length) == (
                len(blocks) + spec.num_selected_tokens(length) + len(range(length)[-spec.w :])
            )


def test_paper_table_4_of_tokens_read_in_decode():
    """8k, 16k, 32k, 64k: 2048, 2560, 3584, 5632 in the paper, which rounds the block counts up."""
    spec = BlockSpec(l=32, d=16, l_sel=64, n_sel=16, w=512)
    reads = [spec.num_reads(length) for length in (8192, 16384, 32768, 65536)]
    assert reads == [2047, 2559, 3583, 5631]


@settings(deadline=None, max_examples=60)
@given(
    strides=st.integers(1, 4),
    sel_strides=st.integers(1, 5),
    d=st.sampled_from([1, 2, 4]),
    length=st.integers(1, 120),
    seed=st.integers(0, 1000),
)
def test_scores_equal_the_overlap_sum(strides, sel_strides, d, length, seed):
    spec = BlockSpec(l=strides * d, d=d, l_sel=sel_strides * d, n_sel=3, w=1)
    num_cmp, num_blocks = spec.num_cmp(length), spec.num_blocks(length)
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(1, 1, 2, 3, num_cmp, dtype=torch.float64, generator=generator)
    expected = torch.zeros(1, 1, 2, num_blocks, dtype=torch.float64)
    for i in range(num_cmp):
        for token in range(i * d, i * d + spec.l):
            expected[..., token // spec.l_sel] += probs[..., i].sum(dim=-1) / d
    torch.testing.assert_close(score_blocks(probs, num_blocks, spec), expected)


@settings(deadline=None, max_examples=60)
@given(
    n_sel=st.integers(3, 9),
    first=st.integers(0, 60),
    num_queries=st.integers(1, 30),
    levels=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_choice_equals_sorting_by_score_then_index(n_sel, first, num_queries, levels, seed):
    """Few distinct scores, so that ties are everywhere."""
    spec = BlockSpec(l=4, d=4, l_sel=4, n_sel=n_sel, w=1)
    num_blocks = spec.num_blocks(first + num_queries)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (1, 2, num_queries, num_blocks), generator=generator)
    chosen = choose_blocks(scores.double(), first, spec)
    assert chosen.dtype == torch.int32
    for head in range(2):
        for row in range(num_queries):
            current = (first + row) // 4
            forced = {0, max(current - 1, 0), current}
            free = [j for j in range(current + 1) if j not in forced]
            free.sort(key=lambda j: (-scores[0, head, row, j].item(), j))
            ids = sorted([*forced, *free[: n_sel - len(forced)]])
            assert chosen[0, head, row].tolist() == ids + [-1] * (n_sel - len(ids))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(d=5), "l=32 is not a multiple of d=5"),
        (dict(l_sel=40), "l_sel=40 is not a multiple of d=16; use l_sel=32 or 48"),
        (dict(l=8), "l=8 is not a multiple of d=16; use l=16"),
        (dict(n_sel=2), "n_sel=2 leaves no room for the 3 forced blocks"),
        (dict(w=0), "w=0 is not a positive integer"),
        (dict(l=-32), "l=-32 is not a positive integer"),
        (dict(d=1.5), "d=1.5 is not a positive integer"),
        (dict(w=True), "w=True is not a positive integer"),
    ],
)
def test_wrong_sizes_are_refused_with_the_way_out(sizes, message):
    with pytest.raises(ValueError, match=message):
        BlockSpec(**sizes)


def test_spec_is_frozen():
    with pytest.raises(AttributeError):
        BlockSpec().l = 64
