"""Writing that a full disk does not turn into the end of a run: it complains once and goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from nsa.files import APPEND, is_at, open_regular


@contextlib.contextmanager
def best_effort(path: Path) -> Iterator[None]:
    """Let an OSError of the block cost only the file that the block writes."""
    try:
        yield
    except OSError as error:
        complain(path, error)


def complain(path: Path, error: OSError, what: str = "not written") -> None:
    """Say on stderr what is missing; a stderr that is closed is no reason to stop, either."""
    with contextlib.suppress(OSError, ValueError):
        text = f"[telemetry] {path}: {what} ({error.strerror or error}); the run goes on"
        print(text, file=sys.stderr, flush=True)


class LineFile:
    """A file that grows by whole lines, each in a single write: no reader sees half of one.

    A line that cannot be written is dropped and counted; the first one is announced on stderr. The
    file is opened again before the next line, because the disk may have room by then. A last line
    that a killed writer left without its end is removed when the file is opened.
    """

    def __init__(self, path: Path, head: str = "") -> None:
        """`head` is written first into a file that is new or empty."""
        self.path = path
        self.num_dropped = 0
        self._head = head.encode()
        self._descriptor: int | None = None
        self._lock = threading.RLock()  # a signal handler may log while its own thread does
        self._append(b"")

    def append(self, line: str) -> None:
        """Add a line; when this returns it is in the file, or counted in num_dropped."""
        if not self._append(line.encode() + b"\n"):
            self.num_dropped += 1

    def close(self) -> None:
        """Give the descriptor back; a later line would open the file again."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):  # nothing is buffered, nothing can be lost
                    os.close(descriptor)

    def is_there(self) -> bool:
        """Whether the file still has its name; one that is not open cannot have lost it."""
        with self._lock:
            return self._descriptor is None or is_at(self.path, self._descriptor)

    def __del__(self) -> None:
        self.close()

    def _append(self, data: bytes) -> bool:
        with self._lock:
            try:
                if self._descriptor is None:
                    self._descriptor = self._open()
                _write_whole(self._descriptor, data)
            except OSError as error:
                self.close()
                if self.num_dropped == 0 and data:
                    complain(self.path, error, "lines are being dropped")
                return False
            return True

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(self.path, APPEND)
        try:
            size = _drop_cut_line(descriptor)
            _write_whole(descriptor, self._head if size == 0 else b"")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all of it or nothing: what a disk that is filling up took of it is taken back."""
    if not data:
        return
    written = os.write(descriptor, data)
    if written < len(data):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(f"only {written} of {len(data)} bytes were taken")


def _drop_cut_line(descriptor: int, block: int = 65536) -> int:
    """Cut the file after its last line end; return its size."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return end
