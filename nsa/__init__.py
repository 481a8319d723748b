"""Native Sparse Attention for PyTorch: the operator, the module, a language model, its training."""

import sys
from collections.abc import Callable, Mapping
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


def on_first_use(package: str, names: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports each of its names when it is first used.

    `names` has them by module of the package. Whoever imports one of the other modules does not
    pay for these: torch takes seconds, and a command that only reads files has no use for it.
    None of the names may be that of a module: its import would put the module in their place.
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
        "ops": ("BlockSpec", "compress", "nsa_attention", "select_blocks"),
        "model": ("NSAAttention", "NSACache", "TinyLM"),
    },
)
