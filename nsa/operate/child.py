"""A training process under the launcher: its output goes to logs, and stopping it is gentle first.

It gets a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, and starts
with SIGUSR1 ignored: ranks answer that signal with a stack dump, and torchrun, which shares their
command line and would die of it, does not notice.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from nsa.files import APPEND, open_regular
from nsa.telemetry.best_effort import complain

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TICK_S = 0.5
LAST_WORDS_S = 2.0
"""For output that is still on its way when the process has ended, and somebody holds its pipe."""
PATIENCE_S = 180.0
"""From a .HALT for a timeout to SIGTERM, and from there to SIGKILL."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    stopped: str
    """Who asked for it: the name of a signal, timeout, or nobody."""


class Transcript:
    """What is said on the console, and in files that grow; a full disk costs only the lines."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[Path, int] = {}
        self._has_console = True
        for path in dict.fromkeys(paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = open_regular(path, APPEND)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self.write(f"[launch] {text}\n".encode())

    def write(self, data: bytes) -> None:
        """Pass output on."""
        for path, descriptor in list(self._files.items()):
            try:
                os.write(descriptor, data)
            except OSError as error:
                complain(path, error)
        if self._has_console:
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            except (OSError, ValueError):  # the terminal is gone, or its reader has seen enough
                self._has_console = False

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


class Child:
    """One process, from its start to its end."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        transcript: Transcript,
        *,
        halt: Callable[[str], None],
        timeout_s: float | None = None,
        kill_last: bool,
    ) -> None:
        """`halt` asks the run to end after a step. `kill_last`: nobody else ends the process."""
        self._command, self._environ, self._transcript = command, environ, transcript
        self._halt, self._kill_last = halt, kill_last
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._heard: list[str] = []
        self._stopped, self._asked = "", 0

    def run(self) -> Ended:
        """Start it, pass its output on, and wait for its end."""
        with self._signals():
            self._process = subprocess.Popen(
                self._command,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._pass_on()
            return Ended(self._process.wait(), self._stopped)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        silent_since: float | None = None
        with self._process.stdout as pipe:
            while True:
                if select.select([pipe], [], [], TICK_S)[0]:
                    data = os.read(pipe.fileno(), 1 << 16)
                    if not data:
                        return
                    self._transcript.write(data)
                    silent_since = None
                elif self._process.poll() is not None:
                    silent_since = silent_since or time.monotonic()
                    if time.monotonic() - silent_since > LAST_WORDS_S:
                        return
                self._attend()

    def _attend(self) -> None:
        """Do what signals and the clock ask for; a signal handler itself must not write."""
        while self._heard:
            self._ask(self._heard.pop(0))
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = time.monotonic() + PATIENCE_S
            self._ask("timeout")

    def _ask(self, who: str) -> None:
        """Ask by .HALT, then by SIGTERM, then, where nobody else does it, by SIGKILL."""
        self._asked += 1
        self._stopped = self._stopped or who
        if self._asked == 1:
            self._transcript.say(f"{who}: the run ends after its step; once more for SIGTERM")
            self._halt(who)
        elif self._asked > 2 and self._kill_last:
            self._process.kill()
        else:
            self._transcript.say(f"{who} again: SIGTERM to the run")
            self._process.terminate()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._hear) for number in STOPPING}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(signal.Signals(number).name)
