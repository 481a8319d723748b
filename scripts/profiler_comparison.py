"""Compare ways to train by real runs: selection v1 and v2, NVTX ranges, gradient compression.

`python scripts/profiler_comparison.py --steps 100 --warmup 10 [--config FILE] [group.key=value]`
writes comparison_report.md and results.json into --out-dir.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from bench.training.compare import RunFailed, compare
from bench.training.compare_report import describe, write_comparison
from nsa.config import BAD_INPUT, StrictParser, load_config
from nsa.config.env import check_environment, read
from scripts.train_showcase import CONFIG

OVERRIDES = (
    *("train.eval_every=0", "train.save_every=0", "train.log_every=1000000"),
    "train.tracker=none",
)
"""Nothing between the steps but the steps; the first and the last are logged always."""


def main(arguments: list[str] | None = None) -> int:
    """Compare, print the report, and return the exit code."""
    flags = _parser().parse_args(arguments)
    try:
        check_environment()
        path, folder = flags.config or read("CONFIG") or CONFIG, Path(flags.out_dir)
        overrides = [*flags.overrides, *OVERRIDES, f"runtime.device={flags.device}"]
        found = compare(load_config(path, overrides), path, folder, flags.steps, flags.warmup)
    except ValueError as error:  # bad input, by the convention of this package
        print(f"profiler_comparison: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except RunFailed as error:
        print(f"profiler_comparison: {error}", file=sys.stderr)
        return 1
    print("\n" + describe(found))
    for file in write_comparison(folder, found):
        print(f"wrote {file}")
    return 0


def _parser() -> StrictParser:
    parser = StrictParser(prog="profiler_comparison", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps per run (100)")
    parser.add_argument(
        "--warmup", type=int, default=10, metavar="N", help="first steps that are not counted (10)"
    )
    parser.add_argument("--config", metavar="FILE", help="config file; default: $CONFIG")
    parser.add_argument("--out-dir", default="artifacts/profiler_comparison", metavar="DIR")
    parser.add_argument("--device", default="auto", help="as runtime.device (auto)")
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main())
