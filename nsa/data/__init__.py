"""Data: tokenizers, sources, the held-out split, prepared shards, and rows in a fixed order."""

from typing import TYPE_CHECKING

from nsa import on_first_use

if TYPE_CHECKING:
    from nsa.data.array_rows import ArrayRows as ArrayRows
    from nsa.data.array_rows import CopyRows as CopyRows
    from nsa.data.array_rows import Rows as Rows
    from nsa.data.array_rows import SyntheticRows as SyntheticRows
    from nsa.data.array_rows import cu_seqlens as cu_seqlens
    from nsa.data.array_rows import document_starts as document_starts
    from nsa.data.array_rows import packed_bounds as packed_bounds
    from nsa.data.errors import DataError as DataError
    from nsa.data.errors import SourceLost as SourceLost
    from nsa.data.errors import WaitEnded as WaitEnded
    from nsa.data.errors import end_process as end_process
    from nsa.data.errors import within as within
    from nsa.data.loader import Loader as Loader
    from nsa.data.open import Data as Data
    from nsa.data.open import open_data as open_data
    from nsa.data.shards import DamagedShard as DamagedShard
    from nsa.data.shards import ShardCheck as ShardCheck
    from nsa.data.tokenizers import ByteTokenizer as ByteTokenizer
    from nsa.data.tokenizers import Tokenizer as Tokenizer
    from nsa.data.tokenizers import open_tokenizer as open_tokenizer

__getattr__ = on_first_use(
    __name__,
    {
        "array_rows": (
            "ArrayRows",
            "CopyRows",
            "Rows",
            "SyntheticRows",
            "cu_seqlens",
            "document_starts",
            "packed_bounds",
        ),
        "errors": ("DataError", "SourceLost", "WaitEnded", "end_process", "within"),
        "loader": ("Loader",),
        "open": ("Data", "open_data"),
        "shards": ("DamagedShard", "ShardCheck"),
        "tokenizers": ("ByteTokenizer", "Tokenizer", "open_tokenizer"),
    },
)
