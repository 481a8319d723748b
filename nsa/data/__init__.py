"""Data: tokenizers, sources, the held-out split, prepared shards, and rows in a fixed order."""

from typing import TYPE_CHECKING

from nsa import on_first_use

if TYPE_CHECKING:
    from nsa.data.boundaries import cu_seqlens as cu_seqlens
    from nsa.data.boundaries import document_starts as document_starts
    from nsa.data.boundaries import packed_bounds as packed_bounds
    from nsa.data.choose_tokenizer import open_tokenizer as open_tokenizer
    from nsa.data.deadline import end_process as end_process
    from nsa.data.deadline import within as within
    from nsa.data.errors import DataError as DataError
    from nsa.data.errors import SourceLost as SourceLost
    from nsa.data.errors import WaitEnded as WaitEnded
    from nsa.data.loader import Loader as Loader
    from nsa.data.open import Data as Data
    from nsa.data.open import open_data as open_data
    from nsa.data.rows import Rows as Rows
    from nsa.data.rows import StreamRows as StreamRows
    from nsa.data.shard_check import DamagedShard as DamagedShard
    from nsa.data.shard_check import ShardCheck as ShardCheck
    from nsa.data.synthetic import CopyRows as CopyRows
    from nsa.data.synthetic import SyntheticRows as SyntheticRows
    from nsa.data.tokenizer import ByteTokenizer as ByteTokenizer
    from nsa.data.tokenizer import Tokenizer as Tokenizer

__getattr__ = on_first_use(
    __name__,
    {
        "boundaries": ("cu_seqlens", "document_starts", "packed_bounds"),
        "choose_tokenizer": ("open_tokenizer",),
        "deadline": ("end_process", "within"),
        "errors": ("DataError", "SourceLost", "WaitEnded"),
        "loader": ("Loader",),
        "open": ("Data", "open_data"),
        "rows": ("Rows", "StreamRows"),
        "shard_check": ("DamagedShard", "ShardCheck"),
        "synthetic": ("CopyRows", "SyntheticRows"),
        "tokenizer": ("ByteTokenizer", "Tokenizer"),
    },
)
