"""The console command `nsa`: its parser, and how errors are reported.

Each module registers its commands with their flags, and imports what a command needs when it runs:
torch takes seconds, and a command that only reads files has no use for it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import nsa
from nsa.cli import checkpoint, dashboard, data, operate, settings, train
from nsa.config import BAD_INPUT, INTERRUPTED, StrictParser
from nsa.config.env import translate_torch_logs
from nsa.files import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2."""
    args = _parser().parse_args(argv)
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    return in_sentences("nsa", lambda: int(args.command(args)))


def in_sentences(program: str, command: Callable[[], int]) -> int:
    """Run a command; what a user or the system can make go wrong is a line, and no traceback."""
    try:
        code = command()
        sys.stdout.flush()
    except ValueError as error:  # bad input, by the convention of this package
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # a run that trains handles it itself
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written, a disk that is full
        print(f"{program}: error: {explain(error)}", file=sys.stderr)
        return BAD_INPUT
    return code


def entry() -> NoReturn:
    """Be the command: run, and end the process with the exit code."""
    translate_torch_logs()
    code = main()
    if "nsa.data" not in sys.modules:  # nothing was read that could hang
        sys.exit(code)
    from nsa.data import end_process

    end_process(code)


def subcommands() -> list[str]:
    """Names of the commands, as in `nsa NAME`."""
    (action,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return list(action.choices)


def _parser() -> StrictParser:
    parser = StrictParser(prog="nsa", description="Native Sparse Attention: train and inspect.")
    parser.add_argument("--version", action="version", version=f"nsa {nsa.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for family in (settings, train, data, checkpoint, operate, dashboard):
        family.register(commands)
    return parser


if __name__ == "__main__":
    entry()
