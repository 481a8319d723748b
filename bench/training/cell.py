"""Measures the variants of one cell in a separate process, so that a crash affects no other cell.

`python bench/training/cell.py '<task as JSON>' EVENTS`. Every event is a line of JSON in EVENTS:
`environment`, `begin` (a variant is about to do something), `failed` (with its reason), `row`. The
benchmark bench_train.py starts it and reads them.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.results import describe_machine
from bench.timing import first_line
from bench.training.cases import Cell, Variant, config_of
from nsa.config import Config
from nsa.model import TinyLM
from nsa.model.cost import peak_flops, training_flops_per_token, utilization
from nsa.train.build import build_step, compile_blocks
from nsa.train.runtime import resolve_runtime
from nsa.train.step import EagerStep, GraphStep, MicroBatch

BROKEN = 3
"""Exit code of a process whose device no longer answers; the failed variant has its event."""
NUM_BATCHES = 8
"""Different batches, in turns: the blocks that are selected differ from step to step."""
STEPS_PER_ROUND = 5
RATE = 2e-4


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process is asked to measure."""

    length: int
    batch: int
    variants: list[str]
    steps: int
    warmup: int
    device: str
    tiny: bool

    @property
    def cell(self) -> Cell:
        return Cell(self.length, self.batch)


@dataclass(kw_only=True)
class Running:
    """A variant that is ready to be timed."""

    variant: Variant
    config: Config
    step: Callable[[], Tensor]
    graph: GraphStep | None
    first_s: float
    """The first update: compilation and tuning. A graph's capture comes later, in `ready_s`."""
    ready_s: float
    peak_mib: float
    times_ms: list[float] = field(default_factory=list)
    loss: float = float("nan")


class Events:
    """Appends lines that survive the end of the process."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the process

    def write(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **content}) + "\n")
        self._file.flush()


def main(argv: list[str]) -> int:
    """Prepare every variant, then time them in turns; a failure does not affect the others."""
    task, events = Task(**json.loads(argv[0])), Events(argv[1])
    events.write("environment", **describe_machine(task.device))
    torch.compiler.reset()
    ready: list[Running] = []
    for name in task.variants:
        shared = next((other.graph for other in ready if other.graph), None)
        with _reported(events, name, task.device):
            ready.append(_prepare(Variant(name), task, shared))
            _say(f"{task.cell} {name}: ready in {ready[-1].ready_s:.1f} s")
    for done in range(0, task.steps, STEPS_PER_ROUND):
        going, ready = ready, []
        for one in going:
            with _reported(events, one.variant.name, task.device):
                _time(one, min(STEPS_PER_ROUND, task.steps - done), task.device)
                events.write("row", **_row(one, task))  # a later round has a better one
                ready.append(one)
    return 0


def _prepare(variant: Variant, task: Task, shared: GraphStep | None) -> Running:
    """Build the model and its step, warm it up, and look at its memory."""
    start = time.perf_counter()
    before = _start_of_peak(task.device)
    config = config_of(task.cell, variant, task.device, tiny=task.tiny)
    update = _build(config, shared)
    graph = update if isinstance(update, GraphStep) else None
    draws = torch.Generator().manual_seed(0)
    size = (NUM_BATCHES, task.batch, task.length + 1)
    rows = torch.randint(config.data.vocab, size, generator=draws).to(task.device)
    turn = iter(_endless(rows))

    def step() -> Tensor:
        with _pinned(variant, task.device):
            return update([MicroBatch(next(turn))], RATE).loss

    step()
    _synchronize(task.device)
    first_s = time.perf_counter() - start
    step()  # with the optimizer's state: the most memory there is
    _synchronize(task.device)
    peak_mib = _peak_since(before, task.device)
    for _ in range(task.warmup - 1):
        step()
    _synchronize(task.device)
    return Running(
        variant=variant,
        config=config,
        step=step,
        graph=graph,
        first_s=first_s,
        ready_s=time.perf_counter() - start,
        peak_mib=peak_mib,
    )


def _build(config: Config, shared: GraphStep | None) -> EagerStep:
    torch.manual_seed(0)
    dims = (config.model.d_k, config.model.d_v)
    runtime = resolve_runtime(config.runtime, dims, config.model.attention_kind)
    model = TinyLM.from_config(config, config.data.vocab).to(runtime.device).train()
    if config.runtime.compile:
        compile_blocks(model, runtime.device)
    return build_step(config, model, runtime, share=shared)


def _time(one: Running, steps: int, device: str) -> None:
    """A few updates in a row, timed from the start of one to the start of the next."""
    one.step()  # not timed: others have run since
    clock = _events_ms if device == "cuda" else _wall_ms
    times, loss = clock(one.step, steps)
    one.times_ms += times
    one.loss = loss.item()


def _events_ms(step: Callable[[], Tensor], steps: int) -> tuple[list[float], Tensor]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    loss = torch.empty(())
    for mark in marks[:-1]:
        mark.record()
        loss = step()
    marks[-1].record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)], loss


def _wall_ms(step: Callable[[], Tensor], steps: int) -> tuple[list[float], Tensor]:
    marks, loss = [time.perf_counter()], torch.empty(())
    for _ in range(steps):
        loss = step()
        marks.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(marks)], loss


def _row(one: Running, task: Task) -> dict[str, Any]:
    median = statistics.median(one.times_ms)
    tokens_per_s = 1e3 * task.cell.tokens / median
    return {
        "variant": one.variant.name,
        "step_ms": median,
        "fastest_ms": min(one.times_ms),
        "slowest_ms": max(one.times_ms),
        "timed_steps": len(one.times_ms),
        "tokens_per_s": tokens_per_s,
        "mfu": _mfu(one.config, tokens_per_s) if task.device == "cuda" else None,
        "peak_mib": one.peak_mib if task.device == "cuda" else None,
        "first_s": one.first_s,
        "ready_s": one.ready_s,
        "loss": one.loss,
    }


def _mfu(config: Config, tokens_per_s: float) -> float | None:
    """None on a card whose peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name(), config.runtime.precision)
    return utilization(sum(training_flops_per_token(config).values()), tokens_per_s, peak)


@contextmanager
def _reported(events: Events, name: str, device: str) -> Iterator[None]:
    """Turn a failure into an event; leave the process where the device no longer answers."""
    events.write("begin", variant=name)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is: the other variants are measured
        reason = f"{type(error).__name__}: {first_line(error)}"
        events.write("failed", variant=name, reason=reason)
        _say(f"{name}: {reason}")
    else:
        return
    if stream is not None:
        try:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream set
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.ones(1, device=device).item()
        except RuntimeError as error:
            _say(f"{name}: the device no longer answers ({first_line(error)}); a new process")
            sys.exit(BROKEN)


def _pinned(variant: Variant, device: str) -> AbstractContextManager[None]:
    """Dense attention goes through cuDNN, the fastest there is on an H200."""
    if variant.attention == "dense" and device == "cuda":
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    return nullcontext()


def _endless(rows: Tensor) -> Iterator[Tensor]:
    while True:
        yield from rows


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _start_of_peak(device: str) -> int:
    if device != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak_since(before: int, device: str) -> float:
    """All that a variant needs in eager updates: weights, optimizer, gradients, activations."""
    return (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else 0.0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
