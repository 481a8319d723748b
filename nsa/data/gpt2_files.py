"""GPT-2's vocabulary from a folder: vocab.json and merges.txt, or encoder.json and vocab.bpe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsa.data.errors import DataError

EOS_NAME = "<|endoftext|>"
NUM_BYTES = 256
NUM_MERGES = 50_000
NUM_RANKS = NUM_BYTES + NUM_MERGES
FILE_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
"""The same two files under the names of two publishers."""


def read_ranks(folder: Path) -> dict[bytes, int]:
    """Return the bytes of each id, and refuse files that are not GPT-2's in size or order.

    An id is also the priority of its merge, so both files must tell the same order.
    """
    vocab_file, merges_file = _find(folder)
    vocab, letters = _read_vocab(vocab_file), byte_letters()
    expected = {letter: rank for rank, letter in enumerate(letters)}
    for rank, merge in enumerate(_read_merges(merges_file), start=NUM_BYTES):
        expected[merge] = rank
    expected[EOS_NAME] = NUM_RANKS
    if vocab != expected:
        odd = next(iter(vocab.items() ^ expected.items()))[0]
        raise DataError(
            f"{vocab_file.name} and {merges_file.name} in {folder} do not agree on {odd!r}, or are "
            f"not GPT-2's: 256 bytes, {NUM_MERGES} merges in order, then {EOS_NAME}; use its files"
        )
    return {
        bytes(letters[letter] for letter in text): rank
        for text, rank in expected.items()
        if text != EOS_NAME
    }


def byte_letters() -> dict[str, int]:
    """Return the letter that stands for each byte in the files, in the order of the ids.

    Bytes that print stand for themselves; the others take the letters from U+0100 on.
    """
    plain = [b for b in range(NUM_BYTES) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(NUM_BYTES) if b not in plain]
    return {chr(b): b for b in plain} | {chr(NUM_BYTES + n): b for n, b in enumerate(others)}


def _find(folder: Path) -> tuple[Path, Path]:
    for first, second in FILE_NAMES:
        if (folder / first).is_file() and (folder / second).is_file():
            return folder / first, folder / second
    pairs = " or ".join(" and ".join(pair) for pair in FILE_NAMES)
    raise DataError(
        f"data.tokenizer_path={folder} is not a folder with {pairs}; put GPT-2's files there"
    )


def _read_vocab(path: Path) -> dict[str, Any]:
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); use GPT-2's file") from None
    if not isinstance(vocab, dict):
        raise DataError(
            f"{path}: holds a {type(vocab).__name__}, not ids by name; use GPT-2's file"
        )
    return vocab


def _read_merges(path: Path) -> list[str]:
    """Return what each merge makes; the file starts with a line that names its version."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); use GPT-2's file") from None
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if len(pairs) != NUM_MERGES or any(len(pair) != 2 for pair in pairs):
        raise DataError(
            f"{path}: {len(pairs)} merges, GPT-2 has {NUM_MERGES} of two words each; use its file"
        )
    return ["".join(pair) for pair in pairs]
