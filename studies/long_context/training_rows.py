"""Training rows: documents with questions, packed to exactly the length of a row.

The documents of a row are of one length. At first all are short, with one needle or two: a value
is learned to be copied where there is little to choose from, and to be chosen by its key after
that. Then documents grow until one fills a row, while the short ones stay among them. No key comes
twice in a row; of the pass keys of a row, the last one told is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa.evaluate.needles import Document, Ids, build, crop, generator_of
from studies.long_context.task import draw_secrets
from studies.long_context.vocabulary import Words


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What training rows are made of."""

    seq_len: int
    shortest: int = 32
    """Tokens of the shortest document."""
    growing: tuple[float, float] = (0.1, 0.6)
    """Shares of training before which documents have fewer than twice as many, and after which
    they may be as long as a row; in between they grow by as many powers of two in equal times."""
    whole: float = 0.3
    """Share of rows that are a single document, when documents are fully grown."""
    single: float = 0.1
    """Share of documents with one needle."""
    passkey: float = 0.1
    """Share of documents with a pass key; those of neither kind have two needles or more, as many
    as there is room for, every power of two as likely."""
    ends: float = 0.1
    """Share of needles at the very beginning of a document, and again at its end."""
    asks: int = 3
    """Most questions for a needle: they are much of what there is to learn in a document."""
    plain: float = 0.0
    """Share of rows that are text alone."""


def make_row(
    index: int,
    side: str,
    mixture: Mixture,
    hay: Ids,
    words: Words,
    eos: int,
    seed: int,
    progress: float = 1.0,
) -> Document:  # of S tokens
    """The row of an index that is read after that share of training.

    Documents end with the end mark, and the last ends with the row.
    """
    draw = generator_of(seed, side, index)
    if mixture.plain and draw.random() < mixture.plain:
        return Document(crop(hay, mixture.seq_len, draw), [], [], [])
    keys = draw.permutation(words.keys)
    length = _draw_length(mixture, progress, draw)
    documents: list[Document] = []
    left = mixture.seq_len
    while left:
        num_tokens = left if left - length < mixture.shortest else length
        document, num_keys = _draw_document(num_tokens - 1, mixture, hay, words, keys, draw)
        documents.append(document._replace(ids=np.append(document.ids, eos)))
        keys = keys[num_keys:]
        left -= num_tokens
    return _joined(documents)


def _draw_document(
    length: int, mixture: Mixture, hay: Ids, words: Words, keys: Ids, draw: np.random.Generator
) -> tuple[Document, int]:
    """A document, and how many keys it has used."""
    kind = draw.random() - mixture.single
    task = "needle" if kind < 0 else "passkey" if kind < mixture.passkey else "multi"
    phrases = (words.opening, words.owner, words.end, words.ask, words.end)
    cost = sum(map(len, phrases)) + 5  # twice key and value, and a token of text
    room = max(1, length // cost)
    num = int(2 * ((room + 1) / 2) ** draw.random()) if task == "multi" else 1
    num = min(num, room, len(keys))
    if not num:  # every key has been used
        return Document(crop(hay, length, draw), [], [], []), 0
    depths = ((draw.random(num) - mixture.ends) / (1 - 2 * mixture.ends)).clip(0, 1)
    secrets = draw_secrets(task, depths.tolist(), words, keys, draw)
    needles = sum(len(s.needle) + 1 for s in secrets)
    questions = sum(len(s.question) + 1 + len(words.end) for s in secrets)
    asks = int(draw.integers(1, mixture.asks + 1))
    asks = max(1, min(asks, (length - needles) // questions))
    document = build(length, secrets, hay, words.end, draw, asks=asks)
    return document, 0 if task == "passkey" else num


def _draw_length(mixture: Mixture, progress: float, draw: np.random.Generator) -> int:
    """Every power of two up to what documents have grown to is as likely."""
    start, end = mixture.growing
    grown = 1.0 if progress >= end else max(0.0, (progress - start) / (end - start))
    if grown == 1.0 and draw.random() < mixture.whole:
        return mixture.seq_len
    powers = max(1.0, grown * np.log2(mixture.seq_len / mixture.shortest))
    return int(mixture.shortest * 2 ** (powers * draw.random()))


def _joined(documents: list[Document]) -> Document:
    """One after another, with the places of all their answers."""
    starts = np.cumsum([0, *(len(document.ids) for document in documents)])
    return Document(
        np.concatenate([document.ids for document in documents]),
        [int(s) + a for s, doc in zip(starts, documents, strict=False) for a in doc.answers],
        [depth for document in documents for depth in document.depths],
        [distance for document in documents for distance in document.distances],
    )
