"""Errors of data sources, optional imports, time limits, and retries with backoff."""

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
from nsa.config.describe import install_line


class DataError(ConfigError):
    """A source, tokenizer or row length that cannot be used."""


class SourceLost(RuntimeError):
    """A source stopped delivering, or did not start in time."""


class WaitEnded(RuntimeError):
    """A stop was requested while waiting for a batch."""


# --- optional packages: imported where used ---


def need(module: str, reason: str, extra: str = "data") -> ModuleType:
    """Import a module of an extra, or raise with the install command."""
    try:
        found = importlib.import_module(module)
        if found.__file__ is None:  # a namespace package: just a folder of that name on sys.path
            raise ImportError(f"{list(found.__path__)} is not it")
        return found
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{reason} needs the package {package} ({error}); install it with "
            f"`{install_line(extra)}`"
        ) from None


# --- time limits ---

T = TypeVar("T")

_abandoned: list[threading.Thread] = []


def within(seconds: float, do: Callable[[], T], what: str) -> T:
    """Run `do` with a time limit; raises SourceLost on timeout.

    It runs in a daemon thread: a read that hangs in the network cannot be interrupted, only
    abandoned.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            results.append(do())
        except BaseException as error:  # noqa: BLE001  re-raised below in the calling thread
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
    """The error for a timeout."""
    return SourceLost(
        f"{what} did not arrive within {seconds:g} s; check the network and the hub (HF_ENDPOINT), "
        "or set a longer --loader-timeout SECONDS"
    )


def leave_behind(thread: threading.Thread) -> None:
    """Remember a thread that hangs in a library; see `end_process`."""
    _abandoned.append(thread)


def end_process(code: int) -> NoReturn:
    """Exit the process; immediately, without cleanup, if a hanging thread was abandoned.

    Such a thread may wake up during interpreter shutdown and crash the process, which would lose
    the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit skips atexit handlers and buffered files, hence the flushes above.
    if any(thread.is_alive() for thread in _abandoned):
        os._exit(code)
    sys.exit(code)


# --- retries with exponential backoff ---

MOST = 5
"""Consecutive failures tolerated; the hub client retries several times within each."""
FIRST_S, LONGEST_S = 1.0, 60.0
HTTP_CLIENTS = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp"}
"""HTTP packages whose errors count as connection errors; the hub client may use any of them."""


class Retries:
    """Retry with exponential backoff; log every retry; give up after `most` failures in a row."""

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
        """Reset the failure count: data arrived."""
        self._failures = 0

    def failed(self, error: BaseException) -> None:
        """Sleep before the next attempt, doubling each time; raises SourceLost after the last.

        Jitter shortens the wait by up to half, so that ranks do not reconnect in lockstep.
        """
        self._failures += 1
        if self._failures > self._most:
            raise SourceLost(
                f"{self._what}: {_describe(error)}; gave up after {self._most} failed retries; "
                "check the network and the hub, then run the same command again"
            ) from error
        wait_s = min(FIRST_S * 2 ** (self._failures - 1), LONGEST_S)
        wait_s *= 0.5 + random.random() / 2
        self._say(
            f"[data] {self._what}: {_describe(error)}; retry {self._failures} of {self._most} "
            f"in {wait_s:.1f} s"
        )
        self._sleep(wait_s)


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: connection error, timeout, 408, 429 or a 5xx status."""
    # The client wraps network errors in its own types: follow the chain of causes.
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status in (408, 429) or status >= 500
        if isinstance(error, ConnectionError | TimeoutError) or _is_http_client_error(error):
            return True
        error = error.__cause__
    return False


def _is_http_client_error(error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] in HTTP_CLIENTS for kind in type(error).__mro__)


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
