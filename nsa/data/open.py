"""From the data section of a config to training rows, held-out rows and their tokenizer."""

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
    """Both sides of a source; the held-out rows are never trained on."""

    train: Rows
    val: Rows
    # A Tokenizer; Any, as long as nsa.train asks for the byte tokenizer by its class.
    tokenizer: Tokenizer
    counts: Counts | None = None
    """What became of the documents, where the source has documents of its own."""
    border: int | None = None
    """The end mark that attention does not look across; None where it may."""
    check: ShardCheck | None = None
    """Of the bytes on the disk, where a manifest says what they must be."""

    def require_whole(self) -> None:
        """Raise DamagedShard where the check of its bytes has found damage; nobody waits for it."""
        if self.check is not None:
            self.check.require_whole()

    def bounds(self, batch: Tensor) -> Tensor | None:  # [B, S+1] int64 -> [documents + 1] int32
        """Where the documents of a batch on the host start; None where attention need not know."""
        return None if self.border is None else packed_bounds(batch, self.border)


HELD_OUT_DOCUMENTS = 128
"""Documents of a stream that are held out for evaluation: the first so many that the hash of their
words puts there, about one in twenty. All others of that side are left out of training, too."""


def open_data(
    config: DataConfig,
    seq_len: int,
    seed: int,
    *,
    report_docs: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Data:
    """Open the source and the tokenizer that the config names.

    `report_docs`: a source that streams says how far it is every so many documents.
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
    if config.dataset in _MADE:
        kind = _MADE[config.dataset]
        sides = [kind(tokenizer.vocab, seq_len, seed, side) for side in (TRAIN, VAL)]
        return Data(sides[0], sides[1], tokenizer)
    if config.dataset == "shakespeare":
        return _open_shakespeare(tokenizer, seq_len, seed)
    if config.dataset == "shards":
        return _open_shards(Path(config.local_path), tokenizer, seq_len, seed)
    if config.dataset == "fineweb_edu":
        return _open_hub(config, tokenizer, seq_len, seed, report, say)
    return _open_local(Path(config.local_path), tokenizer, seq_len, seed)


_MADE = {"synthetic": SyntheticRows, "synthetic_copy": CopyRows}


def _open_shakespeare(tokenizer: Tokenizer, seq_len: int, seed: int) -> Data:
    split = split_works(read_works().values())
    train, val = (Stream([to_stream(side, tokenizer)]) for side in split)
    return _cut(train, val, tokenizer, seq_len, seed)


def _open_local(path: Path, tokenizer: Tokenizer, seq_len: int, seed: int) -> Data:
    """Tokenize everything into memory; for text that does not fit, there are shards."""
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
    """Stream; only the held-out documents are kept in memory."""
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
    """Cut both streams into rows; `sha256` stands for their tokens where it is known."""

    def content(side: str, stream: Stream) -> str:
        tokens = sha256 or stream.sha256()
        return fingerprint_of(side=side, tokens=tokens, tokenizer=tokenizer.fingerprint())

    return Data(
        ArrayRows(train, seq_len, seed, "training", content(TRAIN, train)),
        # A fixed seed for the held-out order: runs of different seeds are judged on the same rows.
        ArrayRows(val, seq_len, 0, "held-out", content(VAL, val)),
        tokenizer,
        counts,
    )
