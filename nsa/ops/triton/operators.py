"""The Triton path as torch operators, with fake implementations and gradients.

torch.compile, activation checkpointing, DDP and FSDP see ordinary operators:

    nsa::attention            inputs -> output, selection, and what its backward reads
    nsa::attention_backward   those, and the gradient of the output -> gradients of the inputs
    nsa::select               q, k_cmp -> selection
    nsa::mean, nsa::mean_backward   mean compression

`blocks` are the sizes of a BlockSpec, `doc_lens` the lengths of the packed documents (one: the
row), `query_lens` and `offsets` which of their tokens are queries (empty: all), `flags` those of a
plan. Static turns them into arguments of operators and back.

For short sequences the dispatcher is a large part of a call. Where nothing intercepts operators (no
compiler, no dispatch mode, no tensor subclass), `call_attention` and `call_mean` run the same
functions as plain autograd functions. Below in the order of a call: public functions, operators,
implementations, gradients; registration is last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import PLAIN, Layout, is_intercepted
from nsa.ops.plan import NO_FLAGS, Flags
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import attention, banded_forward, select
from nsa.ops.triton import compress as compression
from nsa.ops.triton.attention import Inputs, Results, Saved
from nsa.ops.triton.block_index import empty_lists
from nsa.ops.triton.documents import CMP, QUERY, RAW, finite_only
from nsa.ops.triton.launcher import describable, is_compiling_ahead, padded_head, positive_scale
from nsa.ops.triton.problem import LONG_FROM, Problem, keep, kept, problem_of
from nsa.ops.triton.replay import Tape, record

NUM_INPUTS, NUM_SAVED = len(Inputs._fields), len(Saved._fields)
NVTX = [field.name for field in fields(Flags)].index("nvtx")
"""Place of that flag in the arguments of an operator."""
NUM_OWN = 2
"""Results that the caller gets: the output and the selection."""
MAX_GRID = 65535
"""CUDA's limit of the second and third grid dimension, which hold batch * heads."""


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


NO_GRADIENTS = (None,) * (1 + len(Static._fields))
"""Of the selection and of what is not a tensor."""


# --- The public functions of the Triton path ---
# They pad head dims, make the scale positive and split batches that do not fit a grid.


def nsa_attention(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    v_cmp: Tensor,  # [B, N, Hkv, Dv]
    k_sel: Tensor,  # [B, S, Hkv, Dk]
    v_sel: Tensor,  # [B, S, Hkv, Dv]
    k_win: Tensor,  # [B, S, Hkv, Dk]
    v_win: Tensor,  # [B, S, Hkv, Dv]
    gates: Tensor,  # [B, S, Hq, 3]
    spec: BlockSpec,
    *,
    scale: float,
    layout: Layout,
    selection: Tensor | None,  # [B, S, Hkv, n_sel] int32
    flags: Flags = NO_FLAGS,
    form: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, S, Hkv, n_sel] int32
    """Gated sum of the three branches, and the selection used.

    `form` is a key of checks.form_of: `repeat_attention` knows calls of this form from now on.
    """
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    if not layout.whole:
        return _attend_part(tensors, selection, Static(spec, scale, [], flags), layout)
    static, most = Static(spec, scale, layout.key_lens, flags), MAX_GRID // q.shape[2]
    if q.shape[0] <= most:
        out, used = _attend(tensors, selection, static)
        if form is not None and selection is None:
            rest = (None, *static.plain())
            _remember(form, _forward_key(tensors, *rest), rest)
        return out, used
    outs, chosen = [], []
    for first in range(0, q.shape[0], most):
        part = slice(first, first + most)
        ids = None if selection is None else selection[part]
        out, used = _attend(tuple(x[part] for x in tensors), ids, static)
        outs.append(out)
        chosen.append(used)
    return torch.cat(outs), torch.cat(chosen)


def _attend_part(
    tensors: tuple[Tensor, ...], selection: Tensor | None, static: Static, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Queries with an offset."""
    q, *keys, gates = tensors
    batch, apart = q.shape[0], must_be_one_row(layout, q)
    if apart:
        layout = layout.in_one_row(batch)
    else:
        # What no query sees must not be read: it may be NaN, and share a tile with what is seen.
        layout = layout.up_to_last_query()
        stop = layout.key_lens[0]
        stops = [static.spec.num_cmp(stop)] * 2 + [stop] * 4
        tensors = (q, *(cut(x, n) for x, n in zip(keys, stops, strict=True)), gates)
    # Not `replace`: Dynamo cannot trace it.
    flags = static.flags
    skipped = {"no_sel": flags.no_sel, "no_win": flags.no_win}
    flags = Flags(strict=flags.strict, nvtx=flags.nvtx, **skipped)
    static = static._replace(
        doc_lens=layout.key_lens,
        flags=flags,
        query_lens=layout.query_lens,
        offsets=layout.offsets(),
    )
    if not apart:
        return _attend(tensors, selection, static)
    ids = None if selection is None else in_one_row(selection)
    out, chosen = _attend(tuple(in_one_row(x) for x in tensors), ids, static)
    size = (batch, -1)
    return out.squeeze(0).unflatten(0, size), chosen.squeeze(0).unflatten(0, size)


def must_be_one_row(layout: Layout, q: Tensor) -> bool:
    """Whether batch elements become documents of one row: the backward kernels take more keys than
    queries in one row alone."""
    return q.shape[0] > 1 or len(layout.key_lens) > 1 or isinstance(layout.offset, Tensor)


def cut(x: Tensor, stop: int) -> Tensor:
    """The first rows; x itself where that is all: a slice would copy its gradient."""
    return x if x.shape[1] == stop else x[:, :stop]


def in_one_row(x: Tensor) -> Tensor:
    """[B, S, ...] -> [1, B * S, ...]."""
    return x.flatten(0, 1)[None]


def _attend(
    tensors: tuple[Tensor, ...], selection: Tensor | None, static: Static
) -> tuple[Tensor, Tensor]:
    q, *keys, gates = tensors
    d_v = keys[1].shape[3]
    q, scale = positive_scale(q, static.scale)
    aligned = (padded_head(x) for x in (q, *keys))
    static = static._replace(scale=scale)
    out, chosen = call_attention(*aligned, gates, selection, *static.plain())
    out = out if out.shape[3] == d_v else out[..., :d_v]
    return out, chosen if selection is None else selection


@torch.no_grad()
def select_blocks(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    spec: BlockSpec,
    *,
    scale: float,
    doc_lens: list[int],
    flags: Flags = NO_FLAGS,
    largest: bool = False,
) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """The blocks each KV head reads. `largest`: a block's score is that of its best compressed
    token, not the sum."""
    q, scale = positive_scale(q, scale)
    static = Static(spec, scale, doc_lens, flags).plain()
    return _by_batches(
        lambda *pair: torch.ops.nsa.select(*pair, *static, largest),
        (padded_head(q), padded_head(k_cmp)),
    )


@torch.no_grad()
def select_by_tokens(
    q: Tensor,  # [B, S, H, D]
    k: Tensor,  # [B, S, 1, D]
    spec: BlockSpec,
    *,
    flags: Flags = NO_FLAGS,
) -> Tensor:  # [B, S, H, n_sel] int32
    """The blocks of every query of one document: a block's score is its best token's."""
    blocks = replace(spec, l=spec.l_sel, d=spec.l_sel)

    def choose(q: Tensor, k: Tensor) -> Tensor:
        q, k = describable(q), describable(k)
        with torch.cuda.device_of(q):
            problem = problem_of((q, k), q, q, blocks, 1.0, [q.shape[1]], flags)
            return select.choose_by_tokens(problem, q, k).ids

    return _by_batches(choose, (padded_head(q), padded_head(k)))


def _by_batches(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    """The function of parts of the batch whose heads fit a grid."""
    most = MAX_GRID // tensors[0].shape[2]
    done = [function(*part) for part in zip(*(_batches(x, most) for x in tensors), strict=True)]
    return done[0] if len(done) == 1 else torch.cat(done)


def compress(
    x: Tensor, spec: BlockSpec, *, doc_lens: list[int], form: tuple[Any, ...] | None = None
) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D].

    `form`: as of nsa_attention, for `repeat_mean`.
    """
    batches = _batches(x, MAX_GRID // x.shape[2])
    done = [call_mean(part, spec, doc_lens) for part in batches]
    if form is not None:
        static = (spec.to_ints(), doc_lens)
        _remember(form, _key("mean", (x,), *static), static)
    return done[0] if len(done) == 1 else torch.cat(done)


def _batches(x: Tensor, most: int) -> list[Tensor]:
    """x, split along the batch into pieces of at most `most`."""
    return [x] if x.shape[0] <= most else list(x.split(most))


# --- Operators, or the same functions without the dispatcher ---


def call_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Output and selection of nsa::attention."""
    if _intercepted(args[:NUM_INPUTS]):
        out, ids, *_ = torch.ops.nsa.attention(*args)
        return out, ids
    return _Attention.apply(None, args[NUM_INPUTS:], *args[:NUM_INPUTS])


def call_mean(x: Tensor, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
    """nsa::mean."""
    if _intercepted((x,)):
        return torch.ops.nsa.mean(x, spec.to_ints(), doc_lens)
    return _Mean.apply(None, (spec.to_ints(), doc_lens), x)


def _intercepted(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass has to see operators."""
    return is_intercepted() or not all(type(x) in PLAIN for x in tensors)


# --- The same as plain autograd functions, and calls that were recorded: see replay.py ---


class Repeated:
    """Calls of one form: the tape of their forward pass, those of the backward pass by the form of
    the gradient, and the arguments of the operator after its tensors."""

    def __init__(self, tape: Tape, rest: tuple[Any, ...]) -> None:
        self.tape, self.rest = tape, rest
        self.backward: dict[tuple[Any, ...], Tape] = {}


def _remember(form: tuple[Any, ...], key: tuple[Any, ...] | None, rest: tuple[Any, ...]) -> None:
    """Let calls of this form repeat what was recorded under a key, if it was."""
    if tape := kept(key):
        keep(form, Repeated(tape, rest))


def repeat_attention(
    form: tuple[Any, ...], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor] | None:
    """nsa_attention of a form that is known; None: it is not."""
    known = kept(form)
    return None if known is None else _Attention.apply(known, known.rest, *tensors)


def repeat_mean(form: tuple[Any, ...], x: Tensor) -> Tensor | None:
    """compress of a form that is known; None: it is not."""
    known = kept(form)
    return None if known is None else _Mean.apply(known, known.rest, x)


class _Attention(torch.autograd.Function):
    """nsa::attention; `known` may be None."""

    @staticmethod
    def forward(
        ctx: Any, known: Repeated | None, rest: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        packed = known.tape.repeat_packed(tensors) if known else None
        if packed is None:
            out, *saved = _attention(*tensors, *rest)
            if known is None and (tape := kept(_forward_key(tensors, *rest))):
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * (2 + NUM_INPUTS)
        tensors = ctx.saved_tensors
        if ctx.known is None:
            return None, None, *_attention_backward(*tensors, dout, *ctx.static)
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
    grads = _attention_backward(*inputs, ids, *known.tape.unpacked(buffer), dout, *static)
    if tape := kept(_backward_key((*inputs, dout), static)):
        known.backward[kind] = tape
    return grads


class _Mean(torch.autograd.Function):
    """nsa::mean; `known` may be None."""

    @staticmethod
    def forward(ctx: Any, known: Repeated | None, rest: tuple[Any, ...], x: Tensor) -> Tensor:
        ctx.known, ctx.seq_len, ctx.rest = known, x.shape[1], rest
        done = known.tape.repeat((x,)) if known else None
        return _mean(x, *rest) if done is None else done[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        known, form = ctx.known, _form(dout)
        tape = known.backward.get(form) if known else None
        done = tape.repeat((dout,)) if tape else None
        if done is not None:
            return None, None, done[0]
        dx = _mean_backward(dout, ctx.seq_len, *ctx.rest)
        if known and (tape := kept(_key("mean_backward", (dout,), ctx.seq_len, *ctx.rest))):
            known.backward[form] = tape
        return None, None, dx


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


# --- Implementations, and their fake twins, which only make shapes and dtypes ---


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device of the first tensor current, as every allocation and launch expects."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return function(*args)

    return run


def _attention(*args: Any) -> tuple[Tensor, ...]:
    given, rest = args[:NUM_INPUTS], args[NUM_INPUTS:]
    key = _forward_key(given, *rest)
    results = _repeat(key, given)
    return tuple(_attention_anew(key, *args) if results is None else results)


def _forward_key(
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


@_on_device
def _attention_anew(key: tuple[Any, ...] | None, *args: Any) -> Sequence[Tensor]:
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


def _attention_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*args[:NUM_INPUTS])
    problem = Problem(inputs.q, inputs.v_sel, *Static.of(*args[NUM_INPUTS + 1 :]))
    batch, seq_len, num_heads, _ = inputs.q.shape
    groups = problem.num_groups
    reader, num_words = (problem, problem.num_words) if problem.masked else (problem.reader, 0)
    out = (batch, seq_len, num_heads, problem.d_v)
    return tuple(
        Results(
            problem.empty(*out),
            problem.empty(batch, seq_len, groups, problem.spec.n_sel, dtype=torch.int32),
            problem.empty(*out),
            problem.empty(*out),
            problem.empty(*out),
            problem.empty(3, batch, num_heads, seq_len, dtype=torch.float32),
            problem.empty(batch, groups, seq_len, dtype=torch.int32),
            problem.empty(batch, groups, num_words, seq_len, dtype=torch.int32),
            *empty_lists(reader, sized=problem.has_lists),
        )
    )


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    given, static = args[: NUM_INPUTS + NUM_SAVED + 1], args[NUM_INPUTS + NUM_SAVED + 1 :]
    key = _backward_key((*given[:NUM_INPUTS], given[-1]), static)
    results = _repeat(key, given)
    return tuple(_attention_backward_anew(key, *args) if results is None else results)


def _backward_key(tensors: Sequence[Tensor], static: Sequence[Any]) -> tuple[Any, ...] | None:
    """Key of the backward pass for inputs and the gradient of the output; None: never replayed."""
    if not _is_repeatable(tensors, *static):
        return None
    return _key("backward", tensors, torch.are_deterministic_algorithms_enabled(), *static)


@_on_device
def _attention_backward_anew(key: tuple[Any, ...] | None, *args: Any) -> Sequence[Tensor]:
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


def _attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:NUM_INPUTS])


class LargestProblem(Problem):
    """Scores by the best compressed token of a block."""

    largest = True


@_on_device
def _select(q: Tensor, k_cmp: Tensor, *rest: Any) -> Tensor:
    *static, largest = rest
    q, k_cmp = describable(q), describable(k_cmp)
    kind = LargestProblem if largest else Problem
    problem = problem_of((q, k_cmp), q, k_cmp, *Static.of(*static), kind)
    lse = problem.empty(problem.batch, problem.num_heads, problem.seq_len, dtype=torch.float32)
    banded_forward.forward(problem, 0, q, k_cmp, k_cmp, lse)
    return select.choose(problem, q, k_cmp, lse).ids


def _select_fake(q: Tensor, k_cmp: Tensor, *rest: Any) -> Tensor:
    size = (*q.shape[:2], k_cmp.shape[2], Static.of(*rest[:-1]).spec.n_sel)
    return torch.empty(size, dtype=torch.int32, device=q.device)


def _mean(x: Tensor, blocks: list[int], doc_lens: list[int]) -> Tensor:
    key = _key("mean", (x,), blocks, doc_lens) if len(doc_lens) == 1 else None
    done = _repeat(key, (x,))
    return _mean_anew(key, x, blocks, doc_lens) if done is None else done[0]


@_on_device
def _mean_anew(
    key: tuple[Any, ...] | None, x: Tensor, blocks: list[int], doc_lens: list[int]
) -> Tensor:
    def forward(x: Tensor) -> tuple[Tensor]:
        return (compression.forward(x, BlockSpec.from_ints(blocks), doc_lens),)

    return _recorded(key, forward, (describable(x),), (x,))[0]


def _mean_fake(x: Tensor, blocks: list[int], doc_lens: list[int]) -> Tensor:
    num_cmp = sum(BlockSpec.from_ints(blocks).num_cmp(length) for length in doc_lens)
    return x.new_empty(x.shape[0], num_cmp, *x.shape[2:])


def _mean_backward(dout: Tensor, seq_len: int, blocks: list[int], doc_lens: list[int]) -> Tensor:
    rest = (seq_len, blocks, doc_lens)
    key = _key("mean_backward", (dout,), *rest) if len(doc_lens) == 1 else None
    done = _repeat(key, (dout,))
    return _mean_backward_anew(key, dout, *rest) if done is None else done[0]


@_on_device
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


def _mean_backward_fake(
    dout: Tensor, seq_len: int, blocks: list[int], doc_lens: list[int]
) -> Tensor:
    return dout.new_empty(dout.shape[0], seq_len, *dout.shape[2:])


# --- Autograd: contexts and gradients ---


def _attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    results = Results(*output)
    ctx.set_materialize_grads(False)  # only the output has a gradient
    ctx.save_for_backward(*inputs[:NUM_INPUTS], *(getattr(results, x) for x in Saved._fields))
    ctx.static = inputs[NUM_INPUTS + 1 :]


def _attention_gradients(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * NUM_INPUTS + NO_GRADIENTS
    grads = torch.ops.nsa.attention_backward(*ctx.saved_tensors, dout, *ctx.static)
    return (*grads, *NO_GRADIENTS)


def _mean_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seq_len = inputs[0].shape[1]
    ctx.static = inputs[1:]


def _mean_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.nsa.mean_backward(dout, ctx.seq_len, *ctx.static), None, None


def _no_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise NotImplementedError(
        "the Triton path has no second gradient; use backend='reference' for create_graph=True"
    )


# --- Registration: an argument per field of the named tuples of attention.py ---

_STATIC = "int[] blocks, float scale, int[] doc_lens, bool[] flags, int[] query_lens, int[] offsets"
EVERYWHERE = "default"
"""One implementation for every device: CUDA, and the CPU in Triton's interpreter."""


def _tensors(kind: Any) -> str:
    """Arguments of a schema: a tensor for every field of a named tuple."""
    return ", ".join(f"Tensor {name}" for name in kind._fields)


def _returns(kind: Any) -> str:
    """Return values of a schema."""
    return f"({', '.join(['Tensor'] * len(kind._fields))})"


SCHEMAS = {
    "attention": f"({_tensors(Inputs)}, Tensor? selection, {_STATIC}) -> {_returns(Results)}",
    "attention_backward": (
        f"({_tensors(Inputs)}, {_tensors(Saved)}, Tensor dout, {_STATIC}) -> {_returns(Inputs)}"
    ),
    "select": f"(Tensor q, Tensor k_cmp, {_STATIC}, bool largest) -> Tensor",
    "mean": "(Tensor x, int[] blocks, int[] doc_lens) -> Tensor",
    "mean_backward": "(Tensor dout, SymInt seq_len, int[] blocks, int[] doc_lens) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"nsa::{_name}", _schema)

IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_attention, _attention_fake),
    "attention_backward": (_attention_backward, _attention_backward_fake),
    "select": (_select, _select_fake),
    "mean": (_mean, _mean_fake),
    "mean_backward": (_mean_backward, _mean_backward_fake),
}
for _name, (_real, _fake) in IMPLEMENTATIONS.items():
    torch.library.impl(f"nsa::{_name}", EVERYWHERE, _real)
    torch.library.register_fake(f"nsa::{_name}", _fake)
torch.library.register_autograd(
    "nsa::attention", _attention_gradients, setup_context=_attention_context
)
torch.library.register_autograd("nsa::mean", _mean_gradients, setup_context=_mean_context)
for _name in ("attention_backward", "mean_backward"):
    torch.library.register_autograd(f"nsa::{_name}", _no_second_gradient)
