"""Temporary files that say whose they are, and the removal of those that nobody will finish.

A file or folder grows as `.{name}.{pid}-{start}@{host}.tmp` until it is complete. `start` is when
its process started, in clock ticks from the boot of the machine: in a container every run may have
the same pid. A process that is killed leaves its file behind, with nothing in it that anybody could
use; `sweep` removes those of dead processes of this host. A folder that one run alone works in can
say which names are its own: those go also where they come from another host, or from an older
version of this program, which did not say whose they were.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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
