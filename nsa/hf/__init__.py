"""Models of transformers on our operators: `register()` adds attention implementations."""

from typing import TYPE_CHECKING

from nsa import on_first_use

if TYPE_CHECKING:
    from nsa.hf.attention import register
    from nsa.hf.layout import Sizes, sizes

__all__ = ["Sizes", "register", "sizes"]

# transformers is imported on first use: the package is optional, and takes seconds.
__getattr__ = on_first_use(
    __name__,
    {"attention": ("register",), "layout": ("Sizes", "sizes")},
)
