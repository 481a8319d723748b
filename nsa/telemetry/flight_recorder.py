"""The end of torch's flight recorder: which exchanges a rank has begun and ended.

torch keeps it for NCCL, and from 2.8 on for gloo, too; for gloo it knows no times of a device. It
lies in memory and is read without any exchange, so it is there when exchanges hang.
"""

from __future__ import annotations

import json
import threading
from typing import Any

RECENT = 8
"""The last so many exchanges get a line each."""


def read_in_time(patience_s: float = 1.0) -> dict[str, Any] | None:
    """The same, or None where torch does not hand it out in time: what hangs may hold its lock."""
    found: list[dict[str, Any] | None] = []
    reader = threading.Thread(target=lambda: found.append(read_recorder()), daemon=True)
    reader.start()
    reader.join(patience_s)
    return found[0] if found else None


def read_recorder() -> dict[str, Any] | None:
    """`begun` and `ended` exchanges over all groups, and the `recent` ones; None without any.

    What an earlier group of this process has left is not told.
    """
    import torch.distributed as dist  # a reader of a run folder needs no torch

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return None
    try:
        content = json.loads(dump() or b"{}")
    except ValueError:  # a name of a group that torch did not escape, say
        return None
    groups = (content.get("pg_status") or {}).values()
    entries = content.get("entries") or []
    if not groups and not entries:
        return None
    return {
        "begun": sum(_number(group, "last_enqueued_collective") for group in groups),
        "ended": sum(_number(group, "last_completed_collective") for group in groups),
        "recent": [_line(entry) for entry in entries[-RECENT:]],
    }


def _line(entry: dict[str, Any]) -> str:
    number, what = entry.get("collective_seq_id"), entry.get("profiling_name")
    then = "over" if entry.get("retired") else entry.get("state")
    return f"{number}: {what} of sizes {entry.get('input_sizes')}, {then}"


def _number(group: dict[str, Any], name: str) -> int:
    return max(0, int(group.get(name, 0)))
