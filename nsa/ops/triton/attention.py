"""Order of the kernels of one attention call, forward and backward.

Branches are numbered 0 compressed, 1 selected, 2 window. The selected branch has three orders of
work: masked (banded_*.py), by blocks (by_block_*.py) and by queries (by_query.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.plan import NO_FLAGS, Flags, nvtx
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import tile
from nsa.ops.triton.bands import banded_backward, banded_forward, flash
from nsa.ops.triton.bands.banded_forward import Gated
from nsa.ops.triton.choice import best
from nsa.ops.triton.choice.selection import Selection, no_choice, pack_given, split_ids
from nsa.ops.triton.launcher import (
    Launch,
    ceil_div,
    compiling_ahead,
    describable,
    on_meta,
    padded_head,
    start,
)
from nsa.ops.triton.problem import Problem, problem_of
from nsa.ops.triton.selected import by_block_backward, by_block_forward, by_query
from nsa.ops.triton.selected.block_index import (
    QueryLists,
    empty_lists,
    fill_zeros,
    list_queries,
)
from nsa.ops.triton.tiles import padded

QUERY_TILE = 64
"""Queries that are added to at a time."""
GATE_TOKENS, GATE_HEADS = 2, 16
"""Tokens and heads of one program of gate_backward."""


class Inputs(NamedTuple):
    """The tensors of nsa_attention."""

    q: Tensor  # [B, S, Hq, Dk]
    k_cmp: Tensor  # [B, N, Hkv, Dk]
    v_cmp: Tensor  # [B, N, Hkv, Dv]
    k_sel: Tensor  # [B, S, Hkv, Dk]
    v_sel: Tensor  # [B, S, Hkv, Dv]
    k_win: Tensor  # [B, S, Hkv, Dk]
    v_win: Tensor  # [B, S, Hkv, Dv]
    gates: Tensor  # [B, S, Hq, 3]


class Results(NamedTuple):
    """The output, the selection, and what the backward pass needs beside the inputs."""

    out: Tensor  # [B, S, Hq, Dv]
    ids: Tensor  # [B, S, Hkv, n_sel] int32
    o_cmp: Tensor  # [B, S, Hq, Dv]
    o_sel: Tensor  # [B, S, Hq, Dv]
    o_win: Tensor  # [B, S, Hq, Dv]
    lse: Tensor  # [3, B, Hq, S] fp32, base 2
    num_chosen: Tensor  # [B, Hkv, S] int32
    bits: Tensor  # [B, Hkv, words, S] int32; no words if the selected branch reads its blocks
    starts: Tensor  # from here on: QueryLists of block_index.py, empty if the forward built none
    queries: Tensor
    places: Tensor
    item_block: Tensor
    first_item: Tensor


class Saved(NamedTuple):
    """The results that are saved for the backward pass; shapes as in Results."""

    ids: Tensor
    o_cmp: Tensor
    o_sel: Tensor
    o_win: Tensor
    lse: Tensor
    num_chosen: Tensor
    bits: Tensor
    starts: Tensor
    queries: Tensor
    places: Tensor
    item_block: Tensor
    first_item: Tensor


def forward(problem: Problem, inputs: Inputs, selection: Tensor | None) -> Results:
    """All three branches and their gated sum."""
    q, gates = inputs.q, inputs.gates
    # The compressed branch first: its log-sum-exp gives the scores. The selected branch last: its
    # kernels end with the gated sum of all three.
    lse = problem.empty(3, problem.batch, problem.num_heads, problem.seq_len, dtype=torch.float32)
    if problem.flags.no_win:
        lse[2] = 0.0
    routes = {} if problem.shifted else _routes(problem, problem.long)
    marked = problem.flags.nvtx
    with nvtx("pcmp_all", marked):
        o_cmp = _band(problem, 0, q, inputs.k_cmp, inputs.v_cmp, lse[0], routes)
    if selection is not None and problem.flags.no_sel:
        chosen = no_choice(problem, selection)
    elif selection is None:
        with nvtx("nsa.sel.ranges_v2", marked):
            chosen = best.choose(problem, q, inputs.k_cmp, lse[0], has_bits=problem.masked)
    else:
        chosen = pack_given(problem, selection, has_bits=problem.masked)
    with nvtx("branch_attn+gate", marked):
        if problem.flags.no_win:
            o_win = o_cmp  # its gate is 0
        else:
            o_win = _band(problem, 2, q, inputs.k_win, inputs.v_win, lse[2], routes)
        if problem.flags.no_sel:
            lse[1] = 0.0
            out = (o_win * gates[..., 2:] + o_cmp * gates[..., :1]).to(problem.dtype)
            lists = empty_lists(problem.reader)
            return Results(out, chosen.ids, o_cmp, o_win, o_win, lse, *chosen[1:], *lists)
        gated = Gated(gates, o_cmp, o_win, problem.empty(*o_cmp.shape))
        read = chosen
        if problem.reader is not problem and not problem.masked:
            read = pack_given(problem.reader, _read_ids(problem, chosen.ids))
        o_sel, lists = _selected(problem, inputs, read, lse[1], gated)
    return Results(gated.out, chosen.ids, o_cmp, o_sel, o_win, lse, *read[1:], *lists)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dout: Tensor) -> Inputs:
    """Gradients of all inputs.

    In deterministic mode every branch runs on the kernels of this package.
    """
    q, bits = inputs.q, saved.bits
    ordered = torch.are_deterministic_algorithms_enabled()
    routes = {} if ordered else _routes(problem, problem.long_gradients)
    # Gates first: their gradient and the row statistics, which all other kernels read.
    dgates, stats, gated = _gate_backward(problem, saved, dout, inputs.gates, routes)
    keys = ((inputs[1], inputs[2]), (inputs[3], inputs[4]), (inputs[5], inputs[6]))
    grads: dict[int, tuple[Tensor, Tensor]] = {}
    dq_more: Tensor | None = None
    # Keys and values of the compressed and window branch; kernels of another library also return
    # their dq.
    flags = {1: problem.flags.no_sel, 2: problem.flags.no_win}
    skipped = {branch for branch in flags if flags[branch]}
    for branch in skipped:
        grads[branch] = torch.zeros_like(keys[branch][0]), torch.zeros_like(keys[branch][1])
        dgates[..., branch] = 0.0
    summed = {0, 2} - skipped - set(routes) if problem.one_pass and not ordered else set()
    dq_sum = _no_queries(problem, q) if summed else None
    for branch in (0, 1, 2) if problem.masked else (0, 2):
        if branch in skipped:
            continue
        if branch not in routes:
            rest = (q, keys[branch], dout, stats, bits, dq_sum if branch in summed else None)
            grads[branch] = _band_kv(problem, branch, *rest)
        else:
            dq, *grads_kv = flash.backward(
                *(branch, q, *keys[branch], saved.o_cmp if branch == 0 else saved.o_win),
                *(saved.lse[branch], gated.pop(branch), problem.spec, problem.scale),
                *(routes[branch], problem.offset),
            )
            grads[branch] = grads_kv[0], grads_kv[1]
            dq_more = dq if dq_more is None else dq_more + dq
    if dq_sum is not None:
        dq_more = dq_sum if dq_more is None else dq_sum + dq_more
    # dq of the branches that are bands; that of chosen blocks is added to it.
    walked = {0, 1, 2} - skipped - set(routes) - summed
    walked -= set() if problem.masked else {1}
    walked -= set() if problem.num_cmp > 0 else {0}
    if walked or dq_more is None:
        dq = _backward_q(problem, q, keys, dout, stats, bits, dq_more, walked)
    elif problem.masked or problem.flags.no_sel or problem.by_query:
        dq = banded_backward.rounded(problem, "dq", dq_more)
    else:
        dq = dq_more
    if not (problem.flags.no_sel or problem.masked):
        dq, grads[1] = _backward_selected(problem, inputs, saved, dout, stats[1], dq, ordered)
    return Inputs(dq, *grads[0], *grads[1], *grads[2], dgates)


def compile_ahead(
    problem: Problem, inputs: Inputs, selection: Tensor | None, *, backward_too: bool
) -> None:
    """Compile the kernels of a call on threads: the call itself, on tensors without memory.

    The same call at other lengths follows: few kernels have another form there, and a later call
    finds them compiled. Only plain allocations and views: other operations on the meta device
    import sympy, which takes seconds.
    """
    with compiling_ahead():
        for twin in (problem.on_meta(), *problem.at_other_lengths()):
            lengths = problem.lengths_at(twin)
            given = Inputs._make(on_meta(x, lengths) for x in inputs)
            ids = None if selection is None else on_meta(selection, lengths)
            results = forward(twin, given, ids)
            if backward_too:
                saved = Saved._make(getattr(results, name) for name in Saved._fields)
                backward(twin, given, saved, twin.empty(*results.out.shape))


def _backward_selected(
    problem: Problem,
    inputs: Inputs,
    saved: Saved,
    dout: Tensor,
    stats: Tensor,  # [B, Hq, S, 4] fp32
    dq: Tensor,
    ordered: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Gradient of q, dq of the other branches included, and those of the selected keys and values.

    By queries, dq and dk, dv are separate passes; the kernel in Gluon needs one for large groups,
    too.
    """
    reader = problem.reader
    ids = saved.ids if reader is problem else _read_ids(problem, saved.ids)
    chosen = Selection(ids, saved.num_chosen, saved.bits)
    if _is_by_token(problem):
        stats = stats.view(problem.batch, problem.seq_len, problem.num_heads, 4)
    rest = (inputs.q, inputs.k_sel, inputs.v_sel, dout, stats)
    lists = QueryLists(*saved[-len(QueryLists._fields) :])
    if not problem.has_lists:
        lists = list_queries(reader, chosen)
    if problem.by_query and not reader.in_gluon:
        by_query.backward_q(reader, *rest, chosen, dq)
        return dq, by_block_backward.backward_kv(reader, *rest, lists, ordered=ordered)
    dq, *grads = by_block_backward.backward(reader, *rest, chosen, lists, ordered=ordered, more=dq)
    return dq, (grads[0], grads[1])


def _no_queries(problem: Problem, q: Tensor) -> Tensor:
    """Zeros [B, S, Hq, Dk] fp32, to which programs add whole tiles of queries."""
    rows = problem.batch * problem.seq_len
    total = problem.empty(rows + QUERY_TILE, *q.shape[2:], dtype=torch.float32)[:rows].view(q.shape)
    fill_zeros(problem, "no dq", total)
    return total


def _routes(problem: Problem, long: bool) -> dict[int, flash.Kernel]:
    """The branches that kernels of another library compute, and which kernels.

    The plan sends branches to torch's flash kernels (NSA_USE_FA2). By default
    cuDNN computes the compressed branch of long sequences, where it is faster than our kernels.
    """
    routes = {0: flash.CUDNN} if long else {}
    asked = {0: problem.flags.flash_cmp, 2: problem.flags.flash_win}
    routes |= {branch: flash.TORCH for branch in asked if asked[branch]}
    if problem.num_cmp == 0:
        routes.pop(0, None)
    return routes


def _band(
    problem: Problem,
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    routes: dict[int, flash.Kernel],
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the compressed or window branch; writes lse."""
    if branch in routes:
        kernel = routes[branch]
        return flash.forward(branch, q, k, v, problem.spec, problem.scale, lse, kernel)
    in_gluon = problem.hopper.cmp_forward if branch == 0 else problem.hopper.forward
    if in_gluon:
        from nsa.ops.triton.hopper import forward as hopper_forward

        return hopper_forward.forward(problem, branch, q, k, v, lse)
    return banded_forward.forward(problem, branch, q, k, v, lse)


def _selected(
    problem: Problem, inputs: Inputs, chosen: Selection, lse: Tensor, gated: Gated
) -> tuple[Tensor, QueryLists]:
    """Output of the selected branch, and the lists of queries that only block order needs."""
    q, k, v = inputs.q, inputs.k_sel, inputs.v_sel
    if problem.masked and problem.hopper.sel_forward:
        from nsa.ops.triton.hopper import forward as hopper_forward

        o_sel = hopper_forward.forward(problem, 1, q, k, v, lse, chosen.bits, gated)
        return o_sel, empty_lists(problem)
    if problem.masked:
        o_sel = banded_forward.forward(problem, 1, q, k, v, lse, chosen.bits, gated)
        return o_sel, empty_lists(problem)
    reader = problem.reader
    if not problem.has_lists:
        o_sel = by_query.forward(reader, q, k, v, chosen, lse, gated)
        return o_sel, empty_lists(problem)
    lists = list_queries(reader, chosen)
    o_sel = by_block_forward.forward(reader, q, k, v, chosen, lists, lse, gated)
    return o_sel, lists


def _read_ids(problem: Problem, ids: Tensor) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """The ids of the same tokens in the blocks of `problem.reader`, ascending, then -1."""
    if ids.is_meta:  # only kernels are compiled; see compile_ahead
        return problem.reader.empty(*ids.shape[:3], problem.reader.spec.n_sel, dtype=torch.int32)
    return split_ids(ids, problem.spec.l_sel // problem.reader.spec.l_sel)


def _gate_backward(
    problem: Problem, saved: Saved, dout: Tensor, gates: Tensor, routes: dict[int, flash.Kernel]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Gradients of the gates [B, S, Hq, 3], stats [3, B, Hq, S, 4] fp32, gate * dout by branch."""
    gated = {branch: problem.empty(*dout.shape) for branch in routes}
    dgates = problem.empty(*gates.shape, dtype=gates.dtype)
    stats = problem.empty(*saved.lse.shape, 4, dtype=torch.float32)
    num_rows = problem.batch * problem.seq_len * problem.num_heads
    start(
        problem.memo,
        ("gates", *routes),
        tile.gate_backward,
        (
            saved.o_cmp, saved.o_sel, saved.o_win, dout, saved.lse, gates, dgates, stats,
            gated.get(0), gated.get(2), problem.row_shift, _words_of(problem, saved.bits),
        ),
        lambda: Launch.plain(
            (
                ceil_div(problem.seq_len, GATE_TOKENS),
                ceil_div(problem.num_heads, GATE_HEADS),
                problem.batch,
            ),
            (
                num_rows, problem.num_heads, problem.per_group, problem.seq_len,
                *dout.stride()[:3], *gates.stride()[:3],
            ),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v)}
            | {"BY_TOKEN": _is_by_token(problem), "BT": GATE_TOKENS, "BH": GATE_HEADS},
        ),
    )  # fmt: skip
    return dgates, stats, gated


def _words_of(problem: Problem, bits: Tensor) -> Tensor | None:  # [B, Hkv, 1, S]
    """The bits that the stats of the selected branch have, for the kernels in Gluon."""
    read = problem.hopper.sel_keys or problem.hopper.all_queries
    return bits if read and not problem.flags.no_sel else None


def _is_by_token(problem: Problem) -> bool:
    """Whether the stats of the selected branch are [B, S, Hq, 4], for the kernel in Gluon."""
    return not problem.masked and problem.reader.in_gluon


def _band_kv(
    problem: Problem,
    branch: int,
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    dout: Tensor,
    stats: Tensor,
    bits: Tensor,
    dq_sum: Tensor | None,  # [B, S, Hq, Dk] fp32
) -> tuple[Tensor, Tensor]:
    """Gradients of the keys and values of a branch that is a band; what they give the queries is
    added to dq_sum."""
    hopper = problem.hopper
    if (hopper.cmp_keys, hopper.sel_keys, hopper.keys)[branch]:
        from nsa.ops.triton.hopper import keys as hopper_keys

        return hopper_keys.backward_kv(problem, branch, q, *keys, dout, stats, dq_sum)
    return banded_backward.backward_kv(problem, branch, q, *keys, dout, stats, bits)


def _backward_q(
    problem: Problem,
    q: Tensor,
    keys: tuple[tuple[Tensor, Tensor], ...],  # k and v of the three branches
    dout: Tensor,
    stats: Tensor,
    bits: Tensor,
    dq_more: Tensor | None,
    walked: set[int],
) -> Tensor:
    """Gradient of q from the branches to walk, and what kernels of another library gave.

    On Hopper a kernel in Gluon walks the window and, if asked, other branches, and adds the rest.
    """
    masked = 1 in walked
    compressed = 0 in walked and keys[0][0].shape[1] > 0
    in_gluon = problem.hopper.both_queries if compressed else problem.hopper.queries
    if masked:
        in_gluon = problem.hopper.all_queries
    if in_gluon and 2 in walked:
        from nsa.ops.triton.hopper import queries

        cmp, sel = keys[0] if compressed else None, keys[1] if masked else None
        return queries.backward_q(problem, q, cmp, sel, keys[2], dout, stats, dq_more)
    return banded_backward.backward_q(problem, q, keys, dout, stats, bits, dq_more, walked=walked)


# --- Chunked prefill: many queries that continue a cached sequence, forward only ---


@torch.no_grad()
def attend_continued(
    q: Tensor,  # [B, T, Hq, Dk]
    cmp: tuple[Tensor, Tensor],  # k, v [B, N, Hkv, D]: all compressed tokens
    sel: tuple[Tensor, Tensor],  # [B, first + T, Hkv, D]
    win: tuple[Tensor, Tensor],  # [B, first + T - win_first, Hkv, D]
    gates: Tensor,  # [B, T, Hq, 3]
    spec: BlockSpec,
    scale: float,
    *,
    first: int,
    win_first: int,
    flags: Flags = NO_FLAGS,
) -> Tensor:  # [B, T, Hq, Dv]
    """nsa_attention of queries from position `first` on, where a cache has forgotten the keys of
    the window before token `win_first`."""
    d_v = sel[1].shape[3]
    # Head dims are padded to a multiple of 8; the padding of the output is cut off at the end.
    aligned = [describable(padded_head(x)) for x in (q, *cmp, *sel, *win)]
    inputs = Inputs._make([*aligned, gates])
    flags = replace(flags, flash_cmp=False, flash_win=False)
    places = [sel[0].shape[1]], flags, [q.shape[1]], [first]
    problem = problem_of(inputs, inputs.q, inputs.v_sel, spec, scale, *places, win_first=win_first)
    return forward(problem, inputs, None).out[..., :d_v]
