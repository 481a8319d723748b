"""Documents with hidden values, and the questions at their ends.

A needle is a sentence between two tokens of real text, and the question at the end of the document
asks for its value. Everything is drawn from a seed; every document has exactly the length that it
is asked for. `Haystack` makes such documents for any tokenizer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nsa.data import Tokenizer

Ids = NDArray[np.int64]
KEYS = (
    "amber", "basil", "cedar", "delta", "ember", "falcon", "garnet", "harbor",
    "indigo", "juniper", "kestrel", "lantern", "meadow", "nectar", "opal", "pepper",
)  # fmt: skip
"""Words that a needle's value may belong to."""
NEEDLE, QUESTION, END = " The number for {key} is", "\n The number for {key} is", "."
NUM_VALUES = 64
"""Numbers of four digits that are drawn; those of the most common number of tokens are used."""


class Document(NamedTuple):
    """Tokens, and where the answers of its questions stand, with the depths of their needles."""

    ids: Ids
    answers: list[int]
    """Place of the first token of each answer."""
    depths: list[float]
    """Where the needle of each answer stands: 0 at the start of the text, 1 at its end."""
    distances: list[int]
    """Tokens from the value in the needle to the answer."""
    answer_len: int = 1
    """Tokens of each answer."""


@dataclass(frozen=True, kw_only=True)
class Secret:
    """What is hidden, and how it is asked for."""

    needle: Ids
    question: Ids
    value: Ids
    told: int
    """Place of the value in the needle."""
    depth: float


@dataclass(frozen=True)
class Haystack:
    """Text to hide needles in, as tokens."""

    tokenizer: Tokenizer
    hay: Ids
    seed: int = 0

    def documents(self, length: int, depths: Sequence[float], trials: int) -> Iterator[Document]:
        """Contexts of `length` tokens that end with an answer, and one target more: one needle
        each, all depths in turn."""
        end = self.encode(END)
        for trial in range(trials):
            for depth in depths:
                draw = generator_of(self.seed, "needle", length, trial, depth)
                yield build(length + 1, [self._secret(depth, draw)], self.hay, end, draw)

    def least_length(self) -> int:
        """Tokens of a context that has room for every needle and its question."""
        value = max(len(self.encode(f" {n}")) for n in (1000, 4817, 9999))
        longest = max(
            len(self.encode(NEEDLE.format(key=key))) + len(self.encode(QUESTION.format(key=key)))
            for key in KEYS
        )
        return longest + 2 * (value + len(self.encode(END)))

    def encode(self, text: str) -> Ids:
        """The tokens of a text."""
        return self.tokenizer.encode(text).astype(np.int64)

    def _secret(self, depth: float, draw: np.random.Generator) -> Secret:
        key = KEYS[int(draw.integers(len(KEYS)))]
        values = [self.encode(f" {n}") for n in draw.integers(1000, 10000, NUM_VALUES)]
        common = Counter(map(len, values)).most_common(1)[0][0]
        value = next(value for value in values if len(value) == common)
        opening = self.encode(NEEDLE.format(key=key))
        return Secret(
            needle=np.concatenate([opening, value, self.encode(END)]),
            question=self.encode(QUESTION.format(key=key)),
            value=value,
            told=len(opening),
            depth=depth,
        )


def build(
    length: int,
    secrets: Sequence[Secret],
    hay: Ids,
    end: Ids,
    draw: np.random.Generator,
    *,
    asks: int = 1,
) -> Document:
    """Hide the secrets in text from a random place of `hay`, then ask for each so many times.

    All are asked for in random order before one is asked for again. An answer ends with `end`.
    """
    needles = [s.needle for s in secrets]
    questions = [np.concatenate([s.question, s.value, end]) for s in secrets]
    num_hay = length - sum(map(len, needles)) - asks * sum(map(len, questions))
    if num_hay < len(secrets):
        raise ValueError(
            f"{length} tokens have no room for {len(secrets)} needles with their questions; give "
            f"{length - num_hay + len(secrets)} tokens or fewer needles"
        )
    text = crop(hay, num_hay, draw)
    places = [round(s.depth * num_hay) for s in secrets]
    parts: list[Ids] = []
    told = [0] * len(secrets)
    start = place = 0
    for i in np.argsort(places, kind="stable"):
        parts += [text[start : places[i]], needles[i]]
        told[i] = place + places[i] - start + secrets[i].told
        place = told[i] - secrets[i].told + len(needles[i])
        start = places[i]
    parts.append(text[start:])
    place += num_hay - start
    (answer_len,) = {len(s.value) for s in secrets}
    document = Document(np.empty(0, np.int64), [], [], [], answer_len)
    for i in np.concatenate([draw.permutation(len(secrets)) for _ in range(asks)]):
        parts.append(questions[i])
        place += len(questions[i])
        answer = place - len(end) - answer_len
        document.answers.append(answer)
        document.depths.append(secrets[i].depth)
        document.distances.append(answer - told[i])
    return document._replace(ids=np.concatenate(parts))


def crop(hay: Ids, length: int, draw: np.random.Generator) -> Ids:
    """Text of this length from a random place; a text that is too short comes again."""
    start = int(draw.integers(len(hay)))
    return hay[np.arange(start, start + length) % len(hay)]


def generator_of(*parts: object) -> np.random.Generator:
    """A generator that depends on these parts and nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
