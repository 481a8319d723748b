"""Asking a run to stop after a step: by SIGTERM, Ctrl-C, or a file .HALT in its folder.

The end of torchrun asks, too: its ranks would live on as orphans, beside those of the next start.
The first signal is acknowledged at once and obeyed after the step; a second one ends the run in the
middle of it, and a third does not even wait for a checkpoint that is being written. Python calls
handlers in the main thread alone, and only when no call into a library keeps it; so the thread that
the system's own handler wakes (records/dumps.py) hears signals, too, and says what happens to them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nsa.config.env import raw
from nsa.records.sentinels import read_halt
from nsa.train.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
HALT_FILE = ".HALT"
ORPHANED = "the end of torchrun"
REASONS = ("", HALT_FILE, *(number.name for number in SIGNALS), ORPHANED)
"""What `requested` can say."""
AGAIN_S = 2.0
"""SIGTERM that comes sooner than this after another is the same request: `pkill -f` reaches the
ranks and their launcher, which passes it on to them."""
LEAVE_S = 10.0
"""From the second signal to the end of a process whose main thread hangs in a library."""


class Stop:
    """Remembers that somebody asked."""

    def __init__(
        self,
        folder: Path,
        *,
        parent: int | None = None,
        heard: Callable[[], None] = lambda: None,
        quiet: bool = False,
    ) -> None:
        """`parent` is what launcher_pid() said at the start of the run. `heard` is called when
        somebody asks, also in a signal handler. `quiet`: another rank speaks.
        """
        self._folder, self._parent, self._tell, self._quiet = folder, parent, heard, quiet
        self.step = 0
        """The update that is being done, for what is said."""
        self._asked = ""
        self._num_asked, self._last_asked = 0, 0.0
        self._leaving = threading.Event()
        self._heard = {"handler": 0, "thread": 0}
        self._lock = threading.RLock()  # a handler may interrupt the one before
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

    def hear(self, number: int) -> None:
        """A signal has come, as another thread than the main one has heard."""
        if number in SIGNALS:
            self._count("thread", number)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted in step {self.step}; the logs are in {self._folder}; the same "
                "command goes on from the last checkpoint, if there is one"
            ) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count("handler", number)
        if self._num_asked == 2 and not self._leaving.is_set():
            self._leaving.set()
            raise KeyboardInterrupt

    def _count(self, by: str, number: int) -> None:
        """Take a signal in, once: the handler and the thread both hear of it, in any order."""
        with self._lock:
            known = max(self._heard.values())
            self._heard[by] += 1
            if self._heard[by] <= known:
                return
            now, name = time.monotonic(), signal.Signals(number).name
            is_same = number == signal.SIGTERM and now - self._last_asked < AGAIN_S
            if self._num_asked and is_same:
                return
            self._num_asked, self._last_asked = self._num_asked + 1, now
            self._take(name)

    def _take(self, name: str) -> None:
        if self._num_asked == 1:
            self.ask(name)
            doing = f"finishing step {self.step}" if self.step else "before the first step"
            self._say(f"{name} received: {doing}, then a checkpoint; send it again to stop at once")
        elif self._num_asked == 2:
            self._say(f"{name} again: stopping at once; the last checkpoint stays")
            leave = threading.Timer(LEAVE_S, self._leave, ["the step does not end"])
            leave.daemon = True
            leave.start()
        else:
            self._leaving.clear()
            self._leave(f"{name} a third time")

    def _leave(self, why: str) -> None:
        """End the process here and now, unless the main thread is on its way out."""
        if not self._leaving.is_set():
            self._say(f"{why}: leaving without waiting for anything")
            os._exit(Interrupted.exit_code)

    def _say(self, text: str) -> None:
        """In one write: print() is not safe in a handler that has interrupted another print()."""
        if self._quiet:
            return
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            start = "\n" if sys.stderr.isatty() else ""  # below the bar
            os.write(2, f"{start}[stop] {text}\n".encode())


def launcher_pid() -> int | None:
    """The process that started this one, if it is torchrun; any other may end before a run does."""
    return None if raw("TORCHELASTIC_RUN_ID") is None else os.getppid()
