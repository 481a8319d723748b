"""Alarms to a web address: one POST of JSON each, from a thread that nobody waits for."""

from __future__ import annotations

import json
import platform
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from nsa.telemetry.alarms import Alarm, as_line

TIMEOUT_S = 5.0
WAITING = 100
"""Alarms that may wait for a slow address; more are dropped, and that is said."""


class Webhook:
    """Sends alarms in their order; an address that does not answer costs them, nothing else."""

    def __init__(self, url: str, say: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"--webhook {url!r} is no address; give one of http:// or https://")
        self._url, self._say, self._timeout_s = url, say, timeout_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="nsa-webhook", daemon=True)
        self._thread.start()

    def post(self, folder: Path, alarm: Alarm) -> None:
        """Hand an alarm over, and return at once."""
        content = {"folder": str(folder), "hostname": platform.node(), **as_line(alarm)}
        try:
            self._queue.put_nowait(json.dumps(content).encode())
        except queue.Full:
            self._say(f"webhook: {WAITING} alarms wait already; {alarm.type} was not sent")

    def close(self) -> None:
        """Give what waits a last moment."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(self._timeout_s + 1)

    def _work(self) -> None:
        while (body := self._queue.get()) is not None:
            request = Request(self._url, body, {"Content-Type": "application/json"})
            try:
                urlopen(request, timeout=self._timeout_s).close()
            except (URLError, OSError, ValueError) as error:
                self._say(f"webhook: not sent ({error})")
