"""`nsa data prepare`: tokenize local documents once into shards that every run can map."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from nsa.data.documents import TRAIN, VAL, Counts, read_documents
from nsa.data.encode import encode_sides
from nsa.data.errors import DataError
from nsa.data.shards import Manifest, Shard, write_manifest
from nsa.data.tokenizers import Ids, Tokenizer, id_type
from nsa.files import DurableFile

SHARD_TOKENS = 100_000_000
"""Minimum tokens per shard; it ends with the document that reaches this."""


def prepare(
    source: Path,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Write the shards of both sides into a new or empty folder, and the manifest last.

    The same documents and tokenizer give the same bytes for any number of workers (tokenizer
    threads). Memory holds a few documents per worker.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens={shard_tokens} is below 1; use 1 or more")
    if workers < 1:
        raise DataError(f"workers={workers} is below 1; use 1 or more")
    _claim(folder)
    counts = Counts()
    writers = {side: _SideWriter(folder, side, shard_tokens, say) for side in (TRAIN, VAL)}
    try:
        # One pass over the documents; each side appends to its own open shard.
        for side, ids in encode_sides(read_documents(source), tokenizer, counts, workers):
            writers[side].add(ids.astype(id_type(tokenizer.vocab), copy=False))
        if not counts.documents:
            raise DataError(
                f"{source} has no text (documents: {counts.empty}, all empty); nothing was "
                "written; use a file or folder with documents"
            )
        for writer in writers.values():
            writer.finish_shard()
        manifest = Manifest(
            tokenizer=tokenizer.name,
            fingerprint=tokenizer.fingerprint(),
            vocab=tokenizer.vocab,
            eos=tokenizer.eos,
            counts=counts,
            shards=writers[TRAIN].shards + writers[VAL].shards,
        )
        # Last: only a folder with a manifest counts as prepared.
        write_manifest(folder, manifest)
    except BaseException:  # including Ctrl-C: shards without a manifest are useless
        for writer in writers.values():
            writer.discard()
        raise
    return manifest


def _claim(folder: Path) -> None:
    """Create the folder; refuse a non-empty one, so that nothing is ever overwritten."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        first = min((entry.name for entry in folder.iterdir()), default=None)
    except OSError as error:
        raise DataError(f"{folder}: cannot be created or read ({error}); choose another") from None
    if first is not None:
        raise DataError(
            f"{folder} is not empty (it holds {first}); shards go into a new or empty folder; "
            "choose another, or remove it if an earlier preparation did not finish"
        )


class _SideWriter:
    """Writes the shards of one side, one after the other."""

    def __init__(
        self, folder: Path, side: str, shard_tokens: int, say: Callable[[str], None]
    ) -> None:
        self.shards: list[Shard] = []
        self._folder, self._side, self._limit, self._say = folder, side, shard_tokens, say
        self._file: DurableFile | None = None

    def add(self, ids: Ids) -> None:
        """Append a document; close the shard if it is long enough."""
        if self._file is None:
            name = f"{self._side}-{len(self.shards):05d}.bin"
            self._file, self._hash = DurableFile(self._folder / name), hashlib.sha256()
            self._tokens = self._documents = 0
        content = ids.tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._tokens += len(ids)
        self._documents += 1
        if self._tokens >= self._limit:
            self.finish_shard()

    def finish_shard(self) -> None:
        """Commit the open shard under its final name."""
        if self._file is None:
            return
        self._file.commit()
        shard = Shard(
            file=self._file.path.name,
            side=self._side,
            tokens=self._tokens,
            documents=self._documents,
            sha256=self._hash.hexdigest(),
        )
        self._file = None
        self.shards.append(shard)
        self._say(f"wrote {shard.file}: {shard.tokens:,} tokens, {shard.documents:,} documents")

    def discard(self) -> None:
        """Delete the open shard and all finished ones."""
        if self._file is not None:
            self._file.discard()
        for shard in self.shards:
            (self._folder / shard.file).unlink(missing_ok=True)
