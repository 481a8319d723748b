"""Replay of a call: its launches and its memory, recorded once for all calls of its form.

Sizes, keys, views and allocations of a short call take the host longer than its kernels take the
GPU, and none of them depends on data. So the first call of a form is recorded: which kernels it
launches, and where their pointers lie: in a given tensor, in a result, or in memory of its own.
Later calls allocate the results and one workspace, and launch.

A call can be replayed if it consists of launches by launcher.start, allocations and views. A tape
does not change once it is made: threads can share it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.ops.machine import interpreted
from nsa.ops.triton import launcher
from nsa.ops.triton.launcher import ALIGNMENT, CachedLaunch, Rows

BLOCK_STEP = 512
"""Bytes at whose multiples blocks begin, as in torch's allocator."""
MAX_DESCRIPTORS = 1024
"""Descriptors that a tape keeps; a full cache is cleared."""
WORKSPACE = -1
"""Number of the block that a recorded call has for itself."""

Base = Any
"""The start of a block: its address; in the interpreter a tensor."""


class Form(NamedTuple):
    """Size, strides and dtype of a tensor."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Form:
        return Form(tuple(x.shape), x.stride(), x.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=device)


class Pointer(NamedTuple):
    """An argument of a launch: what lies some bytes after the start of a block."""

    block: int
    offset: int
    form: Form
    rows: Rows | None = None
    """The tiles of its descriptor, without a tensor, where the kernel takes one."""


class Described(NamedTuple):
    """An argument that is a descriptor."""

    block: int
    offset: int
    pointer: Pointer
    rows: Rows
    meta: Any
    """How it is encoded; see launcher.Caller."""


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


# --- A recorded call ---


class Tape:
    """Launches and memory. Its blocks are the given tensors, the results and a workspace."""

    def __init__(
        self,
        launches: list[Launched],
        results: list[Form],
        workspace_bytes: int,
        device: torch.device,
        num_own: int,
    ) -> None:
        self.device, self.results, self.num_own = device, results, num_own
        self.workspace_bytes = workspace_bytes
        self.kept_offsets, self.kept_bytes = _in_a_row(map(_num_bytes, results[num_own:]))
        # What launches pick their arguments from: constants, the stream, addresses, descriptors.
        self.constants: list[Any] = []
        self.plain: list[Pointer] = []
        self.described: list[Described] = []
        picked = [self._arguments(one) for one in launches]
        self.steps = [(run, itemgetter(*map(self._place, values))) for run, values in picked]
        self._descriptors: dict[tuple[int, int], Any] = {}
        self._index = -1 if device.index is None else device.index

    def _arguments(self, launched: Launched) -> tuple[Any, list[tuple[Any, int]]]:
        """The function that launches, and for each argument one of the lists and its place there;
        None: the stream."""
        known, arguments = launched
        caller = launcher.caller_of(known)
        metas = iter(caller.metas)
        places = [*self._constants(*known.grid), (None, 0), *self._constants(*caller.head)]
        for x in arguments:
            if x is None:
                places += self._constants(None)
            elif x.rows is None:
                self.plain += [] if x in self.plain else [x]
                places.append((self.plain, self.plain.index(x)))
            else:
                meta = next(metas, None)
                self.described.append(Described(x.block, x.offset, x, x.rows, meta))
                places.append((self.described, len(self.described) - 1))
                # An encoded descriptor is followed by its sizes and strides.
                if meta is not None:
                    places += self._constants(*x.rows.shape, *x.rows.strides)
        return caller.run, [*places, *self._constants(*known.rest)]

    def _constants(self, *values: Any) -> list[tuple[Any, int]]:
        first = len(self.constants)
        self.constants += values
        return [(self.constants, first + i) for i in range(len(values))]

    def _place(self, place: tuple[Any, int]) -> int:
        """Where an argument is among all values."""
        values, number = place
        stream = len(self.constants)
        if values is None:
            return stream
        firsts = {id(self.constants): 0, id(self.plain): stream + 1}
        return number + firsts.get(id(values), stream + 1 + len(self.plain))

    def repeat(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """The results for these tensors. None where the call has to run anew: an address is not
        aligned, or a profiler looks at every launch."""
        bases = self.bases(given)
        return None if bases is None else self.repeat_at(bases)

    def repeat_at(self, bases: list[Base]) -> list[Tensor]:
        """The results for what lies at bases that `bases` has found, or `kept`."""
        results = [form.empty(self.device) for form in self.results]
        self._launch([*bases, *self._starts(results)])
        return results

    def repeat_packed(self, given: Sequence[Tensor]) -> tuple[list[Tensor], Tensor] | None:
        """Like `repeat`, with all results but the first `num_own` in one buffer."""
        bases = self.bases(given)
        if bases is None:
            return None
        results = [form.empty(self.device) for form in self.results[: self.num_own]]
        buffer = _empty_bytes(self.kept_bytes, self.device)
        self._launch([*bases, *self._starts(results), *self.kept(buffer)])
        return results, buffer

    def pack(self, results: Sequence[Tensor]) -> Tensor:
        """Such a buffer, with copies of results that a call has made anew."""
        buffer = _empty_bytes(self.kept_bytes, self.device)
        for place, x in zip(self.unpacked(buffer), results, strict=True):
            place.copy_(x)
        return buffer

    def kept(self, buffer: Tensor) -> list[Base]:
        """The bases of the results in a buffer of `repeat_packed`."""
        start = buffer.data_ptr()
        return [start + offset for offset in self.kept_offsets]

    def unpacked(self, buffer: Tensor) -> list[Tensor]:
        """The results in it, as views."""
        forms = self.results[self.num_own :]
        return [_view(buffer, *pair) for pair in zip(self.kept_offsets, forms, strict=True)]

    def bases(self, given: Sequence[Tensor]) -> list[Base] | None:
        """The bases of given tensors; None: see `repeat`."""
        starts = [x.data_ptr() for x in given]
        bits = 0
        for start in starts:
            bits |= start
        return None if bits % ALIGNMENT or launcher.is_watched() else starts

    def _starts(self, tensors: Sequence[Tensor]) -> list[Base]:
        return [x.data_ptr() for x in tensors]

    def _launch(self, bases: list[Base]) -> None:
        """Run the steps; the workspace is free for what follows on this stream."""
        workspace = None
        if self.workspace_bytes:
            workspace = _empty_bytes(self.workspace_bytes, self.device)
        bases.append(workspace.data_ptr() if workspace is not None else 0)
        values = [bases[x.block] + x.offset for x in self.plain]
        for number, one in enumerate(self.described):
            # Kept by address: in training, tensors return to the places of the last step's.
            at = number, bases[one.block] + one.offset
            values.append(self._descriptors.get(at) or self._encode(one, at))
        launcher.launch_again(self._index, self.steps, self.constants, values)

    def _encode(self, one: Described, at: tuple[int, int]) -> Any:
        if len(self._descriptors) >= MAX_DESCRIPTORS:
            self._descriptors.clear()
        self._descriptors[at] = made = launcher.encoded(one.rows, at[1], one.meta)
        return made


class InterpretedTape(Tape):
    """The same in Triton's interpreter, which takes tensors instead of addresses."""

    def bases(self, given: Sequence[Tensor]) -> list[Base] | None:
        return None if super().bases(given) is None else list(given)

    def kept(self, buffer: Tensor) -> list[Base]:
        return self.unpacked(buffer)

    def _starts(self, tensors: Sequence[Tensor]) -> list[Base]:
        return list(tensors)

    def _launch(self, bases: list[Base]) -> None:
        bases.append(_empty_bytes(self.workspace_bytes, self.device))
        values = [_tensor_at(x, bases) for x in self.plain]
        for x in self.described:
            values.append(launcher.moved_rows(x.rows, _tensor_at(x.pointer, bases)))
        launcher.launch_again(self._index, self.steps, self.constants, values)


def _tensor_at(pointer: Pointer, bases: list[Base]) -> Tensor:
    x, form = bases[pointer.block], pointer.form
    return x if Form.of(x) == form else _view(x.flatten().view(torch.uint8), pointer.offset, form)


# --- Recording ---


class Launched(NamedTuple):
    """A launch that was seen."""

    known: CachedLaunch
    arguments: list[Pointer | None]


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
        return _rounded(self.blocks[block].num_bytes)


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


def _num_bytes(form: Form) -> int:
    return math.prod(form.size) * form.dtype.itemsize  # results are contiguous


def _in_a_row(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of blocks of these bytes one after another, and the bytes of all."""
    offsets, stop = [], 0
    for size in sizes:
        offsets.append(stop)
        stop += _rounded(size)
    return offsets, stop


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_STEP) * BLOCK_STEP


def _empty_bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _view(buffer: Tensor, offset: int, form: Form) -> Tensor:
    """A tensor of this form, `offset` bytes after the start of a buffer of bytes."""
    stop = offset + (buffer.numel() - offset) // form.dtype.itemsize * form.dtype.itemsize
    return buffer[offset:stop].view(form.dtype).as_strided(form.size, form.strides)
