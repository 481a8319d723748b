"""A corpus as .xz files, for a machine without a network: prose, some code, GPT-2's files.

The files are independent of each other, so that all cores compress and decompress at the same time;
the same corpus and the same limit give the same bytes. What the pack holds is in pack.json.
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nsa.files import put_in_place, temporary_name
from studies.corpus.build import TOKENIZER_FOLDER
from studies.corpus.errors import CorpusError
from studies.corpus.fetch import sha256_of
from studies.corpus.pack_manifest import FILE_NAME, Packed, write_pack_manifest
from studies.corpus.record import FILE_NAME as RECORD
from studies.corpus.record import LICENCES, read_record
from studies.corpus.sources import CODE, PROSE

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
