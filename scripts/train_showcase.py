"""Train a model from a config: the trainer, under the name that the runbooks use.

`CONFIG=FILE python scripts/train_showcase.py [flags]`; TinyLM can be imported from here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.config.env import check_environment, in_effect, raw, read, translate_torch_logs

if __name__ == "__main__":
    translate_torch_logs()  # before anything imports torch

from nsa.cli.main import in_sentences
from nsa.config import Config, StrictParser, load_config
from nsa.data import end_process
from nsa.generate import sample_text
from nsa.model import TinyLM
from nsa.train import LoaderOptions, TrainError, run
from nsa.train.checkpoint.resume import AUTO
from nsa.train.distributed.strategy import AUTO as AUTO_RANKS
from nsa.train.distributed.strategy import OFF, ON, speaks_for_all

__all__ = ["TinyLM", "main"]

KEYS = {
    "dataset": "data.dataset",
    "precision": "runtime.precision",
    "seq_len": "train.seq_len",
    "batch_size": "train.batch_size",
    "accum_batches": "train.accumulate_grad_batches",
    "out_dir": "train.out_dir",
    "local_path": "data.local_path",
    "init_from": "train.init_from",
    "strategy": "runtime.strategy",
}
"""Flags that are another spelling of a config key."""


RESUME_HELP = (
    "default: the newest checkpoint in <out_dir>, if it is of the same run; wins over --init-from"
)


def main(arguments: list[str] | None = None) -> int:
    """Train, and return the exit code."""
    flags = _parser().parse_args(arguments)
    return in_sentences("train_showcase", lambda: _train(flags))


def _train(flags: argparse.Namespace) -> int:
    check_environment()
    path = flags.config or read("CONFIG")
    config = _resolve(path, flags)
    for name, value in in_effect().items() if read("RANK") == 0 else ():
        print(f"[boot] environment: {name}={value}")
    try:
        run(
            config,
            config_path=path,
            config_named=bool(flags.config or raw("CONFIG")),
            allow_long_run=flags.allow_long_run,
            stop_after=flags.steps,
            model_path=flags.save,
            sampler=sample_text,
            resume=flags.resume,
            loader=LoaderOptions(
                timeout_s=flags.loader_timeout,
                synthetic_on_fail=flags.synthetic_on_fail,
                report_docs=flags.fwe_report_docs,
            ),
            ddp=flags.ddp,
        )
    except TrainError as error:
        if speaks_for_all(error):
            print(f"train_showcase: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> StrictParser:
    parser = StrictParser(prog="train_showcase", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", metavar="FILE", help="default: the variable CONFIG")
    parser.add_argument("--steps", type=_count, help="end earlier; the LR schedule stays")
    for flag, key in KEYS.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", help=f"sets {key}")
    parser.add_argument("--no-gc", action="store_true", help="gradient checkpointing off")
    parser.add_argument("--save", type=Path, metavar="FILE", help="default: <out_dir>/model.pt")
    parser.add_argument("--resume", default=AUTO, metavar="PATH|latest|none", help=RESUME_HELP)
    parser.add_argument(
        "--ddp",
        type=int,
        choices=(AUTO_RANKS, OFF, ON),
        default=AUTO_RANKS,
        help="many ranks: -1 as WORLD_SIZE says, 0 never, 1 always",
    )
    parser.add_argument(
        "--loader-timeout",
        type=_seconds,
        default=LoaderOptions.timeout_s,
        metavar="SECONDS",
        help="for the first batch of a stream (%(default)g)",
    )
    parser.add_argument(
        "--synthetic-on-fail", action="store_true", help="random tokens if no stream comes"
    )
    parser.add_argument(
        "--fwe-report-docs",
        type=_count,
        default=LoaderOptions.report_docs,
        metavar="N",
        help="a line every N documents of a stream (%(default)d)",
    )
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")
    parser.add_argument("--allow-long-run", action="store_true", help="start a run that is refused")
    return parser


def _resolve(path: str, flags: argparse.Namespace) -> Config:
    overrides = [f"{key}={getattr(flags, f)}" for f, key in KEYS.items() if getattr(flags, f)]
    if flags.no_gc:
        overrides += ["runtime.gradient_checkpointing=false", "runtime.gc_layers="]
    overrides += flags.overrides
    config = load_config(path, overrides)
    if flags.steps and flags.steps > config.train.steps:
        print(
            f"[boot] --steps {flags.steps} is more than train.steps={config.train.steps}; both "
            f"the run and its LR schedule are now {flags.steps} steps long"
        )
        config = load_config(path, [*overrides, f"train.steps={flags.steps}"])
    return config


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1; use one")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0; use one")
    return seconds


if __name__ == "__main__":
    end_process(main())
