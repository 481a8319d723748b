"""Fast launch path: caches the compiled kernel, grid and constants per call signature.

Triton inspects every argument of every launch to find the compiled kernel, and checks every
descriptor; for a short sequence that would be most of the time. Here calls whose inputs have the
same form share a memo. What follows from the form (grid, numbers, constants, the compiled kernel)
is computed once for each place in the code; only the tensors change from call to call.

Compiling takes a second for each kernel. Within `compiling_ahead` nothing is launched: kernels are
compiled on threads, for tensors that may be on the meta device.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops.machine import interpreted
from nsa.ops.triton.tiles import DIM_STEP, Tiles

ALIGNMENT = 16
"""Bytes of the widest load. Triton compiles a kernel separately for pointers that are aligned."""

BEFORE_TENSORS = 9
"""Arguments of a launch before the kernel's own: grid, stream, function, metadata, hooks."""

Memo = dict[Any, "CachedLaunch"]
"""Cached launches, by place in the code and by which addresses are misaligned."""


class CachedLaunch(NamedTuple):
    """A compiled kernel (None for an empty grid), its launcher, grid, numbers and constants."""

    compiled: Any
    run: Any
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]
    device: int


class Rows:
    """Tiles of rows of one head of [B, S, H, D]: a tensor descriptor without Triton's checks.

    It has the attributes of TensorDescriptor that the launcher of a compiled kernel reads. `layout`
    is that of a tile in shared memory, which only kernels in Gluon are told.
    """

    __slots__ = (
        "base",
        "block_shape",
        "layout",
        "padding",
        "round_f32_to_tf32",
        "shape",
        "strides",
    )

    def __init__(self, base: Any, num_rows: int, width: int, layout: Any = None) -> None:
        self.base = base
        self.shape: tuple[int, ...] = base.shape
        self.strides: tuple[int, ...] = base.stride()
        self.block_shape: tuple[int, ...] = (1, num_rows, 1, width)
        self.padding, self.round_f32_to_tf32 = "zero", False
        self.layout = layout

    @classmethod
    def by_head(cls, base: Any, num_rows: int, width: int) -> Rows:
        """The same tiles of [B, H, S, D], a view of the same memory. Their leading sizes are 1:
        Triton drops those, and its products read such a tile as it lies in shared memory."""
        rows = cls(base, num_rows, width)
        rows.shape, rows.strides = (
            (batch, head, row, column) for batch, row, head, column in (rows.shape, rows.strides)
        )
        rows.block_shape = (1, 1, num_rows, width)
        return rows

    def checked(self) -> Any:
        """The descriptor with Triton's checks, for the call that compiles."""
        sizes = list(self.shape), list(self.strides), list(self.block_shape)
        if self.layout is None:
            return TensorDescriptor(self.base, *sizes)
        from triton.experimental.gluon.nvidia import hopper

        return hopper.TensorDescriptor(self.base, *sizes, self.layout)


class Interpreted:
    """A kernel in Triton's interpreter, launched like a compiled one."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, one: Launch) -> None:
        self.kernel, self.one = kernel, one

    def run(self, *arguments: Any) -> None:
        """Its arguments are those of CachedLaunch.run."""
        one = self.one
        tensors = arguments[BEFORE_TENSORS : -len(one.numbers) - len(one.constants)]
        self.kernel[one.grid](*tensors, *one.numbers, **one.constants, **one.options)


class Launch(NamedTuple):
    """Arguments of a launch beside its tensors; numbers and constants are in the kernel's order."""

    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    @staticmethod
    def tiled(
        grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any], tiles: Tiles
    ) -> Launch:
        """A kernel with matrix products: BM and BN are its last constants."""
        sized = {**constants, "BM": tiles.BM, "BN": tiles.BN}
        return Launch(grid, numbers, sized, tiles.options)

    @staticmethod
    def plain(
        grid: tuple[int, ...],
        numbers: tuple[Any, ...],
        constants: dict[str, Any],
        num_warps: int = 4,
    ) -> Launch:
        """A kernel without matrix products."""
        return Launch(grid, numbers, constants, {"num_warps": num_warps})


def start(
    memo: Memo, place: Any, kernel: Any, tensors: tuple[Any, ...], launch: Callable[[], Launch]
) -> None:
    """Launch `kernel` on the tensors' device, on the stream that is current there.

    `launch` is called once, when the place is new to the memo.
    """
    recorder: Any = getattr(_thread, "recorder", None)
    if recorder is None:
        _start(memo, place, kernel, tensors, launch)
        return
    with recorder.paused():
        known = _start(memo, place, kernel, tensors, launch)
    recorder.launched(known, tensors)


def _start(
    memo: Memo, place: Any, kernel: Any, tensors: tuple[Any, ...], launch: Callable[[], Launch]
) -> CachedLaunch | None:
    """What was launched; None if it was only compiled."""
    # Alignment is part of the key: the compiled kernel may use 16-byte loads.
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    place = place, _misaligned(addresses)
    known = memo.get(place)
    if known is not None:
        if known.compiled is not None:
            _launch_cached(known, tensors, addresses)
        return known
    one = launch()
    ahead: CompileAhead | None = getattr(_thread, "ahead", None)
    if ahead is not None:
        ahead.add(kernel, tensors, one)
        return None
    device = _device_of(tensors)
    first, second, third = (*one.grid, 1, 1)[:3]
    # First call: through Triton's dispatcher, which compiles. An empty grid launches nothing.
    compiled = None
    if 0 not in one.grid:
        checked = (x.checked() if isinstance(x, Rows) else x for x in tensors)
        with _current(device), loading:
            compiled = kernel[one.grid](*checked, *one.numbers, **one.constants, **one.options)
    if interpreted() and 0 not in one.grid:
        compiled = Interpreted(kernel, one)
    rest = (*one.numbers, *one.constants.values())
    run = None if compiled is None else compiled.run
    known = CachedLaunch(compiled, run, (first, second, third), rest, device)
    if not interpreted():
        memo[place] = known
    return known


loading = threading.RLock()
"""Held where Triton loads the C launcher of a kernel. All launchers are modules of one name: Python
gives one that it loads again the module object of the last one, so that of two threads one could
get the other's launcher (docs/log/faults.md)."""


# --- Compiling ahead ---

_thread = threading.local()
"""Its `ahead` is the CompileAhead of the thread, its `recorder` that of replay/: other threads
launch as usual meanwhile."""


class CompileAhead:
    """Compiles kernels on a thread for each CPU; equal ones once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._jobs: dict[Any, Future[None]] = {}

    def add(self, kernel: Any, tensors: tuple[Any, ...], one: Launch) -> None:
        """Compile for these arguments, on the current device."""
        if 0 in one.grid:
            return
        arguments = [x.checked() if isinstance(x, Rows) else x for x in tensors]
        kinds = (
            (*x.block_shape, x.base.dtype) if isinstance(x, Rows) else x.dtype
            for x in tensors
            if x is not None
        )
        constants, options = tuple(one.constants.items()), tuple(one.options.items())
        names = kernel.arg_names[len(tensors) :]
        numbers = zip(names, one.numbers, strict=False)
        free = set(kernel.do_not_specialize)
        classes = (_number_kind(number, name in free) for name, number in numbers)
        key = kernel, *kinds, *classes, constants, options
        if key not in self._jobs:
            device = torch.cuda.current_device()
            self._jobs[key] = self._pool.submit(_compile, device, kernel, arguments, one)

    def wait(self) -> int:
        """Wait for all kernels; returns their number. Raises what a compilation raised."""
        for job in self._jobs.values():
            job.result()
        return len(self._jobs)


@contextmanager
def compiling_ahead() -> Iterator[CompileAhead]:
    """Within it, this thread compiles and launches nothing; all is compiled when it ends.

    Within another one it does nothing: what it adds is compiled when the outer one ends.
    """
    outer: CompileAhead | None = getattr(_thread, "ahead", None)
    if outer is not None:
        yield outer
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        _thread.ahead = ahead = CompileAhead(pool)
        try:
            yield ahead
        finally:
            _thread.ahead = None
        ahead.wait()


def on_meta(x: Tensor, lengths: dict[int, int]) -> Tensor:
    """x without memory, with as many rows as another length has."""
    batch, rows, *rest = x.shape
    size, strides = (batch, lengths[rows], *rest), list(x.stride())
    if strides[0] == rows * strides[1]:
        strides[0] = size[1] * strides[1]
    return torch.empty_strided(size, strides, dtype=x.dtype, device="meta")


def _number_kind(number: Any, any_value: bool) -> tuple[Any, ...]:
    """What Triton compiles separately: numbers of 64 bits and, unless `any_value`, 1 and multiples
    of 16."""
    if not isinstance(number, int):
        return (type(number),)
    if any_value:
        return (number >> 31 != 0,)
    return number == 1, number % ALIGNMENT == 0, number >> 31 != 0


def _compile(device: int, kernel: Any, arguments: list[Any], one: Launch) -> None:
    with torch.cuda.device(device):
        compiled = kernel.warmup(
            *arguments, *one.numbers, grid=one.grid, **one.constants, **one.options
        )
        # The property loads the binary, and makes Triton build its C launcher.
        with loading:
            _ = compiled.run


def _misaligned(addresses: list[Any]) -> tuple[bool, ...] | None:
    """Which pointers are not aligned to 16 bytes; None if all are, the usual case."""
    # One modulo for all: the low bits of the OR are 0 only if those of every address are.
    bits = 0
    for x in addresses:
        if type(x) is int:
            bits |= x
    if bits % ALIGNMENT == 0:
        return None
    return tuple(type(x) is int and x % ALIGNMENT != 0 for x in addresses)


def _device_of(tensors: tuple[Any, ...]) -> int:
    """Index of the CUDA device that the tensors are on; -1 is the CPU, in the interpreter."""
    first = next(x for x in tensors if x is not None)
    return int((first.base if isinstance(first, Rows) else first).get_device())


def _current(device: int) -> AbstractContextManager[Any]:
    """Make a device current: Triton launches on the current one, wherever the tensors are."""
    return nullcontext() if interpreted() else torch.cuda.device(device)


def is_current(device: int) -> bool:
    return interpreted() or torch._C._cuda_getDevice() == device


def _launch_cached(known: CachedLaunch, tensors: tuple[Any, ...], addresses: list[Any]) -> None:
    """Launch from the memo; switching the device costs time, and is rarely needed."""
    if is_current(known.device):
        _run(known, tensors, addresses)
        return
    with _current(known.device):
        _run(known, tensors, addresses)


def _run(known: CachedLaunch, tensors: tuple[Any, ...], addresses: list[Any]) -> None:
    """What `compiled[grid](...)` does, without looking up device, hooks and pointers again."""
    compiled, run, grid, rest, device = known
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        compiled[grid](*tensors, *rest)  # a profiler has registered hooks
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(
        *(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None),
        *(*addresses, *rest),
    )


def form(*tensors: Tensor) -> tuple[Any, ...]:
    """Key of a call: what decides how kernels are compiled for these tensors and launched."""
    return (
        tensors[0].device.index,
        *((x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT) for x in tensors),
    )


def describable(x: Tensor) -> Tensor:
    """x, or a contiguous copy where a descriptor cannot read x.

    Rows must be aligned to 16 bytes and must not overlap (a stride of 0).
    """
    *outer, last = x.stride()
    step = ALIGNMENT // x.element_size()
    apart = all(stride > 0 and stride % step == 0 for stride in outer)
    aligned = last == 1 and x.data_ptr() % ALIGNMENT == 0
    return x if apart and aligned else x.clone(memory_format=torch.contiguous_format)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take the maximum before they scale, so a scale <= 0 is multiplied into q."""
    return (q, scale) if scale > 0 else (q * scale, 1.0)


def padded_head(x: Tensor) -> Tensor:
    """Pad the head dim with zeros to a multiple of DIM_STEP; that changes no product."""
    missing = -x.shape[-1] % DIM_STEP
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


# --- Launches that replay/ has recorded ---

Call = tuple[Any, tuple[Any, ...]]
"""A function that launches, and its arguments."""
CallsAt = Callable[[list[Any], int], list[Call]]
"""Makes the launches of a tape from the bases of its blocks and a stream."""


@contextmanager
def recorded_by(recorder: Any) -> Iterator[None]:
    """Within it, `start` tells the recorder of every launch of this thread."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def is_compiling_ahead() -> bool:
    """Whether this thread compiles, and launches nothing."""
    return getattr(_thread, "ahead", None) is not None


def is_watched() -> bool:
    """Whether a profiler has registered hooks, which see the tensors of a launch."""
    hooks = knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def launch_again(device: int, calls_at: CallsAt, bases: list[Any]) -> None:
    """Launch what a tape makes of its bases and of the stream that is current on a device."""
    if is_current(device):
        _launch_all(device, calls_at, bases)
    else:
        with _current(device):
            _launch_all(device, calls_at, bases)


def _launch_all(device: int, calls_at: CallsAt, bases: list[Any]) -> None:
    stream = 0 if interpreted() else torch._C._cuda_getCurrentRawStream(device)
    for run, arguments in calls_at(bases, stream):
        run(*arguments)


class Caller(NamedTuple):
    """How a kernel is launched again: run(*grid, stream, *head, *arguments, *rest)."""

    run: Any
    head: tuple[Any, ...]
    metas: Sequence[Any] = ()
    """How Triton encodes each descriptor; none: `run` encodes them itself, in every launch."""


def caller_of(known: CachedLaunch) -> Caller:
    """The C function of Triton 3.6 itself, or, of other versions, what calls theirs.

    What is between takes 2 us, and 5 us for each descriptor.
    """
    compiled, run = known.compiled, known.run
    hooks = (compiled.packed_metadata, None, None, None)
    metas: list[Any] = []
    launch = getattr(run, "launch", None)
    if launch is None or not is_triton_3_6() or run.global_scratch_size or run.profile_scratch_size:
        return Caller(run, (compiled.function, *hooks))
    if inspect.isfunction(launch):  # a closure that encodes descriptors
        found = inspect.getclosurevars(launch).nonlocals
        launch, metas = found["launcher"], found["tensordesc_meta"]
    if None in metas:
        return Caller(run, (compiled.function, *hooks))
    modes = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return Caller(launch, (compiled.function, *modes, *hooks), metas)


@cache
def is_triton_3_6() -> bool:
    return triton.__version__.startswith("3.6.")


def encoded(rows: Rows, address: int, meta: Any) -> Any:
    """The tiles of memory at an address as an argument: Triton's descriptor, or what it makes one
    of."""
    moved = moved_rows(rows, Address(address))
    if meta is None:
        return moved
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(moved, meta)[0]


class Address:
    """An address in the place of a tensor."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def moved_rows(rows: Rows, base: Any) -> Any:
    """The same tiles of other memory: of an Address, or, in the interpreter, of a tensor."""
    rows = copy.copy(rows)
    rows.base = base
    return rows.checked() if interpreted() else rows
