"""From the data section of a config to training rows, held-out rows and their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nsa.config import DataConfig
from nsa.data.boundaries import packed_bounds
from nsa.data.corpus import read_works
from nsa.data.documents import read_documents
from nsa.data.errors import DataError
from nsa.data.fingerprint import fingerprint_of
from nsa.data.local import TRAIN, VAL, Counts, encode_all
from nsa.data.open_tokenizer import open_tokenizer
from nsa.data.rows import Rows, StreamRows, to_stream
from nsa.data.shards import open_shards
from nsa.data.split import split_works
from nsa.data.stream import Stream
from nsa.data.synthetic import CopyRows, SyntheticRows
from nsa.data.tokenizer import Tokenizer


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

    def bounds(self, batch: Tensor) -> Tensor | None:  # [B, S+1] int64 -> [documents + 1] int32
        """Where the documents of a batch on the host start; None where attention need not know."""
        return None if self.border is None else packed_bounds(batch, self.border)


def open_data(config: DataConfig, seq_len: int, seed: int) -> Data:
    """Open the source and the tokenizer that the config names."""
    if config.dataset == "fineweb_edu":
        raise DataError(
            f"data.dataset={config.dataset}: this version does not have it; it has shakespeare, "
            "synthetic, synthetic_copy, fineweb_edu_local or shards; use one of those"
        )
    tokenizer = open_tokenizer(config)
    data = _open_source(config, tokenizer, seq_len, seed)
    return data._replace(border=tokenizer.eos) if config.respect_documents else data


def _open_source(config: DataConfig, tokenizer: Tokenizer, seq_len: int, seed: int) -> Data:
    if config.dataset in _MADE:
        kind = _MADE[config.dataset]
        sides = [kind(tokenizer.vocab, seq_len, seed, side) for side in (TRAIN, VAL)]
        return Data(sides[0], sides[1], tokenizer)
    if config.dataset == "shakespeare":
        return _open_shakespeare(tokenizer, seq_len, seed)
    if config.dataset == "shards":
        return _open_shards(Path(config.local_path), tokenizer, seq_len, seed)
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
    return _cut(opened.train, opened.val, tokenizer, seq_len, seed, opened.sha256, counts)


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
        StreamRows(train, seq_len, seed, "training", content(TRAIN, train)),
        # A fixed seed for the held-out order: runs of different seeds are judged on the same rows.
        StreamRows(val, seq_len, 0, "held-out", content(VAL, val)),
        tokenizer,
        counts,
    )
