"""Safe file I/O: open regular files only, replace files atomically, append whole lines, and remove
the temporary files of killed processes.

A run folder may be on a shared disk and hold anything. Its files are opened with `open_regular`,
which follows no symlink and never blocks on a pipe or device. Paths that a user names on the
command line (a config, a checkpoint, the run folder itself) may be symlinks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT
"""Flags for an append-only file. Read access is needed to find a truncated last line."""
MOST_BYTES = 16 << 20
"""Default size limit of `read_text`."""
FULL = (errno.ENOSPC, errno.EDQUOT)
# O_NONBLOCK: opening a pipe without a writer would otherwise block forever.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {errno.ENXIO: "is not a regular file", errno.EISDIR: "is a folder, not a file"}


class NotRegular(OSError):
    """The path is a symlink, pipe, socket, device or folder; only a regular file is allowed."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file and return its descriptor; raise NotRegular for anything else.

    Never blocks and never follows a symlink. The type is checked on the open descriptor, so
    swapping the file between check and open has no effect.
    """
    try:
        descriptor = os.open(path, flags | _SAFE_FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            reason = "is a link, and links are not followed"
            raise NotRegular(errno.ELOOP, reason, str(path)) from None
        if error.errno in _KINDS:  # a pipe without a reader, a socket; a folder
            raise NotRegular(error.errno, _KINDS[error.errno], str(path)) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.ENXIO
        raise NotRegular(number, _KINDS[number], str(path))
    return descriptor


def open_binary(path: Path | str) -> IO[bytes]:
    """Open a regular file for reading, as a file object."""
    return os.fdopen(open_regular(path), "rb")


def read_text(path: Path | str, most_bytes: int | None = MOST_BYTES) -> str:
    """Read a regular file of at most `most_bytes` bytes (None: no limit) as text.

    Line ends are kept; invalid UTF-8 is replaced.
    """
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            reason = f"has {size} bytes; at most {most_bytes} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        content = file.read() if most_bytes is None else file.read(most_bytes)
    return content.decode("utf-8", errors="replace")


def explain(error: OSError, path: Path | str = "", need_bytes: int = 0) -> str:
    """Describe an OSError in one sentence; for a full disk, with the space needed and free.

    `path` and `need_bytes` say where and how much was being written. Callers pass them because
    libraries wrap the errors of their writers and lose the errno.
    """
    where = str(path or error.filename or "")
    if error.errno in FULL or need_bytes:
        free = free_bytes(Path(where)) if where else None
        if error.errno in FULL or (free is not None and free < need_bytes):
            need = f"need {size(need_bytes)}, " if need_bytes else ""
            have = f"have {size(free)}" if free is not None else "nothing is left"
            return f"disk full: {need}{have} ({where}); make room"
    reason = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{error.filename}: {reason}" if error.filename else reason


def free_bytes(path: Path) -> int | None:
    """Free space on the disk that holds `path`, or would hold it; None if unknown."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


MIB, GIB = 1 << 20, 1 << 30


def size(num_bytes: float) -> str:
    """Format a number of bytes with a fitting unit."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"


def is_regular(path: Path) -> bool:
    """Whether `path` is an existing regular file, not a symlink to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush the file to disk, rename it, then flush the folder entry.

    Without the first fsync, the rename may reach the disk before the bytes do.
    """
    _fsync(temporary)
    temporary.replace(path)
    _fsync(path.parent)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file; false if it was removed, moved or replaced."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a transient error of a network disk does not mean that the file is gone
        return True
    try:
        held = os.fstat(descriptor)
    except OSError:  # stale handle: another machine removed the file; `found` is a different one
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- processes: a pid may be reused, pid and start time together identify one ---

PROC = Path("/proc")
STATE, FLAGS, START_TICKS = 0, 6, 19
"""Indices into `stat_fields`: process state (R, S, T, ...), kernel flags, start time in clock ticks
since boot."""


def stat_fields(pid: int | str) -> list[str] | None:
    """Fields of /proc/PID/stat after the program name; None if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program name is in parentheses and may itself contain ")" and spaces.
    return text.rpartition(")")[2].split()


def start_ticks(pid: int | str = "self") -> int:
    """Start time of a process in clock ticks since boot; 0 if unknown.

    A pid may be reused; pid and start time together identify a process.
    """
    fields = stat_fields(pid)
    return int(fields[START_TICKS]) if fields else 0


# --- temporary files, and the removal of abandoned ones ---
# An unfinished file is named `.{name}.{pid}-{start}@{host}.tmp`. `start` is the start time of its
# process in clock ticks since boot: in containers, every run may have the same pid.

NAME = re.compile(
    r"\.(?P<name>.+?)(?:\.(?P<pid>\d+)(?:-(?P<start>\d+)@(?P<host>[^/]+))?)?\.tmp", re.DOTALL
)


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{_mark(os.getpid())}.tmp")


class Swept(NamedTuple):
    """Result of `sweep`: the files removed and their total size."""

    names: list[str]
    bytes: int

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        count = f"{len(self.names)} unfinished file{'s' * (len(self.names) != 1)}"
        return f"removed {count} of processes that were killed ({self.bytes / 1e6:.1f} MB): {shown}"


def sweep(folder: Path, *, ours: Callable[[str], bool] = lambda name: False) -> Swept:
    """Remove temporary files whose process on this host is dead; skip what cannot be removed.

    `ours` says which final names only the caller writes in this folder. Temporary files for those
    are removed too if another host, or a version that wrote no host name, left them. Symlinks are
    neither followed nor removed.
    """
    swept = Swept([], 0)
    for path in sorted(folder.glob(".*.tmp")) if folder.is_dir() else ():
        if _is_abandoned(path.name, ours) and (size := _remove(path)) is not None:
            swept = Swept([*swept.names, path.name], swept.bytes + size)
    return swept


def _is_abandoned(name: str, ours: Callable[[str], bool]) -> bool:
    """Whether no live process will finish this temporary file."""
    found = NAME.fullmatch(name)
    if found is None:
        return False
    if found["host"] != _host():  # another host, or no host: its pid says nothing here
        return ours(found["name"])
    return _start(int(found["pid"])) != found["start"]


def _remove(path: Path) -> int | None:
    """Delete a file or folder and return its size; None for a symlink or on failure."""
    try:
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode):
            files = [file.lstat() for file in path.rglob("*")]
            shutil.rmtree(path)
            return sum(file.st_size for file in files if stat.S_ISREG(file.st_mode))
        if not stat.S_ISREG(found.st_mode):
            return None
        path.unlink()
    except OSError:  # another process removed it first, or we have no permission
        return None
    return found.st_size


@lru_cache(maxsize=1)
def _mark(pid: int) -> str:
    """Identify this process in a file name. `pid` is the cache key: a forked child differs."""
    return f"{pid}-{_start(pid)}@{_host()}"


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", platform.node()) or "localhost"


def _start(pid: int) -> str | None:
    """Start time of a process in clock ticks; None if there is none, "0" without /proc."""
    if not (PROC / "self" / "stat").exists():
        return "0" if _is_alive(pid) else None
    fields = stat_fields(pid)
    return None if fields is None else fields[START_TICKS]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # EPERM: it runs as another user
        return True
    return True


# --- atomic replacement ---


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` when the block succeeds.

    If the block raises, the temporary file is removed and `path` keeps its old content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    # O_EXCL on a new file: a symlink planted under this name must not be written through.
    temporary.unlink(missing_ok=True)
    os.close(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staying_in(folder: Path) -> Iterator[Path]:
    """Create a folder, and yield a path that still names it when it is moved meanwhile and another
    one has its name. Without /proc it is the path as given."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (PROC / "self" / "fd").is_dir():
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield PROC / "self" / "fd" / str(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


class DurableFile:
    """`replacing` for a file that is written in pieces: renamed on success, removed on error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_name(path)
        self._file = self._temporary.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)

    def commit(self) -> None:
        """Flush the file and rename it to its final name."""
        self._file.close()
        put_in_place(self._temporary, self.path)

    def discard(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.commit()
        else:
            self.discard()


# --- best-effort writes ---
# Telemetry must not end a run: on a full disk, warn once and keep training.


@contextlib.contextmanager
def best_effort(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a warning about `path`."""
    try:
        yield
    except OSError as error:
        complain(path, error)


def complain(path: Path, error: OSError, what: str = "not written") -> None:
    """Print a warning to stderr; ignore a closed stderr."""
    with contextlib.suppress(OSError, ValueError):
        text = f"[telemetry] {path}: {what} ({error.strerror or error}); the run continues"
        print(text, file=sys.stderr, flush=True)


class LineFile:
    """Append-only file of lines; each line is a single write, so no reader sees half of one.

    A line that cannot be written is dropped and counted; the first drop is logged to stderr. The
    file is reopened before the next line, because the disk may have space again. A truncated last
    line, left by a killed writer, is removed when the file is opened.
    """

    def __init__(self, path: Path, head: str = "") -> None:
        """`head` (a header line) is written first if the file is new or empty."""
        self.path = path
        self.num_dropped = 0
        self._head = head.encode()
        self._descriptor: int | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may log in mid-append
        self._append(b"")

    def append(self, line: str) -> None:
        """Append a line; on return it is in the file or counted in num_dropped."""
        if not self._append(line.encode() + b"\n"):
            self.num_dropped += 1

    def close(self) -> None:
        """Close the descriptor; a later `append` reopens the file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):  # unbuffered: nothing can be lost here
                    os.close(descriptor)

    def is_there(self) -> bool:
        """Whether the path still names the open file; true while the file is closed."""
        with self._lock:
            return self._descriptor is None or is_at(self.path, self._descriptor)

    def __del__(self) -> None:
        self.close()

    def _append(self, data: bytes) -> bool:
        with self._lock:
            try:
                if self._descriptor is None:
                    self._descriptor = self._open()
                _write_whole(self._descriptor, data)
            except OSError as error:
                self.close()
                if self.num_dropped == 0 and data:
                    complain(self.path, error, "lines are being dropped")
                return False
            return True

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(self.path, APPEND)
        try:
            size = _drop_cut_line(descriptor)
            _write_whole(descriptor, self._head if size == 0 else b"")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all of the data or nothing; truncate a partial write on a full disk."""
    if not data:
        return
    # One write() of O_APPEND: lines of several processes do not interleave.
    written = os.write(descriptor, data)
    if written < len(data):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(f"only {written} of {len(data)} bytes were taken")


def _drop_cut_line(descriptor: int, block: int = 65536) -> int:
    """Truncate the file after its last newline; return the new size."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return end
