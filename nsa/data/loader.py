"""Batches ahead of time: a thread reads them into a short queue while the model computes.

The state that a checkpoint gets is that of the batches which were handed out, never of those which
wait in the queue; a run that is killed with a full queue loses nothing and repeats nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from nsa.data.array_rows import Rows, State
from nsa.data.errors import SourceLost, WaitEnded, late, leave_behind, within

PATIENCE_S = 900.0
"""Waiting longer than this for a batch ends the run; retries are over well before that."""
TICK_S = 0.2
"""How often a waiting thread looks whether it should go on waiting."""

Key = tuple[int, int]
"""Position and size of a batch."""


class _Item(NamedTuple):
    """A batch with the state of its source for it, or what came instead."""

    key: Key
    batch: Tensor | None
    state: State
    error: BaseException | None = None


class Loader:
    """Rows in batches that follow each other; any other batch works, too, but is not ahead."""

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
        """`depth` batches wait in the queue, 0 reads each when it is asked for.

        `stride` is the distance of two batches, their size if not given: a rank that takes every
        k-th batch has k times that. The last `keep` batches are remembered. `pin` puts them into
        memory that a GPU can copy from by itself.
        """
        self._rows, self._depth, self._stride, self._pin = rows, depth, stride, pin
        self._patience_s = patience_s
        self.interrupted: Callable[[], object] = lambda: False
        """Asked while a batch is waited for; something true ends the wait with WaitEnded."""
        self._resumed: State = {}
        self._handed_out: deque[_Item] = deque(maxlen=max(1, keep))
        self._first: _Item | None = None
        self._thread: _Reader | None = None

    @property
    def num_rows(self) -> int | None:
        """Different rows in an epoch of the source."""
        return self._rows.num_rows

    @property
    def num_ready(self) -> int:
        """Batches that wait."""
        return (self._first is not None) + (self._thread.items.qsize() if self._thread else 0)

    def fingerprint(self) -> str:
        """Return that of the source."""
        return self._rows.fingerprint()

    def state(self, position: int) -> State:
        """Return that of the source for a position whose batch was handed out, or is the next."""
        before = [item.state for item in self._handed_out if item.key[0] <= position]
        return before[-1] if before else self._resumed

    def resume(self, state: State) -> None:
        """Let the source go on from a state."""
        self.close()
        self._rows.resume(state)
        self._handed_out.clear()
        self._resumed = state

    def fetch_first(self, position: int, size: int, timeout_s: float) -> float:
        """Get the first batch within a time, keep it ready, and return the seconds it took."""
        start = time.perf_counter()
        key = (position, size)
        if self._depth:
            self._first = self._from_thread(key, timeout_s, "the first batch")
        else:
            self._first = within(timeout_s, lambda: self._read(key), "the first batch")
        return time.perf_counter() - start

    def wait_until_ready(self, count: int, timeout_s: float) -> int:
        """Wait for so many batches in the queue, or for the time to pass; return how many came."""
        end = time.perf_counter() + timeout_s
        wanted = min(count, self._depth + (self._first is not None))
        while self.num_ready < wanted and time.perf_counter() < end:
            if self._thread is None or not self._thread.is_alive():
                break
            time.sleep(TICK_S / 20)
        return min(self.num_ready, count)

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Return the rows at global positions `position` to `position + size - 1`."""
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
        """End the thread; one that hangs in the network is left behind, until the process ends."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None
        self._first = None

    def _from_thread(self, key: Key, timeout_s: float, what: str) -> _Item:
        if self._thread is None or self._thread.next_out != key:
            if self._thread is not None and not self._thread.end():
                raise SourceLost(f"{what} is out of order, and its source hangs; start again")
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
        return _Item(key, batch.pin_memory() if self._pin else batch, self._rows.state(key[0]))


class _Reader(threading.Thread):
    """Reads batch after batch into the queue; after an error it puts that there, and ends."""

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
            except BaseException as error:  # noqa: BLE001  raised again where a batch is taken
                item = _Item(self._next_in, None, {}, error)
            self._put(item)
            if item.error is not None:
                return
            self._next_in = (position + self._stride, size)

    def take(self, timeout_s: float, interrupted: Callable[[], object]) -> _Item | None:
        """The next item; None if it does not come in time."""
        end = time.perf_counter() + timeout_s
        while True:
            left_s = end - time.perf_counter()
            try:
                item = self.items.get(timeout=max(min(TICK_S, left_s), 0.001))
                break
            except queue.Empty:
                if left_s <= 0:
                    return None
                if interrupted():
                    raise WaitEnded("the wait for a batch was ended") from None
        position, size = self.next_out
        self.next_out = (position + self._stride, size)
        return item

    def end(self) -> bool:
        """Ask the thread to end, and return whether it did."""
        self._ended.set()
        self.join(timeout=5.0)
        if self.is_alive():
            leave_behind(self)
        return not self.is_alive()

    def _put(self, item: _Item) -> None:
        while not self._ended.is_set():
            try:
                self.items.put(item, timeout=TICK_S)
                return
            except queue.Full:
                continue
