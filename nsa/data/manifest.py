"""manifest.json: what a folder of prepared shards holds. It is written last: without it, nothing.

Whoever only reads or checks a folder needs neither numpy nor torch; shards.py maps its tokens.

Schema, version 1, one JSON object:
  schema       1
  tokenizer    {"name": byte | gpt2 | hf, "fingerprint": sha256}
  vocab, eos   number of ids, and the id that ends a document
  dtype        uint8 | uint16 | uint32, little-endian: the smallest that holds the vocabulary
  documents, empty, held_out    documents on both sides; dropped as empty; on the side of val
  shards       [{"file", "side": train | val, "tokens", "documents", "sha256"}, ...] in the order
               of the stream; a document never crosses from one shard into the next
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.data.durable import DurableFile
from nsa.data.errors import DataError
from nsa.data.split import TRAIN, VAL, Counts

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
        """The type of the tokens in every file."""
        return f"uint{8 * self.token_bytes}"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return id_bytes(self.vocab)

    def of(self, side: str) -> list[Shard]:
        """Return the shards of a side, in the order of its stream."""
        return [shard for shard in self.shards if shard.side == side]


def id_bytes(vocab: int) -> int:
    """Return the bytes of the smallest unsigned integer that holds every id below `vocab`."""
    assert 1 <= vocab <= 2**32, f"a vocabulary of {vocab} ids does not fit 32 bits"
    return 1 if vocab <= 2**8 else 2 if vocab <= 2**16 else 4


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest, all or nothing; the folder counts as complete from then on."""
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
    """Return the manifest and its sha256, which stands for everything in the folder."""
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
    """Read every byte, and return what is wrong: an empty list means all is well."""
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
    """Return what is wrong with the size of a shard: its bytes are not read."""
    path, expected = folder / shard.file, shard.tokens * manifest.token_bytes
    if not path.is_file():
        return f"{path}: missing, the manifest says {expected} bytes"
    found = path.stat().st_size
    return "" if found == expected else f"{path}: expected {expected} bytes, found {found}"


def _parse(content: dict[str, Any]) -> Manifest:
    """Take the content apart; every ValueError here says what is wrong with it."""
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
    if type(value) is not int or value < least:  # a bool is an int, too
        raise ValueError(f"{key}={value!r} is not a whole number >= {least}")
    return value
