"""Native Sparse Attention for PyTorch: the operator, the module, a language model, its training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.model import NSAAttention, NSACache, TinyLM
    from nsa.ops import BlockSpec, compress, nsa_attention, select_blocks

__version__ = "0.1.0"
__all__ = [
    "BlockSpec",
    "NSAAttention",
    "NSACache",
    "TinyLM",
    "compress",
    "nsa_attention",
    "select_blocks",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `nsa env` and other commands start without loading torch."""
    if name not in __all__:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    for module in ("nsa.ops", "nsa.model"):
        found = getattr(import_module(module), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module 'nsa' has no attribute {name!r}")
