"""Data: tokenizers, sources, the held-out split, and rows in a fixed order."""

from nsa.data.errors import DataError
from nsa.data.open import Data, open_data
from nsa.data.rows import Rows, StreamRows, SyntheticRows
from nsa.data.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "Data",
    "DataError",
    "Rows",
    "StreamRows",
    "SyntheticRows",
    "open_data",
]
