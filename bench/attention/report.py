"""What the prefill benchmark prints and writes: a table, the kernels of ours, and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.attention import flops
from bench.attention.measure import Row, Setup

VERSION = 1
"""Of the JSON output: what `environment` gives, then notes by name, rows (`as_json` of
bench/attention/measure.py) and kernels (`kernel_breakdown` there)."""
COLUMNS = (
    ("Hq,Hkv,Dk,Dv", 13),
    ("B", 3),
    ("S", 6),
    ("name", 6),
    ("fwd", 8),
    ("fwd+bwd", 8),
    ("graph fwd", 10),
    ("graph f+b", 10),
    ("peak MiB", 9),
    ("TF/s fwd", 9),
    ("TF/s f+b", 9),
    ("floor fwd", 10),
    ("floor f+b", 10),
    ("wall s", 8),
)
LEGEND = (
    "fwd, fwd+bwd: medians of eager calls in ms, between CUDA events (on a CPU: wall clock). "
    "graph: CUDA-graph replay, ms.\n"
    "peak: beyond inputs, output and gradients. TF/s: products of visible pairs alone. floor: the "
    "least time over the eager time,\n"
    f"least time by {flops.FLOPS_PER_S / 1e12:.0f} TFLOP/s and {flops.BYTES_PER_S / 1e12:.1f} "
    "TB/s of an H200. Dense counts its own work; fla differs in it and has no rate. wall: all the "
    "row took, compilation included."
)


def environment(setup: Setup, selection: str) -> dict[str, Any]:
    """Where and with what the numbers were measured."""
    return {
        "version": VERSION,
        "device": torch.cuda.get_device_name() if setup.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": results.triton_version(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "commit": results.commit(),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "spec": asdict(setup.spec),
        "selection": selection,
        "backend": setup.backend,
    }


def table_head() -> str:
    """Names of the columns."""
    return "".join(f"{name:>{width}}" for name, width in COLUMNS)


def table_line(row: Row) -> str:
    """A row under those names, and below it what could not be measured."""
    values = [
        f"{row.Hq},{row.Hkv},{row.Dk},{row.Dv}",
        str(row.B),
        str(row.S),
        row.name,
        *(_number(x) for x in (row.fwd_ms, row.both_ms, row.fwd_graph_ms, row.both_graph_ms)),
        _number(row.peak_mib),
        _number(row.fwd_tflops),
        _number(row.both_tflops),
        _percent(row.fwd_floor_share),
        _percent(row.both_floor_share),
        f"{row.wall_s:.1f}",
    ]
    cells = zip(values, COLUMNS, strict=True)
    line = "".join(f"{value:>{width}}" for value, (_, width) in cells)
    graphs = {x for x in (row.fwd_graph_ms, row.both_graph_ms) if isinstance(x, str)}
    return "\n".join([line, *(f"    {row.name}: {x}" for x in [row.reason, *sorted(graphs)] if x)])


def kernel_lines(breakdown: dict[str, Any]) -> str:
    """The kernels of one forward and backward of ours, with their share."""
    where = ",".join(str(breakdown[letter]) for letter in ("Hq", "Hkv", "Dk", "Dv"))
    total = breakdown["total_ms"]
    head = (
        f"kernels of nsa fwd+bwd, {where} B={breakdown['B']} S={breakdown['S']}: "
        f"{total:.3f} ms on the device in {breakdown['num_names']} names"
    )
    lines = [
        f"{kernel['ms']:>10.3f} ms {kernel['ms'] / max(total, 1e-9):>6.1%}  {kernel['name']}"
        for kernel in breakdown["kernels"]
    ]
    return "\n".join([head, *lines])


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a result of the prefill benchmark."""
    return results.read_json(path, VERSION, "bench_prefill.py")


def _number(value: float | str | None) -> str:
    """Three significant digits, three decimals at most; `-` where there is no number."""
    if value is None or isinstance(value, str):
        return "-"
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(0, 3 - whole)}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
