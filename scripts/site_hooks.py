"""Hooks of mkdocs.yml: links that leave docs/ become text, and nothing is loaded from elsewhere.

In the repository `[studies/corpus](../studies/corpus/README.md)` leads to a file. In the built site
it would lead nowhere, and the repository has no address to lead to. The reader sees its path.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
WORKER = "https://unpkg.com/iframe-worker/shim"
"""Script that the theme would load from the network, to make search work from local files."""
OWN_WORKER = "assets/search-from-file.js"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of every page, before it becomes HTML."""
    return links_as_text(markdown, page.file.src_uri)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of every page: the theme's worker becomes our own."""
    return output.replace(WORKER, "../" * page.url.count("/") + OWN_WORKER)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for pages without Markdown, such as 404.html."""
    return output_content.replace(WORKER, OWN_WORKER)


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
