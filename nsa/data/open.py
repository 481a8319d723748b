"""Open the data section of a config: training rows, held-out rows and their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nsa.config import DataConfig
from nsa.config.env import read
from nsa.data.array_rows import (
    ArrayRows,
    CopyRows,
    Rows,
    Stream,
    SyntheticRows,
    open_shards,
    packed_bounds,
    to_stream,
)
from nsa.data.documents import (
    TRAIN,
    VAL,
    Counts,
    fingerprint_of,
    read_documents,
    read_works,
    split_works,
)
from nsa.data.encode import Report, encode_all, first_held_out
from nsa.data.hub import HubDocuments
from nsa.data.shards import ShardCheck
from nsa.data.streamed_rows import StreamedRows
from nsa.data.tokenizers import Tokenizer, open_tokenizer


class Data(NamedTuple):
    """Both sides of a source; held-out rows are never trained on."""

    train: Rows
    val: Rows
    # A Tokenizer; typed Any while nsa.train distinguishes the byte tokenizer by its class.
    tokenizer: Tokenizer
    counts: Counts | None = None
    """Document counts, if the source has documents."""
    border: int | None = None
    """EOS id that attention must not cross; None if it may."""
    check: ShardCheck | None = None
    """Checksum verification of the shards, if there is a manifest."""

    def require_whole(self) -> None:
        """Raise DamagedShard if verification has found damage so far; does not block."""
        if self.check is not None:
            self.check.require_whole()

    def bounds(self, batch: Tensor) -> Tensor | None:  # [B, S+1] int64 -> [documents + 1] int32
        """cu_seqlens of a batch on the host; None if attention may cross documents."""
        return None if self.border is None else packed_bounds(batch, self.border)


HELD_OUT_DOCUMENTS = 128
"""Held-out documents of a stream: the first ones that the hash rule puts on that side, about one in
twenty. All other documents on that side are not trained on either."""


def open_data(
    config: DataConfig,
    seq_len: int,
    seed: int,
    *,
    report_docs: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Data:
    """Open the source and the tokenizer named by the config.

    `report_docs`: a streaming source logs its progress every so many documents; 0 never.
    """
    tokenizer = open_tokenizer(config)
    data = _open_source(config, tokenizer, seq_len, seed, Report(report_docs, say), say)
    return data._replace(border=tokenizer.eos) if config.respect_documents else data


def _open_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    seed: int,
    report: Report,
    say: Callable[[str], None],
) -> Data:
    if config.dataset in _SYNTHETIC:
        kind = _SYNTHETIC[config.dataset]
        sides = [kind(tokenizer.vocab, seq_len, seed, side) for side in (TRAIN, VAL)]
        return Data(sides[0], sides[1], tokenizer)
    if config.dataset == "shakespeare":
        return _open_shakespeare(tokenizer, seq_len, seed)
    if config.dataset == "shards":
        return _open_shards(Path(config.local_path), tokenizer, seq_len, seed)
    if config.dataset == "fineweb_edu":
        return _open_hub(config, tokenizer, seq_len, seed, report, say)
    return _open_local(Path(config.local_path), tokenizer, seq_len, seed)


_SYNTHETIC = {"synthetic": SyntheticRows, "synthetic_copy": CopyRows}


def _open_shakespeare(tokenizer: Tokenizer, seq_len: int, seed: int) -> Data:
    split = split_works(read_works().values())
    train, val = (Stream([to_stream(side, tokenizer)]) for side in split)
    return _cut(train, val, tokenizer, seq_len, seed)


def _open_local(path: Path, tokenizer: Tokenizer, seq_len: int, seed: int) -> Data:
    """Tokenize everything into memory; use shards for text that does not fit."""
    counts = Counts()
    tokens = encode_all(read_documents(path), tokenizer, counts)
    train, val = Stream([tokens[TRAIN]]), Stream([tokens[VAL]])
    return _cut(train, val, tokenizer, seq_len, seed, counts=counts)


def _open_shards(folder: Path, tokenizer: Tokenizer, seq_len: int, seed: int) -> Data:
    opened = open_shards(folder, tokenizer)
    counts = opened.manifest.counts
    data = _cut(opened.train, opened.val, tokenizer, seq_len, seed, opened.sha256, counts)
    return data._replace(check=ShardCheck(folder, opened.manifest))


def _open_hub(
    config: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    seed: int,
    report: Report,
    say: Callable[[str], None],
) -> Data:
    """Stream the training side; only held-out documents are kept in memory."""
    documents = HubDocuments(config, say)
    held_out = Stream([first_held_out(documents, tokenizer, HELD_OUT_DOCUMENTS)])
    content = fingerprint_of(
        side=VAL,
        documents=documents.fingerprint(),
        held_out=HELD_OUT_DOCUMENTS,
        tokenizer=tokenizer.fingerprint(),
    )
    doc_batch = max(1, read("NSA_FWE_DOC_BATCH"))
    return Data(
        StreamedRows(documents, tokenizer, seq_len, seed, doc_batch=doc_batch, report=report),
        # Seed 0: the order of evaluation does not depend on the run's seed.
        ArrayRows(held_out, seq_len, 0, "held-out", content),
        tokenizer,
    )


def _cut(
    train: Stream,
    val: Stream,
    tokenizer: Tokenizer,
    seq_len: int,
    seed: int,
    sha256: str = "",
    counts: Counts | None = None,
) -> Data:
    """Cut both streams into rows; `sha256` identifies their tokens, if known."""

    def content(side: str, stream: Stream) -> str:
        # Hashing all tokens of a large corpus takes minutes; the manifest's hash stands for them.
        tokens = sha256 or stream.sha256()
        return fingerprint_of(side=side, tokens=tokens, tokenizer=tokenizer.fingerprint())

    return Data(
        ArrayRows(train, seq_len, seed, "training", content(TRAIN, train)),
        # Fixed seed: runs with different seeds evaluate on the same held-out rows.
        ArrayRows(val, seq_len, 0, "held-out", content(VAL, val)),
        tokenizer,
        counts,
    )
