"""From documents to token ids: split into sides, tokenize in threads, follow endless streams."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from nsa.data.documents import TRAIN, VAL, Counts, Document, is_held_out
from nsa.data.errors import DataError
from nsa.data.tokenizers import Ids, Tokenizer, id_type

# --- documents to (side, ids) ---


def encode_sides(
    documents: Iterable[Document], tokenizer: Tokenizer, counts: Counts, workers: int = 1
) -> Iterator[tuple[str, Ids]]:
    """Yield (side, ids with EOS) for each document, and update `counts`.

    The side depends only on the words of the document, not on its position, file or tokenizer.
    The order is that of the documents, for any number of workers.
    """
    kept = _not_empty(documents, counts)
    for side, ids in map_in_order(partial(_encode, tokenizer), kept, workers):
        counts.documents += 1
        counts.held_out += side == VAL
        yield side, ids


def _not_empty(documents: Iterable[Document], counts: Counts) -> Iterator[Document]:
    for document in documents:
        if document.text.strip():
            yield document
        else:
            counts.empty += 1


def _encode(tokenizer: Tokenizer, document: Document) -> tuple[str, Ids]:
    side = VAL if is_held_out(document.text) else TRAIN
    try:
        ids = tokenizer.encode(document.text)
    except DataError as error:
        raise DataError(f"{document.where}: {error}") from None
    return side, np.append(ids, ids.dtype.type(tokenizer.eos))


def encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, counts: Counts
) -> dict[str, Ids]:
    """The tokens of both sides, in memory."""
    parts: dict[str, list[Ids]] = {TRAIN: [], VAL: []}
    for side, ids in encode_sides(documents, tokenizer, counts):
        parts[side].append(ids)
    nothing: Ids = np.empty(0, dtype=id_type(tokenizer.vocab))
    return {side: np.concatenate([nothing, *found]) for side, found in parts.items()}


# --- ordered thread-pool map ---

AHEAD = 4
"""Items read ahead per thread; bounds the memory."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Like `map`, but on several threads; results and errors come in input order."""
    if workers == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="ahead") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # the consumer stopped early, or an item failed
            for future in waiting:
                future.cancel()


# --- endless document streams, resumable at any place ---


class Place(NamedTuple):
    """A document in an endless stream: epoch, file index, row in the file."""

    epoch: int = 0
    file: int = 0
    row: int = 0


class EndlessDocuments(Protocol):
    """A source in a fixed order; after the last document the next epoch begins."""

    def read(self, place: Place) -> Iterator[tuple[Place, Document]]:
        """Yield (place, document) from a place on."""

    def fingerprint(self) -> str:
        """sha256 of everything that determines the documents and their order."""


def first_held_out(documents: EndlessDocuments, tokenizer: Tokenizer, count: int) -> Ids:
    """Tokens of the first `count` held-out documents, or of all if there are fewer.

    The same hash rule keeps them out of training wherever they are in the stream; the start is
    what every run can read quickly.
    """
    held_out = (document for document in _one_epoch(documents) if is_held_out(document.text))
    sides = encode_sides(held_out, tokenizer, Counts())
    parts: list[Ids] = [np.empty(0, dtype=id_type(tokenizer.vocab))]
    parts += [ids for _, ids in islice(sides, count)]
    return np.concatenate(parts)


def _one_epoch(documents: EndlessDocuments) -> Iterator[Document]:
    for place, document in documents.read(Place()):
        if place.epoch > 0:
            return
        yield document


# --- progress of a stream ---


class Report:
    """Counts documents and tokens read by this process, and logs them at intervals."""

    def __init__(self, every: int, say: Callable[[str], None] = lambda line: None) -> None:
        """`every`: documents between two log lines; 0 logs nothing."""
        self._every, self._say = every, say
        self._documents = self._tokens = 0
        self._since = time.perf_counter()

    def add(self, epoch: int, tokens: int) -> None:
        """Count a tokenized document."""
        self._documents, self._tokens = self._documents + 1, self._tokens + tokens
        if self._every and self._documents % self._every == 0:
            seconds = time.perf_counter() - self._since
            self._say(
                f"[data] {self._documents:,} documents, {self._tokens:,} tokens in {seconds:.1f} s "
                f"(epoch {epoch + 1})"
            )
