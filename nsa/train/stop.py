"""Asking a run to stop after a step: by SIGTERM, Ctrl-C, or a file .HALT in its folder.

The end of torchrun asks, too: its ranks would live on as orphans, beside those of the next start.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nsa.config.env import raw
from nsa.telemetry.sentinels import read_halt

SIGNALS = (signal.SIGTERM, signal.SIGINT)
HALT_FILE = ".HALT"
ORPHANED = "the end of torchrun"
REASONS = ("", HALT_FILE, *(number.name for number in SIGNALS), ORPHANED)
"""What `requested` can say."""


class Stop:
    """Remembers that somebody asked; a second Ctrl-C does not wait for the step."""

    def __init__(
        self,
        folder: Path,
        *,
        parent: int | None = None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """`parent` is what launcher_pid() said at the start of the run. `heard` is called when
        somebody asks, also in a signal handler.
        """
        self._folder, self._parent, self._tell = folder, parent, heard
        self._asked = ""
        self._before: dict[int, Any] = {}

    def requested(self) -> str:
        """Who asked for the end of the run; empty while nobody did."""
        if self._asked:
            return self._asked
        if self._parent is not None and os.getppid() != self._parent:
            self.ask(ORPHANED)
            return ORPHANED
        return HALT_FILE if read_halt(self._folder) is not None else ""

    def ask(self, reason: str) -> None:
        """Ask in the name of somebody else: another rank has heard it, say."""
        self._asked = self._asked or reason
        self._tell()

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
        self._tell()


def launcher_pid() -> int | None:
    """The process that started this one, if it is torchrun; any other may end before a run does."""
    return None if raw("TORCHELASTIC_RUN_ID") is None else os.getppid()
