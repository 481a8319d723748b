"""Forms of files, and how each becomes documents: plain, HTML, books, dictionaries, WordNet."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator

from studies.corpus.errors import CorpusError
from studies.corpus.html import html_text

ENTRIES_CHARS = 16_384
"""Entries of a dictionary are put together until a document has this length."""
MOST_CHARS = 524_288
"""A longer document is cut at empty lines into parts of about the same length: 64k tokens of
English fit into one part, and no single book fills the held-out side."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffd]")
BOOK_STARTS = re.compile(r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG.*$", re.I | re.M)
BOOK_ENDS = re.compile(
    r"^(?:\*{3} ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg).*",
    re.I | re.M | re.S,
)
BINARY_SHARE = 0.002
"""More control characters than this are not text."""


def documents_of(
    content: bytes, member: str, form: str, *, skip: Collection[str], remove: Iterable[str]
) -> Iterator[str]:
    """Yield the documents of one file; one that is not text yields an empty document."""
    text = decode(_inflated(content, member))
    if text is None:
        yield ""
        return
    for pattern in remove:
        text = re.sub(pattern, "", text)
    for document in FORMS[form](text, skip):
        yield from cut_long(tidy(document))


def decode(content: bytes) -> str | None:
    """Return the text, as UTF-8 or else as Latin-1; None for what is not text."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text or len(CONTROL.findall(text)) > BINARY_SHARE * len(text) + 1:
        return None
    return CONTROL.sub("", text)


def tidy(text: str) -> str:
    """Take away spaces at line ends and runs of empty lines; end with a line end."""
    text = re.sub(r"[^\S\n]+\n", "\n", text.replace("\xa0", " "))
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n").rstrip()
    return f"{text}\n" if text else ""


def cut_long(text: str, most: int = MOST_CHARS) -> Iterator[str]:
    """Cut a text that is too long into parts of about the same length, at empty lines."""
    num_parts = -(-len(text) // most)
    length, start = -(-len(text) // max(1, num_parts)), 0
    while len(text) - start > length:
        end = text.rfind("\n\n", start + length // 2, start + length)
        end = end + 2 if end >= 0 else text.rfind("\n", start, start + length) + 1
        end = end if end > start else start + length
        yield text[start:end].rstrip("\n") + "\n"
        start = end
    yield text[start:]


def _inflated(content: bytes, member: str) -> bytes:
    """A dictionary's .dz is a .gz file, too."""
    if not member.endswith((".gz", ".dz")):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{member}: cannot be decompressed ({error}); exclude it") from None


def _plain(text: str, skip: Collection[str]) -> Iterator[str]:
    yield text


def _html(text: str, skip: Collection[str]) -> Iterator[str]:
    yield html_text(text, skip)


def _book(text: str, skip: Collection[str]) -> Iterator[str]:
    """A book of Project Gutenberg, without what its distributor put around it."""
    start = BOOK_STARTS.search(text)
    yield BOOK_ENDS.sub("", text[start.end() if start else 0 :])


def _dictionary(text: str, skip: Collection[str]) -> Iterator[str]:
    """Entries begin at the left margin after an empty line; the indent of the others goes."""
    entries = re.split(r"\n\n(?=\S)", text)
    yield from _together(re.sub(r"(?m)^[ \t]+", "", entry).strip() for entry in entries)


def _paragraphs(text: str, skip: Collection[str]) -> Iterator[str]:
    """One long text of short parts, such as a lexicon: paragraphs, put together."""
    dedented = (re.sub(r"(?m)^[ \t]+", "", part).strip() for part in text.split("\n\n"))
    yield from _together(part for part in dedented if part)


def _wordnet(text: str, skip: Collection[str]) -> Iterator[str]:
    """The words of a synset and its gloss; lines that begin with a space are the licence."""
    yield from _together(
        _synset(line) for line in text.splitlines() if "|" in line and not line.startswith(" ")
    )


def _synset(line: str) -> str:
    data, _, gloss = line.partition("|")
    fields = data.split()
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    names = (re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
    return f"{', '.join(names)}: {gloss.strip()}"


def _together(entries: Iterable[str]) -> Iterator[str]:
    waiting: list[str] = []
    num_chars = 0
    for entry in entries:
        waiting.append(entry)
        num_chars += len(entry) + 2
        if num_chars >= ENTRIES_CHARS:
            yield "\n\n".join(waiting)
            waiting, num_chars = [], 0
    if waiting:
        yield "\n\n".join(waiting)


FORMS: dict[str, Callable[[str, Collection[str]], Iterator[str]]] = {
    "plain": _plain,
    "html": _html,
    "book": _book,
    "dictionary": _dictionary,
    "paragraphs": _paragraphs,
    "wordnet": _wordnet,
}
"""What turns the text of a file, and the HTML elements to skip, into documents."""
