"""The curves of a run for Weights & Biases or trackio, as far as they take them.

The library runs in a process of its own (tracker_child.py), because it may block, print, install
handlers or fail, and none of that may reach the training. Points go to it through a pipe that is
never waited for; a tracker that fails, or takes nothing for long, is dropped with one line.

Two files: tracker.json (schema, version 1: `version`, `tracker`, `id`), by which a resumed run goes
on under the same name, and tracker.log, what the library printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from nsa.config import Config, ConfigError, to_container
from nsa.config.env import raw
from nsa.files import open_regular, read_text
from nsa.telemetry.atomic import write_text
from nsa.telemetry.best_effort import best_effort

VERSION = 1
NAME, LOG = "tracker.json", "tracker.log"
NO_TRACKER = "none"
PROJECT = "nsa"
CHILD = Path(__file__).with_name("tracker_child.py")
MOST_WAITING = 4 * 1024 * 1024
"""Bytes that wait for a tracker at most; about a thousand logged steps."""
CLOSE_S = 60.0
"""How long the end of a run waits for a tracker to finish its own."""


class Tracked(NamedTuple):
    """tracker.json: under which id which tracker has the run."""

    tracker: str
    id: str


class Tracker:
    """Hands points over; without a process every call does nothing, and no call can fail."""

    def __init__(
        self,
        name: str = NO_TRACKER,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._name, self._process, self._log, self._say = name, process, log, say
        self.tracked: Tracked | None = None
        self._waiting = bytearray()
        if process is not None and process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of these curves, without waiting."""
        if self._process is not None:
            self._send({"step": step, "values": dict(values)})

    def renew(self) -> None:
        """Write tracker.json again, into a folder that was removed."""
        if self.tracked is not None and self._log is not None:
            write_tracked(self._log.parent, self.tracked)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Hand over what waits, let the tracker finish, and end it if it does not."""
        process, until = self._process, time.monotonic() + timeout_s
        if process is None or process.stdin is None:
            return
        while self._waiting and self._process is not None and time.monotonic() < until:
            select.select([], [process.stdin], [], max(0.0, until - time.monotonic()))
            self._push()
        if self._process is None:
            return
        process.stdin.close()
        try:
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._drop(f"it did not finish within {timeout_s:.0f} s")
            return
        if code:
            self._drop(f"it ended with exit code {code}")
        self._process = None

    def _send(self, message: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(message).encode() + b"\n"
        self._push()
        if len(self._waiting) > MOST_WAITING:
            self._drop(f"{len(self._waiting) >> 20} MiB wait for it")

    def _push(self) -> None:
        """Write as much as the pipe takes."""
        assert self._process is not None and self._process.stdin is not None
        try:
            while self._waiting:
                taken = os.write(self._process.stdin.fileno(), self._waiting)
                del self._waiting[:taken]
        except BlockingIOError:
            return
        except OSError:  # its log says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._drop("it has ended")

    def _drop(self, why: str) -> None:
        process, self._process = self._process, None
        self._waiting.clear()
        assert process is not None and process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.kill()
        process.wait()
        self._say(
            f"[telemetry] {self._name} gets no more of this run: {why}{self._last_words()}; "
            "the run goes on, and its files are complete"
        )

    def _last_words(self) -> str:
        """The last line that the library printed, and where the others are."""
        with contextlib.suppress(OSError):
            lines = read_text(self._log).split("\n") if self._log else []
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return f" ({last}; see {self._log})" if last else ""
        return ""


def require_tracker(name: str) -> None:
    """Refuse a tracker whose package is not there, before anything is trained."""
    if name != NO_TRACKER and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"train.tracker={name}: the package is not installed; install it with "
            f"`pip install -c constraints.txt -e '.[{name}]'`, or use train.tracker=none",
            key="train.tracker",
        )


def open_tracker(
    cfg: Config, folder: Path, *, resumed: bool, say: Callable[[str], None]
) -> Tracker:
    """Start the process for cfg.train.tracker; for `none`, a tracker that does nothing."""
    name = cfg.train.tracker
    if name == NO_TRACKER:
        return Tracker()
    tracked = _known(folder, say) if resumed else None
    if tracked is None or tracked.tracker != name:
        tracked = Tracked(name, f"{folder.name}-{uuid.uuid4().hex[:8]}")
    write_tracked(folder, tracked)
    log = folder / LOG
    try:
        with open(log, "ab", opener=open_regular) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C stops the trainer, which then finishes this one
            )
    except OSError as error:
        say(f"[telemetry] {name} gets nothing of this run: {error}; the run goes on")
        return Tracker()
    say(f"[telemetry] {name} follows this run as {tracked.id}; what it prints is in {log}")
    tracker = Tracker(name, process, log, say)
    tracker.tracked = tracked
    start = {"kind": name, "project": raw("WANDB_PROJECT") or PROJECT, "name": folder.name}
    start |= {"id": tracked.id, "folder": str(folder)}
    tracker._send(start | {"config": to_container(cfg)})
    return tracker


def _known(folder: Path, say: Callable[[str], None]) -> Tracked | None:
    try:
        return read_tracked(folder)
    except ValueError as error:
        say(f"[telemetry] {error}; the tracker gets this run under a new id")
        return None


def write_tracked(folder: Path, tracked: Tracked) -> Path:
    """Write tracker.json; a full disk costs only the file."""
    path = folder / NAME
    with best_effort(path):
        write_text(path, json.dumps({"version": VERSION, **tracked._asdict()}, indent=2) + "\n")
    return path


def read_tracked(folder: Path) -> Tracked | None:
    """Read tracker.json of a run folder; None where no tracker had the run."""
    path = folder / NAME
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version!r}; this program reads version {VERSION}; use the "
            "program that wrote it"
        )
    return Tracked(str(content.get("tracker")), str(content.get("id")))
