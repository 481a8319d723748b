"""Tiny packages of each client, a list of sources over them, and a client that serves them."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import random
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from studies.corpus.sources import Package, Sources, read_sources

Files = Mapping[str, bytes]


def words(seed: int, count: int = 120) -> str:
    """A paragraph of made-up words, the same for the same seed."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(count))


def tar(files: Files, mode: str = "w:gz") -> bytes:
    """Return a tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def deb(files: Files) -> bytes:
    """Return a Debian package with these files."""
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(b"odd"),
        "data.tar.xz": tar({f"./{name}": content for name, content in files.items()}, "w:xz"),
    }
    out = b"!<arch>\n"
    for name, content in parts.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


def wheel(files: Files) -> bytes:
    """Return a wheel with these files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


REPEATED = words(1)
PAGE = (
    "<html><head><title>no</title></head><body><div class='nav'>Prev <div>x</div></div>"
    f"<p>{words(2)}</p><pre>a  b\n  c</pre><ul><li><p>{words(3)}</p></ul>"
    f"<p>{REPEATED}</p></body></html>"
)
BOOK = (
    "The Project Gutenberg header\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\r\n"
    f"{words(4)}\n\n\n\n{words(5)}   \n*** END OF THE PROJECT GUTENBERG EBOOK X ***\nlicence"
)
ENTRIES = "\n\n".join(
    f"{words(n, 1)}\n   1. {words(n, 20)}\n\n   2. {words(-n, 20)}" for n in range(99)
)
PACKAGES = {
    "books": (
        "books.tgz",
        tar(
            {
                "package/a.txt": BOOK.encode(),
                "package/b.txt": f"{REPEATED}\n\n{words(6)}".encode(),
                "package/equal.txt": f"{REPEATED.upper()}.\n{words(6)}".encode(),
                "package/short.txt": b"too short",
                "package/binary.txt": b"\x00\x01" * 500,
                "package/near.txt": f"{words(4)}\n{words(5)}\n{words(7, 20)}".encode(),
                "package/LICENCE": b"do what you like\n",
            }
        ),
    ),
    "manual": (
        "manual_1_all.deb",
        deb(
            {
                "usr/share/doc/manual/copyright": "© somebody\n".encode(),
                "usr/share/doc/manual/html/index.html": PAGE.encode(),
                "usr/share/dictd/x.dict.dz": gzip.compress(ENTRIES.encode(), mtime=0),
                "usr/src/code.tar.xz": tar(
                    {
                        f"code/{n}.c": f"{{\n\treturn {n};\n}}\n/* {words(n + 20)} */\n".encode()
                        for n in range(20)
                    },
                    "w:xz",
                ),
            }
        ),
    ),
    "bpe": ("bpe.whl", wheel({"data/encoder.json": b"{}", "data/vocab.bpe": b"#version"})),
}


def served(package: Package, folder: Path) -> None:
    """Be the client of every package."""
    name, content = PACKAGES[package.name]
    (folder / name).write_bytes(content)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tiny_list(folder: Path, **hashes: str) -> Path:
    """Write the list of these packages; a hash can be another one."""
    found = {name: sha256(content) for name, (_, content) in PACKAGES.items()} | hashes
    path = folder / "sources.toml"
    path.write_text(LIST.format(**found, json=sha256(b"{}"), bpe_file=sha256(b"#version")))
    return path


def tiny_sources(folder: Path, **hashes: str) -> Sources:
    """Read that list."""
    return read_sources(tiny_list(folder, **hashes))


LIST = """
version = 1
[package.books]
client = "npm"
name = "books"
version = "1.0"
sha256 = "{books}"
notice = "package/LICENCE"
[package.manual]
client = "apt"
name = "manual"
version = "1:1-1"
sha256 = "{manual}"
[package.bpe]
client = "pip"
name = "bpe"
version = "2"
sha256 = "{bpe}"
[[source]]
name = "books"
kind = "prose"
package = "books"
title = "Some books"
licence = "public domain"
include = ["package/*.txt"]
form = "book"
[[source]]
name = "pages"
kind = "prose"
package = "manual"
title = "A page"
licence = "MIT"
include = ["*.html"]
form = "html"
skip = ["nav"]
[[source]]
name = "dictionary"
kind = "prose"
package = "manual"
title = "A dictionary"
licence = "GPL-2.0-or-later"
include = ["*.dict.dz"]
form = "dictionary"
remove = ["1\\\\. "]
[[source]]
name = "code"
kind = "code"
package = "manual"
title = "Some code"
licence = "GPL-2.0-only"
inside = "usr/src/code.tar.xz"
include = ["code/*.[ch]"]
exclude = ["*/7.c"]
form = "plain"
[tokenizer]
package = "bpe"
title = "A vocabulary"
licence = "MIT"
[tokenizer.files]
"encoder.json" = {{ member = "data/encoder.json", sha256 = "{json}" }}
"vocab.bpe" = {{ member = "data/vocab.bpe", sha256 = "{bpe_file}" }}
"""
