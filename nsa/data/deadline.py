"""Waiting for something that may never come, for a limited time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from nsa.data.errors import SourceLost

T = TypeVar("T")

_left_behind: list[threading.Thread] = []


def within(seconds: float, do: Callable[[], T], what: str) -> T:
    """Return what `do` returns, or raise SourceLost when it takes longer.

    It runs in a thread that does not keep the process alive: a read that hangs in the network
    cannot be interrupted, only left behind.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            results.append(do())
        except BaseException as error:  # noqa: BLE001  raised again below, where somebody waits
            errors.append(error)

    thread = threading.Thread(target=attempt, name=f"within {seconds:g} s", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        leave_behind(thread)
        raise late(seconds, what)
    return results[0]


def late(seconds: float, what: str) -> SourceLost:
    """The error of something that did not come in time."""
    return SourceLost(
        f"{what} did not come within {seconds:g} s; look at the network and the hub (HF_ENDPOINT), "
        "or give it more time with --loader-timeout SECONDS"
    )


def leave_behind(thread: threading.Thread) -> None:
    """Remember a thread that hangs in a library, for the end of the process."""
    _left_behind.append(thread)


def end_process(code: int) -> NoReturn:
    """End the process of a command, at once where a thread was left behind in a library.

    Such a thread comes back while Python takes itself apart, and then crashes the process, which
    would lose the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.is_alive() for thread in _left_behind):
        os._exit(code)
    sys.exit(code)
