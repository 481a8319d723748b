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
functions as plain autograd functions. Implementations are in replay/calls.py. Below in the order
of a call: public functions, operators, fake twins, gradients; registration is last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.ops.checks import PLAIN, Layout, is_intercepted
from nsa.ops.plan import NO_FLAGS, Flags
from nsa.ops.spec import BlockSpec
from nsa.ops.triton.attention import Inputs, Results, Saved
from nsa.ops.triton.bands import banded_forward
from nsa.ops.triton.choice import best
from nsa.ops.triton.launcher import describable, padded_head, positive_scale
from nsa.ops.triton.problem import Problem, problem_of
from nsa.ops.triton.replay import calls
from nsa.ops.triton.replay.calls import (
    NUM_INPUTS,
    AttentionFunction,
    MeanFunction,
    Static,
    on_device,
    repeat_attention,
    repeat_mean,
)
from nsa.ops.triton.selected.block_index import empty_lists

__all__ = ["compress", "nsa_attention", "repeat_attention", "repeat_mean", "select_blocks"]

MAX_GRID = 65535
"""CUDA's limit of the second and third grid dimension, which hold batch * heads."""
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
            calls.remember(form, calls.forward_key(tensors, *rest), rest)
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
            return best.choose_by_tokens(problem, q, k).ids

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
        calls.remember(form, calls.mean_key(x, *static), static)
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
    return AttentionFunction.apply(None, args[NUM_INPUTS:], *args[:NUM_INPUTS])


def call_mean(x: Tensor, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
    """nsa::mean."""
    if _intercepted((x,)):
        return torch.ops.nsa.mean(x, spec.to_ints(), doc_lens)
    return MeanFunction.apply(None, (spec.to_ints(), doc_lens), x)


def _intercepted(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass has to see operators."""
    return is_intercepted() or not all(type(x) in PLAIN for x in tensors)


# --- The choice of blocks, and fake twins of all, which only make shapes and dtypes ---


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


def _attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:NUM_INPUTS])


class LargestProblem(Problem):
    """Scores by the best compressed token of a block."""

    largest = True


@on_device
def _select(q: Tensor, k_cmp: Tensor, *rest: Any) -> Tensor:
    *static, largest = rest
    q, k_cmp = describable(q), describable(k_cmp)
    kind = LargestProblem if largest else Problem
    problem = problem_of((q, k_cmp), q, k_cmp, *Static.of(*static), kind)
    lse = problem.empty(problem.batch, problem.num_heads, problem.seq_len, dtype=torch.float32)
    banded_forward.forward(problem, 0, q, k_cmp, k_cmp, lse)
    return best.choose(problem, q, k_cmp, lse).ids


def _select_fake(q: Tensor, k_cmp: Tensor, *rest: Any) -> Tensor:
    size = (*q.shape[:2], k_cmp.shape[2], Static.of(*rest[:-1]).spec.n_sel)
    return torch.empty(size, dtype=torch.int32, device=q.device)


def _mean_fake(x: Tensor, blocks: list[int], doc_lens: list[int]) -> Tensor:
    num_cmp = sum(BlockSpec.from_ints(blocks).num_cmp(length) for length in doc_lens)
    return x.new_empty(x.shape[0], num_cmp, *x.shape[2:])


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
    "attention": (calls.attention_forward, _attention_fake),
    "attention_backward": (calls.attention_backward, _attention_backward_fake),
    "select": (_select, _select_fake),
    "mean": (calls.mean_forward, _mean_fake),
    "mean_backward": (calls.mean_backward, _mean_backward_fake),
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
