"""The Triton kernels against the oracle: on a GPU, or in Triton's interpreter on the CPU.

`pytest -m gpu` runs them on a GPU. test_triton_on_cpu.py runs them with TRITON_INTERPRET=1, where
bf16 is not exact and shapes must be tiny.
"""

import math
from itertools import accumulate, product

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, compress, nsa_attention, select_blocks
from nsa.ops.triton import (
    attention,
    operators,
    problem,
)
from nsa.ops.triton import tiles as tile_sizes
from nsa.ops.triton.bands import banded_backward
from nsa.ops.triton.choice import best, scores
from nsa.ops.triton.choice.selection import pack_given
from nsa.ops.triton.replay import calls as replayed
from nsa.ops.triton.selected import block_index, by_block_backward
from nsa.ops.triton.tiles import forward_tiles
from nsa.tests.support import matrix
from nsa.tests.support.gpu import forward_backward
from nsa.tests.support.helpers import (
    NAMES,
    Case,
    assert_fair_selection,
    assert_near,
    careless_selection,
    make_inputs,
    run,
    run_with_gradients,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
SHORT = BlockSpec(l=8, d=4, l_sel=4, n_sel=4, w=11)  # blocks shorter than what is compressed
TINY_CASES = [
    Case(SMALL, S=1),
    Case(SMALL, S=7),  # no compressed token
    Case(SHORT, S=21, B=2, Hkv=2, G=3, Dk=24, Dv=16),
    Case(SMALL, S=41, docs=(3, 1, 37), G=1, Dk=20, Dv=12),
    Case(
        BlockSpec(l=12, d=4, l_sel=8, n_sel=4, w=11), S=17, docs=(13, 4), G=2
    ),  # the last sees none
    Case(BlockSpec(l=16, d=4, l_sel=64, n_sel=3, w=200), S=70, Hkv=1, G=4),  # two tiles, one block
    Case(BlockSpec(l=4, d=4, l_sel=4, n_sel=20, w=3), S=18, Hkv=1, G=2),  # n * l' > S
    Case(BlockSpec(l=4, d=2, l_sel=8, n_sel=3, w=8), S=35, Hkv=1, G=4),  # no free blocks
    Case(BlockSpec(l=8, d=4, l_sel=4, n_sel=5, w=11, num_first=2, num_local=1), S=41, Hkv=1, G=2),
    Case(BlockSpec(l=8, d=4, l_sel=4, n_sel=5, w=11, num_first=0, num_local=3), S=41, docs=(9, 32)),
]
PAPER = BlockSpec()
LARGE_CASES = [
    Case(PAPER, S=2500, Hkv=2, G=6, Dk=64, Dv=64),
    Case(PAPER, S=2500, Hkv=1, G=4, Dk=128, Dv=128),
    Case(PAPER, S=1700, Hkv=1, G=16, Dk=192, Dv=128),
    Case(PAPER, S=1000, Hkv=1, G=64, Dk=16, Dv=16),
    Case(PAPER, S=5000, Hkv=1, G=16, Dk=128, Dv=128),  # by query
    Case(PAPER, S=4500, Hkv=2, G=6, Dk=64, Dv=64),  # by block
    Case(PAPER, S=1500, Hkv=1, G=5, Dk=20, Dv=12),
    Case(PAPER, S=1300, B=2, Hkv=1, G=1, Dk=256, Dv=256),
    Case(PAPER, S=3000, Hkv=2, G=3, Dk=64, Dv=32, docs=(1, 999, 2000)),
    Case(BlockSpec(l=32, d=16, l_sel=128, n_sel=64, w=100), S=9000, Hkv=1, G=2, Dk=32, Dv=32),
    Case(BlockSpec(l=16, d=16, l_sel=16, n_sel=5, w=3), S=1700, Hkv=1, G=8, Dk=64, Dv=64),
]
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")


def to_device(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in inputs.items()}


class OnDevice(Case):
    """A case whose document bounds are on the device."""

    @property
    def cu_seqlens(self):
        bounds = super().cu_seqlens
        return None if bounds is None else bounds.to(DEVICE)


def on_device(case: Case) -> Case:
    return OnDevice(**vars(case))


def compare(case: Case, dtype: torch.dtype, oracle: str, tolerance: float, grad_tolerance: float):
    """Outputs and all gradients under the oracle's selection."""
    case = on_device(case)
    inputs = to_device(make_inputs(case, dtype))
    wide = {name: x.double() for name, x in inputs.items()}
    _, selection = run(case, wide, oracle, return_selection=True)
    expected, expected_grads = run_with_gradients(case, wide, oracle, selection=selection)
    out, grads = run_with_gradients(case, inputs, "triton", selection=selection)
    assert out.dtype == dtype
    assert_near(out, expected, tolerance)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], grad_tolerance, f"gradient of {name}")


ORDERS = ("masked", "by-block", "by-query")
CASES_IN_ORDERS = [
    (case, order)
    for i, case in enumerate(TINY_CASES)
    for j, order in enumerate(ORDERS)
    # The interpreter takes seconds for each: some cases in all orders, the others in one.
    if DEVICE == "cuda" or i in (2, 3) or i % 3 == j
]


@pytest.fixture(autouse=True)
def forget_calls():
    """A problem keeps its loop order and the sizes of its workspace, and tests change them."""
    problem._kept.clear()
    yield
    problem._kept.clear()


@pytest.fixture
def force_order(monkeypatch):
    """Make the selected branch take one of its loop orders, whatever the shape."""

    def force(order: str) -> None:
        problem._kept.clear()
        monkeypatch.setattr(problem, "BY_BLOCK_BEYOND", 1 << 30 if order == "masked" else 0)
        monkeypatch.setattr(tile_sizes, "BY_QUERY_FROM", 1 if order == "by-query" else 1 << 30)
        monkeypatch.setattr(problem, "FEW_QUERIES", 0)

    return force


@pytest.mark.parametrize(("case", "order"), CASES_IN_ORDERS, ids=str)
def test_float32_equals_the_oracle_in_outputs_and_gradients(case, order, force_order):
    force_order(order)
    compare(case, torch.float32, "reference", 1e-5, 1e-4)


@pytest.mark.parametrize("drawn", matrix.draw(3, 6, small=True), ids=str)
def test_shapes_drawn_at_random_equal_float64(drawn):
    matrix.check(drawn)


@pytest.mark.parametrize(
    ("order", "case"),
    [
        ("by-block", Case(BlockSpec(l=8, d=4, l_sel=12, n_sel=3, w=11), S=41, Hkv=1, G=3)),
        ("by-query", Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=41, docs=(3, 1, 37), G=2)),
    ],
    ids=["by-block", "by-query"],
)
def test_long_blocks_are_read_in_parts(order, case, force_order, monkeypatch):
    """As if a tile held four keys: what the kernels read is then a part of a block."""
    force_order(order)
    monkeypatch.setattr(tile_sizes, "LONGEST_TILE", 4)
    monkeypatch.setattr(tile_sizes, "SHORT_TILE", 4)
    monkeypatch.setattr(tile_sizes, "fits_blocks", lambda d_k, d_v, spec, dtype: spec.l_sel <= 4)
    compare(case, torch.float32, "reference", 1e-5, 1e-4)
    inputs = to_device(make_inputs(case, torch.float32))
    _, chosen = run(on_device(case), inputs, "triton", return_selection=True)
    assert chosen.shape[-1] == case.spec.n_sel
    kept = [p for p in problem._kept.values() if isinstance(p, problem.Problem)]
    assert case.docs or (kept and all(p.reader.spec.l_sel == 4 for p in kept))


PARTS = {
    "one-for-all": (Case(SMALL, S=41, B=2), (20, 20), (21, 21)),
    "of-each-row": (Case(SMALL, S=41, B=2, Dk=20, Dv=12), (9, 9), (3, 32)),
    "documents": (Case(SHORT, S=41, docs=(13, 5, 23)), (7, 0, 20), (6, 0, 3)),
    "one-row": (Case(SMALL, S=41), (12,), (17,)),
}
"""Of each document or batch element: how many queries, and the position of the first."""


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (name, order)
        for i, name in enumerate(PARTS)
        for j, order in enumerate(ORDERS[1:])
        if DEVICE == "cuda" or i % 2 == j
    ],
)
def test_queries_with_an_offset_equal_those_of_the_whole(name, order, force_order):
    """Outputs, choices, and gradients of what the queries see."""
    force_order(order)
    case, counts, offsets = PARTS[name]
    case = on_device(case)
    wide = {name: x.double() for name, x in to_device(make_inputs(case, torch.float32)).items()}
    whole, chosen = run(case, wide, "reference", return_selection=True)
    lens = case.docs or (case.S,) * case.B
    rows = [
        first + offset + torch.arange(count)
        for first, offset, count in zip(accumulate((0, *lens)), offsets, counts, strict=False)
    ]
    rows = torch.cat(rows).to(DEVICE)

    def some(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[rows].unflatten(0, (x.shape[0], -1))

    part = wide | {name: some(wide[name]) for name in ("q", "gates")}
    places = {"q_offset": torch.tensor(offsets, dtype=torch.int32)}
    if case.docs:
        for key, sizes in (("cu_seqlens", counts), ("cu_seqlens_k", case.docs)):
            places[key] = torch.tensor([*accumulate((0, *sizes))], dtype=torch.int32)
    elif len(set(offsets)) == 1:
        places["q_offset"] = offsets[0]
    leaves = {name: x.float().requires_grad_() for name, x in part.items()}
    given = {**leaves, "spec": case.spec, **places}
    out, ids = nsa_attention(**given, backend="triton", return_selection=True)
    assert_near(out, some(whole), 1e-5)
    assert torch.equal(ids, some(chosen))
    wide_leaves = {name: x.requires_grad_() for name, x in part.items()}
    expected = nsa_attention(**given | wide_leaves, backend="torch")
    assert_near(expected, some(whole), 1e-10)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.float())
    wanted = torch.autograd.grad(expected, list(wide_leaves.values()), dout)
    for name, ours, theirs in zip(leaves, grads, wanted, strict=True):
        assert_near(ours, theirs, 1e-4, f"gradient of {name}")


def test_chunks_of_queries_change_nothing(force_order, monkeypatch):
    force_order("by-block")
    monkeypatch.setattr(block_index, "chunk_size", lambda problem: 16)
    monkeypatch.setattr(block_index, "piece_size", lambda problem: 3)
    monkeypatch.setattr(block_index, "MIN_SUB", 4)
    monkeypatch.setattr(block_index, "PART_TOKENS", 1)
    monkeypatch.setattr(scores, "SCORE_BYTES", 1)
    monkeypatch.setattr(scores, "ROWS", 32)
    for case in (TINY_CASES[2], TINY_CASES[3]):
        compare(case, torch.float32, "reference", 1e-5, 1e-4)
        inputs = make_inputs(case, torch.float32)
        q, k_cmp = inputs["q"].to(DEVICE), inputs["k_cmp"].to(DEVICE)
        cu_seqlens = on_device(case).cu_seqlens
        selection = select_blocks(q, k_cmp, case.spec, cu_seqlens=cu_seqlens, backend="triton")
        assert assert_fair_selection(case, inputs, selection.cpu()) <= 0.002


@pytest.mark.parametrize(
    ("order", "part_bytes", "case"),
    [("by-block", 1 << 30, TINY_CASES[3]), ("by-query", 1, TINY_CASES[2])],
    ids=["by-block-at-once", "by-query-chunk-by-chunk"],
)
def test_sums_in_a_fixed_order_equal_the_oracle(order, part_bytes, case, force_order, monkeypatch):
    force_order(order)
    monkeypatch.setattr(block_index, "chunk_size", lambda problem: 16)
    monkeypatch.setattr(block_index, "piece_size", lambda problem: 3)
    monkeypatch.setattr(block_index, "PART_BYTES", part_bytes)
    summed = []
    sum_slots = by_block_backward._sum_slots
    monkeypatch.setattr(by_block_backward, "_sum_slots", _noting(summed, sum_slots))
    torch.use_deterministic_algorithms(True)
    try:
        compare(case, torch.float32, "reference", 1e-5, 1e-4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert summed


def _noting(calls, function):
    def noted(*args):
        calls.append(args)
        return function(*args)

    return noted


def test_slices_of_queries_for_compressed_keys_change_nothing(monkeypatch):
    slices = []
    real = banded_backward._parts
    monkeypatch.setattr(replayed, "_compile_once", lambda *_, **__: None)  # it would be noted, too
    monkeypatch.setattr(banded_backward, "SLICE_TILES", 1)

    def noted(*args):
        slices.append(real(*args))
        return slices[-1]

    monkeypatch.setattr(banded_backward, "_parts", noted)

    for docs in ((45, 55), ()):
        case = Case(SMALL, S=100, Hkv=1, G=2, docs=docs)
        compare(case, torch.float32, "reference", 1e-5, 1e-4)

    assert [num_slices for _, num_slices in slices if num_slices > 1] == [4, 4]


@pytest.mark.parametrize("docs", [(), (3, 1, 37)], ids=["whole", "packed"])
def test_the_index_is_a_stable_sort_of_the_choices(docs, monkeypatch):
    """By chunk, block and query, whatever the order in which programs run."""
    monkeypatch.setattr(block_index, "chunk_size", lambda problem: 16)
    monkeypatch.setattr(block_index, "piece_size", lambda problem: 3)
    monkeypatch.setattr(block_index, "MIN_SUB", 4)
    case = on_device(Case(SHORT, S=41, B=2, docs=docs))
    x = torch.zeros(2, 41, 2, 8, device=DEVICE)
    one = problem.Problem(x, x, SHORT, 1.0, list(docs) or [41])
    assert block_index.sub_size(one) < 16
    chosen = pack_given(one, careless_selection(case).to(DEVICE))
    lists = block_index.list_queries(one, chosen)

    for segment, row in enumerate(chosen.ids.transpose(1, 2).flatten(0, 1).cpu()):
        if docs:
            row = torch.where(row < 0, row, row + one.documents.queries.row_block.cpu()[:, None])
        query, place = (row >= 0).nonzero().unbind(1)
        for chunk, (first, last) in enumerate(zip(*_bounds(lists, segment), strict=True)):
            here = query // 16 == chunk
            order = row[query, place][here].sort(stable=True).indices
            wanted = torch.stack([query[here][order], place[here][order]])
            listed = torch.stack([lists.queries[segment].cpu(), lists.places[segment].cpu()])
            assert torch.equal(listed[:, first:last].long(), wanted)
            starts, items = lists.starts[segment, chunk].cpu(), lists.item_block[segment, chunk]
            assert torch.equal(starts.diff(), _counts(row[query, place][here], one.num_blocks))
            blocks = torch.arange(one.num_blocks).repeat_interleave((starts.diff() + 2) // 3)
            assert torch.equal(items[: len(blocks)].cpu().long(), blocks)
            assert (items[len(blocks) :] == one.num_blocks).all()


def _bounds(lists, segment):
    """First entry, and one past the last, of every chunk."""
    starts = lists.starts[segment].cpu()
    return starts[:, 0].tolist(), starts[:, -1].tolist()


def _counts(blocks, num_blocks):
    return torch.bincount(blocks, minlength=num_blocks).to(torch.int32)


def test_offsets_of_64_bits_change_nothing(force_order, monkeypatch):
    force_order("by-block")
    monkeypatch.setattr(block_index, "WIDE", 0)
    compare(TINY_CASES[2], torch.float32, "reference", 1e-5, 1e-4)


def test_a_planted_future_block_raises_under_strict_asserts(monkeypatch):
    monkeypatch.setenv("NSA_STRICT_ASSERTS", "1")
    case = Case(SMALL, S=20, Hkv=1, G=2)
    inputs = to_device(make_inputs(case, torch.float32))
    assert run(case, inputs, "triton").isfinite().all()
    run_kernel = best.start

    def read_the_future(memo, place, kernel, tensors, one):
        run_kernel(memo, place, kernel, tensors, one)
        if kernel is best.choose_blocks:
            tensors[1][0, 9, 0, -1] = 2

    monkeypatch.setattr(best, "start", read_the_future)
    with pytest.raises(AssertionError, match="would read the future"):
        run(case, inputs, "triton")


@pytest.mark.parametrize("docs", [(), (3, 9, 17)], ids=["one-document", "packed"])
def test_a_given_selection_is_a_set_of_blocks_in_all_orders(docs, force_order):
    """Repeated, in any order, with blocks of the future: as the oracle reads it."""
    case = Case(SMALL, S=29, Hkv=1, G=2, docs=docs)
    inputs = make_inputs(case, torch.float32)
    selection = careless_selection(case)
    expected, expected_grads = run_with_gradients(case, inputs, "reference", selection=selection)
    inputs, selection = to_device(inputs), selection.to(DEVICE)
    for order in ORDERS:
        force_order(order)
        out, grads = run_with_gradients(on_device(case), inputs, "triton", selection=selection)
        assert_near(out.cpu(), expected, 1e-5, order)
        for name in NAMES:
            assert_near(grads[name].cpu(), expected_grads[name], 1e-4, f"{order}: {name}")


def test_batches_that_a_grid_cannot_hold_are_cut(monkeypatch):
    case = Case(SMALL, S=13, B=3, Hkv=1, G=2)
    inputs = to_device(make_inputs(case, torch.float32))
    expected, expected_grads = run_with_gradients(case, inputs, "triton")
    blocks = select_blocks(inputs["q"], inputs["k_cmp"], SMALL, backend="triton")
    monkeypatch.setattr(operators, "MAX_GRID", 4)  # two sequences of two heads
    out, grads = run_with_gradients(case, inputs, "triton")
    cut = select_blocks(inputs["q"], inputs["k_cmp"], SMALL, backend="triton")
    assert torch.equal(out, expected) and torch.equal(cut, blocks)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], 1e-6, f"gradient of {name}")


def test_float16_stays_within_its_rounding():
    compare(TINY_CASES[2], torch.float16, "reference", 3e-3, 3e-3)


@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_selection_is_fair_to_the_oracle(case):
    inputs = make_inputs(case, torch.float32)
    device_case = on_device(case)
    q, k_cmp = inputs["q"].to(DEVICE), inputs["k_cmp"].to(DEVICE)
    cu_seqlens = device_case.cu_seqlens
    selection = select_blocks(q, k_cmp, case.spec, cu_seqlens=cu_seqlens, backend="triton")
    assert assert_fair_selection(case, inputs, selection.cpu()) <= 0.002


@pytest.mark.parametrize("case", [TINY_CASES[3], TINY_CASES[5]], ids=str)
def test_equal_scores_go_to_the_lower_block(case):
    inputs = to_device(make_inputs(case, torch.float32))
    args = dict(cu_seqlens=on_device(case).cu_seqlens)
    q = torch.zeros_like(inputs["q"])
    expected = select_blocks(q, inputs["k_cmp"], case.spec, backend="reference", **args)
    actual = select_blocks(q, inputs["k_cmp"], case.spec, backend="triton", **args)
    assert torch.equal(actual, expected)


def test_a_second_gradient_is_refused():
    x = torch.randn(1, 20, 1, 16, device=DEVICE, requires_grad=True)
    plain = compress(x, SMALL, backend="triton")
    operator = torch.ops.nsa.mean(x, SMALL.to_ints(), [20])
    for out, error in ((plain, RuntimeError), (operator, NotImplementedError)):
        weight = torch.ones_like(out, requires_grad=True)
        (grad,) = torch.autograd.grad(out, x, weight, create_graph=True)
        with pytest.raises(error):
            grad.sum().backward()


@pytest.mark.parametrize("docs", [(), (3, 17, 20)])
def test_mean_compression_equals_the_oracle(docs):
    case = on_device(Case(SMALL, S=40, docs=docs))
    x = torch.randn(2 - bool(docs), 40, 3, 24, device=DEVICE, requires_grad=True)
    results = []
    for backend in ("reference", "triton"):
        out = compress(x, case.spec, cu_seqlens=case.cu_seqlens, backend=backend)
        weight = torch.sin(torch.arange(out.numel(), device=DEVICE)).view_as(out)
        (grad,) = torch.autograd.grad((out * weight).sum(), x)
        results.append((out, grad))
    assert_near(results[1][0], results[0][0], 1e-6)
    assert_near(results[1][1], results[0][1], 1e-6, "gradient of x")


@pytest.mark.parametrize("order", ORDERS)
def test_a_nan_shows_in_its_own_group_and_nowhere_else(order, force_order):
    """Of the selected branch in every order; what is not of it has one way alone."""
    force_order(order)
    case = Case(SMALL, S=18, B=2, Hkv=2, G=1)
    inputs = to_device(make_inputs(case, torch.float32))
    clean = run(case, inputs, "triton")
    for name in NAMES[:-1] if order == "masked" else ("k_sel", "v_sel"):
        poisoned_inputs = inputs | {name: inputs[name].clone()}
        poisoned_inputs[name][1, 1, 1, 0] = torch.nan  # token 1, or the block of tokens 4 to 11
        poisoned = run(case, poisoned_inputs, "triton")
        assert torch.equal(poisoned[0], clean[0]), name
        assert torch.equal(poisoned[1, :, 0], clean[1, :, 0]), name
        reads_it = {"q": [1], "k_cmp": [11, 17], "v_cmp": [11, 17]}.get(name, [1, 11])
        assert poisoned[1, reads_it, 1].isnan().any(dim=-1).all(), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_not_finite_stays_in_its_document(order, bad, force_order):
    """Outputs and gradients of the documents beside it are those of finite inputs."""
    force_order(order)
    case = on_device(Case(SMALL, S=24, Hkv=1, G=2, docs=(9, 8, 7)))
    bad_rows, bad_blocks = slice(9, 17), slice(1, 2)  # of the second document
    inputs, dout = to_device(make_inputs(case, torch.float32)), torch.ones(1, 24, 2, 8)
    _, selection = run(case, inputs, "triton", return_selection=True)
    expected = forward_backward(case, inputs, dout.to(DEVICE), selection=selection)
    tensors = {name: x.clone() for name, x in inputs.items()} | {"dout": dout.to(DEVICE)}
    for name, x in tensors.items():
        x[:, bad_blocks if name.endswith("cmp") else bad_rows] = bad
    out, grads = forward_backward(case, tensors, tensors.pop("dout"), selection=selection)
    for what, actual, clean in [
        ("out", out, expected[0]),
        *((x, grads[x], expected[1][x]) for x in NAMES),
    ]:
        beside = torch.ones(actual.shape[1], dtype=torch.bool)
        beside[bad_blocks if what.endswith("cmp") else bad_rows] = False
        assert_near(actual[:, beside], clean[:, beside], 1e-6, what)
    assert not out[:, bad_rows].isfinite().any()  # and it is not hidden


@pytest.mark.parametrize("order", ORDERS)
def test_within_a_document_a_nan_reaches_back_at_most_a_tile_of_queries_and_of_keys(
    order, force_order
):
    """docs/kernels.md says so; every row that sees it is NaN, as on all paths."""
    force_order(order)
    case = Case(BlockSpec(l=1, d=1, l_sel=8, n_sel=3, w=11), S=130, Hkv=1, G=1, Dk=16, Dv=16)
    inputs = to_device(make_inputs(case, torch.float32))
    clean, selection = run(case, inputs, "triton", return_selection=True)
    first = 120
    for branch, name in enumerate(("cmp", "sel", "win")):
        if name != "sel" and order != "masked":
            continue  # only the selected branch has orders
        tiles = forward_tiles(16, 16, torch.float32, branch)
        before = first - tiles.BM - tiles.BN
        assert before > 0
        poisoned = inputs | {f"{kind}_{name}": inputs[f"{kind}_{name}"].clone() for kind in "kv"}
        for kind in "kv":
            poisoned[f"{kind}_{name}"][:, first] = torch.nan
        out = run(case, poisoned, "triton", selection=selection)
        assert torch.equal(out[:, :before], clean[:, :before]), name
        assert out[:, first].isnan().all(), name


def test_no_tile_of_the_band_kernels_is_longer_than_the_page_says():
    """A NaN reaches back by up to 128 rows and 128 keys."""
    for dtype, d_k, d_v, branch in product(
        (torch.bfloat16, torch.float16, torch.float32), (16, 64, 128, 192, 256), (16, 128), range(3)
    ):
        tiles = forward_tiles(d_k, d_v, dtype, branch)
        assert max(tiles.BM, tiles.BN) <= 128, (dtype, d_k, d_v, branch)


def test_strided_inputs_are_read_where_they_lie():
    case = Case(SMALL, S=20, Hkv=1, G=2)
    inputs = to_device(make_inputs(case, torch.float32))
    expected = run(case, inputs, "triton")
    strided = {name: _strided(x) for name, x in inputs.items()}
    assert not strided["q"].is_contiguous()
    assert torch.equal(run(case, strided, "triton"), expected)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, heads outside the sequence, in a wider buffer."""
    buffer = torch.full((*x.shape[:1], x.shape[2], x.shape[1], x.shape[3] + 5), 7.0, device=DEVICE)
    view = buffer[..., : x.shape[3]].transpose(1, 2)
    view.copy_(x)
    return view


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_large_shapes_equal_float64(case, dtype):
    """Against the torch path in float64, which the CPU tests hold to the oracle at 1e-10."""
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    compare(case, dtype, "torch", tolerance, max(tolerance, 1e-4))


@on_gpu
@pytest.mark.parametrize("case", LARGE_CASES[:2], ids=str)
def test_bfloat16_errs_at_most_twice_as_much_as_flash_attention(case):
    inputs = to_device(make_inputs(case, torch.bfloat16))
    wide = {name: x.double() for name, x in inputs.items()}
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k_win", "v_win"))
    flash = torch.nn.functional.scaled_dot_product_attention
    exact = flash(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    flash_error = (flash(q, k, v, is_causal=True, enable_gqa=True).double() - exact).abs().max()
    expected, selection = run(case, wide, "torch", return_selection=True)
    out = run(case, inputs, "triton", selection=selection)
    assert (out.double() - expected).abs().max() <= 2 * flash_error


@on_gpu
def test_output_does_not_depend_on_the_future_at_8k():
    case = Case(PAPER, S=8192, Hkv=2, G=6, Dk=64, Dv=64)
    inputs = to_device(make_inputs(case, torch.bfloat16))
    other = to_device(make_inputs(case, torch.bfloat16, seed=1))
    before = run(case, inputs, "triton")
    for t in (100, 1023, 4097, 8000):
        keep = {name: PAPER.num_cmp(t + 1) if "cmp" in name else t + 1 for name in NAMES}
        changed = {
            n: torch.cat([inputs[n][:, : keep[n]], other[n][:, keep[n] :]], dim=1) for n in NAMES
        }
        after = run(case, changed, "triton")
        assert torch.equal(before[:, : t + 1], after[:, : t + 1])
        assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


@on_gpu
def test_auto_takes_triton_on_a_gpu():
    from nsa.ops import plan_attention

    assert plan_attention("cuda", torch.bfloat16).backend == "triton"
    assert plan_attention("cuda", torch.float64).backend == "torch"
    plan = plan_attention("cuda", torch.bfloat16, head_dims=(320, 64))
    assert plan.backend == "torch"
    assert "up to 256" in plan.reason


def test_stats_hold_the_gate_in_the_log_sum_exp_and_the_bits_of_a_masked_past():
    """For the kernels in hopper/, which find them there; the other branches have positions."""
    size = (2, 13, 4, 8)
    q, v, o = (torch.randn(2, 13, n, 8, device=DEVICE) for n in (4, 2, 4))
    masked = problem.Problem(q, v, BlockSpec(), 0.1, [13])
    masked.__dict__["hopper"] = problem.Hopper(sel_keys=True)
    words = torch.randint(-(2**31), 2**31, (2, 2, 1, 13), device=DEVICE).to(torch.int32)
    lse, gates = torch.randn(3, 2, 4, 13, device=DEVICE), torch.randn(2, 13, 4, 3, device=DEVICE)
    lse[1, :, :, 5], gates[:, 7] = math.inf, 0.0
    saved = attention.Saved(words, o, o, o, lse, words, words, *[words] * 5)
    dout = torch.randn(size, device=DEVICE)
    _, stats, _ = attention._gate_backward(masked, saved, dout, gates, {})
    by_branch = gates.permute(3, 0, 2, 1)
    torch.testing.assert_close(stats[..., 0], lse - by_branch.abs().log2())
    below = (stats[..., 0].contiguous().view(torch.int32) & 1).bool()
    assert torch.equal(below, (by_branch < 0) & lse.isfinite())
    assert torch.equal(stats[..., 2], torch.where(by_branch < 0, -1.0, 1.0))
    found = stats[1, ..., 3].contiguous().view(torch.int32)
    assert torch.equal(found, words[:, :, 0].repeat_interleave(2, dim=1))
    assert torch.equal(stats[2, 0, 0, :, 3].cpu(), torch.arange(13.0))
