"""Trying again after a broken connection: later and later, aloud, and not for ever."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from nsa.data.errors import SourceLost

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
