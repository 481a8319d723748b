"""Data: tokenizers, sources, the held-out split, prepared shards, and rows in a fixed order."""

from nsa.data.boundaries import cu_seqlens, document_starts, packed_bounds
from nsa.data.deadline import end_process, within
from nsa.data.errors import DataError, SourceLost, WaitEnded
from nsa.data.loader import Loader
from nsa.data.open import Data, open_data
from nsa.data.open_tokenizer import open_tokenizer
from nsa.data.rows import Rows, StreamRows
from nsa.data.synthetic import CopyRows, SyntheticRows
from nsa.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "CopyRows",
    "Data",
    "DataError",
    "Loader",
    "Rows",
    "SourceLost",
    "StreamRows",
    "SyntheticRows",
    "Tokenizer",
    "WaitEnded",
    "cu_seqlens",
    "document_starts",
    "end_process",
    "open_data",
    "open_tokenizer",
    "packed_bounds",
    "within",
]
