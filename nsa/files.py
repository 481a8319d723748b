"""Files that others may tamper with, or read meanwhile: opened only where they are regular files,
and given their name only when they are complete and on the disk.

A run folder may be on a shared disk and hold anything. Its files are opened by `open_regular`: no
link is followed, and no pipe, device or folder is waited for. Paths that a user names on the
command line (a config, a checkpoint, the run folder itself) may be links.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import IO

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
