"""`nsa handoff`: pack what the next operator of a run needs into one archive, without secrets.

The run folder and its launch records are only read. Missing items are listed in the manifest. The
archive is reproducible: the same folder gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from nsa.config.describe import printable
from nsa.files import replacing
from nsa.operate.handoff.contents import (
    ITEMS,
    MANIFEST_FILE,
    PREFIX,
    Collection,
    Entry,
    Manifest,
    Source,
    is_safe,
    manifest_bytes,
    read_manifest,
)
from nsa.operate.handoff.redact import as_bytes, hide, hide_lines, lines_of, secrets_in
from nsa.train.checkpoint.file import CHUNK

COMPLETE, INCOMPLETE = 0, 1
"""Exit codes: the checklist is complete; something is missing and listed."""
LEVEL = 1
"""Compression level: weights hardly compress, and text compresses well at any level."""


# --- writing an archive ---


def command(args: argparse.Namespace) -> int:
    """Write an archive, or verify one."""
    if (args.folder is None) == (args.verify is None):
        raise ValueError("use either a run folder or --verify FILE")
    if args.verify is not None:
        return verify(args.verify)
    out = args.out or Path(f"{args.folder.resolve().name}-handoff.tar.gz")
    manifest = hand_over(args.folder, out, args.run_info, args.report)
    for entry in manifest.files:
        hidden = f", {entry.redacted} secrets hidden" if entry.redacted else ""
        print(f"{entry.item:13} {entry.path} ({entry.bytes:,} bytes{hidden})")
    for missing in manifest.missing:
        print(f"{missing.item:13} MISSING: {missing.reason}")
    print(f"wrote {out}")
    return INCOMPLETE if manifest.missing else COMPLETE


def hand_over(
    folder: Path, out: Path, run_info: Path | None = None, report: Path | None = None
) -> Manifest:
    """Write the archive of a run folder to `out`, a new file outside that folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; use the run folder (train.out_dir)")
    if out.exists():
        raise ValueError(f"{out} exists; name another file with --out, or remove it")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{out} is inside the run folder, which is read-only here; use --out with a path "
            "outside it"
        )
    with ExitStack() as open_files:
        found = Collection(folder, open_files)
        found.collect(run_info, report)
        # Two passes: first find all secrets, then hide each of them in every file.
        known = {s for source in found.sources if source.is_text for s in _secrets(source)}
        staged = [_stage(source, known, open_files) for source in found.sources]
        manifest = Manifest(
            run=folder.resolve().name,
            status=found.run.status if found.run.metrics else None,
            step=found.run.metrics.step if found.run.metrics else None,
            files=[entry for entry, _ in staged],
            missing=found.missing,
        )
        # Written under a temporary name and renamed, so that a partial archive never has the name.
        with replacing(out) as temporary:
            _write(temporary, manifest, [file for _, file in staged])
    return manifest


def _secrets(source: Source) -> set[str]:
    found = secrets_in(lines_of(source.file))
    source.file.seek(0)
    return found


def _stage(source: Source, known: set[str], open_files: ExitStack) -> tuple[Entry, IO[bytes]]:
    """The file as it goes into the archive, redacted, and its manifest entry."""
    file, redacted = source.file, 0
    if source.is_text:
        # The caller's ExitStack closes it, after the archive is written.
        file = open_files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        for line, count in hide_lines(lines_of(source.file), known):
            file.write(as_bytes(line))
            redacted += count
        file.seek(0)
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
    file.seek(0)
    parents = source.origin.absolute().parts
    entry = Entry(
        item=source.item,
        path=source.path,
        source=hide("/".join(parents[-3:]), sorted(known))[0],
        bytes=size,
        sha256=digest.hexdigest(),
        redacted=redacted,
    )
    return entry, file


def _write(path: Path, manifest: Manifest, files: list[IO[bytes]]) -> None:
    content = manifest_bytes(manifest)
    with (
        path.open("wb") as raw,
        # Without name and mtime in the gzip header: the same content gives the same bytes.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        archive.addfile(_member(MANIFEST_FILE, len(content)), io.BytesIO(content))
        for entry, file in zip(manifest.files, files, strict=True):
            archive.addfile(_member(entry.path, entry.bytes), file)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A tar header without owner and time, so that the archive is reproducible."""
    member = tarfile.TarInfo(PREFIX + name)
    member.size, member.mode = size, 0o644
    return member


# --- `nsa handoff --verify`: compare an archive with its manifest, without extracting it ---

GOOD, BAD = 0, 1
LARGEST_MANIFEST = 1 << 20
VERIFY_CHUNK = 1 << 20
BINARY = (".pt", ".distcp", ".metadata")


def verify(path: Path) -> int:
    """Print mismatches and missing items; returns 0 if the archive matches its manifest."""
    try:
        manifest, problems = examine(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; use a file that nsa handoff wrote") from None
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
    """The manifest of an archive, and where the archive differs from it."""
    problems: list[str] = []
    with tarfile.open(path, "r:gz") as archive:
        members = iter(archive)
        manifest = _manifest(archive, next(members, None))
        expected = {entry.path: entry for entry in manifest.files}
        for member in members:
            name = member.name.removeprefix(PREFIX)
            # Never trust names in an archive: "../" and symlinks could lead outside on extraction.
            if not member.isreg() or not member.name.startswith(PREFIX) or not is_safe(name):
                problems.append(f"{member.name!r:.100} is a link, or a path outside the archive")
            # `pop`, so that a second member with the same name is a problem too.
            elif (entry := expected.pop(name, None)) is None:
                problems.append(f"{name}: not in the manifest, or twice in the archive")
            else:
                problems += _compare(entry, member.size, archive.extractfile(member))
    problems += [f"{name}: in the manifest, not in the archive" for name in expected]
    covered = {entry.item for entry in manifest.files} | {lost.item for lost in manifest.missing}
    problems += [
        f"{item}: neither in the archive nor listed as missing"
        for item in ITEMS
        if item not in covered
    ]
    return manifest, problems


def _manifest(archive: tarfile.TarFile, first: tarfile.TarInfo | None) -> Manifest:
    if first is None or first.name != PREFIX + MANIFEST_FILE or not first.isreg():
        raise ValueError(
            f"its first file is not {PREFIX}{MANIFEST_FILE}; it is not an archive of nsa handoff"
        )
    if first.size > LARGEST_MANIFEST:
        raise ValueError(
            f"its {MANIFEST_FILE} has {first.size} bytes; {LARGEST_MANIFEST} are allowed"
        )
    file = archive.extractfile(first)
    return read_manifest(file.read() if file else b"")


def _compare(entry: Entry, size: int, file: IO[bytes] | None) -> Iterator[str]:
    if file is None or size != entry.bytes:
        yield f"{entry.path}: {size} bytes, the manifest says {entry.bytes}"
        return
    digest = hashlib.sha256()
    # Text is also scanned for secrets while it is hashed; weights would give false matches.
    if entry.path.endswith(BINARY):
        while chunk := file.read(VERIFY_CHUNK):
            digest.update(chunk)
    else:
        hashed = _Hashed(file, digest)
        with io.BufferedReader(hashed) as lines:
            for number, (_, count) in enumerate(hide_lines(lines_of(lines)), 1):
                if count:
                    yield f"{entry.path}, line {number}: looks like a secret"
    if digest.hexdigest() != entry.sha256:
        yield f"{entry.path}: its sha256 differs from the manifest"


class _Hashed(io.RawIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes], digest: hashlib._Hash) -> None:
        self.file, self.digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        chunk = self.file.read(len(buffer))
        self.digest.update(chunk)
        buffer[: len(chunk)] = chunk
        return len(chunk)
