"""Files of a comparison of runs: results.json and comparison_report.md.

Schema of results.json, version 2: the fields of Comparison, as one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.config.describe import markdown_table
from nsa.files import write_text

VERSION = 2
RESULTS, REPORT = "results.json", "comparison_report.md"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one way to train took."""

    name: str
    meaning: str
    environ: dict[str, str]
    """The variables that make it this way."""
    ranks: int
    plan: str
    """The attention plan that the run printed."""
    num_steps: int
    """Steps that the figures are from: those after the warm-up."""
    toks_per_s: float
    """By the median time of a step."""
    step_p50_ms: float
    step_p95_ms: float
    peak_mem_mib: float | None
    """Tensors on the GPU at most; on a CPU, the RAM of the process."""
    loss_last: float
    loss_is_equal: bool
    """Whether it is bitwise equal to that of the first result with as many ranks."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several ways to train the same model, on one machine, one after the other."""

    version: int = VERSION
    config_file: str
    steps: int
    warmup: int
    time: str
    """Start of the first run, UTC."""
    git_commit: str | None
    torch: str
    device: str
    gpu_name: str | None
    """None on a CPU."""
    dtype: str
    tokens_per_step: int
    """Of one rank."""
    num_params: int
    results: list[Result] = field(default_factory=list)


def write_comparison(folder: Path, found: Comparison) -> list[Path]:
    """Write both files, each complete or not at all."""
    content = dataclasses.asdict(found)
    write_text(folder / RESULTS, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_text(folder / REPORT, describe(found))
    return [folder / REPORT, folder / RESULTS]


def read_comparison(folder: Path) -> Comparison:
    """Read results.json."""
    content: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{folder / RESULTS} has version {content.get('version')!r}; this program reads "
            f"version {VERSION}; use the program that wrote it"
        )
    content["results"] = [Result(**result) for result in content["results"]]
    return Comparison(**content)


def describe(found: Comparison) -> str:
    """The report, for a person."""
    where = found.gpu_name or f"{found.device}: these are CPU figures and say nothing of a GPU"
    lines = [
        "# Comparison of training runs",
        "",
        f"- device: {where}; {found.dtype}; torch {found.torch}; commit {found.git_commit}",
        f"- config: {found.config_file}, {found.num_params:,} parameters, "
        f"{found.tokens_per_step:,} tokens per step and rank",
        f"- {found.steps} real optimizer steps each, the first {found.warmup} not counted; "
        f"started {found.time}",
        "",
        markdown_table([_header(), *(_row(result, found.results) for result in found.results)]),
        "",
        "Tokens/s are by the median step, of all ranks. A run is compared with the first one of as",
        "many ranks. Losses are compared to the last bit; ways that add in another order, or",
        "exchange rounded gradients, may differ in the last digits.",
        "",
    ]
    lines += [f"- `{result.name}`: {result.meaning}; {result.plan}" for result in found.results]
    return "\n".join(lines) + "\n"


def _header() -> tuple[str, ...]:
    memory = "peak memory MiB"
    return ("run", "tokens/s", "against the first", "step p50 ms", "step p95 ms", memory, "loss")


def _row(result: Result, results: list[Result]) -> tuple[str, ...]:
    first = next(other for other in results if other.ranks == result.ranks)
    loss = f"{result.loss_last:.6f}"
    if result is not first:
        apart = abs(result.loss_last - first.loss_last)
        loss += " (equal)" if result.loss_is_equal else f" (differs by {apart:.1e})"
    return (
        f"`{result.name}`",
        f"{result.toks_per_s:.0f}",
        f"{result.toks_per_s / first.toks_per_s:.2f}x",
        f"{result.step_p50_ms:.2f}",
        f"{result.step_p95_ms:.2f}",
        "unknown" if result.peak_mem_mib is None else f"{result.peak_mem_mib:.0f}",
        loss,
    )
