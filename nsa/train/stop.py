"""Requests to stop a run: SIGTERM, Ctrl-C, a .HALT file in its folder, or the death of torchrun.

If torchrun dies, its ranks would keep running beside those of the next start. The first signal is
acknowledged at once and takes effect after the step; the second ends the run in mid-step; the third
does not even wait for a checkpoint in flight. Python runs signal handlers only in the main thread,
and not while it is inside a library call; so the listener thread of records/dumps.py reports
signals too, and they are acknowledged even if the main thread hangs.
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
"""All return values of `requested`; ranks exchange the index."""
AGAIN_S = 2.0
"""A SIGTERM sooner than this after another is the same request: `pkill -f` reaches both the ranks
and their launcher, which forwards it to them."""
LEAVE_S = 10.0
"""From the second signal to a forced exit, if the main thread hangs in a library."""


class Stop:
    """Collects requests to stop, and handles SIGTERM and SIGINT inside the `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        parent: int | None = None,
        on_request: Callable[[], None] = lambda: None,
        quiet: bool = False,
    ) -> None:
        """`parent` is launcher_pid() at the start of the run. `on_request` is called at each
        request, possibly in a signal handler. `quiet`: rank 0 prints the messages.
        """
        self._folder, self._parent = folder, parent
        self._on_request, self._quiet = on_request, quiet
        self.step = 0
        """The current update, for messages."""
        self._asked = ""
        self._num_asked, self._last_asked = 0, 0.0
        self._leaving = threading.Event()  # set once the main thread is on its way out
        self._heard = {"handler": 0, "thread": 0}  # signals seen by each of the two
        self._lock = threading.RLock()  # reentrant: a handler may interrupt another one
        self._before: dict[int, Any] = {}

    def requested(self) -> str:
        """The source of the request to stop; empty without one."""
        if self._asked:
            return self._asked
        if self._parent is not None and os.getppid() != self._parent:
            self.request(ORPHANED)
            return ORPHANED
        return HALT_FILE if read_halt(self._folder) is not None else ""

    def request(self, reason: str) -> None:
        """Request a stop for another source, for example another rank."""
        self._asked = self._asked or reason
        self._on_request()

    def count_signal(self, number: int) -> None:
        """Count a signal that the listener thread received."""
        if number in SIGNALS:
            self._count("thread", number)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
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
                "command resumes from the last checkpoint, if there is one"
            ) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count("handler", number)
        # Only the handler raises: the exception must unwind the main thread.
        if self._num_asked == 2 and not self._leaving.is_set():
            self._leaving.set()
            raise KeyboardInterrupt

    def _count(self, by: str, number: int) -> None:
        """Count a signal once, although handler and listener thread both report it."""
        with self._lock:
            known = max(self._heard.values())
            self._heard[by] += 1
            if self._heard[by] <= known:  # the other one has reported this signal already
                return
            now, name = time.monotonic(), signal.Signals(number).name
            # Ctrl-C twice is always two requests.
            is_same = number == signal.SIGTERM and now - self._last_asked < AGAIN_S
            if self._num_asked and is_same:
                return
            self._num_asked, self._last_asked = self._num_asked + 1, now
            self._take(name)

    def _take(self, name: str) -> None:
        if self._num_asked == 1:
            self.request(name)
            doing = f"finishing step {self.step}" if self.step else "before the first step"
            self._say(f"{name} received: {doing}, then a checkpoint; repeat it to stop at once")
        elif self._num_asked == 2:
            self._say(f"{name} again: stopping at once; the last checkpoint stays")
            # Inside a library call the handler cannot run: exit by a timer.
            leave = threading.Timer(LEAVE_S, self._leave, ["the step does not end"])
            leave.daemon = True
            leave.start()
        else:
            self._leaving.clear()
            self._leave(f"{name} a third time")

    def _leave(self, why: str) -> None:
        """Exit the process at once, unless the main thread is on its way out."""
        if not self._leaving.is_set():
            self._say(f"{why}: exiting without waiting for anything")
            os._exit(Interrupted.exit_code)

    def _say(self, text: str) -> None:
        """Print with os.write: print() is not reentrant, and a handler may interrupt one."""
        if self._quiet:
            return
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            start = "\n" if sys.stderr.isatty() else ""  # start below the progress bar
            os.write(2, f"{start}[stop] {text}\n".encode())


def launcher_pid() -> int | None:
    """Pid of the parent if it is torchrun, else None: other parents may exit before the run."""
    return None if raw("TORCHELASTIC_RUN_ID") is None else os.getppid()
