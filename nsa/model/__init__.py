"""NSAAttention, its cache, the dense twin, and the language model around them."""

from nsa.model.attention import NSAAttention
from nsa.model.cache import NSACache
from nsa.model.dense import DenseAttention, DenseCache
from nsa.model.lm import ModelCache, TinyLM
from nsa.model.paged import PagedModelCache
from nsa.model.stats import AttentionStats

__all__ = [
    "AttentionStats",
    "DenseAttention",
    "DenseCache",
    "ModelCache",
    "NSAAttention",
    "NSACache",
    "PagedModelCache",
    "TinyLM",
]
