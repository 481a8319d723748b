"""mem_{when}.txt and .json: how memory is used at the start and around chosen steps.

Schema, version 1. `when` is boot, step1, pre_step{N} or post_step{N}; ranks above 0 add _rank{r}.
The text is for people: torch's table of its CUDA allocator, or a line with the memory of the
process. The JSON has `schema`, `when`, `device`, `rss_mib` (memory of the process, MiB) and, with
CUDA, all of torch.cuda.memory_stats under its own names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa.files import read_text
from nsa.telemetry.atomic import write_text
from nsa.telemetry.best_effort import best_effort

if TYPE_CHECKING:  # readers of run folders start without torch
    import torch

SCHEMA = 1
STATUS = Path("/proc/self/status")


class Due(NamedTuple):
    """Whether memory is written before and after a step."""

    pre: bool
    post: bool


def due(step: int, every: int) -> Due:
    """Before the first of each `every` steps, after the last of them; never with 0."""
    if every <= 0:
        return Due(False, False)
    return Due(step % every == 1 % every, step % every == 0)


class MemoryDumps:
    """Writes what is due; a comparison of numbers on all other steps."""

    def __init__(
        self, out_dir: Path | str, device: torch.device | str, *, every: int, rank: int = 0
    ) -> None:
        """`every` is NSA_MEM_DUMP_EVERY; with 0 nothing is ever written."""
        self._folder, self._device = Path(out_dir), device
        self._every, self._rank = every, rank

    def boot(self) -> None:
        """Call when the model is on the device, before the first step."""
        if self._every > 0:
            self._write("boot")

    def before_step(self, step: int) -> None:
        """Call before the forward pass of a step."""
        if due(step, self._every).pre:
            self._write(f"pre_step{step}")

    def after_step(self, step: int) -> None:
        """Call after the optimizer update of a step."""
        if self._every > 0 and step == 1:
            self._write("step1")
        if due(step, self._every).post:
            self._write(f"post_step{step}")

    def _write(self, when: str) -> None:
        write_memory(self._folder, when, self._device, self._rank)


def write_memory(out_dir: Path | str, when: str, device: torch.device | str, rank: int = 0) -> Path:
    """Write both files, and return the JSON; a full disk costs only them."""
    import torch

    device = torch.device(device)
    path = Path(out_dir) / f"mem_{when}{f'_rank{rank}' if rank else ''}.json"
    content: dict[str, Any] = {"schema": SCHEMA, "when": when, "device": str(device)}
    content["rss_mib"] = rss_mib()
    text = f"process memory (RSS): {content['rss_mib']} MiB\n"
    if device.type == "cuda":
        content |= torch.cuda.memory_stats(device)
        text += torch.cuda.memory_summary(device)
    else:
        text = f"device {device}: torch keeps no memory statistics of it\n{text}"
    with best_effort(path):
        write_text(path.with_suffix(".txt"), f"{when}\n{text}")
        write_text(path, json.dumps(content, indent=2) + "\n")
    return path


def read_memory(path: Path) -> dict[str, Any]:
    """Read the JSON of a dump."""
    content: dict[str, Any] = json.loads(read_text(path))
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {content.get('schema')!r}; this program reads schema {SCHEMA}; "
            "use the program that wrote it"
        )
    return content


def rss_mib() -> float | None:
    """Memory of this process that is in RAM, in MiB; None where the system does not say."""
    return _status_mib("VmRSS:")


def peak_memory_mib(device: torch.device) -> float | None:
    """The most that tensors took on a GPU so far; on a CPU, the most RAM of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    return _status_mib("VmHWM:")


def _status_mib(field: str) -> float | None:
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith(field)), None)
