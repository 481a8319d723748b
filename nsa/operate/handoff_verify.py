"""`nsa handoff --verify`: hold an archive to its manifest; nothing is ever extracted."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nsa.operate.handoff_manifest import (
    ITEMS,
    NAME,
    PREFIX,
    Entry,
    Manifest,
    is_safe,
    read_manifest,
)
from nsa.operate.redact import hide_lines, lines_of
from nsa.operate.text import printable

GOOD, BAD = 0, 1
LARGEST_MANIFEST = 1 << 20
CHUNK = 1 << 20
BINARY = (".pt", ".distcp", ".metadata")


def verify(path: Path) -> int:
    """Print what is wrong, and what the checklist lacks; 0 when the archive is as written."""
    try:
        manifest, problems = examine(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give a file that nsa handoff wrote") from None
    except (OSError, ValueError, EOFError, tarfile.TarError, zlib.error) as error:
        print(f"BAD  {path}: {printable(str(error))}")
        return BAD
    for problem in problems:
        print(f"BAD  {printable(problem)}")
    for missing in manifest.missing:
        print(f"missing when it was written: {missing.item}: {printable(missing.reason)}")
    print(f"{path}: {len(manifest.files)} files of the run {printable(manifest.run)}, ", end="")
    print(f"{len(problems)} problems" if problems else "all as the manifest says")
    return BAD if problems else GOOD


def examine(path: Path) -> tuple[Manifest, list[str]]:
    """The manifest of an archive, and what in the archive is not as it says."""
    problems: list[str] = []
    with tarfile.open(path, "r:gz") as archive:
        members = iter(archive)
        manifest = _manifest(archive, next(members, None))
        expected = {entry.path: entry for entry in manifest.files}
        for member in members:
            name = member.name.removeprefix(PREFIX)
            if not member.isreg() or not member.name.startswith(PREFIX) or not is_safe(name):
                problems.append(f"{member.name!r:.100} is a link, or leads out of the archive")
            elif (entry := expected.pop(name, None)) is None:
                problems.append(f"{name}: not in the manifest, or there twice")
            else:
                problems += _compare(entry, member.size, archive.extractfile(member))
    problems += [f"{name}: in the manifest, not in the archive" for name in expected]
    covered = {entry.item for entry in manifest.files} | {lost.item for lost in manifest.missing}
    problems += [
        f"{item}: neither there nor named as missing" for item in ITEMS if item not in covered
    ]
    return manifest, problems


def _manifest(archive: tarfile.TarFile, first: tarfile.TarInfo | None) -> Manifest:
    if first is None or first.name != PREFIX + NAME or not first.isreg():
        raise ValueError(f"its first file is not {PREFIX}{NAME}; it is no archive of nsa handoff")
    if first.size > LARGEST_MANIFEST:
        raise ValueError(f"its {NAME} has {first.size} bytes; {LARGEST_MANIFEST} are allowed")
    file = archive.extractfile(first)
    return read_manifest(file.read() if file else b"")


def _compare(entry: Entry, size: int, file: IO[bytes] | None) -> Iterator[str]:
    if file is None or size != entry.bytes:
        yield f"{entry.path}: {size} bytes, the manifest says {entry.bytes}"
        return
    digest = hashlib.sha256()
    if entry.path.endswith(BINARY):
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    else:
        hashed = _Hashed(file, digest)
        with io.BufferedReader(hashed) as lines:
            for number, (_, count) in enumerate(hide_lines(lines_of(lines)), 1):
                if count:
                    yield f"{entry.path}, line {number}: looks like a secret"
    if digest.hexdigest() != entry.sha256:
        yield f"{entry.path}: its bytes are not those of the manifest"


class _Hashed(io.RawIOBase):
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes], digest: hashlib._Hash) -> None:
        self.file, self.digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        chunk = self.file.read(len(buffer))
        self.digest.update(chunk)
        buffer[: len(chunk)] = chunk
        return len(chunk)
