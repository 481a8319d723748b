"""NVTX ranges around the parts of attention, for profilers; NSA_NVTX=1 turns them on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from nsa.config.env import read

# One shared object: a range that is off must cost nothing in every call.
_OFF = nullcontext()


class _Range:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.cuda.nvtx.range_pop()


def nvtx(name: str) -> AbstractContextManager[None]:
    """A range of this name; a no-op when off, without CUDA, or while torch.compile traces."""
    if torch.compiler.is_compiling() or not read("NSA_NVTX") or not _has_cuda():
        return _OFF
    return _Range(name)


def _has_cuda() -> bool:
    return torch.cuda.is_available()
