"""mem_{when}.txt and .json: how memory is used at the start and around chosen steps.

Schema, version 1. `when` is boot, step1, pre_step{N} or post_step{N}; ranks above 0 add _rank{r}.
The text is for people: torch's table of its CUDA allocator, or a line with the memory of the
process. The JSON has `schema`, `when`, `device`, `rss_mib` (memory of the process, MiB) and, with
CUDA, all of torch.cuda.memory_stats under its own names.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from nsa.files import best_effort, is_at, open_regular, read_text, write_text
from nsa.records.heartbeat import iso

if TYPE_CHECKING:
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


# stackdump_{unixtime}.txt: where every thread of a process is, written when SIGUSR1 asks.
#
# Schema, version 1: the line `Signal {number} at {UTC time}Z`, the line `pid {pid} rank {rank}
# threads {count}`, then each thread: its name, and its stack with the innermost call last.
#
# The signal only wakes a thread of this module, so nothing runs inside a signal handler, and the
# dump is there at once even while the main thread waits in a long operation (torch releases the
# interpreter lock there). Where that lock is never released no Python can run; for this case the
# handler in C of faulthandler first leaves the main thread's stack in a hidden file, which is
# emptied when the dump is written.

SIGNAL = signal.SIGUSR1
OWN = "nsa-"
"""Threads with names that begin so only watch the others, and are left out."""
THREAD = f"{OWN}stack-dump"
PREFIX = "stackdump"
WATCHDOG_PREFIX = "watchdog_stackdump"
"""For dumps that nobody asked for: a watchdog saw no step for too long."""
RAW = ".stackdump_raw_rank{rank}.txt"
"""What faulthandler leaves; not empty only where no dump could be written."""


def install(
    out_dir: Path | str, rank: int = 0, hear: Callable[[int], None] | None = None
) -> Installed | None:
    """Answer SIGUSR1 from now on, until the result is uninstalled.

    `hear` is told of every signal that has a handler, in a thread, also while the main one hangs.
    Outside the main thread, where Python allows no handler, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return Installed(Path(out_dir), rank, hear)


def write_dump(
    out_dir: Path | str, cause: str, rank: int = 0, *, prefix: str = PREFIX
) -> Path | None:
    """Write the stacks of all threads now; an existing dump is never replaced.

    `cause` opens the first line. None, and a line on stderr, if it could not be written.
    """
    folder, now = Path(out_dir), time.time()
    text = "\n".join([f"{cause} at {iso(now)}", *_stacks(rank), ""])
    stem = f"{prefix}_{int(now)}"
    with best_effort(folder / f"{stem}.txt"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = _create(folder, stem)
        try:
            os.write(descriptor, text.encode(errors="replace"))
        finally:
            os.close(descriptor)
        return path
    return None


class Installed:
    """The parts that the answer is made of, and how they go again."""

    def __init__(self, folder: Path, rank: int, hear: Callable[[int], None] | None) -> None:
        self._folder, self._rank, self._hear = folder, rank, hear
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._handler = signal.signal(SIGNAL, _ignore)  # also refuses any other thread
        self._wakeup = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._raw = self._register_raw()
        self._thread = threading.Thread(target=self._listen, name=THREAD, daemon=True)
        self._thread.start()

    def uninstall(self) -> None:
        """Restore what was before; a second call does nothing."""
        if self._mouth < 0:
            return
        faulthandler.unregister(SIGNAL)
        signal.signal(SIGNAL, self._handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._mouth)  # the thread reads the end of the pipe, and ends
        self._mouth = -1
        self._thread.join(timeout=5)
        if self._raw is not None:
            self._remove_raw(self._raw)

    def renew(self) -> None:
        """Make the hidden file anew in a folder that was removed; signals are answered on."""
        before, self._raw = self._raw, self._register_raw()
        if before is not None:
            before.close()

    def _remove_raw(self, raw: BinaryIO) -> None:
        """Only if it is empty, and of this process: the folder may be another run's by now."""
        path = Path(raw.name)
        if os.fstat(raw.fileno()).st_size == 0 and is_at(path, raw.fileno()):
            path.unlink()
        raw.close()

    def _register_raw(self) -> BinaryIO | None:
        path = self._folder / RAW.format(rank=self._rank)
        with best_effort(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            raw = open(path, "wb", buffering=0, opener=open_regular)  # noqa: SIM115
            # Only the thread that the signal interrupts: the stacks of others may change meanwhile.
            faulthandler.register(SIGNAL, file=raw, all_threads=False, chain=True)
            return raw
        return None

    def _listen(self) -> None:
        with contextlib.closing(os.fdopen(self._ear, "rb", buffering=0)) as ear:
            while numbers := ear.read(1):
                if self._hear is not None:
                    self._hear(numbers[0])
                if numbers[0] == SIGNAL and self._dump():
                    self._forget_raw()

    def _dump(self) -> Path | None:
        return write_dump(self._folder, f"Signal {int(SIGNAL)}", self._rank)

    def _forget_raw(self) -> None:
        if self._raw is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._raw.fileno(), 0)
                os.lseek(self._raw.fileno(), 0, os.SEEK_SET)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The byte that the interpreter wrote into the pipe has done all."""


def _create(folder: Path, stem: str) -> tuple[int, Path]:
    """Open a file that did not exist; several ranks may dump into one folder in one second."""
    for suffix in chain([""], (f"_{number}" for number in count(2))):
        path = folder / f"{stem}{suffix}.txt"
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), path
    raise AssertionError("count() does not end")


def _stacks(rank: int) -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {
        ident: frame
        for ident, frame in sys._current_frames().items()
        if not names.get(ident, "").startswith(OWN)
    }
    yield f"pid {os.getpid()} rank {rank} threads {len(frames)}"
    for ident, frame in frames.items():
        yield f"\nThread {names.get(ident, 'without a name')} ({ident:#x}):"
        yield "".join(traceback.format_stack(frame)).rstrip("\n")
