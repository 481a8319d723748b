"""The tokenizer of the study, and the ids that needles are made of.

A byte-level BPE is trained on the study's own text, with all numbers of a few digits as single
tokens: a value is one of them, so that an answer is one decision of the model. Keys are the rarest
whole words of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nsa.data.errors import DataError, need
from nsa.data.tokenizers import HFTokenizer
from nsa.files import replacing

EOS = "<|endoftext|>"
WORD = re.compile(r" [a-z]{4,}")
LEAST_KEYS = 16
NUMBER_WEIGHT = 1500
"""How often every number stands in what the BPE is trained on: each must become a token."""
PHRASES = {
    "opening": " The number",
    "owner": " for",
    "pass_key": " is the pass key",
    "ask": "\n The number for",
    "ask_pass": "\n The pass key",
    "end": ".",
}
PATTERN = r" ?\p{L}+| ?\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class Words:
    """Ids by their part in a needle or in a question."""

    keys: NDArray[np.int64]  # rarest words first
    values: NDArray[np.int64]  # " 000", " 001", ...
    opening: NDArray[np.int64]  # of a needle: before its value
    owner: NDArray[np.int64]  # between value and key
    pass_key: NDArray[np.int64]  # behind a value that has no key
    ask: NDArray[np.int64]  # of a question: before its key
    ask_pass: NDArray[np.int64]  # the same for a value that has no key
    end: NDArray[np.int64]


def train_tokenizer(texts: Iterable[str], path: Path, vocab: int, digits: int) -> None:
    """Write a tokenizer.json of `vocab` ids, with all numbers of `digits` digits among them."""
    tokenizers = need("tokenizers", "the tokenizer of the study")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.Regex(PATTERN % digits)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(split, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(_with_numbers(texts, digits), trainer)
    with replacing(path) as temporary:
        temporary.write_text(model.to_str(), encoding="utf-8")


def find_words(tokenizer: HFTokenizer, digits: int, num_keys: int) -> Words:
    """Look the ids up; a vocabulary without enough of them is refused."""
    texts = {id_: tokenizer.decode([id_]) for id_ in range(tokenizer.vocab)}
    ids = {text: id_ for id_, text in reversed(texts.items())}
    numbers = [f"{n:0{digits}d}" for n in range(10**digits)]
    missing = [n for n in numbers if f" {n}" not in ids]
    keys = [id_ for id_ in reversed(texts) if WORD.fullmatch(texts[id_])][:num_keys]
    if missing or len(keys) < LEAST_KEYS:
        raise DataError(
            f"a vocabulary of {tokenizer.vocab} ids lacks {len(missing)} of {len(numbers)} numbers "
            f"and has {len(keys)} words, {LEAST_KEYS} are needed; use a larger vocabulary or more "
            "text"
        )
    phrases = {name: tokenizer.encode(text).astype(np.int64) for name, text in PHRASES.items()}
    return Words(
        keys=np.array(keys, dtype=np.int64),
        values=np.array([ids[f" {n}"] for n in numbers], dtype=np.int64),
        **phrases,
    )


def _with_numbers(texts: Iterable[str], digits: int) -> Iterator[str]:
    """A number has a space before it, as in a needle."""
    yield from texts
    for n in range(10**digits):
        yield f" {n:0{digits}d}" * NUMBER_WEIGHT
    yield "".join(PHRASES.values()) * NUMBER_WEIGHT
