"""Hooks of mkdocs.yml: links that leave docs/ become text, because the site has no such pages.

In the repository `[studies/corpus](../studies/corpus/README.md)` leads to a file. In the built site
it would lead nowhere, and the repository has no address to lead to. The reader sees its path.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of every page, before it becomes HTML."""
    return links_as_text(markdown, page.file.src_uri)


def links_as_text(markdown: str, source: str) -> str:
    """Replace links that leave docs/, outside of code; `source` is the page's path in docs/."""
    folder = posixpath.dirname(posixpath.join("docs", source))

    def replaced(link: re.Match[str]) -> str:
        target = link["target"].partition("#")[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not target or ":" in target or path.startswith("docs/"):
            return link[0]
        text = link["text"].strip("`")
        return f"`{path}`" if text in path else f"{link['text']} (`{path}`)"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replaced, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replaced, markdown[end:])])
