"""Files out of packages (.deb, .whl, .tar.gz, .tgz), read in memory and never unpacked to a disk.

Names that leave the archive are refused all the same: a package that has them is not what its
publisher meant. Links and devices are passed over.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from studies.corpus.errors import CorpusError

MAX_MEMBER_BYTES = 256 << 20
"""A member that is read must not be larger, whatever its archive says."""
AR_MAGIC, AR_HEADER = b"!<arch>\n", 60
BROKEN = (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error)

Member = tuple[str, bytes]


def read_members(package: Path, wants: Callable[[str], bool], inside: str = "") -> Iterator[Member]:
    """Yield (name, content) of the wanted files in the order of the archive.

    `inside` names a tar archive within the package whose files are offered as well.
    """
    found_inside = False
    try:
        if package.suffix == ".whl":
            yield from _zip_members(package, wants)
            return
        with package.open("rb") as file:
            for name, content in _tar_files(_data_of(package, file)):
                if inside and name == inside:
                    found_inside = True
                    for inner, inner_content in _tar_files(content):
                        if wants(inner):
                            yield inner, _read(inner_content, inner, package)
                elif wants(name):
                    yield name, _read(content, name, package)
    except BROKEN as error:
        raise CorpusError(
            f"{package}: cannot be read as a package ({error}); remove it and repeat"
        ) from None
    if inside and not found_inside:
        raise CorpusError(f"{package} holds no {inside}; correct `inside` in sources.toml")


def check_name(name: str, package: object) -> str:
    """Return the name without a leading ./; refuse one that leads out of the archive."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise CorpusError(
            f"{package}: its member {name!r} leads out of the archive; do not use this package"
        )
    return "/".join(part for part in parts if part != ".")


def _zip_members(package: Path, wants: Callable[[str], bool]) -> Iterator[Member]:
    with zipfile.ZipFile(package) as archive:
        for info in archive.infolist():
            name = check_name(info.filename, package)
            if not info.is_dir() and wants(name):
                with archive.open(info) as content:
                    yield name, _read(content, name, package)


def _tar_files(stream: IO[bytes] | _Part) -> Iterator[tuple[str, IO[bytes]]]:
    """Read a tar archive from its start to its end, as a stream, whatever its compression."""
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            name = check_name(member.name, getattr(stream, "name", "archive"))
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                yield name, content


def _read(content: IO[bytes], name: str, package: Path) -> bytes:
    read = content.read(MAX_MEMBER_BYTES + 1)
    if len(read) > MAX_MEMBER_BYTES:
        raise CorpusError(f"{package}: {name} is larger than {MAX_MEMBER_BYTES} bytes; exclude it")
    return read


def _data_of(package: Path, file: IO[bytes]) -> IO[bytes] | _Part:
    """Return the tar archive of files: the package itself, or a part of a Debian package."""
    if package.suffix != ".deb":
        return file
    if file.read(len(AR_MAGIC)) != AR_MAGIC:
        raise CorpusError(f"{package} is not a Debian package; remove it and repeat")
    while header := file.read(AR_HEADER):
        if len(header) != AR_HEADER or header[58:] != b"`\n" or not header[48:58].strip().isdigit():
            raise CorpusError(f"{package}: a broken ar archive; remove it and repeat")
        name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), int(header[48:58])
        if name.startswith("data.tar"):
            return _Part(file, size, str(package))
        file.seek(size + size % 2, io.SEEK_CUR)
    raise CorpusError(f"{package} has no data.tar; remove it and repeat")


class _Part(io.RawIOBase):
    """The next `size` bytes of a file, as a file of its own."""

    def __init__(self, file: IO[bytes], size: int, name: str) -> None:
        self._file, self._left, self.name = file, size, name

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, or all that are left."""
        size = self._left if size < 0 else min(size, self._left)
        read = self._file.read(size)
        self._left -= len(read)
        return read
