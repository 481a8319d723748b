"""Documents on their sides, as ids with an end mark: in memory, or for shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from nsa.data.ahead import map_in_order
from nsa.data.documents import Document
from nsa.data.errors import DataError
from nsa.data.split import TRAIN, VAL, Counts, is_held_out
from nsa.data.tokenizer import Ids, Tokenizer, id_type


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
