"""How many ids a Hugging Face `tokenizer.json` has: model sizes depend on it before data opens."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from nsa.config.errors import ConfigError

FILE_NAME = "tokenizer.json"


def find_tokenizer_json(path: Path) -> Path:
    """Return the file that `path` is, or that lies in the folder that it is."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such tokenizer file; it must be a Hugging Face {FILE_NAME}; correct "
            "data.tokenizer or data.tokenizer_path"
        )
    return file


def count_ids(path: Path) -> int:
    """Return the highest id plus one: ids may have gaps, and a model needs a row for each."""
    file = find_tokenizer_json(path)
    stat = file.stat()
    return _count(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _count(file: Path, _mtime_ns: int, _size_bytes: int) -> int:
    """Read a version of the file once; the sizes of a model are asked for many times."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return max(int(i) for i in [*ids, *(token["id"] for token in added)]) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: not a Hugging Face {FILE_NAME} with a vocabulary "
            f"({type(error).__name__}: {error}); name such a file"
        ) from None
