"""A recorded call, ready to be repeated with other tensors.

Its blocks of memory are the given tensors, the results, and a workspace in which its temporary
tensors lie. A tape does not change once it is made, but for arguments that it remembers: threads
can share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _dynamo

from nsa.ops.triton import launcher
from nsa.ops.triton.launcher import ALIGNMENT, CachedLaunch, Call, Rows

EMPTY: dict[bool, Any] = {
    on_gpu: getattr(_dynamo.guards, f"_empty_strided_{'cuda' if on_gpu else 'cpu'}", None)
    for on_gpu in (False, True)
}
"""torch.empty_strided on the current device without the dispatcher: half its time. Code that
inductor compiled calls it; None where this torch has no such function."""
BLOCK_STEP = 512
"""Bytes at whose multiples blocks begin, as in torch's allocator."""
MAX_DESCRIPTORS, MAX_CALLS = 1024, 64
"""Descriptors and arguments of calls that a tape keeps; a full cache is cleared."""

CONSTANT, STREAM, ADDRESS, DESCRIPTOR = range(4)
Place = tuple[int, int]
"""Where an argument of a launch is: among which of those, and its number there."""
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


class Launched(NamedTuple):
    """A launch that was seen."""

    known: CachedLaunch
    arguments: list[Pointer | None]


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
        self.kept_offsets, kept_bytes = _in_a_row(num_bytes(form) for form in results[num_own:])
        # What `repeat` allocates, and `repeat_packed`.
        workspace = [_bytes(workspace_bytes)] if workspace_bytes else []
        self._buffer = _bytes(kept_bytes)
        self._apart = [*results, *workspace]
        self._packed = [*results[:num_own], self._buffer, *workspace]
        self._no_workspace: list[Base] = [] if workspace else [0]
        # What launches pick their arguments from: constants, the stream, addresses, descriptors.
        self.constants: list[Any] = []
        self.plain: list[Pointer] = []
        self.described: list[Described] = []
        picked = [self._arguments(one) for one in launches]
        stream, plain = len(self.constants), len(self.plain)
        firsts = {CONSTANT: 0, STREAM: stream, ADDRESS: stream + 1, DESCRIPTOR: stream + 1 + plain}
        self.steps = [
            (run, itemgetter(*(firsts[kind] + number for kind, number in places)))
            for run, places in picked
        ]
        self._descriptors: dict[tuple[int, int], Any] = {}
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        self._index = -1 if device.index is None else device.index

    def _arguments(self, launched: Launched) -> tuple[Any, list[Place]]:
        """The function that launches, and where its arguments are."""
        known, arguments = launched
        caller = launcher.caller_of(known)
        metas = iter(caller.metas)
        places = [*self._constants(*known.grid), (STREAM, 0), *self._constants(*caller.head)]
        for x in arguments:
            if x is None:
                places += self._constants(None)
            elif x.rows is None:
                self.plain += [] if x in self.plain else [x]
                places.append((ADDRESS, self.plain.index(x)))
            else:
                meta = next(metas, None)
                places.append((DESCRIPTOR, len(self.described)))
                self.described.append(Described(x.block, x.offset, x, x.rows, meta))
                # An encoded descriptor is followed by its sizes and strides.
                if meta is not None:
                    places += self._constants(*x.rows.shape, *x.rows.strides)
        return caller.run, [*places, *self._constants(*known.rest)]

    def _constants(self, *values: Any) -> list[Place]:
        first = len(self.constants)
        self.constants += values
        return [(CONSTANT, first + i) for i in range(len(values))]

    def repeat(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """The results for these tensors. None where the call has to run anew: an address is not
        aligned, or a profiler looks at every launch."""
        bases = self.bases(given)
        return None if bases is None else self.repeat_at(bases)

    def repeat_at(self, bases: list[Base]) -> list[Tensor]:
        """The results for what lies at bases that `bases` has found, or `kept`."""
        made = self._allocate(self._apart)
        self._launch([*bases, *self._starts(made)])
        return made[: len(self.results)]

    def repeat_packed(self, given: Sequence[Tensor]) -> tuple[list[Tensor], Tensor] | None:
        """Like `repeat`, with all results but the first `num_own` in one buffer."""
        bases = self.bases(given)
        if bases is None:
            return None
        made, place = self._allocate(self._packed), self.num_own
        starts, buffer = self._starts(made), made[place]
        self._launch([*bases, *starts[:place], *self.kept(buffer), *starts[place + 1 :]])
        return made[:place], buffer

    def pack(self, results: Sequence[Tensor]) -> Tensor:
        """Such a buffer, with copies of results that a call has made anew."""
        (buffer,) = self._allocate([self._buffer])
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
        return None if reduce(or_, starts) % ALIGNMENT or launcher.is_watched() else starts

    def _starts(self, tensors: Sequence[Tensor]) -> list[Base]:
        return [x.data_ptr() for x in tensors]

    def _allocate(self, forms: list[Form]) -> list[Tensor]:
        empty = EMPTY[self._index >= 0]
        if empty is None or not launcher.is_current(self._index):
            return [form.empty(self.device) for form in forms]
        return [empty(*form) for form in forms]

    def _launch(self, bases: list[Base]) -> None:
        """Run the steps; a workspace is free for what follows on this stream."""
        launcher.launch_again(self._index, self._calls_at, [*bases, *self._no_workspace])

    def _calls_at(self, bases: list[Base], stream: int) -> list[Call]:
        """The launches with their arguments.

        Kept by address: in training, tensors return to the places of the last step's.
        """
        at = stream, *bases
        calls = self._calls.get(at)
        if calls is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            self._calls[at] = calls = self._made_calls(bases, stream)
        return calls

    def _made_calls(self, bases: list[Base], stream: int) -> list[Call]:
        values = [*self.constants, stream, *(bases[x.block] + x.offset for x in self.plain)]
        for number, one in enumerate(self.described):
            # Also kept one by one: where a workspace moves, keys and values need not.
            at = number, bases[one.block] + one.offset
            values.append(self._descriptors.get(at) or self._encode(one, at))
        return [(run, pick(values)) for run, pick in self.steps]

    def _encode(self, one: Described, at: tuple[int, int]) -> Any:
        if len(self._descriptors) >= MAX_DESCRIPTORS:
            self._descriptors.clear()
        self._descriptors[at] = made = launcher.encoded(one.rows, at[1], one.meta)
        return made


class InterpretedTape(Tape):
    """The same in Triton's interpreter, which takes tensors instead of addresses."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._no_workspace = [torch.empty(0, dtype=torch.uint8)] if self._no_workspace else []

    def bases(self, given: Sequence[Tensor]) -> list[Base] | None:
        return None if super().bases(given) is None else list(given)

    def kept(self, buffer: Tensor) -> list[Base]:
        return self.unpacked(buffer)

    def _starts(self, tensors: Sequence[Tensor]) -> list[Base]:
        return list(tensors)

    def _calls_at(self, bases: list[Base], stream: int) -> list[Call]:
        tensors = [_tensor_at(x, bases) for x in self.plain]
        rows = [launcher.moved_rows(x.rows, _tensor_at(x.pointer, bases)) for x in self.described]
        values = [*self.constants, stream, *tensors, *rows]
        return [(run, pick(values)) for run, pick in self.steps]


def _tensor_at(pointer: Pointer, bases: list[Base]) -> Tensor:
    x, form = bases[pointer.block], pointer.form
    return x if Form.of(x) == form else _view(x.flatten().view(torch.uint8), pointer.offset, form)


# --- Bytes and blocks ---


def num_bytes(form: Form) -> int:
    return math.prod(form.size) * form.dtype.itemsize  # results are contiguous


def _in_a_row(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of blocks of these bytes one after another, and the bytes of all."""
    offsets, stop = [], 0
    for size in sizes:
        offsets.append(stop)
        stop += rounded(size)
    return offsets, stop


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_STEP) * BLOCK_STEP


def _bytes(count: int) -> Form:
    return Form((count,), (1,), torch.uint8)


def _view(buffer: Tensor, offset: int, form: Form) -> Tensor:
    """A tensor of this form, `offset` bytes after the start of a buffer of bytes."""
    stop = offset + (buffer.numel() - offset) // form.dtype.itemsize * form.dtype.itemsize
    return buffer[offset:stop].view(form.dtype).as_strided(form.size, form.strides)
