"""Fallback counters: calls that did not run as requested, by layer, branch and reason.

Decisions come from static facts, so a count that rises means that a kind of call takes another
path, not that something failed. Each distinct fallback is logged once, through the logger `nsa`. In
a compiled model a call is counted when it is traced, without its layer.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch

LOGGER = logging.getLogger("nsa")


class Fallback(NamedTuple):
    """Key of a counter."""

    layer: int | None
    """Index of the layer, where the model gave it."""
    branch: str
    """cmp, sel, win, or all for the whole backend."""
    reason: str


# A context variable, so that code deep in the operator knows its layer without an argument.
_layer: ContextVar[int | None] = ContextVar("nsa_layer", default=None)
_counts: Counter[Fallback] = Counter()
_lock = threading.Lock()  # checkpointed layers run again in autograd's threads


def record(branch: str, reason: str, layer: int | None = None) -> None:
    """Count a fallback of this layer, or of the one that `in_layer` names."""
    key = Fallback(_layer.get() if layer is None else layer, branch, reason)
    with _lock:
        _counts[key] += 1
        is_new = _counts[key] == 1
    if is_new:
        where = "" if key.layer is None else f" of layer {key.layer}"
        LOGGER.warning("fallback, branch %s%s: %s", branch, where, reason)


def counts() -> dict[Fallback, int]:
    """How often each fallback was taken since the start or the last reset."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Reset all counters; a fallback that happens again is logged again."""
    with _lock:
        _counts.clear()


def in_layer(layer: int | None) -> AbstractContextManager[None]:
    """Context in which fallbacks are recorded for this layer."""
    if layer is None or torch.compiler.is_compiling():  # Dynamo cannot trace context variables
        return nullcontext()
    return _named(layer)


@contextmanager
def _named(layer: int) -> Iterator[None]:
    token = _layer.set(layer)
    try:
        yield
    finally:
        _layer.reset(token)
