"""Dumps for debugging: memory (mem_{when}.txt and .json) and stacks (stackdump_{unixtime}.txt).

Memory dumps, schema version 1. `when` is boot, step1, pre_step{N} or post_step{N}; ranks above 0
add _rank{r}. The text is for people: torch's summary of its CUDA allocator, or the RSS of the
process. The JSON has `schema`, `when`, `device`, `rss_mib` and, with CUDA, all of
torch.cuda.memory_stats under its own names.
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
    """Whether to dump memory before and after a step."""

    pre: bool
    post: bool


def due(step: int, every: int) -> Due:
    """Dump before the first and after the last of every `every` steps; never if 0."""
    if every <= 0:
        return Due(False, False)
    return Due(step % every == 1 % every, step % every == 0)


class MemoryDumps:
    """Writes memory dumps when due; on all other steps this is one comparison."""

    def __init__(
        self, out_dir: Path | str, device: torch.device | str, *, every: int, rank: int = 0
    ) -> None:
        """`every` is NSA_MEM_DUMP_EVERY; 0 disables all dumps."""
        self._folder, self._device = Path(out_dir), device
        self._every, self._rank = every, rank

    def boot(self) -> None:
        """Call after the model is on the device, before the first step."""
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
    """Write both files and return the path of the JSON; on a full disk, warn and continue."""
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
    """Resident set size of this process in MiB; None without /proc."""
    return _status_mib("VmRSS:")


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak tensor memory on the GPU so far; on a CPU, peak RSS of this process."""
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


# --- stackdump_{unixtime}.txt: the stacks of all threads, on SIGUSR1 ---
# Schema, version 1: the line `Signal {number} at {UTC time}Z`, the line `pid {pid} rank {rank}
# threads {count}`, then per thread its name and its stack, innermost call last.
#
# The signal only wakes a listener thread, so the dump works while the main thread is inside a long
# torch call, which releases the GIL. If the GIL is never released, no Python can run; for that case
# faulthandler's C handler first writes the main thread's stack to a hidden file (RAW), which is
# truncated once the dump is written.

SIGNAL = signal.SIGUSR1
OWN = "nsa-"
"""Name prefix of watchdog threads; dumps leave them out."""
THREAD = f"{OWN}stack-dump"
PREFIX = "stackdump"
WATCHDOG_PREFIX = "watchdog_stackdump"
"""For dumps by a watchdog that saw no progress for too long."""
RAW = ".stackdump_raw_rank{rank}.txt"
"""faulthandler's file; non-empty only if no dump could be written."""


def install(
    out_dir: Path | str, rank: int = 0, hear: Callable[[int], None] | None = None
) -> Installed | None:
    """Dump stacks on SIGUSR1 until the result is uninstalled.

    `hear` is called in the listener thread for every handled signal, even while the main thread
    hangs. Does nothing outside the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return Installed(Path(out_dir), rank, hear)


def write_dump(
    out_dir: Path | str, cause: str, rank: int = 0, *, prefix: str = PREFIX
) -> Path | None:
    """Write the stacks of all threads now; never replaces an existing dump.

    `cause` begins the first line. On failure, warn on stderr and return None.
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
    """The signal handler, the wakeup pipe and the listener thread; `uninstall` removes them."""

    def __init__(self, folder: Path, rank: int, hear: Callable[[int], None] | None) -> None:
        self._folder, self._rank, self._hear = folder, rank, hear
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # set_wakeup_fd requires it
        self._handler = signal.signal(SIGNAL, _ignore)  # raises outside the main thread
        self._wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._raw = self._register_raw()
        self._thread = threading.Thread(target=self._listen, name=THREAD, daemon=True)
        self._thread.start()

    def uninstall(self) -> None:
        """Restore the previous handlers; a second call does nothing."""
        if self._write_fd < 0:
            return
        faulthandler.unregister(SIGNAL)
        signal.signal(SIGNAL, self._handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write_fd)  # the listener reads end-of-file and ends
        self._write_fd = -1
        self._thread.join(timeout=5)
        if self._raw is not None:
            self._remove_raw(self._raw)

    def renew(self) -> None:
        """Recreate the RAW file after its folder was removed; handlers stay installed."""
        before, self._raw = self._raw, self._register_raw()
        if before is not None:
            before.close()

    def _remove_raw(self, raw: BinaryIO) -> None:
        """Only if empty and still this process's file: the folder may be another run's by now."""
        path = Path(raw.name)
        if os.fstat(raw.fileno()).st_size == 0 and is_at(path, raw.fileno()):
            path.unlink()
        raw.close()

    def _register_raw(self) -> BinaryIO | None:
        path = self._folder / RAW.format(rank=self._rank)
        with best_effort(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            raw = open(path, "wb", buffering=0, opener=open_regular)  # noqa: SIM115
            # Not all threads: without the GIL, the stacks of others may change while being read.
            faulthandler.register(SIGNAL, file=raw, all_threads=False, chain=True)
            return raw
        return None

    def _listen(self) -> None:
        # The interpreter writes one byte per signal: the signal number.
        with contextlib.closing(os.fdopen(self._read_fd, "rb", buffering=0)) as pipe:
            while numbers := pipe.read(1):
                if self._hear is not None:
                    self._hear(numbers[0])
                if numbers[0] == SIGNAL and self._dump():
                    self._truncate_raw()

    def _dump(self) -> Path | None:
        return write_dump(self._folder, f"Signal {int(SIGNAL)}", self._rank)

    def _truncate_raw(self) -> None:
        if self._raw is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._raw.fileno(), 0)
                os.lseek(self._raw.fileno(), 0, os.SEEK_SET)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the byte in the wakeup pipe is enough, but SIGUSR1 needs some handler."""


def _create(folder: Path, stem: str) -> tuple[int, Path]:
    """Create a new file; several ranks may dump into one folder within the same second."""
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
