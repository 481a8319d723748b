"""tb/: the curves of a run as TensorBoard events, written by rank 0.

Tags: train/loss, train/toks_per_s, train/lr, val/loss, val/ppl, and gates/ with the gate fields of
AttentionStats.summary(). The step of an event is the number of optimizer updates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.telemetry.best_effort import complain

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tb"
FLUSH_S = 30
"""A run that is killed loses the events of at most this many seconds."""
TRAIN_TAGS = ("train/loss", "train/toks_per_s", "train/lr", "train/mfu")
VAL_TAGS = ("val/loss", "val/ppl")
GATES = ("entropy_mean", "entropy_min", "max_gate_mean", "max_gate_max", "collapse_fraction")
BRANCHES = ("cmp", "sel", "win")
GATE_TAGS = tuple(f"gates/{name}" for name in (*GATES, *(f"share_{x}" for x in BRANCHES)))


class TensorBoard:
    """Writes events while it can; without a writer every call does nothing."""

    def __init__(self, folder: Path, writer: SummaryWriter | None) -> None:
        self.folder = folder
        self.num_dropped = 0
        self._writer = writer
        self._failed = False

    def train(
        self, step: int, *, loss: float, toks_per_s: float, lr: float, mfu: float | None = None
    ) -> None:
        """The numbers of a logged step; without an MFU its curve has no point."""
        values = zip(TRAIN_TAGS, (loss, toks_per_s, lr, mfu), strict=True)
        self._add(step, [(tag, value) for tag, value in values if value is not None])

    def val(self, step: int, *, loss: float, ppl: float) -> None:
        """The result of an evaluation."""
        self._add(step, zip(VAL_TAGS, (loss, ppl), strict=True))

    def gates(self, step: int, attention: Mapping[str, Any] | None) -> None:
        """The gates of a logged step, from AttentionStats.summary(), if it was collected."""
        if attention:
            values = (*(attention[name] for name in GATES), *attention["branch_shares"])
            self._add(step, zip(GATE_TAGS, values, strict=True))

    def close(self) -> None:
        """Write what waits, and end the file."""
        self._guarded(lambda writer: writer.close())
        self._writer = None

    def _add(self, step: int, values: Iterable[tuple[str, float]]) -> None:
        events = list(values)

        def write(writer: SummaryWriter) -> None:
            for tag, value in events:
                writer.add_scalar(tag, value, step)

        if not self._guarded(write):
            self.num_dropped += len(events)

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


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
