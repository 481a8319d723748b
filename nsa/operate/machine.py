"""The GPUs of this machine, looked at by a process that ends: the launcher holds none of them.

`python -m nsa.operate.machine` prints them as JSON, `--text` for people.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

from nsa.config.env import with_package
from nsa.telemetry.nvml import driver_version

TIMEOUT_S = 120


class Gpu(NamedTuple):
    """One CUDA device."""

    name: str
    num_bytes: int
    """Of its memory."""


class Machine(NamedTuple):
    """What a run can use here."""

    gpus: list[Gpu]

    @property
    def max_bytes(self) -> int:
        """Memory of the largest GPU; 0 without any."""
        return max((gpu.num_bytes for gpu in self.gpus), default=0)

    def describe(self) -> str:
        """As a line of run.info: the number, the memory and the models."""
        names = ", ".join(sorted({gpu.name for gpu in self.gpus}))
        return f"{len(self.gpus)} (max_mem={self.max_bytes // 2**20}MB)" + (
            f" {names}" * bool(names)
        )


def look() -> Machine:
    """The GPUs that torch sees, CUDA_VISIBLE_DEVICES and all; nobody is asked without a driver."""
    if driver_version() is None:
        return Machine([])
    command = [sys.executable, "-m", "nsa.operate.machine"]
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


def _look_here() -> Machine:
    import torch

    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return Machine([Gpu(gpu.name, gpu.total_memory) for gpu in found])


def _main(arguments: list[str]) -> None:
    machine = _look_here()
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
