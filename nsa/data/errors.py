"""The error of data that cannot be used."""

from __future__ import annotations

import importlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn, TypeVar

from nsa.config import ConfigError


class DataError(ConfigError):
    """A source, a tokenizer or a row length that this version cannot serve."""


class SourceLost(RuntimeError):
    """A source that was there does not deliver any more, or did not begin to in time."""


class WaitEnded(RuntimeError):
    """Somebody asked to stop while a batch was waited for."""


# Packages that only some data needs: imported where used, and asked for by their install line.

INSTALL = "pip install -c constraints.txt 'nsa[{extra}]'"


def need(module: str, reason: str, extra: str = "data") -> ModuleType:
    """Import a module of an extra, or say which line installs it."""
    try:
        found = importlib.import_module(module)
        if found.__file__ is None:  # a mere folder of that name somewhere on the import path
            raise ImportError(f"{list(found.__path__)} is not it")
        return found
    except ImportError as error:
        package = module.partition(".")[0]
        install = INSTALL.format(extra=extra)
        raise DataError(f"{reason} needs the package {package} ({error}); {install}") from None


# Waiting for something that may never come, for a limited time.

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


# Trying again after a broken connection: later and later, aloud, and not for ever.

MOST = 5
"""Failures in a row that are forgiven; the client of the hub has tried several times in each."""
FIRST_S, LONGEST_S = 1.0, 60.0
HTTP_CLIENTS = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp"}
"""Packages whose errors are about a connection; which one the hub client uses is its own matter."""


class Retries:
    """Counts failures in a row, waits after each, and gives up after the last."""

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        *,
        most: int = MOST,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._what, self._say, self._most, self._sleep = what, say, most, sleep
        self._failures = 0

    def worked(self) -> None:
        """Something arrived: the next failure is a first one again."""
        self._failures = 0

    def failed(self, error: BaseException) -> None:
        """Wait before the next attempt, twice as long each time; raise SourceLost after the last.

        The wait is up to half shorter at random, so that ranks do not come back all at once.
        """
        self._failures += 1
        if self._failures > self._most:
            raise SourceLost(
                f"{self._what}: {_describe(error)}; {self._most} attempts to go on have failed; "
                "look at the network and the hub, then start the same command again"
            ) from error
        wait_s = min(FIRST_S * 2 ** (self._failures - 1), LONGEST_S)
        wait_s *= 0.5 + random.random() / 2
        self._say(
            f"[data] {self._what}: {_describe(error)}; attempt {self._failures} of {self._most} "
            f"to go on in {wait_s:.1f} s"
        )
        self._sleep(wait_s)


def is_transient(error: BaseException | None) -> bool:
    """Whether another attempt may succeed: the connection failed, or the server was overwhelmed."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status in (408, 429) or status >= 500
        if isinstance(error, ConnectionError | TimeoutError) or _is_of_a_client(error):
            return True
        error = error.__cause__
    return False


def _is_of_a_client(error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] in HTTP_CLIENTS for kind in type(error).__mro__)


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
