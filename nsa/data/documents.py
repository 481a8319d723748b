"""Documents: reading local files, the held-out split, the embedded corpus, fingerprints."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from nsa.data.errors import DataError, need

KEY = "text"
"""JSON key or Parquet column with the text."""


# --- local files: .jsonl, .jsonl.gz, .txt, .parquet, or a folder of them ---


class Document(NamedTuple):
    """A text and its location, for error messages."""

    text: str
    where: str


class _Broken(Exception):
    """Part of a file that cannot be read; the caller adds how many documents came before."""


def read_documents(path: Path) -> Iterator[Document]:
    """Yield all documents, file by file in name order; stops at the first broken one."""
    num_good = 0
    for file in find_files(path):
        try:
            for where, text in _reader(file)(file):
                yield Document(text, f"{file} {where}".rstrip())
                num_good += 1
        except (_Broken, OSError, EOFError, zlib.error) as error:
            reason = str(error) if isinstance(error, _Broken) else f"cannot be read ({error})"
            raise DataError(
                f"{file} {reason}; {num_good} documents before it are valid; fix or remove the file"
            ) from None


def find_files(path: Path) -> list[Path]:
    """The file itself, or all files of known types below a folder, sorted by name."""
    if path.is_file() and _is_known(path):
        return [path]
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; correct the path (data.local_path)")
    if path.is_file():
        raise DataError(f"{path}: unknown file type; it must be one of {', '.join(READERS)}")
    found = [file for file in path.rglob("*") if file.is_file() and _is_known(file)]
    if not found:
        raise DataError(
            f"{path}: contains no file of type {', '.join(READERS)}; use another folder"
        )
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _is_known(file: Path) -> bool:
    """Known type and not hidden: hidden files are leftovers of other programs."""
    return not file.name.startswith(".") and file.name.endswith(tuple(READERS))


def _reader(file: Path) -> Callable[[Path], Iterator[tuple[str, str]]]:
    return next(reader for ending, reader in READERS.items() if file.name.endswith(ending))


def _read_jsonl(file: Path) -> Iterator[tuple[str, str]]:
    open_file = gzip.open if file.name.endswith(".gz") else open
    with cast(BinaryIO, open_file(file, "rb")) as lines:
        for number, line in enumerate(lines, start=1):
            yield f"line {number}", _parse_line(line, number)


def _parse_line(line: bytes, number: int) -> str:
    try:
        content: Any = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _Broken(f"line {number}: not JSON in UTF-8 ({error})") from None
    text = content.get(KEY) if isinstance(content, dict) else None
    return _checked(text, f"line {number}")


def _read_txt(file: Path) -> Iterator[tuple[str, str]]:
    """The whole file is one document; line endings are kept."""
    try:
        yield "", file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Broken(f"is not UTF-8 ({error})") from None


def _read_parquet(file: Path) -> Iterator[tuple[str, str]]:
    parquet, arrow = need("pyarrow.parquet", str(file)), need("pyarrow", str(file))
    row = 0
    try:
        with parquet.ParquetFile(file) as table:
            if KEY not in table.schema_arrow.names:
                raise _Broken(f"has no column {KEY!r}, only {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(batch_size=1024, columns=[KEY]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield f"row {row}", _checked(text, f"row {row}")
    except arrow.ArrowException as error:
        raise _Broken(f"cannot be read as Parquet after row {row} ({error})") from None


def _checked(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise _Broken(f"{where}: no string {KEY!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise _Broken(f"{where}: invalid Unicode ({error})") from None
    return text


READERS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
}
"""Reader by file suffix; it yields (location, text) pairs."""


# --- held-out split: the hash of a piece of text decides its side ---

TRAIN, VAL = "train", "val"
"""Names of the two sides."""
PIECE_CHARS = 8192
"""A piece ends with the paragraph that reaches this length: about a scene of a play."""
HELD_OUT_OF_256 = 13
"""Hash values out of 256 that are held out: about 5 %."""


@dataclass(kw_only=True)
class Counts:
    """Counts of documents read."""

    documents: int = 0
    """Non-empty documents on both sides."""
    empty: int = 0
    """Dropped: only white space."""
    held_out: int = 0
    """Documents that are never trained on."""


class Split(NamedTuple):
    """The documents of both sides; no piece is on both."""

    train: list[str]
    val: list[str]


def split_works(works: Iterable[str]) -> Split:
    """Join each run of neighbouring pieces on the same side into one document.

    A document never joins text that is not contiguous in the work. The side depends only on the
    words of the piece, so that it is stable when works are added, removed or reordered.
    """
    split = Split([], [])
    for work in works:
        previous = None
        for piece in cut_pieces(work):
            side = split.val if is_held_out(piece) else split.train
            if side is previous:
                side[-1] += piece
            else:
                side.append(piece)
            previous = side
    return split


def cut_pieces(text: str) -> Iterator[str]:
    """Cut at empty lines into pieces of about PIECE_CHARS; concatenated they give the text."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        paragraph_end = text.find("\n\n", start + PIECE_CHARS)
        if paragraph_end < 0:
            break
        yield text[start : paragraph_end + 2]
        start = paragraph_end + 2
    if start < len(text):
        yield text[start:]


def is_held_out(piece: str) -> bool:
    """Hash only the words, so that another layout of the same text gets the same side."""
    words = " ".join(piece.split())
    return hashlib.sha256(words.encode("utf-8")).digest()[0] < HELD_OUT_OF_256


# --- embedded corpus: the works of Shakespeare, one file each (corpus/README.md) ---


def read_works() -> dict[str, str]:
    """Text by name of the work, in name order."""
    folder = files("nsa.data") / "corpus"
    works = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return {
        name.removesuffix(".txt"): (folder / name).read_text(encoding="utf-8") for name in works
    }


# --- fingerprints ---


def fingerprint_of(**parts: str | int) -> str:
    """sha256 of named parts; unambiguous in their order and boundaries."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
