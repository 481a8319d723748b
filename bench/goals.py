"""Goals of the kernels on an H200, and how they are measured.

A part yields a row for each of its goals. Times are those of bf16, batch 1, the default block
sizes and random selections, where a goal does not say otherwise.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import timing
from bench.attention import flops, measure, peers
from bench.attention.cases import Case, Shape, make_inputs
from bench.bench_decode import DENSE, MODEL
from bench.decoding import cell as decode_cell
from bench.training.cases import GOALS, Cell
from bench.training.report import read_result
from nsa.config import load_config
from nsa.config.load import REPOSITORY
from nsa.model.cost import count_pairs
from nsa.ops import BlockSpec, attend_near

LARGE, SMALL, MIDDLE = Shape(64, 4, 128, 128), Shape(12, 2, 64, 64), Shape(32, 8, 128, 128)
GRAPH_MS = {
    LARGE: {4096: 2.9, 8192: 6.2, 16384: 14.0, 32768: 33.0, 65536: 82.0},
    SMALL: {4096: 0.48, 8192: 0.86, 16384: 1.75, 65536: 9.5},
    MIDDLE: {4096: 1.75, 8192: 3.6, 65536: 46.0},
}
"""Forward and backward of compress and nsa_attention, as a graph."""
EAGER_MS = {(SMALL, 4096): 0.9}
EAGER_OVER_GRAPH = {(SMALL, length): 1.3 for length in (8192, 16384, 65536)}
PEAK_GB = {(SMALL, 65536): 1.3}
"""Beyond inputs, output and gradients; 1e9 bytes."""
WINDOW_OVER_FLOOR = (1.6, 2.0)
"""Forward, backward: kernels of the window over the time of its products."""
WINDOW_LENGTHS = (8192, 65536)
DECODE_US = {(LARGE, 32, 65536): 105.0, (LARGE, 1, 65536): 17.0}
DECODE_OVER_DENSE = [(shape, 32, length) for shape in (LARGE, SMALL) for length in (1024, 2048)]
MODEL_TOKENS_PER_S = {(1, 65536): 1700.0}
UNGRAPHED_TOKENS_PER_S = {Cell(2048, 1): 70_000.0}
"""Of training with compiled blocks, no graph."""
LONG = (MIDDLE, 1_048_576)
"""Forward and backward of this must fit the card."""

REPEATS = {4096: 40, 16384: 20, 65536: 10}
"""Timed calls, up to this length."""
DECODE_REPEATS = 40
PROFILED = 7
"""Calls whose kernels are timed."""
TRAINING = ["--variants", "nsa-compiled,dense-compiled", "--steps", "7", "--warmup", "2"]
TINY_MODEL = "configs/quickstart.yaml"
TINY = {LARGE: Shape(4, 2, 16, 16), SMALL: Shape(2, 1, 8, 8), MIDDLE: Shape(2, 2, 16, 16)}
TINY_SPEC = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
TINY_LENGTH = 48
TINY_CELL = "64x2"
STDERR = 2
"""Where processes print their progress: a descriptor, also where sys.stderr is none."""


class Row(NamedTuple):
    """A goal, and what was measured."""

    part: str
    what: str
    unit: str
    limit: float
    value: float | None = None
    at_least: bool = False
    """Whether the limit is the least instead of the most."""
    reason: str = ""
    """Why there is no value."""

    @property
    def missed_by(self) -> float | None:
        """Share of the limit; 0 or less: the goal is met."""
        if self.value is None or math.isnan(self.value):
            return None
        distance = self.value / self.limit - 1
        return -distance if self.at_least else distance


class Run(NamedTuple):
    """How to measure: on which device, and `tiny` in a rehearsal."""

    device: str
    tiny: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def spec(self) -> BlockSpec:
        return TINY_SPEC if self.tiny else BlockSpec()

    def case(self, shape: Shape, length: int) -> Case:
        if self.tiny:
            return Case(TINY[shape], 1, TINY_LENGTH, 1)
        return Case(shape, 1, length, next(n for most, n in REPEATS.items() if length <= most))

    def setup(self) -> measure.Setup:
        return measure.Setup(
            device=self.device,
            dtype=self.dtype,
            backend="auto",
            spec=self.spec,
            peer_names=(),
            dense_long=False,
            select=lambda case: None,
        )


def attention(run: Run) -> Iterator[Row]:
    """Graph, eager call and memory of forward and backward."""
    for shape, limits in GRAPH_MS.items():
        for length, limit in limits.items():
            (found,) = measure.measure_case(run.case(shape, length), run.setup())
            where = f"{_heads(shape)} at {length}"
            graph = found.both_graph_ms if run.device == "cuda" else found.both_ms
            note = found.reason or (graph if isinstance(graph, str) else "")
            of = partial(Row, "attention", reason=note)
            graph = None if note else graph
            assert not isinstance(graph, str)
            yield of(f"{where}, graph", "ms", limit, graph)
            if (shape, length) in EAGER_MS:
                limit = EAGER_MS[shape, length]
                yield of(f"{where}, eager", "ms", limit, found.both_ms)
            if (shape, length) in EAGER_OVER_GRAPH:
                ratio = None if graph is None or found.both_ms is None else found.both_ms / graph
                limit = EAGER_OVER_GRAPH[shape, length]
                yield of(f"{where}, eager / graph", "x", limit, ratio)
            if (shape, length) in PEAK_GB:
                peak = None if found.peak_mib is None else found.peak_mib * 2**20 / 1e9
                yield of(f"{where}, memory", "GB", PEAK_GB[shape, length], peak)


def window(run: Run) -> Iterator[Row]:
    """Kernels of the window alone, over 2 products forward and 5 backward."""
    for shape in GRAPH_MS:
        for length in WINDOW_LENGTHS:
            case = run.case(shape, length)
            found = _window_ms(case, run)
            pairs = count_pairs(case.length, run.spec).win * case.shape.Hq
            floors = flops.products(pairs, case)
            for name, ms, work, limit in zip(
                ("forward", "backward"), found, floors, WINDOW_OVER_FLOOR, strict=True
            ):
                value = ms / (1e3 * work / flops.FLOPS_PER_S) if ms else None
                what = f"{_heads(shape)} at {length}, {name}"
                reason = "" if ms or run.tiny else "no kernel of the window was seen"
                yield Row("window", what, "x floor", limit, value, reason=reason)


def _window_ms(case: Case, run: Run) -> tuple[float, float]:
    """Of a forward and of a backward pass: on a GPU of their kernels, without additions of zeros
    and gates; on a CPU of the calls."""
    q, *_, k, v, gates = make_inputs(case, run.dtype, run.device)
    own = torch.arange(case.length, device=run.device, dtype=torch.int32) // run.spec.l_sel
    own = own[None, :, None, None].repeat(1, 1, case.shape.Hkv, 1)

    def forward() -> torch.Tensor:
        return attend_near(q, (k, v), gates, run.spec, own)

    grad = torch.randn_like(forward())

    def both() -> object:
        return torch.autograd.grad(forward(), (q, k, v), grad)

    if run.device == "cpu":
        total, first = (timing.median_ms(x, 1, run.device) for x in (both, forward))
        return first, max(total - first, 0.0)
    timing.median_ms(both, PROFILED, run.device)
    calls = [timing.kernel_ms(both) for _ in range(PROFILED)]
    return _kernels(calls, "forward"), _kernels(calls, "dkv", "dq", "sum_parts")


def _kernels(calls: list[dict[str, float]], *names: str) -> float:
    """Median over calls of the sum of kernels of bands whose names contain one of `names`."""
    return statistics.median(
        sum(
            ms
            for kernel, ms in call.items()
            if kernel.startswith(("band_", "gluon_", "sum_parts"))
            and any(x in kernel for x in names)
        )
        for call in calls
    )


def long(run: Run) -> Iterator[Row]:
    """A row so long that only what is linear in it fits the card."""
    shape, length = LONG
    case = Case(TINY[shape], 1, TINY_LENGTH, 1) if run.tiny else Case(shape, 1, length, 1)
    of = partial(Row, "long", f"{_heads(shape)} at {length}, all memory", "GB")
    size = torch.cuda.get_device_properties(0).total_memory / 1e9 if run.device == "cuda" else 1.0
    try:
        inputs = make_inputs(case, run.dtype, run.device)
        ours = peers.build_nsa(inputs, run.spec, None, "auto")
        out = ours.call()
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    except torch.OutOfMemoryError as error:
        yield of(size, reason=timing.first_line(error))
        return
    if not all(bool(x.isfinite().all()) for x in (out, *grads)):
        yield of(size, reason="outputs or gradients are not finite")
        return
    peak = torch.cuda.max_memory_allocated() / 1e9 if run.device == "cuda" else 0.0
    yield of(size, peak)


def training(run: Run) -> Iterator[Row]:
    """The 125M model against its dense twin, both with compiled blocks, by bench_train.py."""
    for cell in GOALS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "training.json"
            command = [sys.executable, str(Path(__file__).with_name("bench_train.py")), *TRAINING]
            command += ["--cells", TINY_CELL if run.tiny else str(cell), "--json", str(path)]
            command += ["--device", run.device, *(["--tiny"] if run.tiny else [])]
            ended = subprocess.run(command, stdout=STDERR)
            found = read_result(path)["cells"][0]["rows"] if path.exists() else []
        rows = {row["variant"]: row for row in found}
        reasons = [row["reason"] for row in found if "reason" in row]
        reason = "; ".join(reasons) or ("" if rows else f"bench_train.py: exit {ended.returncode}")
        of = partial(Row, "training", at_least=True, reason=reason)
        ours = rows.get("nsa-compiled", {})
        if cell in UNGRAPHED_TOKENS_PER_S:
            limit = UNGRAPHED_TOKENS_PER_S[cell]
            yield of(f"{cell}, no graph", "tokens/s", limit, ours.get("tokens_per_s"))
        else:
            ratio = GOALS[cell].ratio
            assert ratio is not None
            yield of(f"{cell}, over dense", "x", ratio, ours.get("ratio"))


def decode(run: Run) -> Iterator[Row]:
    """A step of the attention as a graph, and a whole model."""
    for (shape, batch, length), limit in DECODE_US.items():
        found = decode_cell.measure_ours(_decode_cell(run, shape, batch, length))
        what = f"{_heads(shape)} at {length}, batch {batch}"
        yield Row("decode", what, "us", limit, _step_us(found))
    for shape, batch, length in DECODE_OVER_DENSE:
        cell = _decode_cell(run, shape, batch, length)
        ours = _step_us(decode_cell.measure_ours(cell))
        dense = [_step_us(decode_cell.measure_dense(cell, name)) for name in DENSE[run.device]]
        best = min((us for us in dense if us is not None), default=math.nan)
        what = f"{_heads(shape)} at {length}, batch {batch}, over dense"
        yield Row("decode", what, "x", 1.0, None if ours is None else ours / best)
    for (batch, length), limit in MODEL_TOKENS_PER_S.items():
        config = load_config(REPOSITORY / (TINY_MODEL if run.tiny else MODEL), [])
        found = decode_cell.measure_model(
            config, batch, TINY_LENGTH if run.tiny else length, 5, run.device, run.dtype
        )
        what = f"125M model at {length}, batch {batch}"
        yield Row("decode", what, "tokens/s", limit, found["tokens_per_s"], at_least=True)


def _decode_cell(run: Run, shape: Shape, batch: int, length: int) -> decode_cell.Cell:
    if run.tiny:
        shape, batch, length = TINY[shape], 2, TINY_LENGTH
    repeats = 1 if run.tiny else DECODE_REPEATS
    return decode_cell.Cell(shape, run.spec, batch, length, repeats, run.device, run.dtype)


def _step_us(found: dict[str, Any]) -> float | None:
    ms = found.get("graph_ms", found.get("eager_ms"))
    return 1e3 * ms if isinstance(ms, float) else None


def _heads(shape: Shape) -> str:
    return f"{shape.Hq}/{shape.Hkv}/{shape.Dk}"


PARTS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "attention": attention,
    "window": window,
    "long": long,
    "training": training,
    "decode": decode,
}
