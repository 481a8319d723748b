"""HTML pages to plain text: blocks become paragraphs, navigation goes."""

from __future__ import annotations

import re
from collections.abc import Collection
from html.parser import HTMLParser

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
