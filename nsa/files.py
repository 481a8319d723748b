"""Giving a file its name only when it is complete and on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """A name beside `path`, hidden, that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def put_in_place(temporary: Path, path: Path) -> None:
    """Bring the bytes to the disk, then rename, then bring the new name there, too.

    A rename alone may reach the disk before the bytes do.
    """
    _to_disk(temporary)
    temporary.replace(path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
