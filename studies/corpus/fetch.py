"""Packages from apt-get, pip and npm into a cache, and files out of them; nothing is installed.

A package is in the cache under a name that holds its hash, and only if it has that hash. Archives
(.deb, .whl, .tar.gz, .tgz) are read in memory and never unpacked to a disk. Names that leave the
archive are refused all the same: a package that has them is not what its publisher meant. Links and
devices are skipped.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from nsa.files import put_in_place
from studies.corpus.sources import Package
from studies.corpus.text import CorpusError

# --- download ---

LIMIT_S = 900.0
"""Of one download."""
SUFFIXES = (".deb", ".whl", ".tar.gz", ".tgz")
Download = Callable[[Package, Path], None]


def fetch(name: str, package: Package, cache: Path, download: Download | None = None) -> Path:
    """Return the file of a package from the cache, where it is put first if it is not there."""
    stem = f"{name}-{package.sha256[:16]}"
    known = [path for path in (cache / f"{stem}{suffix}" for suffix in SUFFIXES) if path.is_file()]
    if known:
        _check(known[0], package, f"remove {known[0]} and repeat")
        return known[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        (download or run_client)(package, Path(folder))
        found = [path for path in Path(folder).iterdir() if path.name.endswith(SUFFIXES)]
        if len(found) != 1:
            names = sorted(path.name for path in Path(folder).iterdir())
            raise CorpusError(
                f"{package.client} delivered {names} for {package.name} {package.version}; one "
                f"file that ends with one of {', '.join(SUFFIXES)} is expected"
            )
        advice = "if this version was published anew, judge it and correct sources.toml"
        _check(found[0], package, advice)
        suffix = next(suffix for suffix in SUFFIXES if found[0].name.endswith(suffix))
        put_in_place(found[0], cache / f"{stem}{suffix}")
    return cache / f"{stem}{suffix}"


def run_client(package: Package, folder: Path) -> None:
    """Download one package into the folder."""
    command = _command(package, folder)
    if shutil.which(command[0]) is None:
        raise CorpusError(
            f"{command[0]} is not on this machine, and {package.name} comes by it; install it, or "
            "make the corpus elsewhere and bring it here with --pack and unpack"
        )
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CorpusError(
            f"`{' '.join(command)}` took more than {LIMIT_S:g} s; look at the network and repeat"
        ) from None
    if done.returncode:
        last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise CorpusError(
            f"{package.name} {package.version} cannot be fetched: `{' '.join(command)}` ended with "
            f"{done.returncode} ({last}); {ADVICE[package.client].format(name=package.name)}"
        )


def sha256_of(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _command(package: Package, folder: Path) -> list[str]:
    if package.client == "apt":
        return ["apt-get", "download", "-q", f"{package.name}={package.version}"]
    if package.client == "npm":
        return ["npm", "pack", "--ignore-scripts", f"{package.name}@{package.version}"]
    # pip runs the setup of a source package to learn its name: it must know the hash before that.
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    flags = ["--no-deps", "--require-hashes", "--disable-pip-version-check", "-q"]
    return [sys.executable, "-m", "pip", "download", *flags, "-r", wanted.name]


ADVICE = {
    "apt": "run `apt-get update`; `apt-cache policy {name}` says which version the archive has "
    "now: a newer one goes into sources.toml with its sha256",
    "pip": "look at the network, and whether this Python has pip; if it found another hash, judge "
    "the package before sources.toml is corrected",
    "npm": "look at the network, and whether that version exists",
}


def _check(path: Path, package: Package, advice: str) -> None:
    found = sha256_of(path)
    if found != package.sha256:
        raise CorpusError(
            f"{package.name} {package.version}: {path.name} has the sha256 {found}, sources.toml "
            f"says {package.sha256}; it is not used; {advice}"
        )


# --- archives ---

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
