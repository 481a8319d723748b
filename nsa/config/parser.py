"""Command-line parsing in which a wrong flag is an error that names the nearest one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from nsa.config.errors import nearest

BAD_INPUT = 2
"""Exit code of bad input."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended; a run that trains then ends with 0."""


class StrictParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are one line and exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]  # typeshed overloads the namespace type
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse leftovers here, where the flags of this (sub)command are known."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._explain(rest[0]))
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _explain(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; remove it, or write it after all flags"
        flag = word.partition("=")[0]
        known = nearest(flag, self._option_string_actions)
        return f"unknown flag {flag!r}; the nearest known one is {known!r}"
