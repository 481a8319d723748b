"""Giving a file its name only when it is complete and on the disk."""

from __future__ import annotations

import os
from pathlib import Path

from nsa.leftovers import temporary_name

__all__ = ["put_in_place", "temporary_name"]


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
