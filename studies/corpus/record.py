"""corpus.json and LICENCES.md: what a corpus holds, where it is from, under which licences.

corpus.json, version 1: docs/schemas/corpus_json.md. It is written last: without it, the folder is
not complete. Nothing in it depends on the time or the machine.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.files import put_in_place, temporary_name
from studies.corpus.sources import Sources
from studies.corpus.text import CorpusError

SCHEMA = 1
FILE_NAME, LICENCES = "corpus.json", "LICENCES.md"


@dataclass
class Counts:
    """What became of the files and documents of one source."""

    files: int = 0
    documents: int = 0
    """Written."""
    bytes: int = 0
    """Of their texts, in UTF-8."""
    binary: int = 0
    """Dropped: not text, or empty."""
    short: int = 0
    """Dropped: too short."""
    exact: int = 0
    """Dropped: the same words were there before."""
    near: int = 0
    """Dropped: most of it was there before."""
    paragraphs: int = 0
    """Long paragraphs that were cut out of documents, because another document had them before."""

    def describe(self) -> str:
        """Say it in a line."""
        return (
            f"{self.documents:,} documents, {self.bytes / 1e6:.1f} MB; dropped {self.binary:,} "
            f"binary, {self.short:,} short, {self.exact:,} equal, {self.near:,} nearly equal, "
            f"{self.paragraphs:,} paragraphs"
        )


@dataclass
class KindRecord:
    """One of the two .jsonl files."""

    file: str
    documents: int = 0
    bytes: int = 0
    """Of the texts, in UTF-8."""
    file_bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A whole corpus."""

    sources: Sources
    kinds: dict[str, KindRecord]
    counts: dict[str, Counts]


def write_record(folder: Path, record: Record) -> None:
    """Write corpus.json."""
    content = {
        "schema": SCHEMA,
        "sources_sha256": record.sources.sha256,
        "kinds": {kind: dataclasses.asdict(entry) for kind, entry in record.kinds.items()},
        "sources": [_source_entry(record, number) for number in range(len(record.sources.sources))],
    }
    _write(folder / FILE_NAME, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of corpus.json, if it is one of this version."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{path}: cannot be read ({error}); the folder holds no complete corpus; build it"
        ) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise CorpusError(f"{path}: not of schema {SCHEMA}; build the corpus again")
    return content


def write_licences(folder: Path, record: Record, notices: dict[str, str]) -> None:
    """Write the table of licences, then what each package says itself."""
    sources, tokenizer = record.sources, record.sources.tokenizer
    rows = [(s.name, s.title, s.licence, s.package) for s in sources.sources]
    rows.append(("gpt2", tokenizer.title, tokenizer.licence, tokenizer.package))
    lines = ["# Licences of the corpus", ""]
    lines += ["| source | what it is | licence | package |", "| --- | --- | --- | --- |"]
    for name, title, licence, key in rows:
        of = sources.packages[key]
        lines.append(f"| {name} | {title} | {licence} | {of.client}: {of.name} {of.version} |")
    for name, package in sources.packages.items():
        lines += ["", f"## {package.name} {package.version}", ""]
        text = notices[name].strip()
        lines += [f"    {line}".rstrip() for line in text.splitlines()] or ["No notice of its own."]
    _write(folder / LICENCES, "\n".join(lines) + "\n")


def _source_entry(record: Record, number: int) -> dict[str, Any]:
    source = record.sources.sources[number]
    package = record.sources.packages[source.package]
    counts = record.counts[source.name]
    dropped = {name: getattr(counts, name) for name in ("binary", "short", "exact", "near")}
    return {
        "name": source.name,
        "kind": source.kind,
        "title": source.title,
        "licence": source.licence,
        "client": package.client,
        "package": package.name,
        "version": package.version,
        "sha256": package.sha256,
        "files": counts.files,
        "documents": counts.documents,
        "bytes": counts.bytes,
        "dropped": dropped,
        "paragraphs_cut": counts.paragraphs,
    }


def _write(path: Path, text: str) -> None:
    temporary = temporary_name(path)
    temporary.write_text(text, encoding="utf-8", newline="\n")
    put_in_place(temporary, path)
