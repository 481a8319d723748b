"""Calls that are replayed equal calls that run anew, and nothing wrong gets through unchecked.

test_triton_on_cpu.py runs those that are marked `gpu` with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, compress, nsa_attention
from nsa.ops import reference
from nsa.ops.triton import operators, problem
from nsa.ops.triton import tiles as tile_sizes
from nsa.ops.triton.choice import best
from nsa.ops.triton.launcher import CachedLaunch
from nsa.ops.triton.replay import calls
from nsa.ops.triton.replay.recorder import Block, Recorder, record
from nsa.ops.triton.replay.tape import BLOCK_STEP, MAX_CALLS, Form, Launched, Pointer, Tape
from nsa.tests.support.gpu import DEVICE, on_gpu

attention: Any = nsa_attention
"""Its overloads take no starred arguments."""
SPEC = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
ORDERS = ("masked", "by-block", "by-query")
TAPES = {"mean", "mean_backward", "forward", "backward"}


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    problem._kept.clear()
    yield
    problem._kept.clear()


@pytest.fixture
def force_order(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the selected branch take one of its loop orders."""

    def force(order: str) -> None:
        monkeypatch.setattr(problem, "BY_BLOCK_BEYOND", 1 << 30 if order == "masked" else 0)
        monkeypatch.setattr(tile_sizes, "BY_QUERY_FROM", 1 if order == "by-query" else 1 << 30)

    return force


def make(seed: int, length: int = 37, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """q, what keys and values are compressed from, those of sel and win, gates, dout."""
    torch.manual_seed(seed)
    sizes = [(1, length, 2, 16), *[(1, length, 1, 16)] * 6, (1, length, 2, 3), (1, length, 2, 16)]
    return [torch.randn(size, dtype=dtype).to(DEVICE) for size in sizes]


def attend(tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, selection and gradients."""
    *inputs, dout = tensors
    q, raw_k, raw_v, *rest = leaves = [x.detach().requires_grad_() for x in inputs]
    cmp = [compress(x, SPEC, backend="triton") for x in (raw_k, raw_v)]
    options = {"backend": "triton", "return_selection": True} | options
    out, ids = attention(q, *cmp, *rest, SPEC, **options)
    return out.detach(), ids, list(torch.autograd.grad(out, leaves, dout))


def attend_anew(tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    problem._kept.clear()
    return attend(tensors, **options)


def assert_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    for number, (x, y) in enumerate(zip(one[2], other[2], strict=True)):
        # Several programs add to the gradients of selected keys and values, in any order.
        close = torch.equal(x, y) or (DEVICE == "cuda" and number in (3, 4))
        assert close and torch.allclose(x, y, atol=1e-2), f"gradient {number}"


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_a_replay_equals_a_call_that_runs_anew(order: str, force_order: Any) -> None:
    force_order(order)
    first, second = make(0), make(1)
    expected = [attend_anew(second), attend_anew(first)]
    kinds = {key[0]: value for key, value in problem._kept.items() if isinstance(key[0], str)}
    assert all(isinstance(kinds[name], Tape) for name in TAPES)
    for tensors, done in zip((second, first), expected, strict=True):
        assert_equal(attend(tensors), done)


@pytest.mark.gpu
def test_tensors_that_were_one_may_be_two_in_a_replay() -> None:
    """Recorded with the same keys for selection and window."""
    shared = make(0)
    shared[5], shared[6] = shared[3], shared[4]
    attend_anew(shared)
    apart = make(1)
    found = attend(apart)
    assert_equal(found, attend_anew(apart))


@pytest.mark.gpu
def test_strided_and_misaligned_tensors_are_read_where_they_are() -> None:
    """Recorded from whole tensors; the others have the same sizes, not the same places."""
    whole = make(0)
    expected = attend_anew(whole)
    attend_anew(make(1))
    assert_equal(attend([shifted(x) for x in whole]), expected)
    strided = [inside(x) for x in whole[:-1]] + whole[-1:]
    for _ in range(2):  # recorded, then replayed
        assert_equal(attend(strided), expected)
    assert_equal(attend([*map(shifted, strided[:-1]), strided[-1]]), expected)


def inside(x: Tensor) -> Tensor:
    """x as a part of the heads of a larger tensor, as a projection gives it."""
    wide = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), torch.nan, dtype=x.dtype)
    wide = wide.to(DEVICE)
    wide[:, :, 2:-1] = x
    return wide[:, :, 2:-1]


def shifted(x: Tensor) -> Tensor:
    """x with the same strides, at an address that is no multiple of 16."""
    first = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    memory = torch.zeros(first + 2, dtype=x.dtype, device=DEVICE)
    return memory.as_strided(x.shape, x.stride(), 1).copy_(x)


@pytest.mark.gpu
def test_packed_documents_run_anew_each_time() -> None:
    tensors = make(0)
    bounds = torch.tensor([0, 20, tensors[0].shape[1]], dtype=torch.int32)
    q, raw_k, raw_v, *rest = tensors[:-1]

    def run() -> Tensor:
        cmp = [compress(x, SPEC, cu_seqlens=bounds, backend="triton") for x in (raw_k, raw_v)]
        return attention(q, *cmp, *rest, SPEC, cu_seqlens=bounds, backend="triton")

    attend_anew(tensors)
    known = set(problem._kept)
    assert torch.equal(run(), run())
    assert set(problem._kept) == known


@pytest.mark.gpu
def test_deterministic_mode_has_tapes_of_its_own(force_order: Any) -> None:
    force_order("by-block")
    tensors = make(0)
    free = attend_anew(tensors)
    torch.use_deterministic_algorithms(True)
    try:
        ordered = attend(tensors)
        again = attend(tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    names = [key[0] for key in problem._kept]
    assert names.count("backward") == 2
    assert_equal(again, ordered)
    assert all(torch.equal(x, y) for x, y in zip(again[2], ordered[2], strict=True))
    assert_equal(attend(tensors), free)


@pytest.mark.gpu
def test_a_switch_counts_for_calls_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make(0)
    expected = attend_anew(tensors)
    attend(tensors)
    chosen: list[Any] = []
    choose = reference.select_blocks

    def select(*args: Any, **options: Any) -> Tensor:
        chosen.append(args)
        return choose(*args, **options)

    monkeypatch.setattr(reference, "select_blocks", select)
    monkeypatch.setenv("NSA_SEL_RANGES_V2", "0")  # the oracle chooses
    for _ in range(2):
        assert_equal(attend(tensors), expected)
    assert len(chosen) == 2
    monkeypatch.delenv("NSA_SEL_RANGES_V2")
    checked: list[Any] = []
    monkeypatch.setattr(best, "assert_selection", lambda *args: checked.append(args))
    monkeypatch.setenv("NSA_STRICT_ASSERTS", "1")
    for _ in range(2):
        assert_equal(attend(tensors), expected)
    assert len(checked) == 2


@pytest.mark.gpu
@on_gpu
def test_a_replay_can_be_captured() -> None:
    """In a graph, a call that is known reads what its tensors hold when the graph is replayed."""
    first, second = make(0), make(1)
    expected = attend_anew(second)
    held = [x.clone() for x in first]
    attend(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(held)
    for x, y in zip(held, second, strict=True):
        x.copy_(y)
    graph.replay()
    assert_equal(found, expected)


@pytest.mark.gpu
@on_gpu
def test_a_replay_runs_on_the_current_stream() -> None:
    tensors = make(0)
    expected = attend_anew(tensors)
    side = torch.cuda.Stream(torch.device(DEVICE))
    side.wait_stream(torch.cuda.current_stream(torch.device(DEVICE)))
    late = [torch.full_like(x, torch.nan) for x in tensors]
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        found = attend(late)
    side.synchronize()
    assert_equal(found, expected)


@pytest.mark.gpu
def test_what_is_no_launch_is_not_replayed() -> None:
    """Too short for a compressed token: torch fills the output of that branch."""
    tensors = make(0, length=5)
    expected = attend_anew(tensors)
    kinds = {key[0]: value for key, value in problem._kept.items()}
    assert kinds["forward"] is False and "attention" not in kinds
    assert_equal(attend(tensors), expected)


@pytest.mark.gpu
def test_a_known_form_lets_no_wrong_call_through() -> None:
    tensors = make(0)
    attend_anew(tensors)
    attend(tensors)
    *inputs, _ = tensors
    q, raw_k, raw_v, *rest = inputs
    cmp = [compress(x, SPEC, backend="triton") for x in (raw_k, raw_v)]
    given = [q, *cmp, *rest]
    for wrong, message in (
        (dict(scale=True), "is not a number"),
        (dict(backend="cuda"), "backend='cuda' is not known"),
        (dict(q_offset=1), "q_offset=1"),
        (dict(selection=torch.zeros(1)), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*given, SPEC, **({"backend": "triton"} | wrong))
    with pytest.raises(ValueError, match="spec is a str"):
        attention(*given, "sizes", backend="triton")
    for number, x in ((3, given[3][:, :-1]), (0, given[0].float()), (7, given[7][..., :2])):
        with pytest.raises(ValueError):
            attention(*given[:number], x, *given[number + 1 :], SPEC, backend="triton")
    with pytest.raises(ValueError, match="x is a list"):
        compress([1.0], SPEC, backend="triton")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_backward_pass_that_was_not_recorded_reads_the_packed_results() -> None:
    """The forward pass was replayed without gradients before the first backward pass."""
    tensors = make(0)
    expected = attend_anew(tensors)
    problem._kept.clear()
    with torch.no_grad():
        q, raw_k, raw_v, *rest = tensors[:-1]
        cmp = [compress(x, SPEC, backend="triton") for x in (raw_k, raw_v)]
        attention(q, *cmp, *rest, SPEC, backend="triton")
        again = attention(q, *cmp, *rest, SPEC, backend="triton")
    assert torch.equal(again, expected[0])
    assert "backward" not in {key[0] for key in problem._kept}
    assert_equal(attend(tensors), expected)
    assert_equal(attend(tensors), expected)


@pytest.mark.gpu
def test_recomputation_finds_what_the_first_call_saved() -> None:
    """It runs anew, is recorded, and is then replayed for the backward pass."""
    tensors = make(0)
    expected = attend_anew(tensors)
    problem._kept.clear()
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]

    def layer(q: Tensor, raw_k: Tensor, raw_v: Tensor, *rest: Tensor) -> Tensor:
        cmp = [compress(x, SPEC, backend="triton") for x in (raw_k, raw_v)]
        return attention(q, *cmp, *rest, SPEC, backend="triton")

    out = checkpoint(layer, *leaves, use_reentrant=False)
    grads = torch.autograd.grad(out, leaves, dout)
    assert_equal((out.detach(), expected[1], list(grads)), expected)


@pytest.mark.gpu
def test_operators_replay_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled code calls them: every result has memory of its own."""
    tensors = make(0)
    expected = attend_anew(tensors)
    monkeypatch.setattr(operators, "_intercepted", lambda tensors: True)
    monkeypatch.setattr(operators, "repeat_attention", lambda form, tensors: None)
    anew: list[Any] = []
    monkeypatch.setattr(calls, "_forward_anew", lambda *args: anew.append(args))
    assert_equal(attend(tensors), expected)
    assert not anew


# --- Without kernels ---


def test_a_tape_refuses_addresses_that_are_not_aligned() -> None:
    tape = Tape([], [], 0, torch.device("cpu"), 0)
    x = torch.zeros(64, dtype=torch.int16)
    assert tape.bases([x, x[8:]]) == [x.data_ptr(), x.data_ptr() + 16]
    assert tape.bases([x, x[1:]]) is None


def test_arguments_are_kept_by_addresses_and_stream() -> None:
    compiled = SimpleNamespace(function=7, packed_metadata=())
    known = CachedLaunch(compiled, lambda *_: None, (5, 1, 1), (9,), 0)
    form = Form((4,), (1,), torch.float32)
    launched = Launched(known, [Pointer(0, 0, form), Pointer(1, 16, form)])
    tape = Tape([launched], [form], 0, torch.device("cpu"), 0)
    first = tape._calls_at([64, 128], 3)
    ((_, arguments),) = first
    assert arguments == (5, 1, 1, 3, 7, (), None, None, None, 64, 144, 9)
    assert tape._calls_at([64, 128], 3) is first
    others = [tape._calls_at(*at)[0][1] for at in (([64, 128], 4), ([64, 192], 3))]
    assert [(x[3], x[9], x[10]) for x in others] == [(4, 64, 144), (3, 64, 208)]
    for address in range(MAX_CALLS):
        tape._calls_at([64, 256 + address], 3)
    assert len(tape._calls) <= MAX_CALLS


def test_blocks_share_the_workspace_unless_they_live_at_the_same_time() -> None:
    recorder = Recorder([])
    sizes = (1000, 600, 512, 2000)
    recorder.blocks = [Block(i << 20, size) for i, size in enumerate(sizes)]
    form = Form((1,), (1,), torch.uint8)
    known: Any = None
    # Blocks 0 and 1 live together, then 1 and 2, then 3 alone.
    for used in ((0, 1), (1, 2), (3,)):
        recorder.launches.append(Launched(known, [Pointer(i, 0, form) for i in used]))
    offsets = recorder._fitted([0, 1, 2, 3])
    assert all(offset % BLOCK_STEP == 0 for offset in offsets.values())
    spans = {i: range(offsets[i], offsets[i] + sizes[i]) for i in offsets}
    for i, j in ((0, 1), (1, 2)):
        assert spans[i].stop <= spans[j].start or spans[j].stop <= spans[i].start
    assert max(span.stop for span in spans.values()) <= 1024 + 1024


def test_a_recorder_notes_what_it_cannot_replay() -> None:
    x = torch.zeros(8)
    results, tape = record(lambda x: [x.new_empty(8)], [x], 1)
    assert tape is not None and tape.results == [Form((8,), (1,), torch.float32)]
    for function in (
        lambda x: [x + 1],  # computed by torch
        lambda x: [x],  # given
        lambda x: [x.new_empty(8)[2:]],  # a part of a block
        lambda x: [x.new_empty(8).fill_(1.0)],
    ):
        results, tape = record(function, [x], 1)
        assert tape is None and results[0].dtype == x.dtype
