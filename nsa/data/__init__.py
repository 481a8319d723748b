"""Data: tokenizers, sources, the held-out split, prepared shards, and rows in a fixed order."""

from nsa.data.boundaries import cu_seqlens, document_starts, packed_bounds
from nsa.data.errors import DataError
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
    "Rows",
    "StreamRows",
    "SyntheticRows",
    "Tokenizer",
    "cu_seqlens",
    "document_starts",
    "open_data",
    "open_tokenizer",
    "packed_bounds",
]
