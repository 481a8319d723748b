"""From the data section of a config to training rows, held-out rows and their tokenizer."""

from __future__ import annotations

from typing import NamedTuple

from nsa.config import DataConfig
from nsa.data.corpus import read_works
from nsa.data.errors import DataError
from nsa.data.rows import Rows, StreamRows, SyntheticRows, to_stream
from nsa.data.split import split_works
from nsa.data.tokenizer import ByteTokenizer


class Data(NamedTuple):
    """Both sides of a source; the held-out rows are never trained on."""

    train: Rows
    val: Rows
    tokenizer: ByteTokenizer


def open_data(config: DataConfig, seq_len: int, seed: int) -> Data:
    """Open the source and the tokenizer that the config names."""
    if config.tokenizer != ByteTokenizer.name:
        raise _missing("data.tokenizer", config.tokenizer, ByteTokenizer.name)
    tokenizer = ByteTokenizer()
    if config.dataset == "shakespeare":
        return _open_shakespeare(tokenizer, seq_len, seed)
    if config.dataset == "synthetic":
        sides = [SyntheticRows(tokenizer.vocab, seq_len, seed, s) for s in ("train", "val")]
        return Data(sides[0], sides[1], tokenizer)
    raise _missing("data.dataset", config.dataset, "shakespeare or synthetic")


def _open_shakespeare(tokenizer: ByteTokenizer, seq_len: int, seed: int) -> Data:
    split = split_works(read_works().values())
    train = StreamRows(to_stream(split.train, tokenizer), seq_len, seed, "training")
    # The held-out order has a fixed seed: runs with different seeds are judged on the same rows.
    val = StreamRows(to_stream(split.val, tokenizer), seq_len, 0, "held-out")
    return Data(train, val, tokenizer)


def _missing(key: str, given: str, allowed: str) -> DataError:
    return DataError(f"{key}={given}: this version does not have it; it has {allowed}; use that")
