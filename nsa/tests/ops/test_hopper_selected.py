"""Gradients of the selected branch in Gluon: where the kernel runs, its code, its results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nsa.ops import machine
from nsa.ops.machine import interpreted
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import launcher, problem
from nsa.ops.triton.choice.selection import Selection
from nsa.ops.triton.selected import block_index, by_block_backward
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    Started,
    compiling_until,
    ptxas_report,
    reused_barriers,
    shared_addresses,
    spilled_bytes,
    starting_on,
)
from nsa.tests.support.gpu import (
    DEVICE,
    ROUNDING,
    assert_near_gradients,
    compare,
    device_dout,
    device_inputs,
    forward_backward,
    on_device,
)
from nsa.tests.support.helpers import Case
from nsa.tests.support.hopper import DTYPES, FEW, marked, problem_of

if interpreted():
    pytest.skip("Gluon has no interpreter", allow_module_level=True)


# --- Where it runs ---


problem_on = partial(problem_of, S=1100, G=16, dims=(128, 128))


MEASURED: list[dict[str, Any]] = [
    *(dict(S=4096), dict(S=65536), dict(S=5001, dtype=torch.float16)),
    *(dict(S=4096, G=6, dims=(64, 64)), dict(S=65536, G=4)),
]
POSSIBLE: list[dict[str, Any]] = [
    *(dict(G=size) for size in (1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 40, 64)),
    *(dict(dims=(64, 64)), dict(dtype=torch.float16), dict(docs=(400, 700))),
    *(
        dict(S=4095),
        dict(S=8192, G=32),
        dict(S=8192, dims=(64, 64)),
        dict(S=8192, docs=(4096, 4096)),
    ),
]
IMPOSSIBLE: list[dict[str, Any]] = [
    dict(G=65),
    *(dict(dims=dims) for dims in ((192, 128), (64, 128), (32, 32))),
    *(dict(dtype=torch.float32), dict(spec=BlockSpec(n_sel=4, l_sel=32))),
    *(dict(spec=BlockSpec()), dict(offset=3000)),
]
"""The last two: a row that is masked, and queries with an offset."""


@pytest.fixture
def hopper(monkeypatch):
    """A machine with that GPU and Triton 3.6."""
    monkeypatch.setattr(machine, "_machine_of", lambda _: machine.Machine("cuda", (9, 0)))


def test_it_runs_on_one_gpu_where_it_was_measured_to_be_faster(hopper, monkeypatch):
    for changes in MEASURED:
        assert problem_on(90, **changes).in_gluon, changes
    for changes in (*POSSIBLE, *IMPOSSIBLE):
        assert not problem_on(90, **changes).in_gluon, changes
    monkeypatch.setattr(problem, "HOPPER", True)
    for changes in (*MEASURED, *POSSIBLE):
        assert problem_on(90, **changes).in_gluon, changes
    for changes in IMPOSSIBLE:
        assert not problem_on(90, **changes).in_gluon, changes
    for capability in (80, 89, 100, 120):
        assert not problem_on(capability, S=8192).in_gluon


def test_the_triton_kernel_can_be_asked_for(hopper, monkeypatch):
    assert block_index.chunk_size(problem_on(90, S=8192)) == 8192
    monkeypatch.setattr(problem, "HOPPER", False)
    assert not problem_on(90, S=8192).in_gluon
    assert block_index.chunk_size(problem_on(90, S=8192)) == 2048


# --- Its code ---

NAMES = ("selected_backward", "selected_rows_backward")
"""Rows by TMA, and row by row."""


def compiled(group: int, dim: int, dtype: torch.dtype, ordered: bool, docs: list[int]) -> Started:
    """What the backward pass of a batch of two would start on sm_90."""
    q = torch.zeros(2, sum(docs), 2 * group, dim, dtype=dtype)
    k = torch.zeros(2, sum(docs), 2, dim, dtype=dtype)
    with compiling_until("ptx"), starting_on(90, NAMES) as started:
        launch(problem.Problem(q, k, FEW, 0.1, docs), q, k, ordered)
    return next(one for one in started if one.compiled is not None)


def launch(one: problem.Problem, q: torch.Tensor, k: torch.Tensor, ordered: bool = False) -> None:
    batch, seq_len, num_heads, _ = q.shape
    stats = one.empty(batch, seq_len, num_heads, 4, dtype=torch.float32)
    lists = block_index.empty_lists(one, sized=True)
    chosen = Selection(*(one.empty(batch, 2, seq_len, dtype=torch.int32) for _ in range(3)))
    by_block_backward.backward(one, q, k, k, q, stats, chosen, lists, ordered=ordered)


def test_it_is_compiled_ahead(monkeypatch):
    ahead: list[str] = []
    monkeypatch.setattr(launcher, "_compile", lambda *args: ahead.append(args[1].__name__))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    q, k = (torch.empty(1, 4100, h, 128, dtype=torch.bfloat16, device="meta") for h in (16, 1))
    with starting_on(90, ()) as started, launcher.compiling_ahead():
        launch(problem.Problem(q, k, FEW, 0.1, [4100]).on_meta(), q, k)
    assert "selected_backward" in ahead and "block_backward" not in ahead and not started


SPILLED = {128: 320, 64: 16}
"""By head dim, bytes: addresses of shared memory that the loops do not change, not sums."""


def test_it_fits_and_its_products_run_side_by_side(monkeypatch):
    monkeypatch.setattr(problem, "HOPPER", True)
    for group, dim, dtype, ordered, docs in (
        (16, 128, torch.bfloat16, False, [1100]),
        (4, 128, torch.bfloat16, False, [1100]),
        (6, 64, torch.float16, True, [400, 700]),
    ):
        one = compiled(group, dim, dtype, ordered, docs)
        assert one.compiled.metadata.shared <= MAX_SHARED_BYTES[90]
        report = ptxas_report(one.compiled.asm["ptx"])
        assert "serializ" not in report, report
        assert spilled_bytes(report) <= SPILLED[dim], report
        assert_synchronised(one.compiled.asm["ptx"], by_tma=one.name == "selected_backward")
        assert not reused_barriers(one.compiled.asm["ptx"])
        assert not shared_addresses(one.compiled)


def assert_synchronised(ptx: str, *, by_tma: bool) -> None:
    """Barriers are visible to TMA before it signals them, and no warp gives a tile back before the
    products of all four have read it."""
    events = r"mbarrier\.init|mbarrier\.arrive\.shared|fence\.proxy\.async"
    events += r"|bar(?:rier|\.warp)?\.sync|cp\.async\.bulk|wgmma\.wait_group|mbarrier\.try_wait"
    order = re.findall(events, ptx)
    last_init = len(order) - 1 - order[::-1].index("mbarrier.init")
    assert order[last_init + 1 : last_init + 3] == ["fence.proxy.async", "bar.sync"]
    assert "cp.async.bulk" in order[last_init:]
    given_back = [i for i, what in enumerate(order) if what == "mbarrier.arrive.shared"]
    meet = {order[i - 1] for i in given_back}
    # Of the consumers, and by TMA of the warps that store.
    assert meet == ({"bar.sync", "bar.warp.sync"} if by_tma else {"bar.sync"}), meet


def test_a_barrier_that_nobody_waits_for_shares_its_place():
    """What reused_barriers looks for, in a kernel of a few lines."""
    for used in (True, False):
        source = GluonASTSource(waiting, {"p_x": "*i32", "USED": "constexpr"}, {"USED": used})
        one = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
        assert bool(reused_barriers(one.asm["ptx"])) is not used


@gluon.jit  # type: ignore[untyped-decorator]
def waiting(p_x, USED: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    x = gl.load(p_x)
    gl.warp_specialize([(arrive, (bar, USED)), (wait_and_add, (p_x, x, bar, USED))], [1], [24])


@gluon.jit  # type: ignore[untyped-decorator]
def wait_and_add(p_x, x, bar, USED: gl.constexpr):
    if USED:
        mbarrier.wait(bar, 0)
    gl.store(p_x + 1, x + 1)


@gluon.jit  # type: ignore[untyped-decorator]
def arrive(bar, USED: gl.constexpr):
    if USED:
        mbarrier.arrive(bar)


# --- Its results ---


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of the launches of the kernels, whether they were ordered; there must be some."""
    from nsa.ops.triton.hopper import selected, selected_rows

    monkeypatch.setattr(problem, "HOPPER", True)
    problem._kept.clear()
    seen: list[bool] = []

    def noted(real: Any, *args: Any, ordered: bool) -> None:
        if not args[2].is_meta:  # such a call compiles ahead
            seen.append(ordered)
        real(*args, ordered=ordered)

    for module in (selected, selected_rows):
        monkeypatch.setattr(module, "backward", partial(noted, module.backward))
    yield seen
    assert seen


CASES = {
    "two rows of odd length": ("bf16", Case(FEW, S=1187, B=2, Hkv=2, G=16, Dk=128, Dv=128)),
    "fp16": ("fp16", Case(FEW, S=1001, Hkv=1, G=16, Dk=128, Dv=128)),
    "documents": ("bf16", Case(FEW, S=1201, Hkv=2, G=24, Dk=64, Dv=64, docs=(1, 600, 600))),
    "32 heads": ("fp16", Case(FEW, S=900, B=2, Hkv=1, G=32, Dk=128, Dv=128)),
    "64 heads": ("bf16", Case(FEW, S=777, Hkv=2, G=64, Dk=64, Dv=64)),
    "40 heads": ("bf16", Case(FEW, S=640, Hkv=1, G=40, Dk=128, Dv=128)),
    "4 heads": ("bf16", Case(FEW, S=1187, B=2, Hkv=2, G=4, Dk=128, Dv=128)),
    "3 heads": ("fp16", Case(FEW, S=1001, Hkv=2, G=3, Dk=64, Dv=64)),
    "6 heads": ("bf16", Case(FEW, S=1187, B=2, Hkv=2, G=6, Dk=64, Dv=64)),
    "6 heads, documents": ("fp16", Case(FEW, S=1201, Hkv=2, G=6, Dk=64, Dv=64, docs=(1, 600, 600))),
    "5 heads": ("bf16", Case(FEW, S=900, Hkv=1, G=5, Dk=128, Dv=128)),
    "10 heads": ("fp16", Case(FEW, S=900, Hkv=1, G=10, Dk=64, Dv=64)),
    "1 head": ("bf16", Case(FEW, S=900, Hkv=3, G=1, Dk=128, Dv=128)),
}
SPLIT = [
    Case(FEW, S=1100, Hkv=2, G=16, Dk=128, Dv=128),
    Case(FEW, S=1100, Hkv=2, G=4, Dk=128, Dv=128),
]


@pytest.mark.parametrize("name", marked(*CASES))
def test_gradients_equal_float64(name, taken):
    dtype, case = CASES[name]
    compare(case, DTYPES[dtype])


@pytest.mark.parametrize("case", marked(CASES["fp16"][1]))
def test_a_block_that_all_queries_chose_has_several_items(case, taken):
    selection = torch.full((1, case.S, 1, 4), -1, dtype=torch.int32, device=DEVICE)
    selection[..., 0] = 0
    compare(case, torch.float16, selection)


@pytest.mark.parametrize(
    "case",
    marked(
        Case(FEW, S=3001, B=2, Hkv=2, G=16, Dk=128, Dv=128),
        Case(FEW, S=3001, B=2, Hkv=2, G=6, Dk=64, Dv=64),
    ),
)
def test_deterministic_mode_repeats_and_is_near_the_triton_kernel(case, taken, monkeypatch):
    case = on_device(case)
    inputs, dout = device_inputs(case, torch.bfloat16), device_dout(case, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        _, first = forward_backward(case, inputs, dout)
        for _ in range(5):
            _, again = forward_backward(case, inputs, dout)
            assert all(torch.equal(again[name], first[name]) for name in first)
        assert all(taken)
        monkeypatch.setattr(problem, "HOPPER", False)
        problem._kept.clear()
        _, expected = forward_backward(case, inputs, dout)
    finally:
        torch.use_deterministic_algorithms(False)
        problem._kept.clear()
    assert_near_gradients(first, expected, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("case", marked(*SPLIT))
def test_heads_between_others_in_memory_are_read_in_place(case, taken):
    """q, k and v as slices of one projection, as a model may give them."""
    case = on_device(case)
    inputs, dout = device_inputs(case, torch.bfloat16), device_dout(case, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        _, expected = forward_backward(case, inputs, dout)
        fused = torch.cat([inputs["q"], inputs["k_sel"], inputs["v_sel"]], dim=2)
        q, k, v = fused.split([2 * case.G, 2, 2], dim=2)
        _, grads = forward_backward(case, inputs | dict(q=q, k_sel=k, v_sel=v), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
