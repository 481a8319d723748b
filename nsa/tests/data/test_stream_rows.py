"""Rows of a stream: order, epochs, exact state, reading ahead, retries, and the ways it can end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from nsa.config import DataConfig
from nsa.data import ByteTokenizer, DataError, Loader, SourceLost, SyntheticRows, WaitEnded, within
from nsa.data.array_rows import shuffled
from nsa.data.documents import is_held_out
from nsa.data.encode import Place, Report, first_held_out
from nsa.data.errors import MOST, Retries, is_transient
from nsa.data.hub import HubDocuments
from nsa.data.streamed_rows import MOST_ROWS, StreamedRows
from nsa.tests.support.streams import ListDocuments, wait_for

TEXTS = [f"document {i}: " + "lorem ipsum dolor " * (1 + i % 7) for i in range(200)]
TRAINING = [text for text in TEXTS if not is_held_out(text)]
SEQ_LEN, ROWS = 16, 40
"""Small blocks, so that a test crosses many."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.data.streamed_rows.MOST_ROWS", ROWS)


def stream(seed: int = 1, doc_batch: int = 64) -> StreamedRows:
    documents = ListDocuments(TEXTS[:90], [], TEXTS[90:])
    return StreamedRows(documents, ByteTokenizer(), SEQ_LEN, seed, doc_batch=doc_batch)


def expected_rows(number: int, seed: int = 1) -> list[list[int]]:
    """Written from the definition: the training documents of all epochs, cut, shuffled by block."""
    epoch = b"".join(text.encode() + b"\0" for text in TRAINING)
    tokens = epoch * (number * SEQ_LEN // len(epoch) + 2)
    rows = []
    for position in range(number):
        block, index = divmod(position, ROWS)
        start = (block * ROWS + shuffled(index, ROWS, seed, block)) * SEQ_LEN
        rows.append(list(tokens[start : start + SEQ_LEN + 1]))
    return rows


def rows_per_epoch() -> int:
    return sum(len(text.encode()) + 1 for text in TRAINING) // SEQ_LEN


def test_every_token_of_every_epoch_comes_once_and_the_end_is_a_new_epoch() -> None:
    number = 3 * rows_per_epoch()
    assert stream().batch(0, number).tolist() == expected_rows(number)


def test_a_block_is_bounded_in_rows_and_in_tokens() -> None:
    assert MOST_ROWS == 256
    long = StreamedRows(ListDocuments(TEXTS), ByteTokenizer(), 1 << 18, 1)
    longest = StreamedRows(ListDocuments(TEXTS), ByteTokenizer(), 1 << 22, 1)
    assert (stream().block_rows, long.block_rows, longest.block_rows) == (ROWS, 2, 1)


def test_rows_depend_on_the_seed_and_the_position_alone() -> None:
    number = 200
    whole = stream().batch(0, number)
    for size in (1, 7, 64):
        one = stream(doc_batch=size)
        parts = [one.batch(p, min(size, number - p)) for p in range(0, number, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(stream(seed=2).batch(0, number), whole)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_rank_that_takes_every_kth_batch_gets_its_rows(world: int) -> None:
    whole = stream().batch(0, 6 * world * 2).split(2)
    for rank in range(world):
        rows = stream()
        mine = [rows.batch(2 * p, 2) for p in range(rank, 6 * world, world)]
        assert torch.equal(torch.cat(mine), torch.cat(whole[rank::world]))


def test_going_back_reads_again() -> None:
    rows = stream()
    whole = rows.batch(0, 300)
    assert torch.equal(rows.batch(5, 3), whole[5:8])
    assert torch.equal(rows.batch(290, 10), whole[290:])


@pytest.mark.parametrize("position", [0, 1, ROWS - 1, ROWS, 3 * ROWS + 7, 700, 1500])
def test_a_state_is_small_and_continues_without_reading_from_the_start(position: int) -> None:
    whole = stream().batch(0, position + 100)
    first = stream()
    if position:
        first.batch(0, position)
    state = first.state_dict(position)
    documents = ListDocuments(TEXTS[:90], [], TEXTS[90:])
    second = StreamedRows(documents, ByteTokenizer(), SEQ_LEN, 1, doc_batch=1)

    second.load_state_dict(state)

    assert torch.equal(second.batch(position, 100), whole[position:])
    assert len(state) == 5 and all(type(value) is int for value in state.values())
    longest = max(len(text) for text in TEXTS) + 1
    shortest = min(len(text) for text in TEXTS) + 1
    most = (100 + 2 * ROWS) * SEQ_LEN + 2 * longest
    assert documents.num_read <= most // shortest  # whatever the position is


def test_rows_before_a_state_are_found_from_the_start() -> None:
    first = stream()
    whole = first.batch(0, 500)
    second = stream()
    second.load_state_dict(first.state_dict(500))
    assert torch.equal(second.batch(10, 5), whole[10:15])


@pytest.mark.parametrize(
    "state",
    [{}, {"block": 1}, {"block": -1, "epoch": 0, "file": 0, "row": 0, "skip": 0}],
)
def test_what_is_no_state_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(DataError, match="is not a position"):
        stream().load_state_dict(state)


def test_held_out_documents_are_the_first_of_their_side_and_never_trained_on() -> None:
    held_out = [text for text in TEXTS if is_held_out(text)]
    assert len(held_out) > 3
    documents = ListDocuments(TEXTS)

    some = first_held_out(documents, ByteTokenizer(), 3)
    every = first_held_out(documents, ByteTokenizer(), 10_000)

    assert bytes(some) == b"".join(text.encode() + b"\0" for text in held_out[:3])
    assert bytes(every) == b"".join(text.encode() + b"\0" for text in held_out)
    assert not set(held_out) & set(TRAINING)


@pytest.mark.parametrize("texts", [["", "  "], [t for t in TEXTS if is_held_out(t)]])
def test_documents_without_one_to_train_on_end_with_an_error(texts: list[str]) -> None:
    rows = StreamedRows(ListDocuments(texts), ByteTokenizer(), SEQ_LEN, 1, doc_batch=1)
    with pytest.raises(DataError, match="no document to train on"):
        rows.batch(0, 1)


def test_a_fingerprint_changes_with_what_decides_the_rows() -> None:
    base = stream().fingerprint()
    assert stream(doc_batch=3).fingerprint() == base
    others = {
        stream(seed=2).fingerprint(),
        StreamedRows(ListDocuments(TEXTS), ByteTokenizer(), 32, 1).fingerprint(),
        StreamedRows(ListDocuments(TEXTS[1:]), ByteTokenizer(), SEQ_LEN, 1).fingerprint(),
    }
    assert len(others | {base}) == 4


def test_a_line_comes_every_so_many_documents() -> None:
    lines: list[str] = []
    report = Report(every=60, say=lines.append)
    rows = StreamedRows(ListDocuments(TEXTS), ByteTokenizer(), SEQ_LEN, 1, report=report)
    rows.batch(2 * rows_per_epoch(), 1)
    assert lines[0].startswith("[data] 60 documents, ") and lines[0].endswith("(epoch 1)")
    assert lines[3].startswith("[data] 240 documents, ") and lines[3].endswith("(epoch 2)")


# The queue.


def test_batches_read_ahead_are_the_batches_and_the_state_is_that_of_those_handed_out() -> None:
    whole = stream().batch(0, 400)
    loader = Loader(stream(), depth=8)
    for position in range(0, 300, 10):
        assert torch.equal(loader.batch(position, 10), whole[position : position + 10])
    wait_for(lambda: loader.num_ready == 8)

    state = loader.state_dict(300)  # 80 rows wait in the queue, in blocks ahead of it
    loader.close()

    assert state["block"] <= 300 // ROWS
    again = Loader(stream(), depth=8)
    again.load_state_dict(state)
    assert torch.equal(again.batch(300, 10), whole[300:310])
    again.close()


def test_a_state_in_the_middle_of_an_update_is_not_ahead_of_its_start() -> None:
    loader = Loader(stream(), depth=2, keep=10)
    for position in range(0, ROWS + 10, 10):
        loader.batch(position, 10)
    assert loader.state_dict(ROWS - 10)["block"] == 0
    assert loader.state_dict(ROWS + 10)["block"] == 1
    loader.close()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_any_order_works_and_the_last_batches_are_remembered(depth: int) -> None:
    rows = SyntheticRows(256, SEQ_LEN, 1, "train")
    loader = Loader(rows, depth=depth, keep=2)
    for position in (0, 2, 4, 20, 22, 6):
        assert torch.equal(loader.batch(position, 2), rows.batch(position, 2))
    assert loader.batch(22, 2) is loader.batch(22, 2)
    loader.close()


def test_a_thread_that_waits_for_room_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.data.loader.TICK_S", 60.0)
    loader = Loader(stream(), depth=2)
    loader.batch(0, 10)
    wait_for(lambda: loader.num_ready == 2)
    thread = loader._thread
    began = time.monotonic()
    loader.close()
    assert thread is not None and not thread.is_alive() and time.monotonic() - began < 4.0


def test_a_stride_takes_every_kth_batch() -> None:
    whole = stream().batch(0, 60)
    loader = Loader(stream(), depth=3, stride=6)
    assert all(torch.equal(loader.batch(p, 2), whole[p : p + 2]) for p in range(2, 60, 6))
    loader.close()


class Hanging(SyntheticRows):
    """Delivers up to a position, then hangs until it is released."""

    def __init__(self, until: int) -> None:
        super().__init__(256, SEQ_LEN, 1, "train")
        self.until, self.released = until, threading.Event()

    def batch(self, position: int, size: int) -> torch.Tensor:
        if position >= self.until:
            assert self.released.wait(30)
        return super().batch(position, size)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_first_batch_that_does_not_come_is_an_error_in_time(depth: int) -> None:
    rows = Hanging(until=0)
    loader = Loader(rows, depth=depth)
    start = time.perf_counter()
    with pytest.raises(
        SourceLost, match="first batch did not arrive within 0.3 s.*--loader-timeout"
    ):
        loader.fetch_first(0, 2, timeout_s=0.3)
    assert time.perf_counter() - start < 5
    rows.released.set()
    loader.close()


def test_a_stall_later_on_ends_after_patience_or_on_request() -> None:
    rows = Hanging(until=6)
    loader = Loader(rows, depth=2, patience_s=0.3)
    assert loader.fetch_first(0, 2, timeout_s=30) < 30
    assert loader.wait_until_ready(9, timeout_s=30) == 3  # the first one and a full queue
    for position in (0, 2, 4):
        assert torch.equal(loader.batch(position, 2), SyntheticRows.batch(rows, position, 2))
    with pytest.raises(SourceLost, match="batch at row 6 did not arrive within 0.3 s"):
        loader.batch(6, 2)
    loader.interrupted = lambda: "SIGTERM"
    loader._patience_s = 30
    with pytest.raises(WaitEnded):
        loader.batch(6, 2)
    rows.released.set()
    loader.close()


def test_an_error_comes_after_the_batches_before_it() -> None:
    class Broken(SyntheticRows):
        def batch(self, position: int, size: int) -> torch.Tensor:
            if position >= 6:
                raise DataError("row 6 is bad")
            return super().batch(position, size)

    rows = Broken(256, SEQ_LEN, 1, "train")
    loader = Loader(rows, depth=8)
    for position in (0, 2, 4):
        loader.batch(position, 2)
    with pytest.raises(DataError, match="row 6 is bad"):
        loader.batch(6, 2)
    loader.close()


def test_what_is_in_time_is_returned_or_raised() -> None:
    assert within(5, lambda: 7, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "nothing")


# Broken connections.


def test_waits_grow_with_jitter_and_end_with_an_error() -> None:
    said: list[str] = []
    waits: list[float] = []
    retries = Retries("the hub", said.append, sleep=waits.append)
    for _ in range(MOST):
        retries.failed(ConnectionResetError("reset by peer"))
    with pytest.raises(
        SourceLost, match=f"the hub: .*reset by peer; gave up after {MOST} failed retries"
    ):
        retries.failed(ConnectionResetError("reset by peer"))
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits)) and len(waits) == MOST
    assert len(said) == MOST and f"retry 2 of {MOST}" in said[1]
    retries.worked()
    retries.failed(TimeoutError())
    assert waits[-1] <= 1


class Answer:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class HubError(OSError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = Answer(status)


def caused(cause: BaseException) -> BaseException:
    error = RuntimeError("wrapped")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (HubError(503), True),
        (HubError(429), True),
        (HubError(404), False),
        (HubError(401), False),
        (caused(ConnectionError()), True),
        (caused(ValueError()), False),
        (OSError("CRC checksum verification failed"), False),
        (ValueError("not Parquet"), False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_only_connections_are_worth_another_attempt(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


class FlakyHub(HubDocuments):
    """The reading loop of the hub over lists, whose connection breaks before these documents."""

    def __init__(self, breaks: list[tuple[Place, Exception]], *files: list[str]) -> None:
        self.name, self.lists, self.breaks = "a hub", files, breaks
        self.said: list[str] = []
        self._say = self.said.append
        self._files = [f"file{n}" for n in range(len(files))]

    def _texts(self, place: Place) -> Iterator[str]:
        for row in range(place.row, len(self.lists[place.file])):
            for entry in self.breaks:
                if entry[0] == place._replace(row=row):
                    self.breaks.remove(entry)
                    raise entry[1]
            yield self.lists[place.file][row]


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.data.errors.FIRST_S", 0.0)


@pytest.mark.usefixtures("_no_waiting")
def test_every_document_arrives_once_whatever_breaks() -> None:
    places = [Place(0, 0, 0), Place(0, 0, 2), Place(0, 0, 2), Place(0, 1, 1), Place(1, 0, 1)]
    breaks: list[tuple[Place, Exception]] = [(p, ConnectionError("cut")) for p in places]
    hub = FlakyHub(breaks, ["a", "b", "c"], ["d", "e"], [])
    found = list(islice(hub.read(Place()), 12))
    assert "".join(document.text for _, document in found) == "abcdeabcdeab"
    assert [place for place, _ in found[3:7]] == [(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]
    assert len(hub.said) == 5 and "retry 2 of 5" in hub.said[2]
    assert hub.breaks == []


@pytest.mark.usefixtures("_no_waiting")
def test_a_connection_that_stays_broken_ends_and_what_is_corrupt_is_not_read_again() -> None:
    broken = [(Place(0, 0, 1), ConnectionError("cut"))] * (MOST + 1)
    hub = FlakyHub(list(broken), ["a", "b"])
    with pytest.raises(SourceLost, match="a hub: ConnectionError: cut"):
        list(hub.read(Place()))
    corrupt = FlakyHub([(Place(0, 0, 1), OSError("CRC checksum"))], ["a", "b"])
    with pytest.raises(DataError, match=r"file0 row 1: cannot be read \(OSError: CRC checksum"):
        list(corrupt.read(Place()))
    assert corrupt.said == []


def test_a_hub_without_documents_is_an_error() -> None:
    with pytest.raises(DataError, match="has no documents"):
        next(FlakyHub([], [], []).read(Place()))


def test_without_the_client_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets .*'.\[stream\]'"):
        HubDocuments(DataConfig(dataset="fineweb_edu"), print)
