"""Documents on their sides, as ids with an end mark: in memory, or for shards."""

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


def encode_sides(
    documents: Iterable[Document], tokenizer: Tokenizer, counts: Counts, workers: int = 1
) -> Iterator[tuple[str, Ids]]:
    """Yield (side, ids with the end mark) for each document, and count on the way.

    The side is decided by the words of the document alone: not by its place, file or tokenizer.
    The order is that of the documents for any number of workers.
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
    """Return the tokens of both sides in memory."""
    parts: dict[str, list[Ids]] = {TRAIN: [], VAL: []}
    for side, ids in encode_sides(documents, tokenizer, counts):
        parts[side].append(ids)
    nothing: Ids = np.empty(0, dtype=id_type(tokenizer.vocab))
    return {side: np.concatenate([nothing, *found]) for side, found in parts.items()}


# A function over many things on several threads, with the results in the order of the things.

AHEAD = 4
"""Things per thread that are read before their turn: memory holds no more."""
Thing = TypeVar("Thing")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Thing], Result], things: Iterable[Thing], workers: int
) -> Iterator[Result]:
    """Yield what `map` yields; an error comes where `map` would raise it."""
    if workers == 1:
        yield from map(function, things)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="ahead") as pool:
        try:
            for thing in things:
                waiting.append(pool.submit(function, thing))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # nobody wants the others any more
            for future in waiting:
                future.cancel()


# Documents without an end: epoch after epoch, from any place on.


class Place(NamedTuple):
    """A document of an endless stream: how often the data was read, its file, its row in it."""

    epoch: int = 0
    file: int = 0
    row: int = 0


class EndlessDocuments(Protocol):
    """A source in a fixed order: after the last document comes the first one of the next epoch."""

    def read(self, place: Place) -> Iterator[tuple[Place, Document]]:
        """Yield the documents from a place on, each with its own place."""

    def fingerprint(self) -> str:
        """Return a sha256 of what decides all documents and their order."""


def first_held_out(documents: EndlessDocuments, tokenizer: Tokenizer, count: int) -> Ids:
    """Return the tokens of the first `count` held-out documents, or of all if there are fewer.

    They are on the other side of the same rule that keeps them out of training, so where they are
    taken from does not matter; the beginning is what every run can read at once.
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


# A line every so many documents, so that a person sees a stream flow.


class Report:
    """Counts the documents and tokens that were read in this process."""

    def __init__(self, every: int, say: Callable[[str], None] = lambda line: None) -> None:
        """`every` 0 says nothing."""
        self._every, self._say = every, say
        self._documents = self._tokens = 0
        self._since = time.perf_counter()

    def add(self, epoch: int, tokens: int) -> None:
        """A document was tokenized."""
        self._documents, self._tokens = self._documents + 1, self._tokens + tokens
        if self._every and self._documents % self._every == 0:
            seconds = time.perf_counter() - self._since
            self._say(
                f"[data] {self._documents:,} documents, {self._tokens:,} tokens in {seconds:.1f} s "
                f"(epoch {epoch + 1})"
            )
