"""tb/: the curves of a run as TensorBoard events, written by rank 0.

The tags are those of scalars.py. The step of an event is the number of optimizer updates.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.telemetry.best_effort import complain

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tb"
FLUSH_S = 30
"""A run that is killed loses the events of at most this many seconds."""


class TensorBoard:
    """Writes events while it can; without a writer every call does nothing."""

    def __init__(self, folder: Path, writer: SummaryWriter | None) -> None:
        self.folder = folder
        self.num_dropped = 0
        self._writer = writer
        self._failed = False
        self._hook, self._hook_before = threading.excepthook, threading.excepthook
        if writer is not None:
            self._hook = threading.excepthook = _without(writer, self._hook_before)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point to each of these curves: one event, which costs less than one for each."""

        def write(writer: SummaryWriter) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            points = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]
            writer._get_file_writer().add_summary(Summary(value=points), step)

        if not self._guarded(write):
            self.num_dropped += len(scalars)

    def close(self) -> None:
        """Write what waits, and end the file."""
        self._guarded(lambda writer: writer.close())
        self._writer = None
        if threading.excepthook is self._hook:
            threading.excepthook = self._hook_before

    def _guarded(self, action: Callable[[SummaryWriter], None]) -> bool:
        """Do it; after the first OSError, which the writer does not survive, do nothing more."""
        if self._writer is None:
            return not self._failed
        try:
            action(self._writer)
        except OSError as error:
            complain(self.folder, error, "no more events")
            self._writer, self._failed = None, True
            return False
        return True


def open_tensorboard(
    out_dir: Path | str,
    *,
    rank: int = 0,
    disabled: bool = False,
    resumed_at: int = 0,
    say: Callable[[str], None] | None = None,
) -> TensorBoard:
    """Open tb/ in the run folder; for other ranks, or if `disabled`, a board that does nothing.

    A run that goes on after step `resumed_at` tells readers to forget what came later before.
    Without the tensorboard package nothing is written, and `say` (stderr) hears why.
    """
    folder = Path(out_dir) / FOLDER
    if rank != 0 or disabled:
        return TensorBoard(folder, None)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        (say or _to_stderr)(
            "[telemetry] no TensorBoard events: the package is not installed; add it with "
            "`pip install -c constraints.txt -e '.[tensorboard]'`, or set NSA_TB_DISABLE=1"
        )
        return TensorBoard(folder, None)
    purge = resumed_at + 1 if resumed_at else None
    try:
        writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=FLUSH_S)
    except OSError as error:
        complain(folder, error, "no events")
        return TensorBoard(folder, None)
    return TensorBoard(folder, writer)


def read_scalars(out_dir: Path | str) -> dict[str, list[tuple[int, float]]]:
    """All curves of a run folder: (step, value) by tag. Needs the tensorboard package."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(out_dir) / FOLDER), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _without(
    writer: SummaryWriter, before: Callable[[threading.ExceptHookArgs], Any]
) -> Callable[[threading.ExceptHookArgs], Any]:
    """A hook for errors of threads that is silent about the writer's own.

    That one dies of a full disk with a traceback; the next call of the writer raises the error
    again, and then it is said in a line.
    """
    worker = writer._get_file_writer().event_writer._async_writer._worker

    def quietly(args: threading.ExceptHookArgs) -> None:
        if args.thread is not worker or not isinstance(args.exc_value, OSError):
            before(args)

    return quietly


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
