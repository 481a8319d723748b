"""Prepared shards: manifest.json (writer and reader), verification, and a summary.

The manifest is written last: a folder without one is incomplete. This file needs neither numpy nor
torch; array_rows.py maps the tokens.

Schema, version 1, one JSON object:
  schema       1
  tokenizer    {"name": byte | gpt2 | hf, "fingerprint": sha256}
  vocab, eos   number of ids, and the id that ends a document
  dtype        uint8 | uint16 | uint32, little-endian: the smallest that holds the vocabulary
  documents, empty, held_out    documents on both sides; dropped as empty; held out
  shards       [{"file", "side": train | val, "tokens", "documents", "sha256"}, ...] in the order
               of the stream; a document never spans two shards
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.config.describe import text_table
from nsa.data.documents import TRAIN, VAL, Counts
from nsa.data.errors import DataError
from nsa.files import DurableFile

SCHEMA = 1
FILE_NAME = "manifest.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
SHARD_NAME = re.compile(rf"({TRAIN}|{VAL})-\d{{5,}}\.bin")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens."""

    file: str
    side: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole folder."""

    tokenizer: str
    fingerprint: str
    """Of the tokenizer."""
    vocab: int
    eos: int
    counts: Counts
    shards: list[Shard]

    @property
    def dtype(self) -> str:
        """Token type in every file."""
        return f"uint{8 * self.token_bytes}"

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return id_bytes(self.vocab)

    def of(self, side: str) -> list[Shard]:
        """The shards of one side, in stream order."""
        return [shard for shard in self.shards if shard.side == side]


def id_bytes(vocab: int) -> int:
    """Bytes of the smallest unsigned integer that holds every id below `vocab`."""
    assert 1 <= vocab <= 2**32, f"a vocabulary of {vocab} ids does not fit 32 bits"
    return 1 if vocab <= 2**8 else 2 if vocab <= 2**16 else 4


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest atomically; from then on the folder is complete."""
    content = {
        "schema": SCHEMA,
        "tokenizer": {"name": manifest.tokenizer, "fingerprint": manifest.fingerprint},
        "vocab": manifest.vocab,
        "eos": manifest.eos,
        "dtype": manifest.dtype,
        **dataclasses.asdict(manifest.counts),
        "shards": [dataclasses.asdict(shard) for shard in manifest.shards],
    }
    with DurableFile(folder / FILE_NAME) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode("utf-8"))
    return folder / FILE_NAME


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest, and its sha256, which identifies the whole folder."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(
            f"{folder} has no {FILE_NAME}: it is not a folder of shards, or their preparation did "
            "not finish; run `nsa data prepare` into a new folder"
        )
    content = path.read_bytes()
    try:
        manifest = _parse(json.loads(content.decode("utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a manifest of schema {SCHEMA} ({type(error).__name__}: {error}); prepare "
            "the shards again"
        ) from None
    return manifest, hashlib.sha256(content).hexdigest()


def verify_shards(folder: Path) -> list[str]:
    """Read all bytes; returns one line per problem."""
    try:
        manifest, _ = read_manifest(folder)
    except DataError as error:
        return [str(error)]
    return [p for shard in manifest.shards if (p := _problem(folder, manifest, shard))]


def _problem(folder: Path, manifest: Manifest, shard: Shard) -> str:
    if problem := size_problem(folder, manifest, shard):
        return problem
    with (folder / shard.file).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != shard.sha256:
        return f"{folder / shard.file}: sha256 is {found}, the manifest says {shard.sha256}"
    return ""


def size_problem(folder: Path, manifest: Manifest, shard: Shard) -> str:
    """The problem with the size of a shard, if any; its bytes are not read."""
    path, expected = folder / shard.file, shard.tokens * manifest.token_bytes
    if not path.is_file():
        return f"{path}: missing, the manifest says {expected} bytes"
    found = path.stat().st_size
    return "" if found == expected else f"{path}: expected {expected} bytes, found {found}"


def _parse(content: dict[str, Any]) -> Manifest:
    """Parse the content; every ValueError says what is wrong."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {content['schema']!r}")
    manifest = Manifest(
        tokenizer=str(content["tokenizer"]["name"]),
        fingerprint=str(content["tokenizer"]["fingerprint"]),
        vocab=_whole(content, "vocab", 1),
        eos=_whole(content, "eos", 0),
        counts=Counts(**{n: _whole(content, n, 0) for n in ("documents", "empty", "held_out")}),
        shards=[_parse_shard(shard) for shard in content["shards"]],
    )
    if not manifest.eos < manifest.vocab <= 2**32:
        raise ValueError(f"eos={manifest.eos} or vocab={manifest.vocab} is out of range")
    if content["dtype"] != manifest.dtype:
        raise ValueError(f"dtype={content['dtype']!r}, vocab={manifest.vocab} has {manifest.dtype}")
    names = [shard.file for shard in manifest.shards]
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")
    return manifest


def _parse_shard(content: dict[str, Any]) -> Shard:
    file, sha256 = content["file"], content["sha256"]
    match = SHARD_NAME.fullmatch(file)
    if not match or match[1] != content["side"]:
        raise ValueError(f"{file!r} is not the name of a {content['side']} shard")
    if not SHA256.fullmatch(sha256):
        raise ValueError(f"{sha256!r} is not a sha256")
    tokens, documents = _whole(content, "tokens", 1), _whole(content, "documents", 1)
    return Shard(file=file, side=match[1], tokens=tokens, documents=documents, sha256=sha256)


def _whole(content: dict[str, Any], key: str, least: int) -> int:
    value = content[key]
    if type(value) is not int or value < least:  # isinstance would accept a bool
        raise ValueError(f"{key}={value!r} is not a whole number >= {least}")
    return value


# --- verification while a run trains ---
# Opening shards checks only their sizes, so a corrupted byte would be trained on. A small folder is
# hashed before the first step, a large one by a background thread; the trainer asks before every
# update whether damage was found.

SMALL_BYTES = 256 << 20
"""Folders up to this size are verified before the first step: a second or two."""
CHUNK = 1 << 22


class DamagedShard(DataError):
    """The bytes of a shard do not match its manifest."""


class ShardCheck:
    """Hashes every shard of a folder once, now or in the background."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        sizes = [shard.tokens * manifest.token_bytes for shard in manifest.shards]
        self.num_bytes, self.num_read = sum(sizes), 0
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, say: Callable[[str], None]) -> None:
        """Verify a small folder now, raising DamagedShard; start a thread for a large one."""
        if self._thread is not None:
            return
        size = f"{self.num_bytes / 1e6:,.1f} MB in {len(self._manifest.shards)} shards"
        if self.num_bytes <= SMALL_BYTES:
            self._read()
            self.require_whole()
            say(f"[data] {size} match their sha256")
            return
        say(f"[data] {size} are verified against their sha256 in the background")
        self._thread = threading.Thread(target=self._read, name="shard check", daemon=True)
        self._thread.start()

    def require_whole(self) -> None:
        """Raise DamagedShard if damage was found so far; does not block."""
        if self._problem:
            raise DamagedShard(
                f"{self._problem}; its bytes have changed since it was prepared: copy it again, or "
                f"prepare the shards again (`nsa data verify {self._folder}` lists all of them)"
            )

    def settle(self, patience_s: float, say: Callable[[str], None]) -> None:
        """Wait for the verification to finish, and raise as above; log if it takes longer."""
        if self._thread is not None:
            self._thread.join(patience_s)
        self.require_whole()
        if self._thread is not None and self._thread.is_alive():
            say(
                f"[data] WARNING: the run ended after {self.num_read / 1e6:,.1f} of "
                f"{self.num_bytes / 1e6:,.1f} MB were verified against their sha256; "
                f"`nsa data verify {self._folder}` reads all"
            )

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        for shard in self._manifest.shards:
            self._problem = self._problem or self._look_at(shard)
            if self._problem or self._stop.is_set():
                return

    def _look_at(self, shard: Shard) -> str:
        path, digest = self._folder / shard.file, hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    self.num_read += len(chunk)
                    if self._stop.is_set():
                        return ""
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        found = digest.hexdigest()
        differs = f"{path}: sha256 is {found}, the manifest says {shard.sha256}"
        return "" if found == shard.sha256 else differs


# --- summary for `nsa data show` ---


def describe_shards(folder: Path) -> str:
    """Tokenizer, counts and a table of both sides; shards are not read."""
    manifest, sha256 = read_manifest(folder)
    counts = manifest.counts
    rows: list[tuple[str, ...]] = [("side", "shards", "documents", "tokens", "bytes")]
    for side in (TRAIN, VAL):
        shards = manifest.of(side)
        tokens = sum(shard.tokens for shard in shards)
        numbers = (len(shards), sum(s.documents for s in shards), tokens)
        rows.append((side, *(f"{n:,}" for n in (*numbers, tokens * manifest.token_bytes))))
    return "\n".join(
        [
            f"shards: {folder} (manifest {sha256[:12]})",
            f"tokenizer: {manifest.tokenizer}, {manifest.vocab:,} ids, end of document "
            f"{manifest.eos}, fingerprint {manifest.fingerprint[:12]}",
            f"documents: {counts.documents:,}, of which {counts.held_out:,} are held out; "
            f"{counts.empty:,} empty ones were dropped",
            f"tokens are {manifest.dtype}, little-endian",
            text_table(rows, right=[1, 2, 3, 4]),
        ]
    )
