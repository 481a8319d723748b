"""Kernels start on the device of their tensors, and nothing captured outlives its memory.

test_triton_on_cpu.py runs this file with TRITON_INTERPRET=1. One GPU is enough: the tests pretend
that another one is current.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton import knobs
from triton.runtime import interpreter

from nsa import BlockSpec, TinyLM, compress, nsa_attention, select_blocks
from nsa.generate.decode import GraphedStep
from nsa.model.rope import document_positions
from nsa.ops import triton as triton_path
from nsa.ops.checks import refuse_captured_documents
from nsa.ops.machine import interpreted
from nsa.ops.triton import attention, bands, choice, launcher, problem, selected
from nsa.ops.triton.documents import index_documents
from nsa.ops.triton.launcher import CachedLaunch, Launch
from nsa.ops.triton.replay import calls as replayed
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.gpu import DEVICE, on_gpu
from nsa.train import loss as loss_functions
from nsa.train.loss import linear_cross_entropy

MODEL: dict[str, Any] = dict(vocab=50, dim=32, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8)
BLOCKS: dict[str, Any] = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)
LAUNCHES = 20
"""Kernels of training, prefill and decode together, at least."""


class Watch:
    """Which devices `start` has made current, and what was current at each launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside: list[int] = []
        self.launches: list[int | None] = []
        self._real = launcher._current
        monkeypatch.setattr(launcher, "_current", self._current)
        monkeypatch.setattr(launcher, "is_current", lambda device: False)

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        self.inside.append(device)
        with self._real(device):
            yield
        self.inside.pop()

    def launched(self, *_: Any) -> None:
        self.launches.append(self.inside[-1] if self.inside else None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="needs a CUDA device")
def test_every_launch_makes_the_device_of_its_tensors_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all kernels, the first time and again: one that is started elsewhere is seen here."""
    watch = Watch(monkeypatch)
    if interpreted():
        run = interpreter.GridExecutor.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch.launched()
            return run(self, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
        monkeypatch.setattr(loss_functions, "is_fused", lambda device, dtype: True)
    else:
        knobs.runtime.launch_enter_hook.add(watch.launched)
    try:
        _use_every_kernel()
        first = len(watch.launches)
        _use_every_kernel()
    finally:
        if not interpreted():
            knobs.runtime.launch_enter_hook.remove(watch.launched)
    assert len(watch.launches) == 2 * first and first >= LAUNCHES
    assert set(watch.launches) == {torch.empty(0, device=DEVICE).get_device()}


def _use_every_kernel() -> None:
    torch.manual_seed(0)
    model = TinyLM(**MODEL, **BLOCKS, backend="triton").to(DEVICE)
    ids = torch.randint(0, 50, (1, 41), device=DEVICE)
    bounds = torch.tensor([0, 17, 40], dtype=torch.int32)
    hidden = model.hidden(ids[:, :-1], cu_seqlens=bounds)[0]
    linear_cross_entropy(hidden, model.head_weight, ids[0, 1:], torch.float32).backward()
    cache = model.eval().new_cache(1, 40)
    for part in ids[:, :30].split([21, 8, 1], dim=1):
        model.prefill(part, cache)
    q, k_cmp = torch.randn(1, 40, 2, 8), torch.randn(1, 9, 1, 8)
    select_blocks(q.to(DEVICE), k_cmp.to(DEVICE), BlockSpec(**BLOCKS), backend="triton")


def test_the_quick_way_enters_the_device_only_where_another_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: what would be compiled and launched stands in."""
    entered: list[int] = []
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    launched: list[int] = []

    def run(*_: Any) -> None:
        launched.append(current[0])

    monkeypatch.setattr(launcher, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    compiled = SimpleNamespace(run=run, function=0, packed_metadata=())

    def first_run(*_: Any, **__: Any) -> Any:
        run()
        return compiled

    kernel = {(1,): first_run}
    tensor = SimpleNamespace(get_device=lambda: 1)
    memo: dict[Any, CachedLaunch] = {}
    for _ in range(2):
        launcher.start(memo, "here", kernel, (None, tensor), lambda: Launch.plain((1,), (), {}))
    (known,) = memo.values()
    assert (launched, entered, known.device) == ([1, 1], [1, 1], 1)
    current[0] = 1
    launcher.start(memo, "here", kernel, (None, tensor), lambda: Launch.plain((1,), (), {}))
    assert (launched, entered) == ([1, 1, 1], [1, 1])


def test_kernels_are_launched_by_start_alone_and_streams_name_their_device() -> None:
    found = []
    files = [*REPOSITORY.glob("nsa/ops/**/*.py"), *REPOSITORY.glob("nsa/model/*.py")]
    files += [*REPOSITORY.glob("nsa/generate/*.py"), REPOSITORY / "nsa/train/step.py"]
    files += [REPOSITORY / "nsa/train/loss.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            what, where = ast.unparse(node.func), f"{file.name}:{node.lineno}"
            if isinstance(node.func, ast.Subscript) and file.name != "launcher.py":
                found.append(f"{where} launches {what}")
            if what in ("torch.cuda.Stream", "torch.cuda.current_stream") and not node.args:
                found.append(f"{where} has {what} of the current device")
            if what == "torch.cuda.graph" and "stream" not in {key.arg for key in node.keywords}:
                found.append(f"{where} captures on a stream of torch's, of any device")
    assert not found


def test_packed_documents_refuse_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their index is copied from host memory that a replay would not find any more."""
    refuse_captured_documents(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="packed documents or an offset in a CUDA graph"):
        index_documents([3, 5], BlockSpec(**BLOCKS), device)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed documents or an offset in a CUDA graph"):
        document_positions(8, bounds, device)


@pytest.mark.gpu
@on_gpu
def test_packed_documents_refuse_a_real_capture() -> None:
    model = TinyLM(**MODEL, **BLOCKS).to(DEVICE).eval()
    ids, x = torch.zeros(1, 40, dtype=torch.int64, device=DEVICE), torch.zeros(1, 40, 2, 8).cuda()
    bounds = torch.tensor([0, 17, 40], dtype=torch.int32)
    with torch.no_grad():
        model(ids, cu_seqlens=bounds)  # outside, they run
        compress(x, BlockSpec(**BLOCKS), cu_seqlens=bounds)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            more = x + 1  # an empty graph is warned of
            with pytest.raises(ValueError, match="packed documents or an offset in a CUDA graph"):
                model(ids, cu_seqlens=bounds)
            with pytest.raises(ValueError, match="packed documents or an offset in a CUDA graph"):
                compress(x, BlockSpec(**BLOCKS), cu_seqlens=bounds)
    graph.replay()
    assert (more == 1).all()


def test_whether_cudnn_takes_the_compressed_branch_is_asked_by_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.empty(1, problem.LONG_FROM, 1, 128, device="meta")
    kept = problem.Problem(q, q, BlockSpec(), 1.0, [problem.LONG_FROM])
    for runs in (False, True, False):
        monkeypatch.setattr(problem, "cudnn_runs", lambda *_, runs=runs: runs)
        assert kept.long == runs


@pytest.mark.gpu
@on_gpu
def test_cudnn_is_used_only_while_torch_allows_it() -> None:
    device = torch.device(DEVICE)
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("cuDNN is faster from sm_90 on")
    asked = (device, torch.bfloat16, 128, 128)
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        found = []
        for enabled in (False, True, False, True):
            torch.backends.cuda.enable_cudnn_sdp(enabled)
            found.append(problem.cudnn_runs(*asked))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
    assert found == [False, True, False, True]


@pytest.mark.gpu
@on_gpu
def test_a_graph_that_was_captured_under_autocast_outlives_it() -> None:
    """Autocast frees its rounded weights at its end: the graph must not read them."""
    torch.manual_seed(0)
    model = TinyLM(**MODEL, **BLOCKS).to(DEVICE).eval()
    ids = torch.randint(0, 50, (2, 60), device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        cache, eager_cache = (model.new_cache(2, 60) for _ in range(2))
        for each in (cache, eager_cache):
            model.prefill(ids[:, :30], each)
        step = GraphedStep(model, cache)
        expected = [model.step(ids[:, t], eager_cache) for t in range(30, 60)]
    noise = [torch.randn(1 << 16, device=DEVICE) for _ in range(64)]  # where they lay
    for t, logits in enumerate(expected, 30):
        assert torch.equal(step(ids[:, t]), logits), f"at {t}"
    assert len(noise) == 64 and cache.layers[0].dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_new_length_needs_no_code_that_the_first_call_has_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton compiles for dtypes, constants, and numbers that are 1 or a multiple of 16."""
    seen: list[tuple[Any, ...]] = []
    calls: list[Any] = []
    monkeypatch.setattr(problem, "AHEAD_LENGTHS", tuple(1 << power for power in range(6, 18)))
    monkeypatch.setattr(replayed, "_compile_once", lambda *args, **_: calls.append(args))
    # All are imported first: one that is imported later would keep the launcher of this test.
    packages = (triton_path, bands, choice, selected)
    found = [
        one.name
        for package in packages
        for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    for module in map(importlib.import_module, found):
        if hasattr(module, "start"):
            monkeypatch.setattr(module, "start", lambda *given: seen.append(form_of(*given)))
    attend_without_kernels(4096)
    alone = set(seen)
    *first, backward_too = calls[0]
    attention.compile_ahead(*first, backward_too=backward_too)
    ahead = set(seen)
    assert len(alone) >= 15, "kernels were not seen"
    assert {form[0] for form in ahead - alone} <= {"choose_blocks", "band_dkv", "cut_bins"}
    for length in (2049, 5000, 8191, 12288, 32768, 65537, 100001):
        seen.clear()
        attend_without_kernels(length)
        assert {form[0] for form in set(seen) - ahead} == set(), length


def form_of(memo: Any, place: Any, kernel: Any, tensors: Any, launch: Any) -> tuple[Any, ...]:
    """What a compiled kernel is for."""
    one = launch()
    numbers = kernel.arg_names[len(tensors) : len(tensors) + len(one.numbers)]
    # The compiled function has the names as an attribute, the interpreted one as an argument.
    compiled = hasattr(kernel, "do_not_specialize")
    free = kernel.do_not_specialize if compiled else kernel.kwargs["do_not_specialize"]
    special = [
        (name, value == 1, value % 16 == 0, value >= 1 << 31)
        for name, value in zip(numbers, one.numbers, strict=True)
        if isinstance(value, int) and name not in (free or ())
    ]
    dtypes = [getattr(x, "dtype", None) or x.base.dtype for x in tensors if x is not None]
    sized = (*one.constants.items(), *one.options.items())
    return (kernel.__name__, *dtypes, *special, *sized)


def attend_without_kernels(length: int) -> None:
    """A forward and a backward pass; what it computes is never looked at."""
    spec = BlockSpec(l=32, d=16, l_sel=64, n_sel=16, w=512)
    make = partial(torch.zeros, device=DEVICE, requires_grad=True)
    q, gates = make(1, length, 4, 16), make(1, length, 4, 3)
    raw_k, raw_v, k_sel, v_sel, k_win, v_win = (make(1, length, 2, 16) for _ in range(6))
    k_cmp, v_cmp = (compress(x, spec, backend="triton") for x in (raw_k, raw_v))
    out = nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec, backend="triton")
    out.backward(torch.zeros_like(out))
