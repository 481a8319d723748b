"""Clocks of the benchmarks: medians of eager calls, graph replay, peak memory, kernel times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

WARM_UP = 2
"""Calls before the timed ones: the first compiles."""


def median_ms(function: Callable[[], object], repeats: int, device: str) -> float:
    """Median time of one eager call: between CUDA events on a GPU, by the wall clock on a CPU.

    On a GPU calls follow each other without a pause, as in training: the host may run ahead.
    """
    for _ in range(WARM_UP):
        function()
    times = _event_ms(function, repeats) if device == "cuda" else _wall_ms(function, repeats)
    return statistics.median(times)


def graph_ms(function: Callable[[], object], repeats: int, at_a_time: int = 1) -> float | str:
    """Median time of a CUDA-graph replay; `graph: <reason>` where the call cannot be captured.

    Short ones are timed several at a time: a pair of events has a cost of its own.
    """
    try:
        graph, kept = captured(function)
    except RuntimeError as error:
        return f"graph: {first_line(error)}"

    def replay() -> None:
        for _ in range(at_a_time):
            graph.replay()

    total = median_ms(replay, repeats, "cuda")
    del kept  # the results live in the graph's memory: they must outlast the replays
    return total / at_a_time


def captured(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of a call and its results, which live in the graph's memory."""
    stream = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function()
    stream.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = function()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a capture that fails to end leaves its own stream set
        raise
    return graph, kept


def peak_mib(function: Callable[[], object]) -> float:
    """Most memory in use during a call, beyond what is left of it: inputs and returned tensors."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del kept
    return beyond / 2**20


def kernel_ms(function: Callable[[], object]) -> dict[str, float]:
    """Device time of one call by kernel name, largest first.

    Run it after everything that is timed: the profiler may slow down launches that come later.
    """
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.device_type.name == "CUDA":  # host calls such as cudaLaunchKernel are not
            times[event.key] = times.get(event.key, 0.0) + event.self_device_time_total / 1e3
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def first_line(error: BaseException) -> str:
    """The message of an error up to its first line break, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _event_ms(function: Callable[[], object], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        function()
    events[-1].record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def _wall_ms(function: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return times
