"""Run the same training in several variants, each with the real trainer in its own process.

A step lasts from its first heartbeat to that of the next one, the last step to its logged line.
Nothing is logged in between, so nothing synchronizes with the device.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.training.compare_report import Comparison, Result
from nsa.config import Config
from nsa.config.env import changed
from nsa.operate.launch.plan import Nodes, trainer_command
from nsa.records import read_env, read_heartbeat, read_metrics, write_config
from nsa.records.heartbeat import BEAT, PROGRESS

HEARTBEAT = "heartbeat_rank0.jsonl"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train."""

    name: str
    meaning: str
    environ: dict[str, str]
    ranks: int = 1


VARIANTS = (
    Variant(
        name="selection_v2",
        meaning="the default: fast selection",
        environ={"NSA_SEL_RANGES_V2": "1", "NSA_NVTX": "0"},
    ),
    Variant(
        name="selection_v1",
        meaning="NSA_SEL_RANGES_V2=0: the reference selection",
        environ={"NSA_SEL_RANGES_V2": "0", "NSA_NVTX": "0"},
    ),
    Variant(
        name="selection_v2_nvtx",
        meaning="NSA_NVTX=1: fast selection, with NVTX ranges",
        environ={"NSA_SEL_RANGES_V2": "1", "NSA_NVTX": "1"},
    ),
    Variant(
        name="two_ranks",
        meaning="NSA_DDP_COMPRESS=off: two ranks under DDP, gradients exchanged in fp32",
        environ={"NSA_DDP_COMPRESS": "off", "NSA_NVTX": "0"},
        ranks=2,
    ),
    Variant(
        name="two_ranks_bf16",
        meaning="NSA_DDP_COMPRESS=bf16: the same, exchanged in bf16",
        environ={"NSA_DDP_COMPRESS": "bf16", "NSA_NVTX": "0"},
        ranks=2,
    ),
)
"""Each variant is compared with the first one that has the same number of ranks."""


class RunFailed(RuntimeError):
    """A run did not finish, so nothing can be compared."""


def compare(cfg: Config, config_path: str, folder: Path, steps: int, warmup: int) -> Comparison:
    """Train every variant, one after the other, and measure from the files they wrote."""
    if not 0 <= warmup < steps:
        raise ValueError(f"--warmup {warmup} must be less than --steps {steps}, and not negative")
    folder.mkdir(parents=True, exist_ok=True)
    config_file = write_config(folder, cfg, config_path)
    results: list[Result] = []
    for variant in VARIANTS:
        print(f"[compare] {variant.name}: {variant.meaning}", flush=True)
        run_variant(variant, config_file, folder, steps)
        first = next((result for result in results if result.ranks == variant.ranks), None)
        results.append(measure(variant, folder / variant.name, steps, warmup, first))
    metrics, env = read_metrics(folder / VARIANTS[0].name), read_env(folder / VARIANTS[0].name)
    return Comparison(
        config_file=config_path,
        steps=steps,
        warmup=warmup,
        time=env.time,
        git_commit=env.git_commit,
        torch=env.torch,
        device=metrics.device,
        gpu_name=env.gpu_name if metrics.device.startswith("cuda") else None,
        dtype=metrics.dtype,
        tokens_per_step=metrics.tokens_per_step,
        num_params=metrics.num_params,
        results=results,
    )


def run_variant(variant: Variant, config_file: Path, folder: Path, steps: int) -> None:
    """Run the trainer's script; what it prints is in <folder>/<name>.log."""
    environ = {"NSA_HEARTBEAT_EVERY": "1", **variant.environ}
    if variant.ranks > max(1, torch.cuda.device_count()):
        environ["TORCH_BACKEND"] = "gloo"  # ranks may share a device then
    arguments = ["--config", str(config_file), "--steps", str(steps)]
    arguments += ["--out-dir", str(folder / variant.name), "--resume", "none", "--allow-long-run"]
    command = trainer_command(arguments, ranks=variant.ranks, nodes=Nodes())
    log = folder / f"{variant.name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command, env=changed(environ), stdout=output, stderr=output
        ).returncode
    if code:
        last = log.read_text("utf-8", "replace").strip().split("\n")[-1]
        raise RunFailed(f"{variant.name} ended with exit code {code}: {last} (see {log})")


def measure(variant: Variant, run: Path, steps: int, warmup: int, first: Result | None) -> Result:
    """What the files of a run say of its steps after the warm-up; `first` has as many ranks."""
    metrics = read_metrics(run)
    if metrics.step != steps or metrics.loss_last is None:
        raise RunFailed(f"{run}: {metrics.step} of {steps} steps are done ({metrics.status})")
    times = sorted(step_times(run / HEARTBEAT, steps)[warmup:])
    median = statistics.median(times)
    return Result(
        name=variant.name,
        meaning=variant.meaning,
        environ=variant.environ,
        ranks=variant.ranks,
        plan=metrics.attention,
        num_steps=len(times),
        toks_per_s=metrics.tokens_per_step / median,
        step_p50_ms=1e3 * median,
        step_p95_ms=1e3 * times[min(int(0.95 * len(times)), len(times) - 1)],
        peak_mem_mib=metrics.peak_mem_mib,
        loss_last=metrics.loss_last,
        loss_is_equal=first is None or metrics.loss_last == first.loss_last,
    )


def step_times(path: Path, steps: int) -> list[float]:
    """Seconds of each step, from the heartbeat of a run that logged its last step."""
    beats = read_heartbeat(path)
    starts = [beat.ts for beat in beats if beat.msg == BEAT and not beat.is_pause]
    ends = [beat.ts for beat in beats if beat.msg == PROGRESS and beat.step == steps]
    if len(starts) != steps or len(ends) != 1:
        raise RunFailed(f"{path}: {len(starts)} beats and {len(ends)} ends of {steps} steps")
    moments = starts + ends
    return [after - before for before, after in itertools.pairwise(moments)]
