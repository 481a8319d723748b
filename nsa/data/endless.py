"""Documents without an end: epoch after epoch, from any place on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from nsa.data.documents import Document
from nsa.data.local import encode_sides
from nsa.data.split import Counts, is_held_out
from nsa.data.tokenizer import Ids, Tokenizer, id_type


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
