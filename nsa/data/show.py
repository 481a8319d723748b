"""What a folder of shards holds, as text for a person."""

from __future__ import annotations

from pathlib import Path

from nsa.config.describe import text_table
from nsa.data.manifest import read_manifest
from nsa.data.split import TRAIN, VAL


def describe_shards(folder: Path) -> str:
    """Return the tokenizer, the counts and a table of the sides; the shards are not read."""
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
