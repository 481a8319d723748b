"""A function over many things on several threads, with the results in the order of the things."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD = 4
"""Things per thread that are read before their turn: memory holds no more."""
Thing = TypeVar("Thing")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Thing], Result], things: Iterable[Thing], workers: int
) -> Iterator[Result]:
    """Yield what `map` yields; an error comes where `map` would raise it."""
    if workers == 1:
        yield from map(function, things)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="ahead") as pool:
        try:
            for thing in things:
                waiting.append(pool.submit(function, thing))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # nobody wants the others any more
            for future in waiting:
                future.cancel()
