"""pack.json: the files of a pack, and what each becomes (docs/schemas/corpus_pack_json.md)."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.files import put_in_place, temporary_name
from studies.corpus.errors import CorpusError

SCHEMA = 1
FILE_NAME = "pack.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
PACKED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.xz")
TARGET_NAME = re.compile(r"([a-z0-9]+/)?[A-Za-z0-9][A-Za-z0-9._]*")
"""A file, or a file in a folder; nothing that leads elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One .xz file; those with the same target follow each other in it, as in the list."""

    file: str
    sha256: str
    target: str
    bytes: int
    """After decompression."""
    content_sha256: str
    """After decompression."""


def write_pack_manifest(folder: Path, files: list[Packed]) -> None:
    """Write it, all or nothing; the pack counts as complete from then on."""
    content = {"schema": SCHEMA, "files": [dataclasses.asdict(file) for file in files]}
    temporary = temporary_name(folder / FILE_NAME)
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    put_in_place(temporary, folder / FILE_NAME)


def read_pack_manifest(folder: Path) -> list[Packed]:
    """Return the files; refuse names that lead out of a folder, and numbers that are none."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        files = [_checked(entry) for entry in content["files"]]
        if len({file.file for file in files}) != len(files):
            raise ValueError("a file is named twice")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{path}: not the list of a complete pack of schema {SCHEMA} "
            f"({type(error).__name__}: {error}); pack the corpus again"
        ) from None
    return files


def _checked(entry: dict[str, Any]) -> Packed:
    packed = Packed(**entry)
    for value, pattern in (
        (packed.file, PACKED_NAME),
        (packed.target, TARGET_NAME),
        (packed.sha256, SHA256),
        (packed.content_sha256, SHA256),
    ):
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"{value!r} does not fit {pattern.pattern}")
    if type(packed.bytes) is not int or packed.bytes < 0:
        raise ValueError(f"bytes={packed.bytes!r} is not a whole number")
    return packed
