"""The processes that train or time arms: how they are started, stopped, and what they said last."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nsa.config.env import changed
from nsa.files import write_text
from studies.nsa_vs_dense.arms import Arm
from studies.nsa_vs_dense.train_arm import Task

CHILD = Path(__file__).resolve().parent / "train_arm.py"
STOP_S = 60.0
"""For a process that was asked to stop: it saves a checkpoint first."""
LAST_LINES = 12


class Job(NamedTuple):
    """A process at work on an arm."""

    arm: Arm
    name: str
    """Of its files, and of what failed."""
    child: subprocess.Popen[bytes]
    log: Path
    start: float

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.start

    def last_words(self) -> str:
        """Of a process that has ended: how, and the end of its log."""
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()[-LAST_LINES:]
        ending = f"exit code {self.child.returncode} after {self.seconds:.0f} s"
        return f"{ending}: " + "\n".join(lines)


def start_job(name: str, task: Task, folder: Path) -> Job:
    """Start a process; its task and what it prints are <folder>/<name>.task.json and .log."""
    file, log = folder / f"{name}.task.json", folder / f"{name}.log"
    write_text(file, task.to_json())
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, str(CHILD), str(file)],
            env=changed(task.arm.environ),
            stdout=output,
            stderr=output,
        )
    return Job(task.arm, name, child, log, time.monotonic())


def stop_jobs(jobs: Sequence[Job]) -> None:
    """Ask all that are running to leave, and make sure that they do."""
    for job in jobs:
        if job.child.poll() is None:
            job.child.terminate()
    deadline = time.monotonic() + STOP_S
    for job in jobs:
        try:
            job.child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.child.kill()
            job.child.wait()
