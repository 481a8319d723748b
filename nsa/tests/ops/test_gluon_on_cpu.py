"""The kernels in hopper/ against float64 without a GPU: as Python (support/gluon.py), beside the
others in Triton's interpreter.

test_triton_on_cpu.py runs this file with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, sparse_attention
from nsa.ops import machine, plan
from nsa.ops.triton import problem
from nsa.ops.triton.bands import flash
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected import block_index
from nsa.tests.ops.test_routes import PLAIN
from nsa.tests.support import gluon
from nsa.tests.support.decoding import SEGMENTS, assert_both_ways_agree
from nsa.tests.support.gpu import (
    DEVICE,
    GRAD_TOLERANCE,
    compare,
    device_dout,
    device_inputs,
    forward_backward,
)
from nsa.tests.support.helpers import Case, assert_near

ON_CPU = machine.interpreted() and DEVICE == "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_CPU, reason="needs the interpreter")]
if ON_CPU:
    gluon.install()

BANDS = {"gluon_forward", "gluon_dkv"}


class Example(NamedTuple):
    """Heads and tokens, whether the selected branch masks the past, the kernels that run, and
    whether one pass gives all gradients of window and compressed branch."""

    case: Case
    masked: bool
    kernels: set[str]
    one_pass: bool = False


FEW = BlockSpec(n_sel=3, w=100)
EXAMPLES = {
    "16 heads": Example(
        Case(FEW, S=197, Hkv=1, G=16, Dk=64, Dv=64),
        False,
        BANDS | {"gluon_dq", "selected_forward", "selected_backward"},
    ),
    "2 heads of 128": Example(
        Case(FEW, S=193, Hkv=1, G=2, Dk=128, Dv=128),
        False,
        BANDS | {"gluon_dq", "selected_forward", "selected_rows_backward"},
    ),
    "6 heads in a fixed order": Example(
        Case(FEW, S=261, Hkv=1, G=6, Dk=64, Dv=64),
        False,
        BANDS | {"gluon_dq", "selected_forward", "selected_rows_backward"},
    ),
    "10 heads of 128, more than a round": Example(
        Case(BlockSpec(l=64, d=32, n_sel=3, w=64), S=130, Hkv=1, G=10, Dk=128, Dv=128),
        False,
        BANDS | {"gluon_dq", "selected_forward", "selected_rows_backward"},
    ),
    "documents": Example(
        Case(FEW, S=200, Hkv=2, G=3, Dk=64, Dv=64, docs=(1, 79, 120)),
        False,
        {"selected_forward", "selected_rows_backward"},
    ),
    # More blocks than are chosen: otherwise the mask is that of causal attention.
    "a masked past and a narrow window": Example(
        Case(BlockSpec(n_sel=3, w=63), S=259, B=2, Hkv=1, G=2, Dk=64, Dv=64),
        True,
        BANDS | {"gluon_dq"},
    ),
    "a masked past and no compressed token": Example(
        Case(BlockSpec(l=320, n_sel=3, w=80), S=270, Hkv=1, G=4, Dk=128, Dv=128),
        True,
        BANDS | {"gluon_dq"},
    ),
    "one pass, its slots used again": Example(
        Case(BlockSpec(l=16, d=4, n_sel=3, w=100), S=401, Hkv=1, G=3, Dk=64, Dv=64),
        False,
        BANDS | {"selected_forward", "selected_rows_backward"},
        True,
    ),
}
LONG_ITEMS = {"16 heads", "2 heads of 128", "10 heads of 128, more than a round"}
"""All queries of a block are one item: buffers are used again, as in long sequences."""


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short calls take the kernels, too, as if the CPU were that GPU."""
    monkeypatch.setattr(Problem, "_takes_hopper", True)
    monkeypatch.setattr(problem, "HOPPER", True)
    monkeypatch.setattr(problem, "FULL_ENOUGH", 0.0)
    monkeypatch.setattr(problem, "COMPRESSED_FROM", 0)
    for name in ("COMPRESSED_DIMS", "MASKED_DIMS"):
        monkeypatch.setattr(problem, name, (64, 128))
    monkeypatch.setattr(problem, "MASKED_TILES", 0)
    problem.forget()
    gluon.launched.clear()
    yield
    problem.forget()


@pytest.mark.parametrize("name", EXAMPLES)
def test_outputs_and_gradients_equal_float64(name, monkeypatch):
    case, masked, kernels, one_pass = EXAMPLES[name]
    monkeypatch.setattr(problem, "ONE_PASS_FROM", 0 if one_pass else problem.MAX_TOKENS + 1)
    monkeypatch.setattr(problem, "BY_BLOCK_BEYOND", 2 if masked else 0)
    monkeypatch.setattr(problem, "H200_PROCESSORS", 7)
    if name in LONG_ITEMS:
        monkeypatch.setattr(block_index, "MIN_PIECE", 256)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms("order" in name)
    try:
        compare(case, torch.float16)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert set(gluon.launched) == kernels


def test_a_nan_stays_in_its_batch_element_in_one_pass(monkeypatch):
    """Tiles of queries reach beyond the end of a row, to the next."""
    monkeypatch.setattr(problem, "ONE_PASS_FROM", 0)
    monkeypatch.setattr(problem, "BY_BLOCK_BEYOND", 0)
    case = Case(BlockSpec(n_sel=3, w=63), S=100, B=2, Hkv=1, G=2, Dk=64, Dv=64)
    inputs, dout = device_inputs(case, torch.float16), device_dout(case, torch.float16)
    wide = {name: x.double() for name, x in inputs.items()}
    _, wanted = forward_backward(case, wide, dout.double(), "torch")
    inputs["v_cmp"][0, 1] = inputs["v_win"][0, -1] = torch.nan
    _, found = forward_backward(case, inputs, dout)
    assert found["q"][0].isnan().any()
    assert_near(found["q"][1], wanted["q"][1], GRAD_TOLERANCE[torch.float16])
    assert "gluon_dkv" in gluon.launched and "gluon_dq" not in gluon.launched


def test_one_pass_adds_the_gradient_of_a_window_that_another_library_computes(monkeypatch):
    """With a plain softmax in the place of the flash kernels."""
    monkeypatch.setattr(problem, "ONE_PASS_FROM", 0)
    monkeypatch.setattr(problem, "BY_BLOCK_BEYOND", 0)
    monkeypatch.setattr(flash, "TORCH", PLAIN)
    monkeypatch.setattr(plan, "_flash_obstacle", lambda *_: "")
    monkeypatch.setenv("NSA_USE_FA2_WIN", "1")
    plan._plan.cache_clear()
    try:
        compare(Case(FEW, S=139, Hkv=1, G=2, Dk=64, Dv=64), torch.float16)
    finally:
        plan._plan.cache_clear()
    assert gluon.launched.count("gluon_dkv") == 1 and "gluon_dq" not in gluon.launched


def test_gradients_of_a_document_with_a_nan_are_nan_and_those_of_no_other():
    """NaN is replaced by 0 before the kernels run; the log-sum-exps of the document carry it."""
    q = torch.randn(1, 150, 2, 64, dtype=torch.float16)
    k, v = torch.randn(2, 1, 150, 1, 64, dtype=torch.float16)
    v[0, 70] = torch.nan  # the first token of the second document
    leaves = [x.requires_grad_() for x in (q, k, v.detach())]
    index = torch.arange(2, dtype=torch.int32).expand(1, 150, 1, 2)
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32)
    out = sparse_attention(*leaves, index, block=64, cu_seqlens=bounds, backend="triton")
    for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
        assert grad[:, :70].isfinite().all() and grad[:, 70:].isnan().all()
    assert {"selected_forward", "selected_rows_backward"} <= set(gluon.launched)


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_decode_step_by_segment_is_that_of_several_launches(name, monkeypatch):
    assert_both_ways_agree(SEGMENTS[name], monkeypatch)
    assert set(gluon.launched) == {"step_by_segment"}


# --- what is wrong is found ---


def run_roles(role: Any, other: Any, tensor: torch.Tensor | None = None) -> None:
    """A program of two roles, which share a barrier and a buffer of four rows of 64."""
    gl, mbarrier = gluon.language(), gluon.mbarrier

    def kernel(p_x: Any) -> None:
        barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier, 1)
        buf = gl.allocate_shared_memory(gl.float32, [4, 64], gl.NVMMASharedLayout(128, 32))
        one = SimpleNamespace(p_x=p_x, barrier=barrier, buf=buf)
        gl.warp_specialize([(role, (one,)), (other, (one,))], [1], [24])

    gluon.jit(kernel)[(1,)](torch.ones(4, 64) if tensor is None else tensor)


def nothing(one: Any) -> None:
    pass


def test_a_phase_that_nobody_completes_is_an_error(monkeypatch):
    run_roles(lambda one: gluon.mbarrier.wait(one.barrier, 1), nothing)  # as if it had just ended
    run_roles(
        lambda one: gluon.mbarrier.wait(one.barrier, 0),
        lambda one: gluon.mbarrier.arrive(one.barrier),
    )
    monkeypatch.setattr(gluon, "SECONDS", 0.4)
    with pytest.raises(AssertionError, match="nobody completes this phase"):
        run_roles(lambda one: gluon.mbarrier.wait(one.barrier, 0), nothing)


def test_addresses_outside_of_a_tensor_are_an_error():
    gl = gluon.language()
    for at, mask, is_wrong in ((255, None, False), (256, None, True), (256, False, False)):

        def role(one: Any, at: int = at, mask: Any = mask) -> None:
            gl.store(one.p_x + at, gl.load(one.p_x + at, mask=mask, other=0.0), mask=mask)

        if is_wrong:
            with pytest.raises(AssertionError, match="outside of the tensor"):
                run_roles(role, nothing)
        else:
            run_roles(role, nothing)


def test_a_copy_reads_zeros_outside_of_the_tensor_and_shared_memory_begins_as_nan():
    x = torch.arange(128.0).view(2, 64)
    found = []

    def role(one: Any) -> None:
        t = gluon.TensorDescriptor(x, x.shape, x.stride(), (4, 64), gluon.Layout(128))
        found.append(one.buf.load())
        gluon.mbarrier.expect(one.barrier, 4 * 64 * 4)
        gluon.tma.async_copy_global_to_shared(t, [-1, 0], one.barrier, one.buf)
        gluon.mbarrier.wait(one.barrier, 0)
        found.append(one.buf.load())
        gluon.tma.async_copy_shared_to_global(t, [0, 0], one.buf)
        gluon.tma.store_wait(0)

    run_roles(role, nothing)
    assert found[0].isnan().all()
    assert torch.equal(found[1][1:3].as_subclass(torch.Tensor), torch.arange(128.0).view(2, 64))
    assert not found[1][[0, 3]].any()
    assert torch.equal(x[1], torch.arange(64.0)) and not x[0].any()


def test_products_are_made_when_they_are_waited_for():
    gl = gluon.language()
    ones = gluon.as_value(torch.ones(4, 4, dtype=torch.float16))
    none = gluon.as_value(torch.zeros(4, 4))

    def role(one: Any) -> None:
        right = gl.allocate_shared_memory(gl.float16, [4, 4], gl.NVMMASharedLayout(128, 16))
        right.store(ones)
        first = gluon.warpgroup_mma(ones, right, none, use_acc=False, is_async=True)
        second: Any = gluon.warpgroup_mma(ones, right, first, is_async=True)
        first = gluon.warpgroup_mma_wait(1, deps=(first,))
        assert (first == 4).all()
        right.store(2 * ones)  # too early
        with pytest.raises(TypeError):
            second + 1
        second = gluon.warpgroup_mma_wait(0, deps=(second,))
        assert (second == 12).all()

    run_roles(role, nothing)
    with pytest.raises(AssertionError, match="not waited for"):
        run_roles(lambda _: gluon.warpgroup_mma(ones, ones, none, is_async=True), nothing)


def test_panels_lie_one_after_the_other():
    """As TMA writes tiles of more than 128 bytes in a row, and other views of their memory read."""
    gl = gluon.language()
    tile = gl.allocate_shared_memory(gl.float16, [2, 64, 128], gl.NVMMASharedLayout(128, 16))
    x = torch.arange(64 * 128).view(64, 128).to(torch.float16)
    tile.index(1).store(x)
    panels = tile._reinterpret(gl.float16, [4, 64, 64], gl.NVMMASharedLayout(128, 16))
    assert torch.equal(panels.index(3).load().as_subclass(torch.Tensor), x[:, 64:])
    assert torch.equal(tile.index(1).permute((1, 0)).load().as_subclass(torch.Tensor), x.T)
    assert torch.equal(tile.index(1).slice(16, 8).load().as_subclass(torch.Tensor), x[16:24])
