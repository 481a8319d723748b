"""What /proc tells about a process, so that a pid is never taken for another process."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
STATE, FLAGS, START_TICKS = 0, 6, 19
"""Fields after the name of the program: R, S, T and so on; flags of the kernel; clock ticks from
boot to its start."""


def stat_fields(pid: int | str) -> list[str] | None:
    """The fields after the name of the program, which may hold anything; None without a process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int | str = "self") -> int:
    """When a process started; with the pid it names one process for good. 0 where unknown."""
    fields = stat_fields(pid)
    return int(fields[START_TICKS]) if fields else 0
