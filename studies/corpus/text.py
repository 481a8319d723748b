"""Files to documents: how each form is read, HTML as plain text, and what was there before.

Forms: plain, HTML, books, dictionaries, WordNet. A document is left out or cut where it repeats:

equal   the same words in the same order, whatever their case, spaces and punctuation
near    at least NEAR_SHARE of a document's shingles (runs of 8 words, of which one in 16 is looked
        at, chosen by its hash) occur in documents that were kept before
paragraph  in prose, a paragraph of LONG_CHARS or more that another document had before is cut out
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from html.parser import HTMLParser

import numpy as np
from numpy.typing import NDArray


class CorpusError(ValueError):
    """A list, a package, a client or a file that cannot be used; the message says what to do."""


# --- forms ---

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


# --- HTML ---

LEFT_OUT = {
    "head", "script", "style", "nav", "header", "footer", "aside", "form", "button", "select",
    "noscript", "svg", "iframe", "template", "object", "math",
}  # fmt: skip
VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source",
    "track", "wbr",
}  # fmt: skip
PARAGRAPHS = {
    "address", "article", "blockquote", "body", "center", "dd", "div", "dl", "figure", "h1", "h2",
    "h3", "h4", "h5", "h6", "hr", "main", "ol", "p", "pre", "section", "table", "ul",
}  # fmt: skip
BULLET = "- "
LINES = {"br", "dt", "li", "tr", "caption", "figcaption"}


def html_text(page: str, skip: Collection[str] = ()) -> str:
    """Return the text; elements whose class or id is in `skip` are left out with their content."""
    parser = _Text(frozenset(skip))
    parser.feed(page)
    parser.close()
    return parser.text()


class _Text(HTMLParser):
    """Collects text; knows paragraphs, lines, preformatted text, and what to leave out."""

    def __init__(self, skip: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self._skip = skip
        self._parts: list[str] = []
        self._left_out = ""
        """The tag of the element that is being left out, if any."""
        self._depth = 0
        """Elements of that tag that are open."""
        self._pre = 0

    def text(self) -> str:
        """Return what was collected; no run of empty lines is longer than one."""
        text = re.sub(r"[ \t]+\n", "\n", "".join(self._parts))
        return re.sub(r"\n{3,}", "\n\n", text).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        if self._left_out:
            self._depth += tag == self._left_out
            return
        if tag not in VOID and (tag in LEFT_OUT or self._is_named(attrs)):
            self._left_out, self._depth = tag, 1
            return
        self._pre += tag == "pre"
        self._separate(tag)
        if tag == "li":
            self._parts.append(BULLET)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element without content: only its place counts."""
        if not self._left_out:
            self._separate(tag)

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        if self._left_out:
            self._depth -= tag == self._left_out
            if not self._depth:
                self._left_out = ""
            return
        self._pre = max(0, self._pre - (tag == "pre"))
        if tag in ("td", "th"):
            self._parts.append("  ")
        elif tag in PARAGRAPHS:
            self._separate(tag)

    def handle_data(self, data: str) -> None:
        """Text: its spaces and line ends count in preformatted text only."""
        if self._left_out:
            return
        if self._pre:
            self._parts.append(data)
            return
        text = re.sub(r"\s+", " ", data)
        if not self._parts or self._parts[-1].endswith(("\n", " ")):
            text = text.removeprefix(" ")
        self._parts.append(text)

    def _is_named(self, attrs: list[tuple[str, str | None]]) -> bool:
        names = (value for key, value in attrs if key in ("class", "id") and value)
        return any(name in self._skip for value in names for name in value.split())

    def _separate(self, tag: str) -> None:
        if self._parts and self._parts[-1] == BULLET:  # a paragraph in a list item
            return
        if tag in PARAGRAPHS:
            self._parts.append("\n\n")
        elif tag in LINES:
            self._parts.append("\n")


# --- duplicates ---

SHINGLE_WORDS = 8
SAMPLE_BITS = 4
"""One shingle in 2 to this power is looked at."""
NEAR_SHARE = 0.8
LEAST_SAMPLES = 4
"""A document with fewer sampled shingles is too short to be called nearly equal."""
LONG_CHARS = 200
WORD = re.compile(r"\w+")


class Seen:
    """All that was kept so far, as hashes."""

    def __init__(self) -> None:
        self._documents: set[bytes] = set()
        self._paragraphs: set[bytes] = set()
        self._shingles: set[int] = set()
        self._words = _WordHashes()

    def why_not(self, text: str) -> str:
        """Return "exact", "near" or, for a document that is new and is now known, ""."""
        words = WORD.findall(text.lower())
        key = _key(words)
        if key in self._documents:
            return "exact"
        shingles = self._sample(words)
        num_known = len(self._shingles.intersection(shingles))
        if len(shingles) >= LEAST_SAMPLES and num_known >= NEAR_SHARE * len(shingles):
            return "near"
        self._documents.add(key)
        self._shingles.update(shingles)
        return ""

    def without_repeats(self, text: str) -> tuple[str, int]:
        """Return the text without long paragraphs of earlier documents, and how many went."""
        kept, new, num_cut = [], set(), 0
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= LONG_CHARS:
                key = _key(WORD.findall(paragraph.lower()))
                if key in self._paragraphs:
                    num_cut += 1
                    continue
                new.add(key)
            kept.append(paragraph)
        self._paragraphs |= new
        return ("\n\n".join(kept).strip("\n") + "\n" if num_cut else text), num_cut

    def _sample(self, words: list[str]) -> list[int]:
        """Return the sampled hashes of the shingles; the same words always give the same."""
        if len(words) < SHINGLE_WORDS:
            return []
        hashes = np.fromiter(map(self._words.__getitem__, words), dtype=np.uint64, count=len(words))
        shingles = _shingle_hashes(hashes)
        chosen = shingles >> np.uint64(64 - SAMPLE_BITS) == 0
        return np.unique(shingles[chosen]).tolist()


def _key(words: list[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode("utf-8"), digest_size=16).digest()


class _WordHashes(dict[str, int]):
    """A hash of each word that is the same in every process, found once."""

    def __missing__(self, word: str) -> int:
        content = word.encode("utf-8")
        self[word] = value = zlib.crc32(content) << 32 | zlib.adler32(content)
        return value


def _shingle_hashes(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix every SHINGLE_WORDS neighbours into one number; arithmetic is modulo 2 to the 64."""
    num_shingles = len(words) - SHINGLE_WORDS + 1
    total = np.zeros(num_shingles, dtype=np.uint64)
    for at in range(SHINGLE_WORDS):
        total = total * np.uint64(0x9E3779B97F4A7C15) + words[at : at + num_shingles]
        total ^= total >> np.uint64(29)
    total *= np.uint64(0xBF58476D1CE4E5B9)
    return total ^ (total >> np.uint64(32))
