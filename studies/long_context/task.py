"""Retrieval in a long text: documents with hidden values, and the questions at their ends.

A needle is " The number VALUE for KEY." between two tokens of real text; the question, " The number
for KEY", is a line at the end, and the value is the answer. `needle` hides one, `multi` many, asked
in another order, `passkey` one without a key. The value stands before its key, so that the key can
carry it when the question comes to look for the same word: two layers on random tokens learned that
much sooner than to look for what follows the word. Everything is drawn from a seed; every document
has exactly the length that it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from studies.long_context.vocabulary import Words

TASKS = ("needle", "passkey", "multi")
Ids = NDArray[np.int64]


class Document(NamedTuple):
    """Tokens, and where the answers of its questions stand, with the depths of their needles."""

    ids: Ids
    answers: list[int]
    """Place of each answer, which is one token."""
    depths: list[float]
    """Where the needle of each answer stands: 0 at the start of the text, 1 at its end."""
    distances: list[int]
    """Tokens from the value in the needle to the answer."""


@dataclass(frozen=True, kw_only=True)
class Secret:
    """What is hidden, and how it is asked for."""

    needle: Ids
    question: Ids
    value: int
    depth: float


def generator_of(*parts: object) -> np.random.Generator:
    """A generator that depends on these parts and nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def draw_secrets(
    task: str, depths: Sequence[float], words: Words, keys: Ids, draw: np.random.Generator
) -> list[Secret]:
    """One secret for each depth; `keys` are as many ids of keys."""
    num = len(depths)
    values = draw.choice(words.values, num, replace=num > len(words.values))
    secrets = []
    for depth, value, key in zip(depths, values, keys[:num], strict=True):
        if task == "passkey":
            owner, question = words.pass_key, words.ask_pass
        else:
            owner, question = np.append(words.owner, key), np.append(words.ask, key)
        needle = np.concatenate([words.opening, [value], owner, words.end])
        secret = Secret(needle=needle, question=question, value=int(value), depth=depth)
        secrets.append(secret)
    return secrets


def build(
    length: int,
    secrets: Sequence[Secret],
    hay: Ids,
    words: Words,
    draw: np.random.Generator,
    *,
    asks: int = 1,
) -> Document:
    """Hide the secrets in text from a random place of `hay`, then ask for each so many times.

    All are asked for in random order before one is asked for again.
    """
    needles = [s.needle for s in secrets]
    questions = [np.concatenate([s.question, [s.value], words.end]) for s in secrets]
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
        told[i] = place + places[i] - start + len(words.opening)
        place = told[i] - len(words.opening) + len(needles[i])
        start = places[i]
    parts.append(text[start:])
    place += num_hay - start
    document = Document(np.empty(0, np.int64), [], [], [])
    for i in np.concatenate([draw.permutation(len(secrets)) for _ in range(asks)]):
        parts.append(questions[i])
        place += len(questions[i])
        answer = place - len(words.end) - 1
        document.answers.append(answer)
        document.depths.append(secrets[i].depth)
        document.distances.append(answer - told[i])
    return document._replace(ids=np.concatenate(parts))


def crop(hay: Ids, length: int, draw: np.random.Generator) -> Ids:
    """Text of this length from a random place; a text that is too short comes again."""
    start = int(draw.integers(len(hay)))
    return hay[np.arange(start, start + length) % len(hay)]
