"""The selected forward by blocks in Gluon: where the kernel runs, its code, its results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, compress, nsa_attention, sparse_attention
from nsa.ops import machine
from nsa.ops.machine import interpreted
from nsa.ops.triton import launcher, problem
from nsa.ops.triton.choice.selection import Selection
from nsa.ops.triton.selected import block_index, by_block_forward
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    Started,
    compiling_until,
    ptxas_report,
    shared_addresses,
    starting_on,
)
from nsa.tests.support.gpu import DEVICE, compare, device_inputs, on_device
from nsa.tests.support.helpers import Case, run
from nsa.tests.support.hopper import DTYPES, FEW, marked, problem_of

if interpreted():
    pytest.skip("Gluon has no interpreter", allow_module_level=True)


# --- Where it runs ---


problem_on = partial(problem_of, S=4100, G=6, dims=(64, 64))


WIDE = (128, 128)
MEASURED: list[dict[str, Any]] = [
    dict(S=4096),
    dict(S=65536),
    dict(G=4, dims=WIDE),
    dict(G=4, dims=WIDE, dtype=torch.float16),
]
POSSIBLE: list[dict[str, Any]] = [
    *(dict(G=size) for size in (1, 2, 3, 4, 5, 8, 12, 16, 40)),
    *(dict(G=size, dims=WIDE) for size in (1, 3, 6, 32)),
    *(dict(S=700), dict(docs=(2000, 2100)), dict(offset=3000)),
]
IMPOSSIBLE: list[dict[str, Any]] = [
    *(dict(dims=dims) for dims in ((192, 128), (64, 128), (32, 32))),
    *(dict(dtype=torch.float32), dict(spec=BlockSpec(n_sel=4, l_sel=32))),
    *(dict(S=500), dict(S=300, offset=3000), dict(G=16, S=300, offset=3000)),
]
"""The last three: a row that is masked, and few queries with an offset."""


@pytest.fixture
def hopper(monkeypatch):
    """A machine with that GPU and Triton 3.6."""
    monkeypatch.setattr(machine, "_machine_of", lambda _: machine.Machine("cuda", (9, 0)))


def test_it_runs_on_one_gpu_where_it_was_measured_to_be_faster(hopper, monkeypatch):
    for changes in MEASURED:
        assert problem_on(**changes).forward_in_gluon, changes
    for changes in (*POSSIBLE, *IMPOSSIBLE):
        assert not problem_on(**changes).forward_in_gluon, changes
    monkeypatch.setattr(problem, "HOPPER", True)
    for changes in (*MEASURED, *POSSIBLE):
        assert problem_on(**changes).forward_in_gluon, changes
    for changes in IMPOSSIBLE:
        assert not problem_on(**changes).forward_in_gluon, changes
    for capability in (80, 89, 100, 120):
        assert not problem_on(capability).forward_in_gluon
    monkeypatch.setattr(problem, "HOPPER", False)
    assert not problem_on().forward_in_gluon


def test_lists_are_made_for_it_in_query_order_too(hopper, monkeypatch):
    large = dict(G=24, dims=(64, 64))
    assert problem_on(**large).by_query and not problem_on(**large).has_lists
    monkeypatch.setattr(problem, "HOPPER", True)
    assert problem_on(**large).by_query and problem_on(**large).has_lists


def test_segments_that_do_not_fit_the_workspace_together_follow_each_other(hopper, monkeypatch):
    monkeypatch.setattr(problem, "HOPPER", True)
    one = problem_on(G=16, dims=WIDE, S=4096)
    each = 4096 * 4 * 16 * 128 * 2  # queries, places, heads, and bytes of a row
    for workspace, expected in ((2 * each, [range(2)]), (each, [range(1), range(1, 2)]), (1, None)):
        monkeypatch.setattr(by_block_forward, "PART_BYTES", workspace)
        assert by_block_forward._slices(one, 4096) == (expected or [range(1), range(1, 2)])
    monkeypatch.setattr(problem, "HOPPER", False)
    assert by_block_forward._slices(problem_on(G=4, dims=WIDE), 4096) == [range(2)]


# --- Its code ---


def launch(one: problem.Problem, q: torch.Tensor, k: torch.Tensor) -> None:
    """The forward pass of this branch."""
    segments = (one.batch, one.num_groups)
    ids = one.empty(one.batch, one.seq_len, one.num_groups, one.spec.n_sel, dtype=torch.int32)
    num_chosen = one.empty(*segments, one.seq_len, dtype=torch.int32)
    chosen = Selection(ids, num_chosen, one.empty(*segments, 0, one.seq_len, dtype=torch.int32))
    lists = block_index.empty_lists(one, sized=True)
    lse = one.empty(one.batch, one.num_heads, one.seq_len, dtype=torch.float32)
    by_block_forward.forward(one, q, k, k, chosen, lists, lse, None)


def compiled(group: int, dim: int, dtype: torch.dtype, docs: list[int]) -> Started:
    """What the forward pass of a batch of two would start on sm_90."""
    q = torch.zeros(2, sum(docs), 2 * group, dim, dtype=dtype)
    k = torch.zeros(2, sum(docs), 2, dim, dtype=dtype)
    with compiling_until("ptx"), starting_on(90, ("selected_forward",)) as started:
        launch(problem.Problem(q, k, FEW, 0.1, docs), q, k)
    return next(one for one in started if one.compiled is not None)


def test_it_is_compiled_ahead(monkeypatch):
    ahead: list[str] = []
    monkeypatch.setattr(launcher, "_compile", lambda *args: ahead.append(args[1].__name__))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    q, k = (torch.empty(1, 4100, h, 64, dtype=torch.bfloat16, device="meta") for h in (6, 1))
    with starting_on(90, ()) as started, launcher.compiling_ahead():
        launch(problem.Problem(q, k, FEW, 0.1, [4100]).on_meta(), q, k)
    assert "selected_forward" in ahead and "block_forward" not in ahead and not started


def test_it_compiles_with_few_spills_and_reads_16_bytes_at_a_time(monkeypatch):
    monkeypatch.setattr(problem, "HOPPER", True)
    for group, dim, dtype, docs in (
        (6, 64, torch.bfloat16, [1100]),
        (4, 128, torch.bfloat16, [1100]),
        (16, 128, torch.float16, [400, 700]),
    ):
        one = compiled(group, dim, dtype, docs).compiled
        ptx = one.asm["ptx"]
        assert one.metadata.shared <= MAX_SHARED_BYTES[90] // 5
        assert not shared_addresses(one)
        report = ptxas_report(ptx)
        assert "serializ" not in report, report
        # Four programs share an SM at D 128: 24 bytes of 128 registers, faster than three without.
        assert all(int(size) <= 24 for size in re.findall(r"(\d+) bytes spill", report)), report
        # k, v and two tiles of q, and the outputs: no smaller pieces of rows.
        pieces = ROWS * dim * 2 // (128 * 16)
        assert len(re.findall(r"ld\.global[.a-z]*\.v4\.b32", ptx)) == 4 * pieces
        assert len(re.findall(r"st\.global[.a-z]*\.v4\.b32", ptx)) == pieces
        assert_synchronised(ptx)


ROWS = 64
"""Of a tile, as the kernel has it; importing it needs a machine with Gluon."""


def assert_synchronised(ptx: str) -> None:
    """Keys and values are visible to the products of all warps before the first one."""
    events = r"stmatrix|st\.shared\.v4|fence\.proxy\.async|bar(?:rier)?\.sync|wgmma\.mma_async"
    order = re.findall(events, ptx)
    first = order.index("wgmma.mma_async")
    written = max(i for i, what in enumerate(order[:first]) if what.startswith("st"))
    between = order[written + 1 : first]
    assert between[0] == "fence.proxy.async" and "bar.sync" in between, order[: first + 1]
    assert not any(what.startswith("st") for what in order[first:])


# --- Its results ---


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[range]]:
    """The segments of each launch of the kernel; there must be some."""
    from nsa.ops.triton.hopper import selected_forward

    monkeypatch.setattr(problem, "HOPPER", True)
    problem._kept.clear()
    seen: list[range] = []
    real = selected_forward.forward_group

    def noted(*args: Any) -> None:
        if not args[3].is_meta:  # such a call compiles ahead
            seen.append(args[2])
        real(*args)

    monkeypatch.setattr(selected_forward, "forward_group", noted)
    yield seen
    problem._kept.clear()
    assert seen


CASES = {
    "6 heads, odd length": ("bf16", Case(FEW, S=1187, B=2, Hkv=2, G=6, Dk=64, Dv=64)),
    "4 heads": ("bf16", Case(FEW, S=1100, B=2, Hkv=2, G=4, Dk=128, Dv=128)),
    "4 heads in fp16": ("fp16", Case(FEW, S=999, Hkv=1, G=4, Dk=128, Dv=128)),
    "1 head": ("fp16", Case(FEW, S=901, B=2, Hkv=2, G=1, Dk=64, Dv=64)),
    "3 heads": ("bf16", Case(FEW, S=777, Hkv=2, G=3, Dk=128, Dv=128)),
    "5 heads": ("bf16", Case(FEW, S=640, Hkv=1, G=5, Dk=64, Dv=64)),
    "16 heads": ("bf16", Case(FEW, S=1001, B=2, Hkv=2, G=16, Dk=128, Dv=128)),
    "40 heads": ("fp16", Case(FEW, S=641, Hkv=1, G=40, Dk=64, Dv=64)),
    "documents": ("bf16", Case(FEW, S=1201, Hkv=2, G=6, Dk=64, Dv=64, docs=(1, 600, 600))),
    "many documents": (
        "fp16",
        Case(FEW, S=1500, Hkv=1, G=16, Dk=128, Dv=128, docs=(700, 63, 65, 672)),
    ),
}


@pytest.mark.parametrize("name", marked(*CASES))
def test_outputs_and_gradients_equal_float64(name, taken):
    dtype, case = CASES[name]
    compare(case, DTYPES[dtype])


@pytest.mark.parametrize("case", marked(Case(FEW, S=1001, Hkv=1, G=6, Dk=64, Dv=64)))
def test_a_block_that_all_queries_chose_has_several_items(case, taken):
    selection = torch.full((1, case.S, 1, 4), -1, dtype=torch.int32, device=DEVICE)
    selection[..., 0] = 0
    compare(case, torch.float16, selection)


@pytest.mark.parametrize("case", marked(CASES["16 heads"][1]))
def test_one_segment_at_a_time_gives_the_same(case, taken, monkeypatch):
    case = on_device(case)
    inputs = device_inputs(case, torch.bfloat16)
    expected = run(case, inputs, "triton")
    monkeypatch.setattr(by_block_forward, "PART_BYTES", 1)
    problem._kept.clear()
    assert torch.equal(run(case, inputs, "triton"), expected)
    assert taken == [range(4), *(range(i, i + 1) for i in range(4))]


@pytest.mark.parametrize("dim", marked(64, 128))
def test_late_queries_are_those_of_the_whole_row(dim, taken):
    new = torch.Generator(DEVICE).manual_seed(dim)
    size = {"q": 8, "k_sel": 2, "v_sel": 2, "k_win": 2, "v_win": 2}
    given = {
        name: torch.randn(1, 3000, heads, dim, generator=new, device=DEVICE).bfloat16()
        for name, heads in size.items()
    }
    given |= {f"{x}_cmp": compress(given[f"{x}_sel"], FEW) for x in "kv"}
    given["gates"] = torch.rand(1, 3000, 8, 3, generator=new, device=DEVICE).bfloat16()
    whole, chosen = nsa_attention(**given, spec=FEW, return_selection=True)
    late = given | {name: given[name][:, 700:] for name in ("q", "gates")}
    out = nsa_attention(**late, spec=FEW, q_offset=700, selection=chosen[:, 700:])
    assert len(taken) == 2
    torch.testing.assert_close(out, whole[:, 700:], rtol=0, atol=2e-2)


@pytest.mark.parametrize("group", marked(4, 16))
def test_rows_between_others_in_memory_are_read_in_place(group, taken):
    """q, k and v as slices of one projection, as a model may give them."""
    new = torch.Generator(DEVICE).manual_seed(group)
    fused = torch.randn(2, 1100, 2 * group + 4, 128, generator=new, device=DEVICE).bfloat16()
    q, k, v = fused.split([2 * group, 2, 2], dim=2)
    own = torch.arange(1100, device=DEVICE)[None, :, None, None] // 64
    index = (own - torch.arange(4, device=DEVICE)).expand(2, 1100, 2, 4).clamp(min=-1).int()
    out = sparse_attention(q, k, v, index, block=64)
    copies = sparse_attention(q.clone(), k.clone(), v.clone(), index, block=64)
    assert torch.equal(out, copies)
