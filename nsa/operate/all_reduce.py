"""One all-reduce among as many ranks as a run will have, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nsa.operate.text import first_line

NUMBERS = 1 << 16
"""In the tensor that is added up."""


def reduce_once(ranks: int, store: Path, backend: str, device: str, timeout_s: float) -> str:
    """Add up in so many processes, which meet through a new file; what went wrong, or nothing."""
    arguments = (ranks, str(store), backend, device, timeout_s)
    if ranks == 1:
        try:
            take_part(0, *arguments)
        except (RuntimeError, ValueError) as error:
            return first_line(error)
        return ""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=take_part, args=(r, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    until = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    if late:
        return f"rank {late[0]} did not come back within {timeout_s:g} s"
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    return f"rank {failed[0]} failed: its message is above" if failed else ""


def take_part(
    rank: int, world_size: int, store: str, backend: str, device: str, timeout_s: float
) -> None:
    """What one rank does: meet the others, add, and look at the sum."""
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        tensor = torch.full((NUMBERS,), float(rank + 1), device=where)
        dist.all_reduce(tensor)
        expected = world_size * (world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"rank {rank}: the sum is {tensor[0].item():g}, not {expected:g}")
    finally:
        dist.destroy_process_group()
