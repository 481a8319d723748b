"""The console command `nsa`: its parser, and how errors are reported.

Each module registers its commands with their flags, and imports what a command needs only when it
runs: importing torch takes seconds, and commands that only read files do not need it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import nsa
from nsa.cli import dashboard, data, evaluate, operate, settings, train
from nsa.config import BAD_INPUT, INTERRUPTED, StrictParser
from nsa.config.env import translate_torch_logs
from nsa.files import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; invalid input prints one line on stderr and exits with 2."""
    args = _parser().parse_args(argv)
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command("nsa", lambda: int(args.command(args)))


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command; print expected errors as one line, without a traceback."""
    try:
        code = command()
        sys.stdout.flush()
    except ValueError as error:  # bad user input, by the convention of this package
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # a training run handles Ctrl-C itself
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, e.g. `head`, has exited
        # Python flushes stdout again at exit: point it to /dev/null, or that flush fails too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # e.g. no write permission, or a full disk
        print(f"{program}: error: {explain(error)}", file=sys.stderr)
        return BAD_INPUT
    return code


def entry() -> NoReturn:
    """Entry point of the process: run the command and exit with its code."""
    translate_torch_logs()
    code = main()
    # Skip Python's final garbage collection: over all that torch imports it takes half a second.
    # Frozen objects are left out; the process ends anyway.
    gc.freeze()
    if "nsa.data" not in sys.modules:  # no data source was opened, so no thread can hang
        sys.exit(code)
    from nsa.data import end_process

    end_process(code)


def subcommands() -> list[str]:
    """Names of all commands, as in `nsa NAME`."""
    (action,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return list(action.choices)


def _parser() -> StrictParser:
    parser = StrictParser(prog="nsa", description="Native Sparse Attention: train and inspect.")
    parser.add_argument("--version", action="version", version=f"nsa {nsa.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in (settings, train, evaluate, data, operate, dashboard):
        family.register(commands)
    return parser


if __name__ == "__main__":
    entry()
