"""The console command `nsa`: settings, sizes, the plan, and training."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import nsa
from nsa.config import BAD_INPUT, Config, StrictParser, load_config
from nsa.config.describe import (
    key_markdown,
    key_rows,
    text_table,
    variable_markdown,
    variable_rows,
)
from nsa.config.env import check_environment, in_effect, raw, read


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
        sys.stdout.flush()
    except ValueError as error:  # bad input, by the convention of this package
        print(f"nsa: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> StrictParser:
    parser = StrictParser(prog="nsa", description="Native Sparse Attention: train and inspect.")
    parser.add_argument("--version", action="version", version=f"nsa {nsa.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("env", _env, "list the environment variables and their values"),
        ("keys", _keys, "list the config keys and their defaults"),
    ):
        listing = commands.add_parser(name, help=text, description=text)
        listing.add_argument("--markdown", action="store_true", help="as in the documentation")
        listing.set_defaults(command=command)
    for name, command, text in (
        ("info", _info, "print a config and what it costs: parameters, FLOPs, bytes, memory"),
        ("plan", _plan, "print which attention backend would run here, and why"),
        ("train", _train, "train a model"),
    ):
        parsed = commands.add_parser(name, help=text, description=text)
        parsed.add_argument("--config", metavar="FILE", help="default: the variable CONFIG")
        parsed.add_argument("overrides", nargs="*", metavar="group.key=value")
        parsed.set_defaults(command=command)
        if name == "train":
            parsed.add_argument(
                "--allow-long-run",
                action="store_true",
                help="start a long run without checkpoints or with a config that nobody named",
            )
    return parser


def _env(args: argparse.Namespace) -> int:
    print(variable_markdown() if args.markdown else text_table(variable_rows()))
    check_environment()  # after the table, which shows what is wrong
    return 0


def _keys(args: argparse.Namespace) -> int:
    print(key_markdown() if args.markdown else text_table(key_rows()))
    return 0


def _info(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.model.report import describe_config  # torch takes seconds: only where it is needed

    print(describe_config(config, path))
    return 0


def _plan(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.train.runtime import resolve_runtime

    runtime = resolve_runtime(config.runtime, (config.model.d_k, config.model.d_v))
    print(f"config: {path}")
    print(f"device: {runtime.describe_device()}, precision: {runtime.precision}")
    print(runtime.plan)
    return 0


def _train(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.generate import sample_text
    from nsa.train import TrainError, run

    try:
        run(
            config,
            config_path=path,
            config_named=bool(args.config or raw("CONFIG")),
            allow_long_run=args.allow_long_run,
            sampler=sample_text,
        )
    except TrainError as error:
        print(f"nsa: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _load(args: argparse.Namespace) -> tuple[str, Config]:
    """Resolve the config that the command names, and say which variables took part."""
    check_environment()
    path = args.config or read("CONFIG")
    config = load_config(path, args.overrides)
    for name, value in in_effect().items():
        print(f"environment: {name}={value}")
    return path, config


if __name__ == "__main__":
    sys.exit(main())
