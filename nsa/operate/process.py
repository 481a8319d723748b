"""Is a rank's process alive, send signals to it safely, and list the GPUs of this machine.

A heartbeat names a pid, but the system may have reused that pid. A process counts as the rank only
if it runs on this host, started before the rank's last beat, and has the command line in env.json.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nsa import files
from nsa.config.env import HIDDEN, with_package
from nsa.config.load import REPOSITORY
from nsa.files import START_TICKS, stat_fields
from nsa.records.env import RunEnvironment, driver_version

# --- the process of a rank ---

CLOCK_SLACK_S = 2.0
"""Allowed difference between the heartbeat's clock and the clock of process start times."""


def is_gone(pid: int, env: RunEnvironment, started: int = 0) -> bool | None:
    """Whether the process of a rank has ended; None when the run is on another host.

    `started` is its start time in clock ticks, 0 if unknown. Same pid with another start time
    means that the pid was reused.
    """
    if env.hostname != platform.node() or not (files.PROC / "self").exists():
        return None
    fields = stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return True
    return bool(started) and int(fields[START_TICKS]) != started


def why_not_ours(pid: int | None, last_beat: float, env: RunEnvironment | None) -> str:
    """Why this pid is not the rank that beat at Unix time `last_beat`; empty if it is.

    Anything that cannot be verified counts as "not ours".
    """
    if pid is None or pid <= 1:
        return f"the heartbeat names no process (pid {pid})"
    if pid == os.getpid():
        return f"pid {pid} is this process"
    if env is None:
        return "env.json cannot be read; it names the machine and the command of the run"
    if env.hostname != platform.node():
        return f"the run is on {env.hostname}, but this is {platform.node()}"
    fields, command = stat_fields(pid), _command(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return f"pid {pid} is gone"
    if _started(fields) > last_beat + CLOCK_SLACK_S:
        return f"pid {pid} was reused: this process started after the last heartbeat"
    if not same_command(command, env.argv):
        return f"pid {pid} runs another command: {' '.join(command)[:120]!r}"
    return ""


def send(
    pid: int | None, number: signal.Signals, last_beat: float, env: RunEnvironment | None
) -> str:
    """Send a signal if the process is the rank; return the reason why not, or "" when sent.

    The pidfd is opened before the checks, so the pid cannot be reused between check and signal.
    SIGUSR1 is sent only to a process that handles it: the default action kills the process.
    """
    if pid is None:
        return why_not_ours(pid, last_beat, env)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return f"pid {pid} is gone"
    except OSError as error:
        return f"pid {pid} cannot be opened ({error.strerror})"
    try:
        if reason := why_not_ours(pid, last_beat, env):
            return reason
        if number == signal.SIGUSR1 and not _handles(pid, number):
            return f"pid {pid} has no handler for {number.name}, which would kill it"
        signal.pidfd_send_signal(descriptor, number)
    except OSError as error:
        return f"pid {pid} cannot be sent {number.name} ({error.strerror})"
    finally:
        os.close(descriptor)
    return ""


def same_command(command: Sequence[str], argv: Sequence[str]) -> bool:
    """Whether /proc's command line belongs to a program with this recorded sys.argv.

    Python removes `-m package.module` and its own flags from sys.argv; env.json masks secrets.
    """
    if not argv or len(command) < len(argv):
        return False
    # The interpreter and its flags come first; the last len(argv) - 1 words must match argv[1:].
    split = len(command) - len(argv) + 1
    before, rest = command[:split], command[split:]
    program = Path(argv[0])
    names = {program.parent.name if program.stem == "__main__" else program.name, program.stem}
    named = any({Path(word).name, word.rpartition(".")[2]} & names for word in before)
    return named and all(_same_word(*words) for words in zip(rest, argv[1:], strict=True))


def _same_word(word: str, recorded: str) -> bool:
    if recorded.endswith(HIDDEN):
        return word.startswith(recorded.removesuffix(HIDDEN))
    return word == recorded


def _started(fields: Sequence[str]) -> float:
    """Start in Unix time, from clock ticks since boot."""
    since_boot = int(fields[START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def _command(pid: int) -> list[str]:
    try:
        text = (files.PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.removesuffix("\0").split("\0")


def _handles(pid: int, number: signal.Signals) -> bool:
    try:
        text = (files.PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # SigCgt is a hex bit mask of handled signals; bit n - 1 is signal n.
    caught = next((line for line in text.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


# --- the trainer ---


def trainer() -> list[str]:
    """What starts the trainer, after `python`.

    In a clone that is the script by which people find the process; a wheel has no scripts.
    """
    script = REPOSITORY / "scripts" / "train_showcase.py"
    return [str(script)] if script.is_file() else ["-m", "nsa.cli", "train"]


# --- the GPUs of this machine ---
# A short-lived subprocess lists them, so that the launcher itself never opens a CUDA context.
# `python -m nsa.operate.process` prints them as JSON, with `--text` as plain lines.

TIMEOUT_S = 120


class Gpu(NamedTuple):
    """One CUDA device."""

    name: str
    num_bytes: int
    """Total memory."""


class Machine(NamedTuple):
    """The GPUs that a run can use on this host."""

    gpus: list[Gpu]

    @property
    def max_bytes(self) -> int:
        """Memory of the largest GPU; 0 without a GPU."""
        return max((gpu.num_bytes for gpu in self.gpus), default=0)

    def describe(self) -> str:
        """One line for run.info: number of GPUs, largest memory, models."""
        names = ", ".join(sorted({gpu.name for gpu in self.gpus}))
        return f"{len(self.gpus)} (max_mem={self.max_bytes // 2**20}MB)" + (
            f" {names}" * bool(names)
        )


def find_gpus() -> Machine:
    """The GPUs that torch sees under CUDA_VISIBLE_DEVICES; none without an NVIDIA driver."""
    if driver_version() is None:
        return Machine([])
    command = [sys.executable, "-m", "nsa.operate.process"]
    done = subprocess.run(
        command,
        env=with_package(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise ValueError(
            f"the GPUs cannot be listed: {done.stderr.strip()[-300:]}; see `{' '.join(command)}`"
        )
    return Machine([Gpu(*gpu) for gpu in json.loads(done.stdout.splitlines()[-1])])


def _list_gpus() -> Machine:
    import torch

    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return Machine([Gpu(gpu.name, gpu.total_memory) for gpu in found])


def _main(arguments: list[str]) -> None:
    machine = _list_gpus()
    if "--text" not in arguments:
        print(json.dumps(machine.gpus))
        return
    for index, gpu in enumerate(machine.gpus):
        size = f"{gpu.num_bytes / 1e9:.0f} GB ({gpu.num_bytes // 2**20} MiB)"
        print(f"GPU {index}: {gpu.name}, {size}")
    if not machine.gpus:
        print("no GPU: runs will be on the CPU")


if __name__ == "__main__":
    _main(sys.argv[1:])
