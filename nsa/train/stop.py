"""Asking a run to stop after a step: by SIGTERM, Ctrl-C, or a file .HALT in its folder."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nsa.telemetry.sentinels import read_halt

SIGNALS = (signal.SIGTERM, signal.SIGINT)
HALT_FILE = ".HALT"
REASONS = ("", HALT_FILE, *(number.name for number in SIGNALS))
"""What `requested` can say."""


class Stop:
    """Remembers that somebody asked; a second Ctrl-C does not wait for the step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked = ""
        self._before: dict[int, Any] = {}

    def requested(self) -> str:
        """Who asked for the end of the run; empty while nobody did."""
        if self._asked:
            return self._asked
        return HALT_FILE if read_halt(self._folder) is not None else ""

    def ask(self, reason: str) -> None:
        """Ask in the name of somebody else: another rank has heard it, say."""
        self._asked = self._asked or reason

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = signal.Signals(number).name
