"""`nsa handoff`: what whoever takes over a run needs, in one archive, without secrets.

It reads the run folder and its launch records and writes nothing there. What is not there is named
in the manifest and never made up. The same folder gives the same archive, bit by bit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from nsa.operate.handoff_items import Collection, Source
from nsa.operate.handoff_manifest import NAME, PREFIX, Entry, Manifest, manifest_bytes
from nsa.operate.handoff_verify import verify
from nsa.operate.redact import as_bytes, hide, hide_lines, lines_of, secrets_in
from nsa.telemetry.atomic import replacing
from nsa.train.checkpoint import CHUNK

COMPLETE, INCOMPLETE = 0, 1
"""Exit codes: all of the checklist is there; something is missing, and named."""
LEVEL = 1
"""Of compression: weights hardly shrink, and text does at any level."""


def command(args: argparse.Namespace) -> int:
    """Make an archive, or verify one."""
    if (args.folder is None) == (args.verify is None):
        raise ValueError("give a run folder, or --verify FILE; one of them")
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
    """Write the archive of a run folder to `out`, which must be new and outside of it."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the run folder (train.out_dir)")
    if out.exists():
        raise ValueError(f"{out} exists; name another file with --out, or remove it")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{out} is inside the run folder, which is only read; use --out elsewhere")
    with ExitStack() as open_files:
        found = Collection(folder, open_files)
        found.collect(run_info, report)
        known = {s for source in found.sources if source.is_text for s in _secrets(source)}
        staged = [_stage(source, known, open_files) for source in found.sources]
        manifest = Manifest(
            run=folder.resolve().name,
            status=found.metrics.status if found.metrics else None,
            step=found.metrics.step if found.metrics else None,
            files=[entry for entry, _ in staged],
            missing=found.missing,
        )
        with replacing(out) as temporary:
            _write(temporary, manifest, [file for _, file in staged])
    return manifest


def _secrets(source: Source) -> set[str]:
    found = secrets_in(lines_of(source.file))
    source.file.seek(0)
    return found


def _stage(source: Source, known: set[str], open_files: ExitStack) -> tuple[Entry, IO[bytes]]:
    """The file as it goes into the archive, and its entry."""
    file, redacted = source.file, 0
    if source.is_text:
        # Closed by the stack of whoever writes the archive.
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
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        archive.addfile(_member(NAME, len(content)), io.BytesIO(content))
        for entry, file in zip(manifest.files, files, strict=True):
            archive.addfile(_member(entry.path, entry.bytes), file)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A member that says nothing of who wrote it, and when."""
    member = tarfile.TarInfo(PREFIX + name)
    member.size, member.mode = size, 0o644
    return member
