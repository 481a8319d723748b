"""Triton's interpreter, made several times faster: what it repeats for every operation is kept.

Results are the same; overflow of integers is no longer checked. conftest.py calls `speed_up` where
TRITON_INTERPRET=1. It replaces private names of Triton: a version without them fails here, at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any


def speed_up() -> None:
    """Replace what is slow in the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    # 0. Every operation goes through three wrappers that only pass `_semantic` on.
    semantic = interpreter.interpreter_semantic
    interpreter._patch_attr = partial(_set_operation, semantic)

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
    core.tuple.__eq__ = _comparing(core.tuple.__eq__, core.constexpr(True))
    core.dtype.__eq__ = _comparing(core.dtype.__eq__, True)
    core._unwrap_if_constexpr = _unwrapping(core._unwrap_if_constexpr, core.tensor, core.dtype)
    interpreter.TensorHandle.__post_init__ = _checking_sizes(core.pointer_type)

    # 5. Every operation finds out again what its operands have to become; their types tell.
    kind = type(semantic)
    kind.scalar_constant = _making_constants(kind.scalar_constant)
    kind.broadcast_impl_value = _broadcasting(kind.broadcast_impl_value)
    kind.binary_op_type_checking_impl = _converting(kind.binary_op_type_checking_impl, core.tensor)

    # 6. A reduction by a function of our own goes number by number.
    interpreter.ReduceOps.generic_reduce = _reduce_pairs

    # 7. A program takes as long for 16 tokens as for the two that a GPU gives it.
    from nsa.ops.triton import attention

    attention.GATE_TOKENS = 16


def _set_operation(
    semantic: Any, holder: Any, name: str, operation: Any, _: Any, scope: Any
) -> None:
    inner = inspect.unwrap(operation)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(holder, name, call)


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


def _comparing(compare: Callable[..., Any], true: Any) -> Callable[..., Any]:
    """Shapes and types are compared in every operation, and mostly are one object."""
    return lambda self, other: true if self is other else compare(self, other)


def _unwrapping(unwrap: Callable[..., Any], tensor: Any, dtype: Any) -> Callable[..., Any]:
    """Most of what is looked at is no constexpr."""
    plain = {tensor, dtype, int, float, bool, str, type(None)}
    return lambda value: value if type(value) in plain else unwrap(value)


def _checking_sizes(pointer: Any) -> Callable[..., None]:
    """Numbers are at most as wide as their type says; numpy has none of less than a byte."""
    known: dict[str, int] = {}

    def check(handle: Any) -> None:
        dtype = handle.dtype
        if dtype.name not in known:
            is_pointer = isinstance(dtype, pointer)
            known[dtype.name] = 8 if is_pointer else max(1, dtype.primitive_bitwidth // 8)
        if handle.data.itemsize > known[dtype.name]:
            raise ValueError(f"numbers of {handle.data.itemsize} bytes for the type {dtype}")

    return check


def _making_constants(make: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing changes a tensor, so that one of each constant is enough."""
    known: dict[Any, Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in known:
            known[key] = make(self, value, dtype)
        return known[key]

    return scalar_constant


def _broadcasting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """The types of two operands say which they have afterwards."""
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.type is right.type:
            return left, right
        key = (left.type.name, right.type.name)
        if key not in known:
            wide = broadcast(self, left, right)
            known[key] = wide[0].type, wide[1].type
            return wide
        left_type, right_type = known[key]
        return _widened(self, left, left_type), _widened(self, right, right_type)

    return broadcast_impl_value


def _widened(semantic: Any, x: Any, type: Any) -> Any:
    if x.type.name == type.name:
        return x
    builder = semantic.builder
    if x.type.is_block():
        return semantic.tensor(builder.create_broadcast(x.handle, type.shape.values), type)
    return semantic.tensor(builder.create_splat(type, x.handle), type)


def _converting(convert: Callable[..., Any], tensor: Any) -> Callable[..., Any]:
    """The types of two tensors say which they get; a number beside a tensor is a constant."""
    types: dict[Any, tuple[Any, Any]] = {}
    constants: dict[Any, Any] = {}

    def of_tensors(self: Any, left: Any, right: Any, *flags: Any) -> tuple[Any, Any]:
        key = (left.dtype.name, right.dtype.name, flags)
        if key not in types:
            made = convert(self, left, right, *flags)
            types[key] = made[0].dtype, made[1].dtype
            return made
        left_type, right_type = types[key]
        if left_type.name != key[0]:
            left = self.cast(left, left_type)
        if right_type.name != key[1]:
            right = self.cast(right, right_type)
        return self.broadcast_impl_value(left, right)

    def of_any(self: Any, left: Any, right: Any, *flags: Any) -> tuple[Any, Any]:
        given = (left, right)
        at = int(type(left) is tensor)  # of the number, if one is a tensor and one is not
        number, other = given[at], given[1 - at]
        if type(number) is tensor:
            return of_tensors(self, left, right, *flags)
        if type(other) is not tensor or type(number) not in (int, float):
            return convert(self, left, right, *flags)
        key = (at, type(number), number, other.type.name, flags)
        if key not in constants:
            made = convert(self, left, right, *flags)
            if made[1 - at] is not other:
                return made
            constants[key] = made[at]
        return (other, constants[key]) if at else (constants[key], other)

    return of_any


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
