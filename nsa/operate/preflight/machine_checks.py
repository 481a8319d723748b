"""Checks of the machine: disk, memory, leftovers of earlier runs, matching versions."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from nsa.config.describe import duration
from nsa.files import GIB, MIB, PROC, size
from nsa.model.cost import training_memory
from nsa.operate.preflight.config_checks import PlannedRun
from nsa.operate.process import why_not_ours
from nsa.operate.report.evidence import Question
from nsa.operate.report.verdict import Row
from nsa.operate.run_folder import Run, read_run
from nsa.records import env as machine
from nsa.records.sentinels import HALT, read_halt

PROBE_BYTES = 64 * MIB
"""Bytes written to measure the disk speed."""
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""Oldest NVIDIA driver for each major CUDA version that torch may be built with."""
MEMINFO = PROC / "meminfo"


def disk_space(plan: PlannedRun) -> Row:
    """All checkpoints of the run fit, plus one while the oldest is not yet deleted."""
    train, free = plan.config.train, shutil.disk_usage(plan.scratch).free
    # keep_last=0 keeps every checkpoint.
    saves = train.steps // train.save_every if train.save_every else 1
    kept = min(saves, train.keep_last or saves) + 1
    needed = max(kept * plan.checkpoint_bytes, int(plan.limits.free_gib * GIB))
    asked = Question(
        "disk space", f">= {size(needed)}: {kept} checkpoints of {size(plan.checkpoint_bytes)}"
    )
    return asked.judged(
        free >= needed,
        f"{size(free)} free",
        evidence=f"the disk of {plan.folder}",
        advice="make room, set train.keep_last lower, or train.out_dir elsewhere",
    )


def disk_speed(plan: PlannedRun) -> Row:
    """A checkpoint is written in reasonable time."""
    # Random bytes, so that a compressing file system cannot cheat; fsync, or we time the cache.
    path, block = plan.scratch / "speed", os.urandom(MIB)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(PROBE_BYTES // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = PROBE_BYTES / MIB / (time.perf_counter() - start)
    path.unlink()
    limit = plan.limits.write_mib_per_s
    asked = Question("disk speed", f">= {limit:g} MiB/s")
    return asked.judged(
        rate >= limit,
        f"{rate:.0f} MiB/s, a checkpoint in {plan.checkpoint_bytes / MIB / rate:.1f} s",
        evidence=f"{PROBE_BYTES // MIB} MiB written with fsync to the disk of {plan.folder}",
        advice="use a local disk for train.out_dir, and train.backup_dir for the network",
    )


def memory(plan: PlannedRun) -> Row:
    """A training step fits into the free memory."""
    parts = training_memory(plan.config)
    needed, free = sum(parts.values()), free_memory(plan.runtime.device)
    asked = Question("memory", f"<= {plan.limits.memory_share:g} x what is free")
    largest = max(parts, key=lambda name: parts[name])
    if free is None:
        evidence = f"free memory is unknown on this system; the estimate is {size(needed)}"
        return asked.missing(evidence, "look at it by hand")
    return asked.judged(
        needed <= plan.limits.memory_share * free,
        f"{size(needed)} of {size(free)} free",
        evidence=f"the estimate of `nsa info`; most of it {largest}, {size(parts[largest])}",
        advice="train.batch_size lower with more accumulation, runtime.gradient_checkpointing=true"
        ", a shorter train.seq_len; or stop other programs on the device",
    )


def free_memory(device: torch.device) -> int | None:
    """Free bytes on the GPU, or in RAM; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        # MemAvailable, not MemFree: the page cache can be reclaimed.
        found = re.search(r"MemAvailable:\s*(\d+) kB", MEMINFO.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def processes(plan: PlannedRun) -> Row:
    """No other run writes to this folder or, with a GPU, trains on this machine."""
    asked = Question("processes", "no other run here")
    found = [f"pid {pid} writes to {plan.folder}" for pid in writers(plan.folder)]
    # Runs can share a CPU, but two on one GPU run out of memory or slow each other down.
    if plan.runtime.device.type == "cuda":
        found += [f"pid {pid}: {command}" for pid, command in trainers()]
    return asked.judged(
        not found,
        f"{len(found)} others" if found else "no other",
        evidence=found[0][:160] if found else "heartbeats of the folder, /proc",
        advice="stop it (touch .HALT in its folder, or kill PID), or choose another train.out_dir",
    )


def writers(folder: Path) -> list[int]:
    """Pids that currently write heartbeats into a folder."""
    if not folder.is_dir():
        return []
    run: Run = read_run(folder)
    pids = []
    for rank in run.ranks:
        last = rank.last
        if last is not None and last.pid is not None:
            reason = why_not_ours(last.pid, last.ts, run.env)
            if not reason and last.pid not in pids:
                pids.append(last.pid)
    return pids


def trainers() -> list[tuple[int, str]]:
    """Other training processes on this machine as (pid, command line)."""
    found = []
    for path in PROC.glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode("utf-8", errors="replace")
        except OSError:  # the process has ended, or belongs to another user
            continue
        pid, words = int(path.parent.name), text.removesuffix("\0").split("\0")
        if pid != os.getpid() and is_trainer(words):
            found.append((pid, " ".join(words)))
    return found


def is_trainer(words: Sequence[str]) -> bool:
    """Whether a command line is a Python process that runs a training entry point."""
    # An editor or `tail` with the script's name in its arguments is not a trainer.
    if not words or not Path(words[0]).name.startswith("python"):
        return False
    if any(Path(word).name == "train_showcase.py" for word in words[1:]):
        return True
    modules = ("nsa.cli", "nsa.cli.__main__")
    entries = [i for i, word in enumerate(words) if word in modules or Path(word).name == "nsa"]
    return any(words[i + 1 : i + 2] == ["train"] for i in entries)


def halt_file(plan: PlannedRun) -> Row:
    """No stale .HALT file is left from an earlier run."""
    asked = Question("halt file", f"no {HALT}")
    halt = read_halt(plan.folder)
    value = "none"
    if halt is not None:
        value = f"{duration(halt.age_s)} old: {halt.reason or 'without a reason'}"
    return asked.judged(
        halt is None,
        value,
        evidence=f"{plan.folder / HALT}",
        advice="find out why it is there, then remove it: the run would stop at once",
    )


def versions(plan: PlannedRun) -> Row:
    """Driver, torch and Triton versions match."""
    asked = Question("versions", "a driver for torch's CUDA, the Triton that torch asks for")
    cuda, triton = torch.version.cuda, _installed("triton")
    problems = (
        pairing_problems(cuda, machine.driver_version(), triton, metadata.requires("torch") or [])
        if plan.runtime.device.type == "cuda"
        else []
    )
    return asked.judged(
        not problems,
        f"torch {torch.__version__}, triton {triton}, driver {machine.driver_version()}",
        evidence="; ".join(problems) or "the packages and the driver",
        advice="install the pair that constraints.txt names, or a newer driver",
    )


def pairing_problems(
    cuda: str | None, driver: str | None, triton: str | None, required: Sequence[str]
) -> list[str]:
    """Version mismatches for a GPU run, one line each."""
    found = []
    if cuda is None:
        found.append("torch was built without CUDA")
    least = LEAST_DRIVER.get((cuda or "").partition(".")[0])
    if driver is not None and least is not None and int(driver.partition(".")[0]) < least:
        found.append(f"driver {driver} is older than {least}, which CUDA {cuda} needs")
    # torch pins one Triton version in its package metadata; another one may not compile.
    asked = next((text for text in required if re.match(r"triton\b", text)), "")
    exact = re.match(r"triton\s*\(?==\s*([\w.]+)", asked)
    if triton is None:
        found.append("Triton is not installed")
    elif exact is not None and triton != exact[1]:
        found.append(f"Triton {triton} is installed, torch asks for {exact[1]}")
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
