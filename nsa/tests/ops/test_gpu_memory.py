"""Where the kernels read and write, nothing but their own tensors, however far apart these lie; and
how much memory a call takes beside them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, compress
from nsa.ops.triton import problem
from nsa.ops.triton.launcher import ceil_div
from nsa.ops.triton.replay.tape import EMPTY
from nsa.ops.triton.selected.block_index import ZERO_BLOCK, zero_two
from nsa.tests.support.gpu import (
    DEVICE,
    ROUNDING,
    TOLERANCE,
    assert_near_gradients,
    device_dout,
    device_inputs,
    forward_backward,
    needs_gpu,
    on_device,
)
from nsa.tests.support.helpers import NAMES, Case, assert_near, run

pytestmark = needs_gpu

NAN_WORD = 0x7FFF7FFF
"""A NaN as one float32, as two bfloat16 and as two float16; as an int32 far out of any range."""
FEW = BlockSpec(n_sel=4)
SURROUNDED = [
    (torch.bfloat16, Case(FEW, S=3000, Hkv=2, G=6, Dk=64, Dv=64)),
    (torch.bfloat16, Case(FEW, S=1500, B=2, Hkv=1, G=16, Dk=128, Dv=128)),
    (torch.float16, Case(BlockSpec(l_sel=48, n_sel=5, w=70), S=2001, Hkv=2, G=3, Dk=80, Dv=48)),
    (torch.bfloat16, Case(BlockSpec(), S=1100, Hkv=2, G=5, Dk=96, Dv=32, docs=(1, 65, 1034))),
    (torch.float32, Case(FEW, S=1600, Hkv=1, G=4, Dk=64, Dv=128)),
    (torch.float32, Case(BlockSpec(), S=7, B=2, Hkv=3, G=2, Dk=16, Dv=16)),
]
FAR = Case(BlockSpec(l=32, d=16, l_sel=32, n_sel=3, w=40), S=500, B=2, Hkv=2, G=3, Dk=64, Dv=32)
FAR_IN_GLUON = Case(FEW, S=700, B=2, Hkv=2, G=4, Dk=64, Dv=64)
"""With blocks and heads that the kernels in hopper/ take, where they are asked to."""
DIMS = {"batch": 0, "token": 1, "head": 2}
HAS_H200 = (
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 130 << 30
)
INDEX_LIMIT = 1 << 31
"""The first element that an int32 cannot point at."""


@pytest.mark.parametrize(("dtype", "case"), SURROUNDED, ids=str)
def test_fresh_memory_full_of_nan_changes_nothing(dtype, case, monkeypatch):
    """Memory that torch.empty hands out inside the operator."""
    case = on_device(case)
    inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
    clean = forward_backward(case, inputs, dout)
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", _poisoning(Tensor.new_empty))
    # Calls that are replayed allocate by it.
    monkeypatch.setitem(EMPTY, True, _poisoning(EMPTY[True]))
    assert torch.empty(3, device=DEVICE).isnan().all()
    _assert_same(forward_backward(case, inputs, dout), clean, dtype)


@pytest.mark.parametrize(("dtype", "case"), SURROUNDED, ids=str)
def test_free_memory_full_of_nan_changes_nothing(dtype, case):
    """Memory beside every tensor, and what libraries take from the allocator."""
    case = on_device(case)
    inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
    clean = forward_backward(case, inputs, dout)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    _fill_free_memory()
    out = run(case, leaves, "triton")
    _fill_free_memory()
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    _assert_same((out.detach(), dict(zip(leaves, grads, strict=True))), clean, dtype)


@pytest.mark.parametrize(("dtype", "case"), SURROUNDED, ids=str)
def test_views_into_a_buffer_of_nan_are_read_and_nothing_beside_them(dtype, case):
    case = on_device(case)
    inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
    clean = forward_backward(case, inputs, dout)
    views = {name: _inside_nan(x) for name, x in inputs.items()}
    _assert_same(forward_backward(case, views, _inside_nan(dout)), clean, dtype)
    for name in ("k_sel", "v_sel"):
        args = dict(spec=case.spec, cu_seqlens=case.cu_seqlens, backend="triton")
        assert torch.equal(compress(views[name], **args), compress(inputs[name], **args))


@pytest.mark.parametrize(
    ("dim", "names"),
    [
        *[("token", kind) for kind in ("q", "k", "v", "gates", "dout", "all")],
        ("batch", "all"),
        ("head", "all"),
    ],
)
def test_strides_that_reach_beyond_int32(dim, names):
    """The last index of `dim` lies beyond 2^31 elements from the first, in these tensors."""
    _compare_far(FAR, dim, names)


@pytest.mark.parametrize("dim", DIMS)
def test_kernels_in_gluon_take_strides_that_reach_beyond_int32(dim, monkeypatch):
    """Both passes of the selected branch on a GPU that has them, else as above."""
    monkeypatch.setattr(problem, "HOPPER", True)
    problem._kept.clear()
    _compare_far(FAR_IN_GLUON, dim, "all")
    problem._kept.clear()


def _compare_far(case: Case, dim: str, names: str) -> None:
    dtype = torch.bfloat16
    tensors = device_inputs(case, dtype) | {"dout": device_dout(case, dtype)}
    far = {
        name: _far(x, DIMS[dim]) if names in ("all", name.split("_")[0]) else x
        for name, x in tensors.items()
    }
    dout, far_dout = tensors.pop("dout"), far.pop("dout")
    clean = forward_backward(case, tensors, dout)
    _assert_same(forward_backward(case, far, far_dout), clean, dtype)


@pytest.mark.parametrize("dim", DIMS)
def test_compression_takes_strides_that_reach_beyond_int32(dim):
    x = device_inputs(FAR, torch.bfloat16)["k_sel"]
    near, far = (y.detach().requires_grad_() for y in (x, _far(x, DIMS[dim])))
    expected, actual = (compress(y, FAR.spec, backend="triton") for y in (near, far))
    dout = torch.cos(torch.arange(expected.numel(), device=DEVICE)).view_as(expected)
    dout = dout.to(x.dtype)
    assert torch.equal(actual, expected)
    (expected_grad,) = torch.autograd.grad(expected, near, dout)
    (grad,) = torch.autograd.grad(actual, far, _far(dout, DIMS[dim]))
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("dim", [128, 64])
def test_tensors_of_more_than_2_to_the_31_elements(dim):
    """Some rows from the start to the end, each against its own exact value and gradient. With
    narrow heads the gradients come from one pass, where there is one."""
    spec = BlockSpec(n_sel=4, w=64)
    case = Case(spec, S=(1 << 25) // dim + 100, Hkv=4, G=16, Dk=dim, Dv=dim)
    inputs, dout = _large_inputs(case)
    assert inputs["q"].numel() > INDEX_LIMIT and dout.numel() > INDEX_LIMIT
    selection = _spread_selection(case)
    out, grads = forward_backward(case, inputs, dout, selection=selection)
    rows = [0, 1, 64, 1000, case.S // 2, case.S - 101, case.S - 100, case.S - 2, case.S - 1]
    exact = [_exact_row(case, inputs, selection, t, dout[0, t]) for t in rows]
    actual = {"out": out, "q": grads["q"], "gates": grads["gates"]}
    for name, x in actual.items():
        expected = torch.stack([row[name] for row in exact])
        assert_near(x[0, rows], expected, 2 * TOLERANCE[x.dtype], name)
    for name in ("k_sel", "v_sel", "k_win", "v_win"):  # the last query alone sees the last token
        assert_near(grads[name][0, -1], exact[-1][name], 2 * TOLERANCE[torch.bfloat16], name)
    for name, grad in grads.items():
        assert all(part.isfinite().all() for part in grad.split(1 << 14, dim=1)), name


def test_more_numbers_than_an_int32_counts_are_set_to_0():
    for size in (INDEX_LIMIT - 1, INDEX_LIMIT + 1):
        x, y = (torch.ones(n, dtype=torch.int8, device=DEVICE) for n in (size, 10))
        grid = (ceil_div(size, ZERO_BLOCK) + 1,)
        zero_two[grid](x, y, size, 10, BLOCK=ZERO_BLOCK)
        assert not x.any() and not y.any()


def test_memory_of_a_call_is_linear_in_its_length():
    """Peak of forward and backward beyond inputs, output and gradients, 12/2/64."""
    peaks = {length: _peak_bytes(_case(length, 2, 6, 64)) for length in (1 << 16, 1 << 18)}
    assert peaks[1 << 16] <= 1.3e9
    # Partial results and scores have fixed limits, so that a longer call takes less than its share.
    assert peaks[1 << 18] <= 4 * peaks[1 << 16]


@pytest.mark.skipif(not HAS_H200, reason="needs a GPU with 130 GiB of memory")
def test_forward_and_backward_of_a_million_tokens_fit():
    """32/8/128; 64 GiB beyond inputs, output and gradients, which are 49.

    No other process may use the GPU meanwhile.
    """
    assert _peak_bytes(_case(1 << 20, 8, 4, 128)) <= 64 << 30


def _case(length: int, num_groups: int, per_group: int, dim: int) -> Case:
    return Case(BlockSpec(), S=length, Hkv=num_groups, G=per_group, Dk=dim, Dv=dim)


def _peak_bytes(case: Case) -> int:
    """Most memory in use during a call, beyond what is left of it."""
    inputs, dout = _large_inputs(case)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kept = forward_backward(case, inputs, dout)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    out, grads = kept
    rows = [0, case.S // 2, case.S - 1]
    assert all(x[0, rows].isfinite().all() for x in (out, grads["q"], grads["k_sel"]))
    return beyond


def _assert_same(
    actual: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Outputs bit for bit; gradients but for the order of sums."""
    assert torch.equal(actual[0], expected[0])
    assert_near_gradients(actual[1], expected[1], ROUNDING[dtype])


def _poisoning(make):
    def make_and_fill(*args, **options):
        x = make(*args, **options)
        return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)

    return make_and_fill


def _fill_free_memory() -> None:
    """Make the allocator's free blocks NaN, in its pool of small blocks and in that of large."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    options: dict[str, Any] = dict(dtype=torch.int32, device=DEVICE)
    small = [torch.full((1 << 18,), NAN_WORD, **options) for _ in range(64)]  # 1 MiB each
    large = torch.full((1 << 30,), NAN_WORD, **options)
    del small, large
    torch.cuda.synchronize()


def _inside_nan(x: Tensor) -> Tensor:
    """The same values with NaN before and after the sequence, between heads, and after each."""
    batch, length, heads, dim = x.shape
    buffer = x.new_full((batch, length + 10, 2 * heads + 1, dim + 8), torch.nan)
    view = buffer[:, 5 : 5 + length, 1::2, :dim]
    view.copy_(x)
    return view


def _far(x: Tensor, dim: int) -> Tensor:
    """The same values, with a stride of `dim` by which its last index lies beyond INDEX_LIMIT."""
    stride = INDEX_LIMIT // (x.shape[dim] - 1) // 16 * 16 + 16  # aligned as rows usually are
    sizes = [size for i, size in enumerate(x.shape) if i != dim]
    inner = list(x.new_empty(sizes).stride())
    assert inner[0] * sizes[0] <= stride, "the rows would overlap"
    strides = inner[:dim] + [stride] + inner[dim:]
    num_elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    view = x.new_full((num_elements,), torch.nan).as_strided(x.shape, strides)
    return view.copy_(x)


def _large_inputs(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and dout in bf16, made on the device."""
    torch.manual_seed(0)
    heads = case.Hkv * case.G

    def normal(*size: int) -> Tensor:
        return torch.randn(1, *size, dtype=torch.bfloat16, device=DEVICE)

    inputs = {"q": normal(case.S, heads, case.Dk)}
    for branch, length in (("cmp", case.spec.num_cmp(case.S)), ("sel", case.S), ("win", case.S)):
        inputs[f"k_{branch}"] = normal(length, case.Hkv, case.Dk)
        inputs[f"v_{branch}"] = normal(length, case.Hkv, case.Dv)
    inputs["gates"] = normal(case.S, heads, 3).softmax(dim=-1)
    return inputs, normal(case.S, heads, case.Dv)


def _spread_selection(case: Case) -> Tensor:  # [1, S, Hkv, 4] int32
    """The forced blocks and the one in the middle of the past."""
    current = torch.arange(case.S, device=DEVICE) // case.spec.l_sel
    ids = torch.stack([torch.zeros_like(current), current // 2, current - 1, current], dim=-1)
    ids = ids.clamp(min=0)
    for place, before in reversed(list(pairwise(range(4)))):
        ids[:, before] = torch.where(ids[:, before] == ids[:, place], -1, ids[:, before])
    far = case.spec.num_blocks(case.S)
    ids = torch.where(ids < 0, far, ids).sort(dim=-1).values
    ids = torch.where(ids == far, -1, ids).to(torch.int32)
    return ids[None, :, None].expand(-1, -1, case.Hkv, -1).contiguous()


def _exact_row(
    case: Case, inputs: dict[str, Tensor], selection: Tensor, t: int, dout: Tensor
) -> dict[str, Any]:
    """Output and gradients of query t in float64, from the tokens that it sees and no others.

    The gradients of keys and values are those of token t itself, in the selected branch and in
    the window: complete where no later query exists.
    """
    spec = case.spec
    q = inputs["q"][0, t].double().requires_grad_()
    gates = inputs["gates"][0, t].double().requires_grad_()
    inside = torch.arange(spec.l_sel, device=q.device)
    outs = []
    leaves: dict[str, Any] = {name: [] for name in NAMES}
    for group in range(case.Hkv):
        blocks = selection[0, t, group]
        tokens = (blocks[blocks >= 0, None] * spec.l_sel + inside).flatten()
        seen = {
            "cmp": torch.arange(spec.num_cmp(t + 1), device=q.device),
            "sel": tokens[tokens <= t],
            "win": torch.arange(max(t + 1 - spec.w, 0), t + 1, device=q.device),
        }
        heads = slice(group * case.G, (group + 1) * case.G)
        branches = []
        for branch, index in seen.items():
            k, v = (inputs[f"{x}_{branch}"][0, index, group].double() for x in "kv")
            leaves[f"k_{branch}"].append(k.requires_grad_())
            leaves[f"v_{branch}"].append(v.requires_grad_())
            branches.append((q[heads] @ k.T * case.Dk**-0.5).softmax(dim=-1) @ v)
        outs.append((gates[heads, :, None] * torch.stack(branches, dim=1)).sum(dim=1))
    out = torch.cat(outs)
    out.backward(dout.double())
    exact = {"out": out.detach(), "q": q.grad, "gates": gates.grad}
    for name in ("k_sel", "v_sel", "k_win", "v_win"):
        exact[name] = torch.stack([x.grad[-1] for x in leaves[name]])
    return exact
