"""Attention and compression as the operators implement them: replayed where a call of the form was
recorded, else run anew; and as plain autograd functions, without the dispatcher.

Below in the order of a call: calls whose form is known, operators, keys of forms and recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.plan import Flags
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import attention
from nsa.ops.triton import compress as compression
from nsa.ops.triton.attention import Inputs, Results, Saved
from nsa.ops.triton.documents import CMP, QUERY, RAW, finite_only
from nsa.ops.triton.launcher import describable, is_compiling_ahead
from nsa.ops.triton.problem import LONG_FROM, Problem, keep, kept, problem_of
from nsa.ops.triton.replay.recorder import record
from nsa.ops.triton.replay.tape import Tape

NUM_INPUTS, NUM_SAVED = len(Inputs._fields), len(Saved._fields)
NVTX = [field.name for field in fields(Flags)].index("nvtx")
"""Place of that flag in the arguments of an operator."""
NUM_OWN = 2
"""Results that the caller gets: the output and the selection."""


class Static(NamedTuple):
    """The arguments of attention and selection that are not tensors."""

    spec: BlockSpec
    scale: float
    doc_lens: list[int]
    flags: Flags
    query_lens: Sequence[int] = ()
    """Queries of each document, where they are not all of its tokens."""
    offsets: Sequence[int] = ()

    def plain(self) -> tuple[list[int], float, list[int], list[bool], list[int], list[int]]:
        """The arguments _STATIC of an operator."""
        # No method of `flags`: a plan is a constant of the graph; Dynamo knows its fields alone.
        flags = self.flags
        bools = [flags.flash_cmp, flags.flash_win, flags.strict, flags.nvtx]
        bools += [flags.no_sel, flags.no_win]
        places = list(self.query_lens), list(self.offsets)
        return self.spec.to_ints(), self.scale, self.doc_lens, bools, *places

    @staticmethod
    def of(
        blocks: list[int], scale: float, doc_lens: list[int], flags: list[bool], *places: list[int]
    ) -> Static:
        """The inverse of `plain`."""
        return Static(BlockSpec.from_ints(blocks), scale, doc_lens, Flags(*flags), *places)


# --- Plain autograd functions, and calls whose form is known ---


class Repeated:
    """Calls of one form: the tape of their forward pass, those of the backward pass by the form of
    the gradient, and the arguments of the operator after its tensors."""

    def __init__(self, tape: Tape, rest: tuple[Any, ...]) -> None:
        self.tape, self.rest = tape, rest
        self.backward: dict[tuple[Any, ...], Tape] = {}


def remember(form: tuple[Any, ...], key: tuple[Any, ...] | None, rest: tuple[Any, ...]) -> None:
    """Let calls of this form repeat what was recorded under a key, if it was."""
    if tape := kept(key):
        keep(form, Repeated(tape, rest))


def repeat_attention(
    form: tuple[Any, ...], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor] | None:
    """nsa_attention of a form that is known; None: it is not."""
    known = kept(form)
    return None if known is None else AttentionFunction.apply(known, known.rest, *tensors)


def repeat_mean(form: tuple[Any, ...], x: Tensor) -> Tensor | None:
    """compress of a form that is known; None: it is not."""
    known = kept(form)
    return None if known is None else MeanFunction.apply(known, known.rest, x)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator, which also guards a backward pass that makes no graph: nearly all."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


class AttentionFunction(torch.autograd.Function):
    """nsa::attention; `known` may be None."""

    @staticmethod
    def forward(
        ctx: Any, known: Repeated | None, rest: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        packed = known.tape.repeat_packed(tensors) if known else None
        if packed is None:
            out, *saved = attention_forward(*tensors, *rest)
            if known is None and (tape := kept(forward_key(tensors, *rest))):
                known = Repeated(tape, rest)
            # All calls of a form save alike: recomputation compares what is saved.
            saved = saved if known is None else [saved[0], known.tape.pack(saved[1:])]
        else:
            (out, *saved), buffer = packed
            saved.append(buffer)
        ctx.known, ctx.static = known, rest[1:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(saved[0])
        ctx.save_for_backward(*tensors, *saved)
        return out, saved[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * (2 + NUM_INPUTS)
        tensors = ctx.saved_tensors
        if ctx.known is None:
            return None, None, *attention_backward(*tensors, dout, *ctx.static)
        *inputs, ids, buffer = tensors
        return None, None, *_packed_backward(ctx.known, inputs, ids, buffer, dout, ctx.static)


def _packed_backward(
    known: Repeated,
    inputs: list[Tensor],
    ids: Tensor,
    buffer: Tensor,
    dout: Tensor,
    static: tuple[Any, ...],
) -> Sequence[Tensor]:
    """Gradients of the inputs, from the selection and a buffer of the other saved results."""
    kind = torch.are_deterministic_algorithms_enabled(), *_form(dout)
    tape = known.backward.get(kind)
    bases = tape.bases((*inputs, ids, dout)) if tape else None
    if tape is not None and bases is not None:
        *before, last = bases
        return tape.repeat_at([*before, *known.tape.kept(buffer), last])
    grads = attention_backward(*inputs, ids, *known.tape.unpacked(buffer), dout, *static)
    if tape := kept(_backward_key((*inputs, dout), static)):
        known.backward[kind] = tape
    return grads


class MeanFunction(torch.autograd.Function):
    """nsa::mean; `known` may be None."""

    @staticmethod
    def forward(ctx: Any, known: Repeated | None, rest: tuple[Any, ...], x: Tensor) -> Tensor:
        ctx.known, ctx.seq_len, ctx.rest = known, x.shape[1], rest
        done = known.tape.repeat((x,)) if known else None
        return mean_forward(x, *rest) if done is None else done[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        known, form = ctx.known, _form(dout)
        tape = known.backward.get(form) if known else None
        done = tape.repeat((dout,)) if tape else None
        if done is not None:
            return None, None, done[0]
        dx = mean_backward(dout, ctx.seq_len, *ctx.rest)
        if known and (tape := kept(_key("mean_backward", (dout,), ctx.seq_len, *ctx.rest))):
            known.backward[form] = tape
        return None, None, dx


# --- Implementations of the operators ---


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device of the first tensor current, as every allocation and launch expects."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return function(*args)

    return run


def attention_forward(*args: Any) -> tuple[Tensor, ...]:
    """nsa::attention: Inputs, selection, static -> Results."""
    given, rest = args[:NUM_INPUTS], args[NUM_INPUTS:]
    key = forward_key(given, *rest)
    results = _repeat(key, given)
    return tuple(_forward_anew(key, *args) if results is None else results)


def forward_key(
    inputs: Sequence[Tensor], selection: Tensor | None, *static: Any
) -> tuple[Any, ...] | None:
    """Key of the forward pass; None: it is never replayed."""
    if selection is not None or not _is_repeatable(inputs, *static):
        return None
    return _key("forward", inputs, *static)


def _is_repeatable(
    inputs: Sequence[Tensor],
    blocks: list[int],
    scale: float,
    doc_lens: list[int],
    flags: list[bool],
    query_lens: list[int],
    offsets: list[int],
) -> bool:
    """Whether calls of the form launch the same kernels each time. Long ones ask cuDNN."""
    if inputs[0].shape[1] >= LONG_FROM or flags[NVTX]:
        return False
    return len(doc_lens) == 1 and not query_lens


@on_device
def _forward_anew(key: tuple[Any, ...] | None, *args: Any) -> Sequence[Tensor]:
    inputs = _inputs(args)
    selection, *static = args[NUM_INPUTS:]
    problem = problem_of(inputs, inputs.q, inputs.v_sel, *Static.of(*static))
    _compile_once(problem, inputs, selection, any(x.requires_grad for x in args[:NUM_INPUTS]))
    (inputs,) = _zero_non_finite(problem, inputs)

    def forward(*tensors: Tensor) -> Results:
        return attention.forward(problem, Inputs(*tensors), selection)

    return _recorded(key, forward, inputs, args[:NUM_INPUTS], num_own=NUM_OWN)


def _compile_once(
    problem: Problem,
    inputs: Inputs,
    selection: Tensor | None,
    backward_too: bool,
    forward_too: bool = True,
) -> None:
    """At the first call of a kind, compile its kernels on threads instead of one by one."""
    new = forward_too and problem.is_first_of_kind("forward", selection is None)
    if backward_too:
        new = problem.is_first_of_kind("backward") or new
    if new:
        attention.compile_ahead(problem, inputs, selection, backward_too=backward_too)


def _inputs(args: tuple[Any, ...]) -> Inputs:
    """The inputs as the kernels need them: rows for descriptors, gates with a stride of 1."""
    given = Inputs._make(args[:NUM_INPUTS])
    gates = given.gates if given.gates.stride(-1) == 1 else given.gates.contiguous()
    return Inputs._make([*(describable(x) for x in given[:-1]), gates])


def _zero_non_finite(problem: Problem, inputs: Inputs, *more: Tensor) -> tuple[Any, ...]:
    """Packed documents: replace non-finite values by 0, and mark their rows by a NaN gate.

    A tile may hold two documents, and 0 * NaN would cross. A gate belongs to one query: its NaN
    reaches only that query's output, and the gradients of what the query sees.
    """
    if len(problem.doc_lens) == 1:
        return inputs, *more
    assert problem.documents is not None
    kinds = (QUERY, CMP, CMP, RAW, RAW, RAW, RAW, *(QUERY for _ in more))
    clean, is_bad = finite_only(problem.documents, (*inputs[:-1], *more), kinds)
    gates = inputs.gates.masked_fill(is_bad[None, :, None, None], torch.nan)
    return Inputs._make([*clean[: NUM_INPUTS - 1], gates]), *clean[NUM_INPUTS - 1 :]


def attention_backward(*args: Any) -> tuple[Tensor, ...]:
    """nsa::attention_backward: Inputs, Saved, dout, static -> gradients of the inputs."""
    given, static = args[: NUM_INPUTS + NUM_SAVED + 1], args[NUM_INPUTS + NUM_SAVED + 1 :]
    key = _backward_key((*given[:NUM_INPUTS], given[-1]), static)
    results = _repeat(key, given)
    return tuple(_backward_anew(key, *args) if results is None else results)


def _backward_key(tensors: Sequence[Tensor], static: Sequence[Any]) -> tuple[Any, ...] | None:
    """Key of the backward pass for inputs and the gradient of the output; None: never replayed."""
    if not _is_repeatable(tensors, *static):
        return None
    return _key("backward", tensors, torch.are_deterministic_algorithms_enabled(), *static)


@on_device
def _backward_anew(key: tuple[Any, ...] | None, *args: Any) -> Sequence[Tensor]:
    inputs = _inputs(args)
    saved = args[NUM_INPUTS : NUM_INPUTS + NUM_SAVED]
    given_dout, *static = args[NUM_INPUTS + NUM_SAVED :]
    dout = describable(given_dout)
    problem = problem_of((*inputs, dout), inputs.q, inputs.v_sel, *Static.of(*static))
    _compile_once(problem, inputs, None, backward_too=True, forward_too=False)
    inputs, dout = _zero_non_finite(problem, inputs, dout)

    def backward(*tensors: Tensor) -> Inputs:
        split = (tensors[:NUM_INPUTS], tensors[NUM_INPUTS:-1], tensors[-1])
        return attention.backward(problem, Inputs(*split[0]), Saved(*split[1]), split[2])

    given = args[: NUM_INPUTS + NUM_SAVED + 1]
    return _recorded(key, backward, (*inputs, *saved, dout), given)


def mean_forward(x: Tensor, blocks: list[int], doc_lens: list[int]) -> Tensor:
    """nsa::mean."""
    key = mean_key(x, blocks, doc_lens)
    done = _repeat(key, (x,))
    return _mean_forward_anew(key, x, blocks, doc_lens) if done is None else done[0]


@on_device
def _mean_forward_anew(
    key: tuple[Any, ...] | None, x: Tensor, blocks: list[int], doc_lens: list[int]
) -> Tensor:
    def forward(x: Tensor) -> tuple[Tensor]:
        return (compression.forward(x, BlockSpec.from_ints(blocks), doc_lens),)

    return _recorded(key, forward, (describable(x),), (x,))[0]


def mean_backward(dout: Tensor, seq_len: int, blocks: list[int], doc_lens: list[int]) -> Tensor:
    """nsa::mean_backward."""
    rest = (seq_len, blocks, doc_lens)
    key = _key("mean_backward", (dout,), *rest) if len(doc_lens) == 1 else None
    done = _repeat(key, (dout,))
    return _mean_backward_anew(key, dout, *rest) if done is None else done[0]


@on_device
def _mean_backward_anew(
    key: tuple[Any, ...] | None,
    dout: Tensor,
    seq_len: int,
    blocks: list[int],
    doc_lens: list[int],
) -> Tensor:
    def backward(dout: Tensor) -> tuple[Tensor]:
        return (compression.backward(dout, seq_len, BlockSpec.from_ints(blocks), doc_lens),)

    return _recorded(key, backward, (describable(dout),), (dout,))[0]


# --- Keys of forms, and recording ---


def mean_key(x: Tensor, blocks: list[int], doc_lens: list[int]) -> tuple[Any, ...] | None:
    """Key of compression; None: it is never replayed."""
    return _key("mean", (x,), blocks, doc_lens) if len(doc_lens) == 1 else None


def _key(name: str, tensors: Sequence[Tensor], *rest: Any) -> tuple[Any, ...]:
    """Key of an operator's calls of one form; addresses are the tape's business."""
    static = (tuple(x) if isinstance(x, list) else x for x in rest)
    return (name, tensors[0].device.index, *map(_form, tensors), *static)


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride()


def _repeat(key: tuple[Any, ...] | None, given: Sequence[Tensor]) -> list[Tensor] | None:
    """The results of an operator whose call was recorded; None: it runs anew."""
    tape: Tape | None = kept(key)
    return tape.repeat(given) if tape else None


def _recorded(
    key: tuple[Any, ...] | None,
    function: Callable[..., Sequence[Tensor]],
    used: Sequence[Tensor],
    given: Sequence[Tensor],
    num_own: int = 0,
) -> Sequence[Tensor]:
    """function(*used), recorded under the key unless a call of the form was before.

    `used` are the given tensors as the kernels need them: a call that had to copy one is not
    recorded.
    """
    copied = any(x is not y for x, y in zip(used, given, strict=True))
    if key is None or copied or kept(key) is not None or is_compiling_ahead():
        return function(*used)
    results, tape = record(function, used, num_own)
    keep(key, tape or False)  # False: known, and not recorded
    return results
