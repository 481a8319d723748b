"""Training rows: documents with questions, packed to exactly the length of a row.

Some rows are one document as long as the row, the others hold documents of many lengths: short
distances are learned first, and long ones follow from them. No key comes twice in a row, so that
every question has one answer, wherever attention may look.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from studies.long_context.task import Ids, build, crop, draw_secrets, generator_of
from studies.long_context.vocabulary import Words


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What training rows are made of."""

    seq_len: int
    shortest: int = 256
    """Tokens of the shortest document."""
    whole: float = 0.4
    """Share of rows that are a single document."""
    single: float = 0.1
    """Share of documents with one needle, and again of those with a pass key; the rest has many."""
    spacing: int = 16
    """Tokens of a document for each of its needles; of others it is twice or four times that. Where
    needles are dense, retrieval is most of what there is to learn."""


def make_row(
    index: int, side: str, mixture: Mixture, hay: Ids, words: Words, eos: int, seed: int
) -> Ids:  # [S]
    """The row of an index; documents end with the end mark, and the last ends with the row."""
    draw = generator_of(seed, side, index)
    keys = draw.permutation(words.keys)
    parts, left, passed = [], mixture.seq_len, False
    while left:
        length = _draw_length(left, mixture, draw)
        kind = draw.random()
        task = "multi"
        if kind < mixture.single:
            task = "needle"
        elif kind < 2 * mixture.single and not passed:
            task, passed = "passkey", True
        num = _draw_num(length, mixture, words, len(keys), draw) if task == "multi" else 1
        depths = draw.random(num).tolist()
        secrets = draw_secrets(task, depths, words, keys, draw) if len(keys) else []
        keys = keys[num:] if task != "passkey" else keys
        if secrets:
            parts.append(build(length - 1, secrets, hay, words, draw).ids)
        else:  # every key has been used
            parts.append(crop(hay, length - 1, draw))
        parts.append(np.array([eos]))
        left -= length
    return np.concatenate(parts)


def _draw_num(
    length: int, mixture: Mixture, words: Words, num_keys: int, draw: np.random.Generator
) -> int:
    """Needles of a document, at most as many as there are keys and room for."""
    wanted = length // (mixture.spacing * int(draw.choice([1, 2, 4])))
    phrases = (words.opening, words.owner, words.end, words.ask, words.end)
    room = (length - 1) // (sum(map(len, phrases)) + 5)  # twice key and value, and a token of text
    return max(1, min(wanted, room, num_keys))


def _draw_length(left: int, mixture: Mixture, draw: np.random.Generator) -> int:
    """All that is left, or a length of which every power of two is as likely."""
    if left < 2 * mixture.shortest or (left == mixture.seq_len and draw.random() < mixture.whole):
        return left
    longest = np.log2(left / mixture.shortest)
    length = int(mixture.shortest * 2 ** (longest * draw.random()))
    return left if left - length < mixture.shortest else length
