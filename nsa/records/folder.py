"""The folder of a run: made fresh, with the files of an earlier run moved aside."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from nsa.config import ConfigError
from nsa.files import explain, is_at, open_regular, write_text
from nsa.records import alarms, env, hang_report, launch, metrics, results, sentinels, sinks, tables
from nsa.records.env import hide_arguments
from nsa.records.heartbeat import iso
from nsa.records.machine import FLAGS, STATE, start_ticks, stat_fields
from nsa.records.sentinels import read_halt

MODEL = "model.pt"
PROBE = ".writable"
CHECKPOINTS = "checkpoint_step*"
RUN_FILES = (
    tables.TRAINING,
    tables.VAL,
    metrics.NAME,
    metrics.CONFIG_NAME,
    results.SAMPLE_NAME,
    results.CURVE_NAME,
    MODEL,
    CHECKPOINTS,
    tables.K_STATS,
    tables.FALLBACK_COUNTERS,
    tables.NAME,
    env.NAME,
    results.DTYPES,
    results.OPT_STATE,
    sinks.FOLDER,
    sinks.NAME,
    sinks.LOG,
    "wandb",
    alarms.NAME,
    alarms.GATE_DETAILS_NAME,
    launch.PHASE_NAME,
    sentinels.ANOMALY,
    sentinels.DONE + "*",
    "anomaly_step*.pt",
    "heartbeat_rank*.jsonl",
    "stackdump_*.txt",
    "watchdog_stackdump_*.txt",
    "span_rank*.json",
    hang_report.PATTERN,
    "mem_boot*",
    "mem_step1*",
    "mem_pre_step*",
    "mem_post_step*",
)
"""Patterns of what a run writes; other files, a .HALT, which is an order, and the locks
are not touched."""


class Folder(NamedTuple):
    """A run folder that is ready, and where the files of the run before went, if there were any."""

    path: Path
    previous: Path | None


def open_folder(path: Path, *, resumed: bool = False) -> Folder:
    """Create the folder; move an earlier run's files to previous/<time>/, unless it goes on."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / PROBE, "")
        (path / PROBE).unlink()
    except OSError as error:
        raise not_made(path, error) from None
    old = [file for pattern in RUN_FILES for file in sorted(path.glob(pattern))]
    if resumed or not old:
        return Folder(path, None)
    previous = _new_folder(path / "previous")
    for file in old:
        file.rename(previous / file.name)
    return Folder(path, previous)


def not_made(path: Path, error: OSError) -> ConfigError:
    """What is wrong with a run folder that could not be made."""
    return ConfigError(
        f"train.out_dir={path}: the folder cannot be made or written ({explain(error, path)}); "
        "name one that can"
    )


def _new_folder(parent: Path) -> Path:
    """Name it after the time; a second run within the same second gets a number."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    folder = next(parent / name for name in names if not (parent / name).exists())
    folder.mkdir(parents=True)
    return folder


# `.lock` and `.launch.lock`: who works in a folder; one run, and one launch, at a time.
#
# Schema, version 1: one JSON object, the fields of Holder, followed by blanks up to SIZE bytes; it
# is written over in place, because the lock belongs to the file. What locks is flock(2) on the
# file, and what it says only names the holder: a process that was killed leaves its words and no
# lock. The file is never moved or replaced. On NFS, Linux turns the flock into a byte-range lock on
# the server, for which the file must be open for writing. Page: docs/schemas/lock.md.

SCHEMA = 1
RUN, LAUNCH = ".lock", ".launch.lock"
SIZE = 2048
MOST_COMMAND = 1000
RUNNING, STOPPING, ENDED = "running", "stopping", "ended"
STOPPING_S = 60.0
"""How long a holder that is stopping is waited for."""
GRACE_S = 1.0
"""How long any holder is: somebody may only look whether the lock is free."""
POLL_S = 0.1
MOST_REMOVED = 100
"""Attempts to lock a file that somebody removes at the same time."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What flock answers on a file system that has no locks, or whose lock server is not there."""
PF_EXITING = 0x4
"""Flag of a process that is being taken apart, which takes long if it has much memory."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock, or held it last."""

    schema: int = SCHEMA
    state: str = RUNNING
    """running, stopping (asked to, or finishing) or ended."""
    pid: int
    host: str
    started: int
    """Clock ticks from the boot of the machine to the start of the process; 0 if unknown."""
    time: str
    """When the lock was taken, UTC."""
    command: str
    """Its first part, without secrets."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.time}: {self.command}"

    @property
    def is_ending(self) -> bool:
        """Whether it will let go soon, as far as can be seen from here."""
        if self.state == STOPPING:
            return True
        if self.host != platform.node() or not self.started:
            return False
        fields = stat_fields(self.pid)
        if fields is None or start_ticks(self.pid) != self.started:
            return True
        return fields[STATE] in "ZX" or bool(int(fields[FLAGS]) & PF_EXITING)


class FolderHeld(RuntimeError):
    """Another process holds the lock."""

    def __init__(self, folder: Path, holder: Holder | None) -> None:
        self.holder = holder
        super().__init__(f"{folder} is in use by {holder or 'a process that left no name'}")


class FolderLock:
    """A lock that this process holds, until `release`; a forked child has no part in it."""

    def __init__(self, path: Path, descriptor: int, *, locks: bool) -> None:
        """`locks` is false on a file system without locks: then nobody is kept out."""
        self.path, self.locks = path, locks
        self._descriptor = descriptor
        _descriptors.add(descriptor)
        self._holder = Holder(
            pid=os.getpid(),
            host=platform.node(),
            started=start_ticks(),
            time=iso(time.time()),
            command=shlex.join(hide_arguments(sys.argv))[:MOST_COMMAND],
        )
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name
            os.ftruncate(descriptor, 0)
        self.mark(RUNNING)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def mark(self, state: str) -> None:
        """Say how it stands; safe in a signal handler, and after `release` without effect."""
        self._holder = dataclasses.replace(self._holder, state=state)
        text = json.dumps(dataclasses.asdict(self._holder)).ljust(SIZE)
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, text.encode(), 0)

    def is_there(self) -> bool:
        """Whether the file still has its name: else the folder was removed, or moved away."""
        return self._descriptor >= 0 and is_at(self.path, self._descriptor)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        self.mark(ENDED)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _descriptors.discard(descriptor)
            if self.locks:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def remove(self) -> None:
        """Let go, and leave no file; whoever waits for it finds that it has lost its name."""
        if self.is_there():
            self.path.unlink()
        self.release()


def take_lock(
    folder: Path,
    name: str = RUN,
    *,
    say: Say,
    patience_s: float = STOPPING_S,
    waits: bool = False,
) -> FolderLock:
    """Lock a folder, and make it where it is missing; FolderHeld where somebody else has it.

    A holder that is stopping is waited for, `patience_s` at most; with `waits`, any holder.
    """
    since, said = time.monotonic(), False
    while (lock := _try(folder / name, say)) is None:
        holder = read_holder(folder, name)
        ending = waits or read_halt(folder) is not None or (holder is not None and holder.is_ending)
        if time.monotonic() - since > (max(patience_s, GRACE_S) if ending else GRACE_S):
            raise FolderHeld(folder, holder)
        if ending and patience_s > GRACE_S and not said:
            said = True
            text = f"waiting for its end, {patience_s:.0f} s at most"
            say(f"[lock] {FolderHeld(folder, holder)}; {text}")
        time.sleep(POLL_S)
    return lock


def read_holder(folder: Path, name: str = RUN) -> Holder | None:
    """What the file says; None where it says nothing that can be read."""
    try:
        descriptor = open_regular(folder / name, os.O_RDWR)
        try:
            content = json.loads(os.pread(descriptor, SIZE, 0))
        finally:
            os.close(descriptor)
        holder = Holder(**content)
        numbers = (holder.schema, holder.pid, holder.started)
        texts = (holder.state, holder.host, holder.time, holder.command)
        fits = all(type(x) is int for x in numbers) and all(isinstance(x, str) for x in texts)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return holder if fits and holder.schema == SCHEMA else None


def held_by(folder: Path, name: str = RUN) -> Holder | str:
    """Who holds the lock now; empty if nobody does, or the file system has no locks."""
    try:
        descriptor = open_regular(folder / name, os.O_RDWR)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        unlocked = error.errno in WITHOUT_LOCKS
        return "" if unlocked else read_holder(folder, name) or "a process that left no name"
    finally:
        os.close(descriptor)  # and with it the lock, if it was free
    return ""


def _try(path: Path, say: Say) -> FolderLock | None:
    """One attempt; None where somebody holds it."""
    for _ in range(MOST_REMOVED):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed since: make it again
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o666)
            locks = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                locks = False
                if error.errno not in WITHOUT_LOCKS:
                    os.close(descriptor)
                    if error.errno in (errno.EAGAIN, errno.EACCES):
                        return None
                    raise
                say(
                    f"[lock] WARNING: no locks on the file system of {path} ({error.strerror}): "
                    f"nothing keeps a second run out of {path.parent}; see that there is none"
                )
            if is_at(path, descriptor):
                return FolderLock(path, descriptor, locks=locks)
            os.close(descriptor)  # its holder has removed it in between
    raise FileNotFoundError(errno.ENOENT, "removed again and again", str(path))


_descriptors: set[int] = set()


def _close_in_child() -> None:
    """A copy would keep the lock after the end of its holder; to close it does not unlock."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
