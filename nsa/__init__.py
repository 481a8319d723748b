"""Native Sparse Attention for PyTorch: the operator, the module, a language model, its training."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.model import NSAAttention, NSACache, TinyLM
    from nsa.ops import BlockSpec, compress, nsa_attention, select_blocks, sparse_attention

__version__ = "0.1.0"
__all__ = [
    "BlockSpec",
    "NSAAttention",
    "NSACache",
    "TinyLM",
    "compress",
    "nsa_attention",
    "select_blocks",
    "sparse_attention",
]


def on_first_use(package: str, names: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a lazy `__getattr__` for a package: each name is imported on first use.

    `names` maps modules of the package to their names. Importing another module of the package then
    does not import these: torch takes seconds, and commands that only read files do not need it.
    No name may equal that of a module, because importing the module would replace it.
    """
    homes = {name: f"{package}.{module}" for module, held in names.items() for name in held}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


__getattr__ = on_first_use(
    __name__,
    {
        "ops": ("BlockSpec", "compress", "nsa_attention", "select_blocks", "sparse_attention"),
        "model": ("NSAAttention", "NSACache", "TinyLM"),
    },
)
