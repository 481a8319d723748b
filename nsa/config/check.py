"""ConfigError, the rules that config values obey, and the vocabulary size of a tokenizer.json."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn


class ConfigError(ValueError):
    """An unusable setting; the message says what was given, what is allowed and what to do."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key
        """The "group.key" at fault, if any; the loader adds which source set it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to `name`; always returns one."""
    choices = sorted(known)
    assert choices, "nearest() needs at least one known name"
    return difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]


# --- rules: each raises a ConfigError that names the key ---


def refuse(key: str, given: object, allowed: str, todo: str) -> NoReturn:
    """Raise the three-part error: what was given, what is allowed, what to do."""
    raise ConfigError(f"{key}={given!r} is not allowed; it must be {allowed}; {todo}", key=key)


def at_least(least: int, group: object, group_name: str, *keys: str) -> None:
    """Require whole numbers >= `least`."""
    for key in keys:
        value = getattr(group, key)
        if value < least:
            refuse(f"{group_name}.{key}", value, f">= {least}", f"use {least} or more")


def finite_positive(group: object, group_name: str, *keys: str) -> None:
    """Require finite numbers > 0."""
    for key in keys:
        value = getattr(group, key)
        if not (math.isfinite(value) and value > 0):
            refuse(f"{group_name}.{key}", value, "a finite number > 0", "use a positive number")


def between(low: float, high: float, group: object, group_name: str, *keys: str) -> None:
    """Require numbers in [low, high]; NaN is rejected."""
    for key in keys:
        value = getattr(group, key)
        if not low <= value <= high:
            refuse(f"{group_name}.{key}", value, f"from {low:g} to {high:g}", "use a value inside")


def divides(part_key: str, part: int, whole_key: str, whole: int) -> None:
    """Require `whole` to be a multiple of `part`; the error suggests the nearest multiples."""
    if whole % part:
        low = max(whole // part, 1) * part
        todo = f"use {low} or {low + part}" if low < whole else f"use {low}"
        refuse(whole_key, whole, f"a multiple of {part_key}={part}", todo)


def one_of(key: str, given: str, allowed: Sequence[str]) -> None:
    """Require one of the allowed words."""
    if given not in allowed:
        refuse(key, given, " | ".join(allowed), f"the nearest is {nearest(given, allowed)!r}")


def parse_layers(text: str) -> tuple[int, int]:
    """Parse the layer range "A:B" as (A, B); ValueError for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a layer range; write A:B, for example 0:6")
    return int(match[1]), int(match[2])


def ok_layers(key: str, text: str, n_layers: int) -> None:
    """Require a non-empty layer range "A:B" inside the model."""
    allowed = f"A:B with 0 <= A < B <= n_layers={n_layers}"
    if not re.fullmatch(r"\d+:\d+", text):
        refuse(key, text, allowed, 'write it in quotes in YAML, for example "0:6"')
    first, last = parse_layers(text)
    if not first < last <= n_layers:
        refuse(key, text, allowed, f'use a range inside "0:{n_layers}"')


# --- vocabulary size of a Hugging Face `tokenizer.json` ---
# Model sizes depend on it before data is opened; the package `tokenizers` is not needed for that.

FILE_NAME = "tokenizer.json"


def find_tokenizer_json(path: Path) -> Path:
    """`path` itself, or the tokenizer.json in that folder."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such tokenizer file; it must be a Hugging Face {FILE_NAME}; correct "
            "data.tokenizer or data.tokenizer_path"
        )
    return file


def count_ids(path: Path) -> int:
    """Highest id plus one: ids may have gaps, and the embedding needs a row for each."""
    file = find_tokenizer_json(path)
    stat = file.stat()
    return _count(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _count(file: Path, _mtime_ns: int, _size_bytes: int) -> int:
    """Cached per file version, since model sizes are computed many times."""
    return max(token_ids(file).values()) + 1


def token_ids(file: Path) -> dict[str, int]:
    """The id of every token of a tokenizer.json, the added ones included."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
        # BPE and WordPiece store a dict of ids, Unigram a list of pieces in id order.
        pieces = vocab if isinstance(vocab, dict) else {p[0]: i for i, p in enumerate(vocab)}
        ids = {str(text): int(i) for text, i in pieces.items()}
        ids |= {token.get("content", f"id {token['id']}"): int(token["id"]) for token in added}
        if not ids:
            raise ValueError("no token")
        return ids
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: not a Hugging Face {FILE_NAME} with a vocabulary "
            f"({type(error).__name__}: {error}); name such a file"
        ) from None
