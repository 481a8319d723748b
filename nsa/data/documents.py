"""Documents from local files: .jsonl, .jsonl.gz, .txt and .parquet, or a folder of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from nsa.data.errors import DataError
from nsa.data.optional import need

KEY = "text"
"""The key of a JSON line, and the column of a Parquet file, that holds the document."""


class Document(NamedTuple):
    """A text, and where it stands, for the messages about it."""

    text: str
    where: str


class _Broken(Exception):
    """A place in a file that cannot be read; the caller adds how far it came."""


def read_documents(path: Path) -> Iterator[Document]:
    """Yield every document, file by file in the order of their names; stop at a broken one."""
    num_good = 0
    for file in find_files(path):
        try:
            for where, text in _reader(file)(file):
                yield Document(text, f"{file} {where}".rstrip())
                num_good += 1
        except (_Broken, OSError, EOFError, zlib.error) as error:
            reason = str(error) if isinstance(error, _Broken) else f"cannot be read ({error})"
            raise DataError(
                f"{file} {reason}; {num_good} good documents came before it; correct or remove it"
            ) from None


def find_files(path: Path) -> list[Path]:
    """Return the file, or all files of known types under the folder, sorted by name."""
    if path.is_file() and _is_known(path):
        return [path]
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; correct the path (data.local_path)")
    if path.is_file():
        raise DataError(f"{path}: its type is not known; it must be one of {', '.join(READERS)}")
    found = [file for file in path.rglob("*") if file.is_file() and _is_known(file)]
    if not found:
        raise DataError(f"{path}: holds no file of the types {', '.join(READERS)}; put some there")
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _is_known(file: Path) -> bool:
    """Hidden files are what other programs leave behind."""
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
    """A file is a document; its line ends stay as they are."""
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
        raise _Broken(f"{where}: no {KEY!r} that is a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise _Broken(f"{where}: text that is not Unicode ({error})") from None
    return text


READERS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
}
"""A file's ending, and what yields (place, text) for each of its documents."""
