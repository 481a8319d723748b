"""Overhead of telemetry and checkpoints, measured with real runs of the trainer in turns.

`python bench/bench_overhead.py [--config FILE] [--steps N] [--rounds N] [group.key=value ...]`

The same steps run in three ways: bare (nothing is logged between the first and the last step),
with all telemetry, and with all telemetry and one checkpoint in the middle. The cost of a
checkpoint is the difference of the last two, spread over SAVE_EVERY steps. Use enough steps that
the checkpoint is written within half of them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from bench.training.compare import RunFailed, Variant, run_variant
from nsa.config import StrictParser, load_config
from nsa.config.load import REPOSITORY
from nsa.records import TRAINING, TrainingRow, read_env, read_metrics, read_rows, write_config

PRODUCTION = REPOSITORY / "configs" / "m7c_125m_2xa100_production.yaml"
SAVE_EVERY = 500
NEVER = 1_000_000
GOAL = 0.02
QUIET = {
    "NSA_TB_DISABLE": "1",
    "NSA_DISABLE_AUX_STATS": "1",
    "NSA_HEARTBEAT_EVERY": str(NEVER),
}
LOUD = {"NSA_TB_DISABLE": "0", "NSA_DISABLE_AUX_STATS": "0", "NSA_HEARTBEAT_EVERY": "1"}


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and a JSON line; 1 if a run failed or the goal is missed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.steps < 4 or args.rounds < 1:
        parser.error(
            f"--steps {args.steps} --rounds {args.rounds}; use at least 4 steps and 1 round"
        )
    with tempfile.TemporaryDirectory(prefix="overhead") as folder:
        try:
            result = measure(args, Path(folder))
        except RunFailed as error:
            print(f"bench_overhead: {error}", file=sys.stderr)
            return 1
        except ValueError as error:
            parser.error(str(error))
    print(describe(result))
    print(json.dumps(result))
    return 0 if result["share"] <= GOAL else 1


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds per step of the three ways, as medians over the rounds."""
    ways = {
        "bare": (QUIET, (f"train.log_every={NEVER}", "train.save_every=0")),
        "telemetry": (LOUD, ("train.log_every=20", "train.save_every=0")),
        # One, so that it never waits for another write; in the middle, so that the end does not
        # wait for it.
        "checkpoint": (LOUD, ("train.log_every=20", f"train.save_every={args.steps // 2 + 1}")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name, (environ, settings) in ways.items():
            place = folder / f"{number}-{name}"
            place.mkdir()
            fixed = ("train.eval_every=0", "train.keep_last=1", *settings)
            config = load_config(args.config, [*args.overrides, *fixed])
            file = write_config(place, config, args.config)
            variant = Variant(name=name, meaning="", environ=environ)
            run_variant(variant, file, place, args.steps)
            seconds[name].append(step_seconds(place / name, args.steps))
            print(f"{name}, round {number + 1}: {1e3 * seconds[name][-1]:.2f} ms", flush=True)
    metrics, env = read_metrics(place / name), read_env(place / name)
    return summarize(seconds, args.steps) | {
        "config": args.config,
        "overrides": args.overrides,
        "steps": args.steps,
        "device": env.gpu_name if metrics.device.startswith("cuda") else metrics.device,
        "torch": env.torch,
        "commit": env.git_commit,
        "tokens_per_step": metrics.tokens_per_step,
        "num_params": metrics.num_params,
    }


def step_seconds(run: Path, steps: int) -> float:
    """Mean over all steps but the first, which warms up; pauses for a checkpoint count."""
    metrics = read_metrics(run)
    first = read_rows(TrainingRow, run / TRAINING)[0]
    if metrics.step != steps:
        raise RunFailed(f"{run.name}: {metrics.step} of {steps} steps are done ({metrics.status})")
    first_s = metrics.tokens_per_step / first.toks_per_s
    return (metrics.train_s - first_s + metrics.eval_and_save_s) / (steps - 1)


def summarize(seconds: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Shares of a bare step; a difference below the noise may be negative, and stays so."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    bare, telemetry, checkpoint = (median[x] for x in ("bare", "telemetry", "checkpoint"))
    save_s = (checkpoint - telemetry) * (steps - 1)
    shares = {"telemetry": telemetry / bare - 1, "checkpoint": save_s / (SAVE_EVERY * bare)}
    return {
        "step_ms": {name: 1e3 * value for name, value in median.items()},
        "rounds_ms": {name: [1e3 * x for x in times] for name, times in seconds.items()},
        "save_s": save_s,
        "shares": shares,
        "share": sum(shares.values()),
        "goal": GOAL,
    }


def describe(result: dict[str, Any]) -> str:
    """A few lines for a person."""
    step, shares = result["step_ms"], result["shares"]
    met = "ok" if result["share"] <= result["goal"] else "miss"
    return "\n".join(
        [
            f"{result['num_params']:,} parameters, {result['tokens_per_step']:,} tokens a step, "
            f"{result['device']}, torch {result['torch']}, commit {result['commit']}",
            f"bare        {step['bare']:9.2f} ms a step",
            f"telemetry   {step['telemetry']:9.2f} ms: {shares['telemetry']:+.2%}",
            f"checkpoint  {result['save_s']:9.2f} s each; one in {SAVE_EVERY} steps: "
            f"{shares['checkpoint']:+.2%}",
            f"together    {result['share']:+.2%} (goal: at most {result['goal']:.0%}): {met}",
        ]
    )


def _parser() -> StrictParser:
    parser = StrictParser(prog="bench_overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default=str(PRODUCTION), metavar="FILE")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps per run (100)")
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="rounds of all three runs (2)"
    )
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main())
