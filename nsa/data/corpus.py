"""The embedded corpus: the works of Shakespeare, one text file each (see corpus/README.md)."""

from __future__ import annotations

from importlib.resources import files


def read_works() -> dict[str, str]:
    """Return the text of each work by its name, in the order of the names."""
    folder = files("nsa.data") / "corpus"
    works = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return {
        name.removesuffix(".txt"): (folder / name).read_text(encoding="utf-8") for name in works
    }
