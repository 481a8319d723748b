"""Recording of a call: its launches, and where their pointers lie.

A call can be replayed if it consists of launches by launcher.start, allocations and views: that is
all that a tape repeats. Anything else is an obstacle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.ops.machine import interpreted
from nsa.ops.triton import launcher
from nsa.ops.triton.launcher import CachedLaunch, Rows
from nsa.ops.triton.replay.tape import Form, InterpretedTape, Launched, Pointer, Tape, rounded

WORKSPACE = -1
"""Number of the block that a recorded call has for itself."""


def record(
    function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], num_own: int
) -> tuple[Sequence[Tensor], Tape | None]:
    """The results of a function of tensors, and its tape; None if it cannot be replayed.

    The first `num_own` results have memory of their own in every replay.
    """
    # Other objects, so that a tensor that is given twice counts as two: later ones may differ.
    aliases = [x.detach() for x in given]
    recorder = Recorder(aliases)
    with launcher.recorded_by(recorder), recorder:
        results = function(*aliases)
    return results, recorder.tape(results, num_own)


class Block(NamedTuple):
    """Memory that was allocated within a recorded call."""

    start: int
    num_bytes: int


ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


class Recorder(TorchDispatchMode):
    """Sees the allocations of a call as a dispatch mode, and its launches as launcher.start."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.blocks: list[Block] = []
        self.launches: list[Launched] = []
        self.obstacle = ""
        """Why the call cannot be replayed."""
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_paused or func.is_view:
            return result
        if func in ALLOCATIONS:
            self.blocks.append(_block_of(result))
        else:
            self.obstacle = f"{func} is not a launch"
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within a launch: what Triton itself does is no part of the call."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def launched(self, known: CachedLaunch | None, tensors: tuple[Any, ...]) -> None:
        """Note a launch; None: it did not take place."""
        if known is None:
            self.obstacle = "kernels are compiled, not launched"
        elif known.compiled is not None:
            self.launches.append(Launched(known, [self._pointer(x) for x in tensors]))

    def _pointer(self, x: Any) -> Pointer | None:
        if x is None:
            return None
        rows, x = (_without_tensor(x), x.base) if isinstance(x, Rows) else (None, x)
        if not isinstance(x, Tensor):
            self.obstacle = f"a kernel takes a {type(x).__name__}"
            return None
        form = Form.of(x)
        for number, tensor in enumerate(self.given):
            if tensor is x:
                return Pointer(number, 0, form, rows)
        if x.numel() == 0:
            return Pointer(WORKSPACE, 0, form, rows)  # never read
        found = self._block_at(x.data_ptr())
        if found is None:
            self.obstacle = "a kernel reads memory that is not of this call"
            return None
        offset = x.data_ptr() - self.blocks[found].start
        return Pointer(len(self.given) + found, offset, form, rows)

    def _block_at(self, address: int) -> int | None:
        """The latest block there: what was freed may be allocated again."""
        for number in reversed(range(len(self.blocks))):
            start, num_bytes = self.blocks[number]
            if start <= address < start + num_bytes:
                return number
        return None

    def tape(self, results: Sequence[Tensor], num_own: int) -> Tape | None:
        """What was recorded, if it can be replayed."""
        where = self._places_of(results)
        if self.obstacle:
            return None
        num_given = len(self.given)
        own = num_given + len(results)
        inside = self._fitted([i for i in self._lives() if i not in where])
        places = {i: (num_given + place, 0) for i, place in where.items()}
        places |= {i: (own, offset) for i, offset in inside.items()}
        workspace_bytes = max((inside[i] + self._step_of(i) for i in inside), default=0)
        launches = [
            Launched(known, [_moved(x, places, num_given, own) for x in arguments])
            for known, arguments in self.launches
        ]
        kind = InterpretedTape if interpreted() else Tape
        forms, device = [Form.of(x) for x in results], self.given[0].device
        return kind(launches, forms, workspace_bytes, device, num_own)

    def _places_of(self, results: Sequence[Tensor]) -> dict[int, int]:
        """Which block is which result."""
        where: dict[int, int] = {}
        for place, x in enumerate(results):
            if x.numel() == 0:
                continue
            number = self._block_at(x.data_ptr())
            whole = x.is_contiguous() and number is not None and number not in where
            if number is None or not whole or self.blocks[number] != _block_of(x):
                self.obstacle = f"result {place} is not a block of its own"
                break
            where[number] = place
        return where

    def _lives(self) -> dict[int, tuple[int, int]]:
        """First and last launch that uses each block."""
        lives: dict[int, tuple[int, int]] = {}
        for step, (_, arguments) in enumerate(self.launches):
            for x in arguments:
                if x is not None and x.block >= len(self.given):
                    number = x.block - len(self.given)
                    lives[number] = (lives.get(number, (step, step))[0], step)
        return lives

    def _fitted(self, blocks: list[int]) -> dict[int, int]:
        """Offsets in the workspace: blocks that live at the same time do not overlap."""
        lives = self._lives()
        offsets: dict[int, int] = {}
        for i in sorted(blocks, key=lambda i: -self.blocks[i].num_bytes):
            first, last = lives[i]
            others = [j for j in offsets if lives[j][0] <= last and first <= lives[j][1]]
            offset = 0
            for start, stop in sorted((offsets[j], offsets[j] + self._step_of(j)) for j in others):
                if offset + self._step_of(i) <= start:
                    break
                offset = max(offset, stop)
            offsets[i] = offset
        return offsets

    def _step_of(self, block: int) -> int:
        return rounded(self.blocks[block].num_bytes)


def _moved(
    x: Pointer | None, places: dict[int, tuple[int, int]], num_given: int, own: int
) -> Pointer | None:
    """The pointer in the blocks of a tape."""
    if x is None or 0 <= x.block < num_given:
        return x
    block, offset = (own, 0) if x.block == WORKSPACE else places[x.block - num_given]
    return x._replace(block=block, offset=offset + x.offset)


def _block_of(x: Tensor) -> Block:
    return Block(x.data_ptr(), x.numel() * x.element_size())


def _without_tensor(rows: Rows) -> Rows:
    """The tiles alone: a tape must not keep the memory of the call that it was recorded from."""
    rows = copy.copy(rows)
    rows.base = None
    return rows
