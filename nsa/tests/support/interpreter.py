"""Triton's interpreter, made several times faster: what it repeats for every operation is kept.

Results are the same; overflow of integers is no longer checked. conftest.py calls `speed_up` where
TRITON_INTERPRET=1. It replaces private names of Triton: a version without them fails here, at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any


def speed_up() -> None:
    """Replace what is slow in the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    # 1. Every call of a device function searches triton.language for what it has to replace.
    #    Here that is replaced once, for as long as the process lives.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    # 2. Every operation builds the table of numpy's types.
    interpreter._get_np_dtype = partial(_remembered, {}, interpreter._get_np_dtype)

    # 3. Every sum of integers is computed again in 64 bits; tiny shapes cannot overflow.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    # 4. Every result builds its type and its shape; there are few of either.
    core = tl.core
    core.block_type.__init__ = _setting_block_types(core.block_type.__init__)
    core.tensor.__init__ = _setting_tensors(core.tensor.__init__)
    core.tuple.__eq__ = _comparing_tuples(core.tuple.__eq__, core.constexpr(True))

    # 5. A reduction by a function of our own goes number by number.
    interpreter.ReduceOps.generic_reduce = _reduce_pairs


def _remembered(known: dict[str, Any], find: Any, dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in known:
        known[name] = find(dtype.scalar)
    return known[name]


def _setting_block_types(build: Callable[..., None]) -> Callable[..., None]:
    """What depends on the shape and the element's name alone is computed once."""
    known: dict[Any, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            build(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def _setting_tensors(build: Callable[..., None]) -> Callable[..., None]:
    """Tensors of one type share the objects that tell their shape; nothing changes them."""
    known: dict[str, Any] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            build(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    return init


def _comparing_tuples(compare: Callable[..., Any], true: Any) -> Callable[..., Any]:
    """Shapes are compared in every operation, and are one object where they are equal."""
    return lambda self, other: true if self is other else compare(self, other)


def _reduce_pairs(self: Any, given: Any) -> list[Any]:
    """Combine neighbours, half as many each time; tl.reduce wants an associative function."""
    from triton.language import block_type, tensor
    from triton.runtime.interpreter import TensorHandle

    assert self.axis is not None and not self.keep_dims, "not used by our kernels"

    def half(x: Any, first: int) -> Any:
        data = x.handle.data.take(range(first, x.shape[self.axis], 2), axis=self.axis)
        return tensor(TensorHandle(data, x.dtype), block_type(x.dtype, list(data.shape)))

    while given[0].shape[self.axis] > 1:
        made = self.combine_fn.fn(*(half(x, 0) for x in given), *(half(x, 1) for x in given))
        given = made if isinstance(made, tuple) else (made,)
    return [self.to_tensor(x.handle.data.take(0, axis=self.axis), x.dtype) for x in given]
