"""A pack back into the files of a corpus, on all cores, every part checked against its hash."""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsa.files import put_in_place, temporary_name
from studies.corpus.errors import CorpusError
from studies.corpus.pack_manifest import Packed, read_pack_manifest


def unpack(
    folder: Path, out: Path, *, jobs: int = 0, say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Restore every file; nothing gets its name unless all of the pack is as it was written."""
    files = read_pack_manifest(folder)
    sizes: dict[str, int] = {}
    places = []
    for packed in files:
        places.append((packed, sizes.get(packed.target, 0)))
        sizes[packed.target] = sizes.get(packed.target, 0) + packed.bytes
    temporary = {target: temporary_name(out / target) for target in sizes}
    try:
        for target, path in temporary.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(sizes[target])
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            tasks = [
                pool.submit(_restore, folder, packed, temporary[packed.target], start)
                for packed, start in places
            ]
            for task in tasks:
                task.result()
    except BaseException:  # Ctrl-C as well: half a file is of no use to anybody
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise
    for target, path in temporary.items():
        put_in_place(path, out / target)
        say(f"{out / target}: {sizes[target]:,} bytes")
    return [out / target for target in temporary]


def _restore(folder: Path, packed: Packed, path: Path, start: int) -> None:
    """Decompress one file of the pack to its place in the target."""
    try:
        compressed = (folder / packed.file).read_bytes()
    except OSError as error:
        raise CorpusError(
            f"{folder / packed.file}: {error.strerror}; bring the pack again"
        ) from None
    if hashlib.sha256(compressed).hexdigest() != packed.sha256:
        raise CorpusError(f"{folder / packed.file} was changed or cut; bring the pack again")
    try:
        # One byte more than allowed is enough to see that there is too much.
        content = lzma.LZMADecompressor().decompress(compressed, packed.bytes + 1)
    except lzma.LZMAError as error:
        raise CorpusError(f"{folder / packed.file}: {error}; pack the corpus again") from None
    if hashlib.sha256(content).hexdigest() != packed.content_sha256:
        raise CorpusError(
            f"{folder / packed.file}: its content is not what pack.json says; pack the corpus again"
        )
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)
