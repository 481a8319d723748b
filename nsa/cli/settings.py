"""`nsa env`, `keys`, `info`, `plan` and `warmup`: the settings and their effect on this machine."""

from __future__ import annotations

import argparse
import time
from typing import Any

from nsa.config import Config, ConfigError, load_config
from nsa.config.describe import (
    key_markdown,
    key_rows,
    text_table,
    variable_markdown,
    variable_rows,
)
from nsa.config.env import check_environment, in_effect, read
from nsa.config.load import DEFAULT

OVERRIDE = "set a config key"


def register(commands: Any) -> None:
    """Add the commands to the `nsa` parser."""
    for name, command, text in (
        ("env", _env, "list the environment variables and their values"),
        ("keys", _keys, "list the config keys and their defaults"),
    ):
        listing = commands.add_parser(name, help=text, description=text)
        listing.add_argument(
            "--markdown",
            action="store_true",
            help="print a Markdown table, as in the documentation",
        )
        listing.set_defaults(command=command)
    for name, command, text in (
        ("info", _info, "print a config and what it costs: parameters, FLOPs, bytes, memory"),
        ("plan", _plan, "print which attention backend would run here, and why"),
        ("warmup", _warmup, "compile the GPU kernels of a config ahead, in parallel"),
    ):
        parsed = commands.add_parser(name, help=text, description=text)
        add_config_flags(parsed)
        parsed.set_defaults(command=command)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `load` reads: a config file and overrides."""
    parser.add_argument(
        "--config",
        metavar="NAME|FILE",
        help=f"name of a bundled config, or a file; default: $CONFIG, else {DEFAULT}",
    )
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help=OVERRIDE)


def load(args: argparse.Namespace, *, quiet: bool = False) -> tuple[str, Config]:
    """Resolve the command's config, and print the environment variables in effect."""
    check_environment()
    path = args.config or read("CONFIG") or DEFAULT
    config = load_config(path, args.overrides)
    # Only rank 0 prints, or every rank of a torchrun job would repeat the list.
    for name, value in in_effect().items() if read("RANK") == 0 and not quiet else ():
        print(f"environment: {name}={value}")
    return path, config


def _env(args: argparse.Namespace) -> int:
    print(variable_markdown() if args.markdown else text_table(variable_rows()))
    check_environment()  # after the table, so that the user sees the variable at fault
    return 0


def _keys(args: argparse.Namespace) -> int:
    print(key_markdown() if args.markdown else text_table(key_rows()))
    return 0


def _info(args: argparse.Namespace) -> int:
    path, config = load(args)
    from nsa.cli.info import describe_config  # imports torch, which takes seconds

    print(describe_config(config, path))
    return 0


def _plan(args: argparse.Namespace) -> int:
    path, config = load(args)
    from nsa.train.runtime import resolve_runtime

    runtime = resolve_runtime(
        config.runtime, (config.model.d_k, config.model.d_v), config.model.attention_kind
    )
    print(f"config: {path}")
    print(f"device: {runtime.describe_device()}, precision: {runtime.precision}")
    print(runtime.plan)
    return 0


def _warmup(args: argparse.Namespace) -> int:
    path, config = load(args)
    from nsa.train.build import compile_kernels
    from nsa.train.runtime import deterministic_algorithms, resolve_runtime

    dims = (config.model.d_k, config.model.d_v)
    runtime = resolve_runtime(config.runtime, dims, config.model.attention_kind)
    print(f"config: {path}")
    print(runtime.plan)
    if runtime.device.type != "cuda":
        raise ConfigError(
            f"runtime.device={config.runtime.device} is {runtime.device} here, and kernels are "
            "compiled for a CUDA GPU; run `nsa warmup` on the machine that will train",
            key="runtime.device",
        )
    from triton import knobs

    began = time.monotonic()
    with deterministic_algorithms(config.runtime):
        num_kernels = compile_kernels(config, runtime)
    print(
        f"compiled {num_kernels} kernels for {runtime.describe_device()} in "
        f"{time.monotonic() - began:.1f} s, into {knobs.cache.dir}"
    )
    return 0
