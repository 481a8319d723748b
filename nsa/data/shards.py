"""Prepared shards as a run reads them: mapped, never loaded whole, and checked when opened."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from nsa.data.errors import DataError
from nsa.data.manifest import Manifest, read_manifest, size_problem
from nsa.data.split import TRAIN, VAL
from nsa.data.stream import Stream
from nsa.data.tokenizer import Tokenizer, id_type


class OpenShards(NamedTuple):
    """Both sides of a folder, and the hash of its manifest."""

    train: Stream
    val: Stream
    sha256: str
    manifest: Manifest


def open_shards(folder: Path, tokenizer: Tokenizer) -> OpenShards:
    """Map every shard of the folder, after its size and the tokenizer were checked."""
    manifest, sha256 = read_manifest(folder)
    if manifest.fingerprint != tokenizer.fingerprint():
        raise DataError(
            f"{folder} was prepared with the tokenizer {_name(manifest)}, the config has "
            f"{tokenizer.name} of {tokenizer.vocab} ids, fingerprint {tokenizer.fingerprint()[:12]}"
            "; set data.tokenizer (and tokenizer_path, eos) to the first, or prepare again"
        )
    sides = [_map_side(folder, manifest, side) for side in (TRAIN, VAL)]
    return OpenShards(sides[0], sides[1], sha256, manifest)


def _map_side(folder: Path, manifest: Manifest, side: str) -> Stream:
    parts, dtype = [], id_type(manifest.vocab)
    for shard in manifest.of(side):
        if problem := size_problem(folder, manifest, shard):
            raise DataError(f"{problem}; copy or prepare the shards again")
        mapped = np.memmap(folder / shard.file, dtype=dtype, mode="r", shape=(shard.tokens,))
        parts.append(np.asarray(mapped))  # the same pages, without memmap's slow slicing
    return Stream(parts)


def _name(manifest: Manifest) -> str:
    return f"{manifest.tokenizer} of {manifest.vocab} ids, fingerprint {manifest.fingerprint[:12]}"
