"""A corpus as .xz files for a machine without a network: prose, some code, GPT-2's files. And back.

The files are independent of each other, so that all cores compress and decompress at the same time;
the same corpus and the same limit give the same bytes. pack.json lists the files of a pack, and
what each becomes (docs/schemas/corpus_pack_json.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.files import put_in_place, temporary_name
from studies.corpus.build import TOKENIZER_FOLDER
from studies.corpus.fetch import sha256_of
from studies.corpus.record import FILE_NAME as RECORD
from studies.corpus.record import LICENCES, read_record
from studies.corpus.sources import CODE, PROSE
from studies.corpus.text import CorpusError

# --- pack.json ---

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


# --- pack ---

DEFAULT_MB = 52
MIB = 1 << 20
PROSE_BYTES, CODE_BYTES = 16 * MIB, 8 * MIB
"""Of a part before compression; that of code is the step in which the limit is approached."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 16 * MIB}]
MANIFEST_BYTES = 64 * 1024
"""Kept free for pack.json."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """Some bytes of a file of the corpus, and the name that they get in the pack."""

    name: str
    target: str
    content: bytes


def pack(
    corpus: Path,
    folder: Path,
    *,
    max_mb: float = DEFAULT_MB,
    jobs: int = 0,
    say: Say = lambda line: None,
) -> list[Packed]:
    """Write all prose and as much code as fits into the limit, and pack.json last."""
    record = read_record(corpus)
    for kind in (PROSE, CODE):
        if sha256_of(corpus / f"{kind}.jsonl") != record["kinds"][kind]["sha256"]:
            raise CorpusError(f"{corpus}/{kind}.jsonl is not that of {RECORD}; build it again")
    _claim(folder)
    left = int(max_mb * MIB) - MANIFEST_BYTES
    packed: list[Packed] = []
    for part, compressed in _compressed([*_small_parts(corpus), *_prose_parts(corpus)], jobs):
        left -= len(compressed)
        packed.append(_write(folder, part, compressed))
    if left < 0:
        raise CorpusError(
            f"--pack-mb {max_mb:g} is too little: prose and tokenizer alone exceed it by "
            f"{-left / MIB:.1f} MiB; allow more"
        )
    code = _code_parts(corpus / f"{CODE}.jsonl", record["kinds"][CODE]["file_bytes"])
    for part, compressed in _compressed(code, jobs):
        left -= len(compressed)
        if left < 0:
            break
        packed.append(_write(folder, part, compressed))
    write_pack_manifest(folder, packed)
    total = sum(path.stat().st_size for path in folder.iterdir())
    say(f"{folder}: {len(packed)} files and {FILE_NAME}, {total:,} bytes")
    return packed


def _claim(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = min((path.name for path in folder.iterdir()), default=None)
    if first is not None:
        raise CorpusError(f"{folder} is not empty (it holds {first}); choose another or empty it")


def _small_parts(corpus: Path) -> Iterator[Part]:
    names = [LICENCES, RECORD]
    names += sorted(f"{TOKENIZER_FOLDER}/{p.name}" for p in (corpus / TOKENIZER_FOLDER).iterdir())
    for name in names:
        yield Part(f"{name.replace('/', '-')}.xz", name, (corpus / name).read_bytes())


def _prose_parts(corpus: Path) -> Iterator[Part]:
    """Neighbouring documents, which have much in common."""
    number, waiting, size = 0, [], 0
    with (corpus / f"{PROSE}.jsonl").open("rb") as lines:
        for line in lines:
            waiting.append(line)
            size += len(line)
            if size >= PROSE_BYTES:
                yield _lines_part(PROSE, number, waiting)
                number, waiting, size = number + 1, [], 0
    if waiting:
        yield _lines_part(PROSE, number, waiting)


def _code_parts(path: Path, num_bytes: int) -> Iterator[Part]:
    """Each part is a sample of everything, chosen by the hash of its lines."""
    num_parts = max(1, round(num_bytes / CODE_BYTES))
    for number in range(num_parts):
        with path.open("rb") as lines:
            chosen = [line for line in lines if _bucket(line) % num_parts == number]
        if chosen:
            yield _lines_part(CODE, number, chosen)


def _lines_part(kind: str, number: int, lines: list[bytes]) -> Part:
    return Part(f"{kind}-{number:03d}.jsonl.xz", f"{kind}.jsonl", b"".join(lines))


def _bucket(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big")


def _compressed(parts: Iterator[Part] | list[Part], jobs: int) -> Iterator[tuple[Part, bytes]]:
    """Compress in order, `jobs` parts at a time; only those are in memory."""
    jobs = jobs or os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as pool:  # lzma works outside the interpreter's lock
        waiting = []
        for part in parts:
            waiting.append((part, pool.submit(_compress, part.content)))
            if len(waiting) == jobs:
                first, result = waiting.pop(0)
                yield first, result.result()
        for first, result in waiting:
            yield first, result.result()


def _compress(content: bytes) -> bytes:
    return lzma.compress(content, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=FILTERS)


def _write(folder: Path, part: Part, compressed: bytes) -> Packed:
    temporary = temporary_name(folder / part.name)
    temporary.write_bytes(compressed)
    put_in_place(temporary, folder / part.name)
    return Packed(
        file=part.name,
        sha256=hashlib.sha256(compressed).hexdigest(),
        target=part.target,
        bytes=len(part.content),
        content_sha256=hashlib.sha256(part.content).hexdigest(),
    )


# --- unpack ---


def unpack(
    folder: Path, out: Path, *, jobs: int = 0, say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Restore every file; nothing gets its name unless all of the pack is as it was written."""
    files = read_pack_manifest(folder)
    sizes: dict[str, int] = {}
    places = []
    for packed in files:
        places.append((packed, sizes.get(packed.target, 0)))
        sizes[packed.target] = sizes.get(packed.target, 0) + packed.bytes
    temporary = {target: temporary_name(out / target) for target in sizes}
    try:
        for target, path in temporary.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(sizes[target])
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            tasks = [
                pool.submit(_restore, folder, packed, temporary[packed.target], start)
                for packed, start in places
            ]
            for task in tasks:
                task.result()
    except BaseException:  # Ctrl-C as well: half a file is of no use to anybody
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise
    for target, path in temporary.items():
        put_in_place(path, out / target)
        say(f"{out / target}: {sizes[target]:,} bytes")
    return [out / target for target in temporary]


def _restore(folder: Path, packed: Packed, path: Path, start: int) -> None:
    """Decompress one file of the pack to its place in the target."""
    try:
        compressed = (folder / packed.file).read_bytes()
    except OSError as error:
        raise CorpusError(
            f"{folder / packed.file}: {error.strerror}; bring the pack again"
        ) from None
    if hashlib.sha256(compressed).hexdigest() != packed.sha256:
        raise CorpusError(f"{folder / packed.file} was changed or cut; bring the pack again")
    try:
        # One byte more than allowed is enough to see that there is too much.
        content = lzma.LZMADecompressor().decompress(compressed, packed.bytes + 1)
    except lzma.LZMAError as error:
        raise CorpusError(f"{folder / packed.file}: {error}; pack the corpus again") from None
    if hashlib.sha256(content).hexdigest() != packed.content_sha256:
        raise CorpusError(
            f"{folder / packed.file}: its content is not what pack.json says; pack the corpus again"
        )
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)
