"""The curves of a run and their sinks: TensorBoard events in tb/, Weights & Biases, trackio."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa.config import Config, ConfigError, to_container
from nsa.config.describe import install_line
from nsa.config.env import raw
from nsa.files import best_effort, complain, open_regular, read_text, write_text
from nsa.records.numbers import ATTENTION, EVALUATED, MEASURED, Number
from nsa.records.tracker_process import Point, Start, encode

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


# --- the points of the curves: one definition for TensorBoard and for trackers ---

Scalars = dict[str, float]
"""Values by tag."""


def train_scalars(**numbers: float | None) -> Scalars:
    """The numbers of a logged step; one that is not known has no point."""
    return _tagged(MEASURED, numbers)


def val_scalars(*, loss: float, ppl: float) -> Scalars:
    """The result of an evaluation."""
    return _tagged(EVALUATED, {"loss": loss, "ppl": ppl})


def _tagged(numbers: Sequence[Number], values: Mapping[str, float | None]) -> Scalars:
    known = ((number.tag, values.get(number.name)) for number in numbers if number.tag)
    return {tag: value for tag, value in known if value is not None}


def attention_scalars(
    attention: Mapping[str, Any] | None, layers: Sequence[Mapping[str, float | None]] | None
) -> Scalars:
    """Gates and selection, over all layers and by layer, if they were collected.

    `attention` is AttentionStats.summary(), `layers` is AttentionStats.per_layer().
    """
    scalars: Scalars = {}
    for number in ATTENTION if attention else ():
        value = (attention or {})[number.stat]
        if value is None:  # the model has no gates
            continue
        if number.parts:
            scalars |= {part.tag: x for part, x in zip(number.parts, value, strict=True)}
        elif number.tag:
            scalars[number.tag] = value
    # TensorBoard shows what precedes the slash together: all layers of a number.
    for index, layer in enumerate(layers or ()):
        known = ((name, value) for name, value in layer.items() if value is not None)
        scalars |= {f"layer_{name}/{index:02d}": value for name, value in known}
    return scalars


# --- tb/: TensorBoard events, written by rank 0 ---
# The step of an event is the number of optimizer updates.

FOLDER = "tb"
FLUSH_S = 30
"""Flush interval: a killed run loses at most this many seconds of events."""


class TensorBoard:
    """Writes events until the first I/O error; without a writer every call is a no-op."""

    def __init__(self, folder: Path, writer: SummaryWriter | None) -> None:
        self.folder = folder
        self.num_dropped = 0
        self._writer = writer
        self._failed = False
        self._hook, self._hook_before = threading.excepthook, threading.excepthook
        if writer is not None:
            self._hook = threading.excepthook = _hook_without(writer, self._hook_before)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point to each curve, in a single event: cheaper than one event per curve."""

        def write(writer: SummaryWriter) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            points = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]
            writer._get_file_writer().add_summary(Summary(value=points), step)

        if not self._guarded(write):
            self.num_dropped += len(scalars)

    def close(self) -> None:
        """Flush and close the file."""
        self._guarded(lambda writer: writer.close())
        self._writer = None
        if threading.excepthook is self._hook:
            threading.excepthook = self._hook_before

    def _guarded(self, action: Callable[[SummaryWriter], None]) -> bool:
        """Run the action; after the first OSError, which kills the writer, do nothing more."""
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
    """Open tb/ in the run folder; on ranks above 0, or if `disabled`, return a no-op.

    After a resume, TensorBoard is told to discard events of steps after `resumed_at`. Without the
    tensorboard package nothing is written, and `say` (default: stderr) gets the reason.
    """
    folder = Path(out_dir) / FOLDER
    if rank != 0 or disabled:
        return TensorBoard(folder, None)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        (say or _to_stderr)(
            "[telemetry] no TensorBoard events: the package is not installed; add it with "
            f"`{install_line('tensorboard')}`, or set NSA_TB_DISABLE=1"
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


def _hook_without(
    writer: SummaryWriter, before: Callable[[threading.ExceptHookArgs], Any]
) -> Callable[[threading.ExceptHookArgs], Any]:
    """A threading.excepthook that ignores OSErrors of the writer's own thread.

    On a full disk that thread dies with a traceback. The next call of the writer raises the same
    error again, and `_guarded` reports it in one line.
    """
    worker = writer._get_file_writer().event_writer._async_writer._worker

    def quietly(args: threading.ExceptHookArgs) -> None:
        if args.thread is not worker or not isinstance(args.exc_value, OSError):
            before(args)

    return quietly


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- trackers: Weights & Biases or trackio ---
# The library runs in a child process (tracker_process.py), because it may block, print, install
# signal handlers or crash. Points go through a non-blocking pipe; a tracker that fails or stops
# reading is dropped with a warning. tracker.json (schema, version 1: `version`, `tracker`, `id`)
# lets a resumed run continue under the same id; tracker.log holds the library's output.

VERSION = 1
TRACKER, LOG = "tracker.json", "tracker.log"
NO_TRACKER = "none"
PROJECT = "nsa"
CHILD = Path(__file__).with_name("tracker_process.py")
MOST_WAITING = 4 * 1024 * 1024
"""Limit in bytes of the queue to a tracker; about a thousand logged steps."""
CLOSE_S = 60.0
"""How long the end of a run waits for the tracker to finish."""


class Tracked(NamedTuple):
    """tracker.json: the tracker and the id of the run there."""

    tracker: str
    id: str


class Tracker:
    """Sends points to the child process; without one every call is a no-op. Never raises."""

    def __init__(
        self,
        name: str = NO_TRACKER,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._name, self._process, self._log, self._say = name, process, log, say
        self.tracked: Tracked | None = None
        self._waiting = bytearray()
        if process is not None and process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve; never blocks."""
        if self._process is not None:
            self._send(Point(step=step, values=dict(values)))

    def renew(self) -> None:
        """Write tracker.json again after the folder was removed."""
        if self.tracked is not None and self._log is not None:
            write_tracked(self._log.parent, self.tracked)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Flush the queue and let the tracker finish; kill it after `timeout_s`."""
        process, until = self._process, time.monotonic() + timeout_s
        if process is None or process.stdin is None:
            return
        while self._waiting and self._process is not None and time.monotonic() < until:
            select.select([], [process.stdin], [], max(0.0, until - time.monotonic()))
            self._push()
        if self._process is None:
            return
        process.stdin.close()
        try:
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._drop(f"it did not finish within {timeout_s:.0f} s")
            return
        if code:
            self._drop(f"it ended with exit code {code}")
        self._process = None

    def _send(self, message: Start | Point) -> None:
        self._waiting += encode(message)
        self._push()
        # A tracker that stopped reading: drop it before the queue grows without bound.
        if len(self._waiting) > MOST_WAITING:
            self._drop(f"{len(self._waiting) >> 20} MiB are queued for it")

    def _push(self) -> None:
        """Write as much of the queue as the pipe accepts."""
        assert self._process is not None and self._process.stdin is not None
        try:
            while self._waiting:
                taken = os.write(self._process.stdin.fileno(), self._waiting)
                del self._waiting[:taken]
        except BlockingIOError:
            return
        except OSError:  # the child closed the pipe; its log says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # let it finish writing its log
            self._drop("it has ended")

    def _drop(self, why: str) -> None:
        process, self._process = self._process, None
        self._waiting.clear()
        assert process is not None and process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.kill()
        process.wait()
        self._say(
            f"[telemetry] {self._name} stopped receiving this run: {why}{self._last_words()}; "
            "the run continues, and its files are complete"
        )

    def _last_words(self) -> str:
        """The last line that the library printed, and the path of its log."""
        with contextlib.suppress(OSError):
            lines = read_text(self._log).split("\n") if self._log else []
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return f" ({last}; see {self._log})" if last else ""
        return ""


def require_tracker(name: str) -> None:
    """Raise ConfigError before training if the tracker's package is not installed."""
    if name != NO_TRACKER and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"train.tracker={name}: the package is not installed; install it with "
            f"`{install_line(name)}`, or use train.tracker=none",
            key="train.tracker",
        )


def open_tracker(
    cfg: Config, folder: Path, *, resumed: bool, say: Callable[[str], None]
) -> Tracker:
    """Start the child process for cfg.train.tracker; for `none`, return a no-op tracker."""
    name = cfg.train.tracker
    if name == NO_TRACKER:
        return Tracker()
    tracked = _tracked_before(folder, say) if resumed else None
    if tracked is None or tracked.tracker != name:
        tracked = Tracked(name, f"{folder.name}-{uuid.uuid4().hex[:8]}")
    write_tracked(folder, tracked)
    log = folder / LOG
    try:
        with open(log, "ab", opener=open_regular) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C must reach only the trainer, which closes this
            )
    except OSError as error:
        say(f"[telemetry] {name} does not track this run: {error}; the run continues")
        return Tracker()
    say(f"[telemetry] {name} tracks this run as {tracked.id}; its output is in {log}")
    tracker = Tracker(name, process, log, say)
    tracker.tracked = tracked
    tracker._send(
        Start(
            kind=name,
            project=raw("WANDB_PROJECT") or PROJECT,
            name=folder.name,
            id=tracked.id,
            folder=str(folder),
            config=to_container(cfg),
        )
    )
    return tracker


def _tracked_before(folder: Path, say: Callable[[str], None]) -> Tracked | None:
    try:
        return read_tracked(folder)
    except ValueError as error:
        say(f"[telemetry] {error}; the tracker uses a new run id")
        return None


def write_tracked(folder: Path, tracked: Tracked) -> Path:
    """Write tracker.json; on a full disk, warn and continue."""
    path = folder / TRACKER
    with best_effort(path):
        write_text(path, json.dumps({"version": VERSION, **tracked._asdict()}, indent=2) + "\n")
    return path


def read_tracked(folder: Path) -> Tracked | None:
    """Read tracker.json of a run folder; None if the run had no tracker."""
    path = folder / TRACKER
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version!r}; this program reads version {VERSION}; use the "
            "program that wrote it"
        )
    return Tracked(str(content.get("tracker")), str(content.get("id")))
