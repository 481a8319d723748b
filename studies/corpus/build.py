"""From packages to prose.jsonl and code.jsonl: read, turn into text, drop, and write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nsa.files import put_in_place, temporary_name
from studies.corpus.fetch import Download, fetch, read_members
from studies.corpus.record import FILE_NAME as RECORD
from studies.corpus.record import Counts, KindRecord, Record, write_licences, write_record
from studies.corpus.sources import CODE, PROSE, Package, Source, Sources
from studies.corpus.text import CorpusError, Seen, documents_of

LEAST_CHARS = 256
"""A shorter document is dropped."""
TOKENIZER_FOLDER = "gpt2"
Say = Callable[[str], None]


@dataclass
class Notice:
    """What a package says about its licence; empty if it has no such file."""

    text: str = ""


def build(
    sources: Sources,
    out: Path,
    cache: Path,
    *,
    say: Say = lambda line: None,
    download: Download | None = None,
) -> Record:
    """Write both files, the tokenizer's, LICENCES.md and, last, corpus.json."""
    out.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, package in sources.packages.items():
        files[name] = fetch(name, package, cache, download)
        say(f"have {files[name].name}")
    (out / RECORD).unlink(missing_ok=True)  # it would speak of files that are about to change
    notices = {name: Notice() for name in sources.packages}
    counts: dict[str, Counts] = {}
    kinds = {}
    for kind in (PROSE, CODE):
        with _Lines(out / f"{kind}.jsonl") as lines:
            seen = Seen()
            for source in (source for source in sources.sources if source.kind == kind):
                package = sources.packages[source.package]
                found = counts[source.name] = Counts()
                _add(source, package, files[source.package], notices, seen, lines, found)
                say(f"{kind}: {source.name}: {found.describe()}")
        kinds[kind] = lines.record
    _copy_tokenizer(sources, files, out, notices)
    record = Record(sources=sources, kinds=kinds, counts=counts)
    write_licences(out, record, {name: notice.text for name, notice in notices.items()})
    write_record(out, record)
    return record


def _add(
    source: Source,
    package: Package,
    file: Path,
    notices: dict[str, Notice],
    seen: Seen,
    lines: _Lines,
    counts: Counts,
) -> None:
    """Add the documents of one source, and count what becomes of them."""
    notice = package.notice_member
    for member, content in read_members(
        file, lambda name: name == notice or source.wants(name), source.inside
    ):
        if member == notice:
            notices[source.package].text = content.decode("utf-8", errors="replace")
            continue
        counts.files += 1
        for text in documents_of(
            content, member, source.form, skip=source.skip, remove=source.remove
        ):
            _add_document(source, text, seen, lines, counts)
    if not counts.files:
        raise CorpusError(
            f"source {source.name!r}: no member of {file.name} matches {source.include}; correct "
            "sources.toml"
        )


def _add_document(source: Source, text: str, seen: Seen, lines: _Lines, counts: Counts) -> None:
    if not text:
        counts.binary += 1
        return
    if source.kind == PROSE:
        text, num_cut = seen.without_repeats(text)
        counts.paragraphs += num_cut
    if len(text) < LEAST_CHARS:
        counts.short += 1
        return
    reason = seen.why_not(text)
    counts.exact += reason == "exact"
    counts.near += reason == "near"
    if not reason:
        counts.documents += 1
        counts.bytes += lines.add(text, source.name)


class _Lines:
    """A .jsonl file that gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, temporary_name(path)
        self.record = KindRecord(file=path.name)
        self._hash = hashlib.sha256()

    def __enter__(self) -> _Lines:
        self._file: IO[bytes] = self._temporary.open("wb")
        return self

    def add(self, text: str, source: str) -> int:
        """Write one document, and return the bytes of its text."""
        line = json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n"
        content = line.encode("utf-8")
        self._file.write(content)
        self._hash.update(content)
        num_bytes = len(text.encode("utf-8"))
        self.record.documents += 1
        self.record.bytes += num_bytes
        self.record.file_bytes += len(content)
        return num_bytes

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is not None:
            self._temporary.unlink()
            return
        self.record.sha256 = self._hash.hexdigest()
        put_in_place(self._temporary, self._path)


def _copy_tokenizer(
    sources: Sources, files: dict[str, Path], out: Path, notices: dict[str, Notice]
) -> None:
    """Put GPT-2's files where `--tokenizer-path` can find them."""
    name = sources.tokenizer.package
    wanted = {file.member: file for file in sources.tokenizer.files}
    notice = sources.packages[name].notice_member
    folder = out / TOKENIZER_FOLDER
    folder.mkdir(exist_ok=True)
    for member, content in read_members(files[name], lambda m: m in wanted or m == notice):
        if member == notice:
            notices[name].text = content.decode("utf-8", errors="replace")
            continue
        file = wanted.pop(member)
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise CorpusError(f"{member} of {name} has not the sha256 of GPT-2's {file.name}")
        temporary = temporary_name(folder / file.name)
        temporary.write_bytes(content)
        put_in_place(temporary, folder / file.name)
    if wanted:
        raise CorpusError(f"{files[name].name} holds no {sorted(wanted)}; correct sources.toml")
