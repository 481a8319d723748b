"""The run folder: creating it, moving the files of an earlier run aside, and the lock that lets
only one run, and one launch, work in it.
"""

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
from nsa.files import (
    FLAGS,
    STATE,
    explain,
    is_at,
    open_regular,
    start_ticks,
    stat_fields,
    write_text,
)
from nsa.records import alarms, env, hang_report, launch, metrics, results, sentinels, sinks, tables
from nsa.records.env import hide_arguments
from nsa.records.heartbeat import iso
from nsa.records.sentinels import read_halt

MODEL = "model.pt"
PROBE = ".writable"
CHECKPOINTS = "checkpoint_step*"
RUN_FILES = (
    tables.TRAINING,
    tables.VAL,
    metrics.METRICS_FILE,
    metrics.CONFIG_FILE,
    results.SAMPLE_FILE,
    results.SAMPLES_FILE,
    results.CURVE_FILE,
    MODEL,
    CHECKPOINTS,
    tables.K_STATS,
    tables.FALLBACK_COUNTERS,
    tables.SELECTION,
    env.ENV_FILE,
    results.DTYPES,
    results.OPT_STATE,
    sinks.FOLDER,
    sinks.TRACKER,
    sinks.LOG,
    "wandb",
    alarms.ALARMS_FILE,
    alarms.GATE_DETAILS_FILE,
    launch.PHASE_FILE,
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
"""Patterns of the files that a run writes. Not listed, so never moved: files of the user, the
locks, and .HALT, which is a request and not a result."""


class Folder(NamedTuple):
    """A run folder ready for use, and where the files of an earlier run were moved, if any."""

    path: Path
    previous: Path | None


def open_folder(path: Path, *, resumed: bool = False) -> Folder:
    """Create the folder; unless `resumed`, move an earlier run's files to previous/<time>/."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # mkdir succeeds on an existing folder that is not writable, so write a probe.
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
    """The error for a run folder that cannot be created or written."""
    return ConfigError(
        f"train.out_dir={path}: the folder cannot be created or written ({explain(error, path)}); "
        "use another folder"
    )


def _new_folder(parent: Path) -> Path:
    """Create a folder named after the current time, with a number if that name exists."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    folder = next(parent / name for name in names if not (parent / name).exists())
    folder.mkdir(parents=True)
    return folder


# --- the lock: .lock and .launch.lock ---
# Schema, version 1 (docs/schemas/lock.md): the fields of Holder as one JSON object, padded with
# blanks to SIZE bytes. The lock itself is flock(2); the content only names the holder, so a killed
# process leaves its name but no lock. The file is overwritten in place and never replaced, because
# flock belongs to the inode. On NFS, flock needs the file open for writing.

SCHEMA = 1
RUN, LAUNCH = ".lock", ".launch.lock"
SIZE = 2048
MOST_COMMAND = 1000
RUNNING, STOPPING, ENDED = "running", "stopping", "ended"
STOPPING_S = 60.0
"""How long to wait for a holder that is stopping."""
GRACE_S = 1.0
"""How long to wait for any holder: `held_by` of another process takes the lock for a moment."""
POLL_S = 0.1
MOST_REMOVED = 100
"""Attempts to lock a file that another process keeps removing."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""errno of flock on a file system without locks, or with an unreachable lock server."""
PF_EXITING = 0x4
"""Kernel flag of an exiting process. Freeing much memory can take it many seconds."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock, or held it last."""

    schema: int = SCHEMA
    state: str = RUNNING
    """running, stopping (asked to stop, or finishing) or ended."""
    pid: int
    host: str
    started: int
    """Start time of the process in clock ticks since boot; 0 if unknown."""
    time: str
    """When the lock was taken, UTC."""
    command: str
    """First MOST_COMMAND characters of the command line, with secrets hidden."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.time}: {self.command}"

    @property
    def is_ending(self) -> bool:
        """Whether it will release the lock soon, as far as this host can tell."""
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
    """A lock held by this process until `release`; forked children do not inherit it."""

    def __init__(self, path: Path, descriptor: int, *, locks: bool) -> None:
        """`locks` is false on a file system without locks: then no other process is kept out."""
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
        with contextlib.suppress(OSError):  # full disk: the lock works without the holder's name
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
        """Write the state into the lock file; safe in a signal handler; no-op after `release`."""
        self._holder = dataclasses.replace(self._holder, state=state)
        text = json.dumps(dataclasses.asdict(self._holder)).ljust(SIZE)
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, text.encode(), 0)

    def is_there(self) -> bool:
        """Whether the lock file still has its name; if not, the folder was removed or moved."""
        return self._descriptor >= 0 and is_at(self.path, self._descriptor)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self.mark(ENDED)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _descriptors.discard(descriptor)
            if self.locks:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def remove(self) -> None:
        """Release the lock and delete its file; waiting processes notice with `is_at`."""
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
    """Lock a folder, creating it if needed; raise FolderHeld if another process has it.

    Waits up to `patience_s` for a holder that is stopping; with `waits`, for any holder.
    """
    since, said = time.monotonic(), False
    while (lock := _try_lock(folder / name, say)) is None:
        holder = read_holder(folder, name)
        # A .HALT in the folder also means that the holder will stop soon.
        ending = waits or read_halt(folder) is not None or (holder is not None and holder.is_ending)
        if time.monotonic() - since > (max(patience_s, GRACE_S) if ending else GRACE_S):
            raise FolderHeld(folder, holder)
        if ending and patience_s > GRACE_S and not said:
            said = True
            text = f"waiting up to {patience_s:.0f} s for it to end"
            say(f"[lock] {FolderHeld(folder, holder)}; {text}")
        time.sleep(POLL_S)
    return lock


def read_holder(folder: Path, name: str = RUN) -> Holder | None:
    """The content of the lock file; None if it is missing or invalid."""
    try:
        descriptor = open_regular(folder / name)
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
    """The current holder of the lock; empty if it is free or the file system has no locks."""
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
        os.close(descriptor)  # this also releases the lock if it was free
    return ""


def _try_lock(path: Path, say: Say) -> FolderLock | None:
    """One attempt to take the lock; None if another process holds it."""
    for _ in range(MOST_REMOVED):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # folder removed since mkdir: retry
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
                    f"a second run in {path.parent} would not be detected; make sure that there "
                    "is none"
                )
            if is_at(path, descriptor):
                return FolderLock(path, descriptor, locks=locks)
            os.close(descriptor)  # the holder removed the file between open and flock: retry
    raise FileNotFoundError(errno.ENOENT, "removed again and again", str(path))


_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Close lock descriptors after a fork: a copy in the child would keep the lock alive after
    its holder ends. Closing a copy does not unlock."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
