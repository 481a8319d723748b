"""Prefetching: a thread reads batches into a short queue while the model computes.

A checkpoint stores the state of the batches handed out, not of those still queued. A run that is
killed with a full queue neither skips nor repeats data.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from nsa.data.array_rows import Rows, State
from nsa.data.errors import SourceLost, WaitEnded, late, leave_behind, within

PATIENCE_S = 900.0
"""A run ends after waiting this long for a batch; retries give up well before."""
TICK_S = 0.2
"""Seconds between checks for interruption while waiting."""

Key = tuple[int, int]
"""Position and size of a batch."""


class _Item(NamedTuple):
    """A batch with the source's state for it, or the error raised instead."""

    key: Key
    batch: Tensor | None
    state: State
    error: BaseException | None = None


class Loader:
    """Prefetches consecutive batches; any other batch works too, but is not prefetched."""

    def __init__(
        self,
        rows: Rows,
        *,
        depth: int,
        stride: int | None = None,
        keep: int = 1,
        pin: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`depth` batches are queued; 0 reads each batch on demand.

        `stride` is the distance between two batches in rows, by default their size; a rank that
        takes every k-th batch uses k times the size. The last `keep` batches are cached. `pin`
        puts batches into pinned memory for asynchronous copies to a GPU.
        """
        self._rows, self._depth, self._stride, self._pin = rows, depth, stride, pin
        self._patience_s = patience_s
        self.interrupted: Callable[[], object] = lambda: False
        """Called while waiting; a true result ends the wait with WaitEnded."""
        self._resumed: State = {}
        self._handed_out: deque[_Item] = deque(maxlen=max(1, keep))
        self._first: _Item | None = None
        self._thread: _Reader | None = None

    @property
    def num_rows(self) -> int | None:
        """Distinct rows per epoch of the source."""
        return self._rows.num_rows

    @property
    def num_ready(self) -> int:
        """Batches that are ready."""
        return (self._first is not None) + (self._thread.items.qsize() if self._thread else 0)

    def fingerprint(self) -> str:
        """The fingerprint of the source."""
        return self._rows.fingerprint()

    def state_dict(self, position: int) -> State:
        """The source's state for a position whose batch was handed out, or comes next."""
        before = [item.state for item in self._handed_out if item.key[0] <= position]
        return before[-1] if before else self._resumed

    def load_state_dict(self, state: State) -> None:
        """Resume the source from a state."""
        self.close()
        self._rows.load_state_dict(state)
        self._handed_out.clear()
        self._resumed = state

    def fetch_first(self, position: int, size: int, timeout_s: float) -> float:
        """Fetch the first batch within a time limit, cache it, return the seconds it took."""
        start = time.perf_counter()
        key = (position, size)
        if self._depth:
            self._first = self._from_thread(key, timeout_s, "the first batch")
        else:
            self._first = within(timeout_s, lambda: self._read(key), "the first batch")
        return time.perf_counter() - start

    def wait_until_ready(self, count: int, timeout_s: float) -> int:
        """Wait for `count` queued batches or the timeout; returns how many are ready."""
        end = time.perf_counter() + timeout_s
        wanted = min(count, self._depth + (self._first is not None))
        while self.num_ready < wanted and time.perf_counter() < end:
            if self._thread is None or not self._thread.is_alive():
                break
            time.sleep(TICK_S / 20)
        return min(self.num_ready, count)

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """The rows at global positions `position` to `position + size - 1`."""
        key = (position, size)
        for item in self._handed_out:
            if item.key == key and item.batch is not None:
                return item.batch
        if self._first is not None and self._first.key == key:
            item, self._first = self._first, None
        elif self._depth:
            self._first = None
            what = f"the batch at row {position}"
            item = self._from_thread(key, self._patience_s, what)
        else:
            self._first, item = None, self._read(key)
        assert item.batch is not None, "an item without an error has a batch"
        self._handed_out.append(item)
        return item.batch

    def close(self) -> None:
        """Stop the thread; one that hangs in the network is abandoned until the process ends."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None
        self._first = None

    def _from_thread(self, key: Key, timeout_s: float, what: str) -> _Item:
        # Not the next batch in line (e.g. after a rollback): restart the thread at this one.
        if self._thread is None or self._thread.next_out != key:
            if self._thread is not None and not self._thread.end():
                raise SourceLost(f"{what} is out of order, and its source hangs; restart the run")
            self._thread = _Reader(self._read, key, self._stride or key[1], self._depth)
            self._thread.start()
        item = self._thread.take(timeout_s, self.interrupted)
        if item is None:
            raise late(timeout_s, what)
        if item.error is not None:
            self._thread = None
            raise item.error
        return item

    def _read(self, key: Key) -> _Item:
        batch = self._rows.batch(*key)
        return _Item(key, batch.pin_memory() if self._pin else batch, self._rows.state_dict(key[0]))


class _Reader(threading.Thread):
    """Reads consecutive batches into the queue; an error is queued too and ends the thread."""

    def __init__(self, read: Callable[[Key], _Item], key: Key, stride: int, depth: int) -> None:
        super().__init__(name="loader", daemon=True)
        self.items: queue.Queue[_Item] = queue.Queue(maxsize=depth)
        self.next_out = key
        self._read, self._next_in, self._stride = read, key, stride
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            position, size = self._next_in
            try:
                item = self._read(self._next_in)
            except BaseException as error:  # noqa: BLE001  re-raised where the batch is taken
                item = _Item(self._next_in, None, {}, error)
            self._put(item)
            if item.error is not None:
                return
            self._next_in = (position + self._stride, size)

    def take(self, timeout_s: float, interrupted: Callable[[], object]) -> _Item | None:
        """The next item; None on timeout."""
        end = time.perf_counter() + timeout_s
        while True:
            left_s = end - time.perf_counter()
            # Wait in short ticks, so that a request to stop is seen within TICK_S.
            try:
                item = self.items.get(timeout=max(min(TICK_S, left_s), 0.001))
                break
            except queue.Empty:
                if left_s <= 0:
                    return None
                if interrupted():
                    raise WaitEnded("the wait for a batch was interrupted") from None
        position, size = self.next_out
        self.next_out = (position + self._stride, size)
        return item

    def end(self) -> bool:
        """Ask the thread to stop; returns whether it did."""
        self._ended.set()
        with suppress(queue.Empty):  # a thread that waits for room goes on at once
            self.items.get_nowait()
        self.join(timeout=5.0)
        if self.is_alive():
            leave_behind(self)
        return not self.is_alive()

    def _put(self, item: _Item) -> None:
        # Never block forever on a full queue: `end` must be able to stop this thread.
        while not self._ended.is_set():
            try:
                self.items.put(item, timeout=TICK_S)
                return
            except queue.Full:
                continue
