"""Files that others may tamper with, or read meanwhile: opened only where they are regular files,
and given their name only when they are complete and on the disk.

A run folder may be on a shared disk and hold anything. Its files are opened by `open_regular`: no
link is followed, and no pipe, device or folder is waited for. Paths that a user names on the
command line (a config, a checkpoint, the run folder itself) may be links.
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
"""Flags of a file that grows by lines; it is also read, to find a cut last line."""
MOST_BYTES = 16 << 20
"""Of a file that is read as a whole, unless a reader says otherwise."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {errno.ENXIO: "is not a regular file", errno.EISDIR: "is a folder, not a file"}


class NotRegular(OSError):
    """A link, pipe, socket, device or folder where only a regular file is read or written."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file and return its descriptor; NotRegular for anything else.

    It never blocks and never follows a link, also where somebody swaps the file meanwhile.
    """
    try:
        descriptor = os.open(path, flags | _ALWAYS, mode)
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
    """The same for reading, as a file object."""
    return os.fdopen(open_regular(path), "rb")


def read_text(path: Path | str, most_bytes: int | None = MOST_BYTES) -> str:
    """The text of a regular file that is not larger than that; None: of any size.

    Line ends stay as they are; what is not UTF-8 is replaced.
    """
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            reason = f"has {size} bytes; at most {most_bytes} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        content = file.read() if most_bytes is None else file.read(most_bytes)
    return content.decode("utf-8", errors="replace")


def explain(error: OSError, path: Path | str = "", need_bytes: int = 0) -> str:
    """An error of the system as a sentence; a full disk with what it lacks.

    `path` is where it was written, and `need_bytes` how much, where the error does not say so:
    libraries wrap the errors of their writers.
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
    """What the disk of a file, or of the folder that it would be in, still takes."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def size(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"


def is_regular(path: Path) -> bool:
    """Whether a file is there that `open_regular` would open."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def put_in_place(temporary: Path, path: Path) -> None:
    """Bring the bytes to the disk, then rename, then bring the new name there, too.

    A rename alone may reach the disk before the bytes do.
    """
    _to_disk(temporary)
    temporary.replace(path)
    _to_disk(path.parent)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name; false where it was removed, moved or replaced."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a network disk that stumbles has removed nothing
        return True
    try:
        held = os.fstat(descriptor)
    except OSError:  # stale: another machine has removed it, and what is there is another file
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Temporary files that say whose they are, and the removal of those that nobody will finish.
#
# A file or folder grows as `.{name}.{pid}-{start}@{host}.tmp` until it is complete. `start` is when
# its process started, in clock ticks from the boot of the machine: in a container every run may
# have the same pid. A process that is killed leaves its file behind, with nothing in it that
# anybody could use; `sweep` removes those of dead processes of this host. A folder that one run
# alone works in can say which names are its own: those go also where they come from another host,
# or from an older version of this program, which did not say whose they were.

NAME = re.compile(
    r"\.(?P<name>.+?)(?:\.(?P<pid>\d+)(?:-(?P<start>\d+)@(?P<host>[^/]+))?)?\.tmp", re.DOTALL
)
START_TICKS = 19
"""Of the fields after the name of the program in /proc/PID/stat."""


def temporary_name(path: Path) -> Path:
    """A name beside `path`, hidden, that no other process uses."""
    return path.with_name(f".{path.name}.{_mark(os.getpid())}.tmp")


class Swept(NamedTuple):
    """What was removed."""

    names: list[str]
    bytes: int

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        count = f"{len(self.names)} unfinished file{'s' * (len(self.names) != 1)}"
        return f"removed {count} of processes that were killed ({self.bytes / 1e6:.1f} MB): {shown}"


def sweep(folder: Path, *, ours: Callable[[str], bool] = lambda name: False) -> Swept:
    """Remove what dead processes left unfinished in a folder; what cannot be removed stays.

    `ours` knows names that only the caller writes there. Links are neither followed nor removed.
    """
    swept = Swept([], 0)
    for path in sorted(folder.glob(".*.tmp")) if folder.is_dir() else ():
        if _is_left(path.name, ours) and (size := _remove(path)) is not None:
            swept = Swept([*swept.names, path.name], swept.bytes + size)
    return swept


def _is_left(name: str, ours: Callable[[str], bool]) -> bool:
    """Whether nobody will finish it."""
    found = NAME.fullmatch(name)
    if found is None:
        return False
    if found["host"] != _host():  # or none
        return ours(found["name"])
    return _start(int(found["pid"])) != found["start"]


def _remove(path: Path) -> int | None:
    """Its size; None where it is a link, or cannot be removed."""
    try:
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode):
            files = [file.lstat() for file in path.rglob("*")]
            shutil.rmtree(path)
            return sum(file.st_size for file in files if stat.S_ISREG(file.st_mode))
        if not stat.S_ISREG(found.st_mode):
            return None
        path.unlink()
    except OSError:  # somebody else was faster, or it is not ours to remove
        return None
    return found.st_size


@lru_cache(maxsize=1)
def _mark(pid: int) -> str:
    """Of this process, which has this pid; a child that was forked has another one."""
    return f"{pid}-{_start(pid)}@{_host()}"


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", platform.node()) or "localhost"


def _start(pid: int) -> str | None:
    """When a process started; None where there is none, 0 where nobody can say."""
    if not Path("/proc/self/stat").exists():
        return "0" if _answers(pid) else None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[START_TICKS]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


# Writing a file so that its name never holds half of it.


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it to `path` when the block ends well.

    When the block raises, the temporary file goes and what `path` held before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    # A new file, and not what somebody has put under its name: that could be a link.
    temporary.unlink(missing_ok=True)
    os.close(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, all or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


# A file that has its name only when it is complete and on the disk.


class DurableFile:
    """Written under a temporary name; when the block ends well it gets its own, else it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_name(path)
        self._file = self._temporary.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        """Append."""
        self._file.write(content)

    def commit(self) -> None:
        """Give the file its name."""
        self._file.close()
        put_in_place(self._temporary, self.path)

    def discard(self) -> None:
        """Leave nothing behind."""
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


# Writing that a full disk does not turn into the end of a run: it complains once and goes on.


@contextlib.contextmanager
def best_effort(path: Path) -> Iterator[None]:
    """Let an OSError of the block cost only the file that the block writes."""
    try:
        yield
    except OSError as error:
        complain(path, error)


def complain(path: Path, error: OSError, what: str = "not written") -> None:
    """Say on stderr what is missing; a stderr that is closed is no reason to stop, either."""
    with contextlib.suppress(OSError, ValueError):
        text = f"[telemetry] {path}: {what} ({error.strerror or error}); the run goes on"
        print(text, file=sys.stderr, flush=True)


class LineFile:
    """A file that grows by whole lines, each in a single write: no reader sees half of one.

    A line that cannot be written is dropped and counted; the first one is announced on stderr. The
    file is opened again before the next line, because the disk may have room by then. A last line
    that a killed writer left without its end is removed when the file is opened.
    """

    def __init__(self, path: Path, head: str = "") -> None:
        """`head` is written first into a file that is new or empty."""
        self.path = path
        self.num_dropped = 0
        self._head = head.encode()
        self._descriptor: int | None = None
        self._lock = threading.RLock()  # a signal handler may log while its own thread does
        self._append(b"")

    def append(self, line: str) -> None:
        """Add a line; when this returns it is in the file, or counted in num_dropped."""
        if not self._append(line.encode() + b"\n"):
            self.num_dropped += 1

    def close(self) -> None:
        """Give the descriptor back; a later line would open the file again."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):  # nothing is buffered, nothing can be lost
                    os.close(descriptor)

    def is_there(self) -> bool:
        """Whether the file still has its name; one that is not open cannot have lost it."""
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
    """Write all of it or nothing: what a disk that is filling up took of it is taken back."""
    if not data:
        return
    written = os.write(descriptor, data)
    if written < len(data):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(f"only {written} of {len(data)} bytes were taken")


def _drop_cut_line(descriptor: int, block: int = 65536) -> int:
    """Cut the file after its last line end; return its size."""
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
