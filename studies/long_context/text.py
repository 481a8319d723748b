"""The text that needles are hidden in, as tokens of the study's own tokenizer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nsa.data.documents import TRAIN, VAL, is_held_out, read_documents, read_works, split_works
from nsa.data.errors import DataError
from nsa.data.tokenizers import HFTokenizer, Ids
from nsa.files import DurableFile
from studies.long_context.vocabulary import Words, train_tokenizer

TOKENIZER = "tokenizer.json"
BPE_CHARS = 12_000_000
"""Characters that the tokenizer is trained on: the first of the text."""
PIECE_CHARS = 200_000
"""Characters that are encoded at a time: a long document shall not hold up the others."""
Say = Callable[[str], None]


def prepare_text(
    source: Path | None, folder: Path, *, vocab: int, digits: int, chars: int, say: Say
) -> None:
    """Train the tokenizer and encode both sides of the text, once; what is there already stays.

    Without a source the text is the corpus that comes with the package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOKENIZER
    if not path.is_file():
        texts = (text for _, text in _sided(source, min(chars, BPE_CHARS)))
        train_tokenizer(texts, path, vocab, digits)
        say(f"trained {path} of {vocab} ids")
    if all(hay_path(folder, side).is_file() for side in (TRAIN, VAL)):
        return
    parts: dict[str, list[Ids]] = {TRAIN: [], VAL: []}
    sided = list(_sided(source, chars))
    for (side, _), ids in zip(sided, _encode([text for _, text in sided], path), strict=True):
        parts[side].append(ids)
    for side, found in parts.items():
        if not found:
            raise DataError(f"{source or 'the corpus'} has no {side} text; give more documents")
        _write(hay_path(folder, side), np.concatenate(found))
        say(f"{side} text: {sum(map(len, found)):,} tokens")


def hay_path(folder: Path, side: str) -> Path:
    """Where the tokens of a side are."""
    return folder / f"hay-{side}.npy"


def read_hay(folder: Path, side: str, words: Words) -> NDArray[np.int64]:
    """The text of a side without keys and values: those of the needles are the only ones."""
    ids = np.load(hay_path(folder, side), allow_pickle=False).astype(np.int64)
    return ids[~np.isin(ids, np.concatenate([words.keys, words.values]))]


def _sided(source: Path | None, chars: int) -> Iterator[tuple[str, str]]:
    """(side, text) up to so many characters; the hash of a document's words decides its side."""
    left = chars
    for side, text in _embedded() if source is None else _documents(source):
        for start in range(0, len(text), PIECE_CHARS):
            if left <= 0:
                return
            piece = text[start : start + min(PIECE_CHARS, left)]
            left -= len(piece)
            yield side, piece


def _documents(source: Path) -> Iterator[tuple[str, str]]:
    for document in read_documents(source):
        yield VAL if is_held_out(document.text) else TRAIN, document.text


def _embedded() -> Iterator[tuple[str, str]]:
    """Held-out text first: it must be there, however little is asked for."""
    split = split_works(read_works().values())
    for side, texts in ((VAL, split.val), (TRAIN, split.train)):
        for text in texts:
            yield side, text


def _encode(texts: list[str], tokenizer: Path) -> Iterator[Ids]:
    """In processes of their own where there is much to do."""
    if sum(map(len, texts)) < 10 * PIECE_CHARS:
        yield from map(HFTokenizer(tokenizer).encode, texts)
        return
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=_open, initargs=(tokenizer,)
    ) as pool:
        yield from pool.map(_encode_one, texts, chunksize=4)


_tokenizer: list[HFTokenizer] = []
"""The tokenizer of a process that encodes."""


def _open(path: Path) -> None:
    _tokenizer.append(HFTokenizer(path))


def _encode_one(text: str) -> Ids:
    return _tokenizer[0].encode(text)


def _write(path: Path, ids: Ids) -> None:
    content = io.BytesIO()
    np.save(content, ids)
    with DurableFile(path) as file:
        file.write(content.getbuffer())
