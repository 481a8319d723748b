"""Order of the kernels of the whole attention, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.plan import FLASH, flash_asked, plan_attention
from nsa.ops.ranges import nvtx
from nsa.ops.triton import band, flash, select, selected
from nsa.ops.triton.band import Gated
from nsa.ops.triton.kernels import gate
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.selected import Inverse
from nsa.ops.triton.start import Launch, ceil_div, start
from nsa.ops.triton.tiles import padded

ROWS_PER_GATE_PROGRAM = 16


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
    """The output, the selection, and what the backward reads beside the inputs."""

    out: Tensor  # [B, S, Hq, Dv]
    ids: Tensor  # [B, S, Hkv, n_sel] int32
    o_cmp: Tensor  # [B, S, Hq, Dv]
    o_sel: Tensor  # [B, S, Hq, Dv]
    o_win: Tensor  # [B, S, Hq, Dv]
    lse: Tensor  # [3, B, Hq, S] fp32, base 2
    num_chosen: Tensor  # [B, Hkv, S] int32
    bits: Tensor  # [B, Hkv, words, S] int32
    before: Tensor  # [B, Hkv, words, S] int16
    ends: Tensor  # these five: the Inverse of selected.py, empty where the forward has none
    queries: Tensor
    places: Tensor
    item_block: Tensor
    item_ends: Tensor


class Saved(NamedTuple):
    """The results that the backward reads."""

    ids: Tensor
    o_cmp: Tensor
    o_sel: Tensor
    o_win: Tensor
    lse: Tensor
    num_chosen: Tensor
    bits: Tensor
    before: Tensor
    ends: Tensor
    queries: Tensor
    places: Tensor
    item_block: Tensor
    item_ends: Tensor


def forward(problem: Problem, inputs: Inputs, selection: Tensor | None) -> Results:
    """All three branches and their gated sum."""
    q, gates = inputs.q, inputs.gates
    lse = problem.empty(3, problem.batch, problem.num_heads, problem.seq_len, dtype=torch.float32)
    routed = _flash_branches(problem)
    with nvtx("pcmp_all"):
        o_cmp = _band(problem, 0, q, inputs.k_cmp, inputs.v_cmp, lse[0], routed)
    if selection is None:
        with nvtx("nsa.sel.ranges_v2"):
            chosen = select.choose(problem, q, inputs.k_cmp, lse[0])
    else:
        chosen = select.given(problem, selection)
    with nvtx("branch_attn+gate"):
        o_win = _band(problem, 2, q, inputs.k_win, inputs.v_win, lse[2], routed)
        gated = Gated(gates, o_cmp, o_win, torch.empty_like(o_cmp))
        o_sel, inverse = _selected(problem, inputs, chosen, lse[1], gated)
    return Results(gated.out, chosen.ids, o_cmp, o_sel, o_win, lse, *chosen[1:], *inverse)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dout: Tensor) -> Inputs:
    """Gradients of all inputs.

    Where sums need a fixed order, the selected branch masks the past whatever its length.
    """
    q, bits = inputs.q, saved.bits
    masked = problem.masked or torch.are_deterministic_algorithms_enabled()
    dgates, stats = _gate_backward(problem, saved, dout, inputs.gates)
    keys = ((inputs[1], inputs[2]), (inputs[3], inputs[4]), (inputs[5], inputs[6]))
    routed = _flash_branches(problem)
    dq_cmp, dk_cmp, dv_cmp = _band_backward(problem, 0, inputs, saved, dout, stats, routed)
    dq_win, dk_win, dv_win = _band_backward(problem, 2, inputs, saved, dout, stats, routed)
    dq_sel: Tensor | None = None
    if masked:
        dk_sel, dv_sel = band.backward_kv(problem, 1, q, *keys[1], dout, stats, bits)
    else:
        chosen = Selection(saved.ids, saved.num_chosen, bits, saved.before)
        inverse = Inverse(*saved[-len(Inverse._fields) :])
        if problem.by_query:
            inverse = selected.invert(problem, chosen)
        dq_sel, dk_sel, dv_sel = selected.backward(
            problem, q, *keys[1], dout, stats[1], chosen, inverse
        )
    dq = band.backward_q(problem, q, keys, dout, stats, bits, dq_sel)
    for part in (dq_cmp, dq_win):
        if part is not None:
            dq += part
    return Inputs(dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates)


def _flash_branches(problem: Problem) -> tuple[int, ...]:
    """The branches that go through flash kernels; the caller has counted those that cannot."""
    if not any(flash_asked()):
        return ()
    head_dims = (problem.d_k, problem.d_v)
    plan = plan_attention(problem.device, problem.dtype, "triton", head_dims, packed=problem.packed)
    return tuple(branch for branch, how in ((0, plan.cmp), (2, plan.win)) if how == FLASH)


def _band(
    problem: Problem,
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    routed: tuple[int, ...],
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the compressed or window branch; writes lse."""
    if branch in routed and k.shape[1]:
        return flash.forward(branch, q, k, v, problem.spec, problem.scale, lse)
    return band.forward(problem, branch, q, k, v, lse)


def _band_backward(
    problem: Problem,
    branch: int,
    inputs: Inputs,
    saved: Saved,
    dout: Tensor,
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    routed: tuple[int, ...],
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of k and v of a branch, and of q where band.backward_q shall not add it."""
    k, v = inputs[1 + 2 * branch], inputs[2 + 2 * branch]
    if branch not in routed or not k.shape[1]:
        return None, *band.backward_kv(problem, branch, inputs.q, k, v, dout, stats, saved.bits)
    out = saved.o_cmp if branch == 0 else saved.o_win
    gated = (dout * inputs.gates[..., branch, None]).to(problem.dtype)
    grads = flash.backward(
        *(branch, inputs.q, k, v, out, saved.lse[branch], gated, problem.spec, problem.scale)
    )
    stats[branch, ..., 2] = 0.0  # with a gate of 0 the branch adds nothing to the gradient of q
    return grads


def _selected(
    problem: Problem, inputs: Inputs, chosen: Selection, lse: Tensor, gated: Gated
) -> tuple[Tensor, Inverse]:
    q, k, v = inputs.q, inputs.k_sel, inputs.v_sel
    if problem.masked:
        o_sel = band.forward(problem, 1, q, k, v, lse, chosen.bits, gated)
        return o_sel, selected.empty_inverse(problem)
    if problem.by_query:
        o_sel = selected.forward_by_query(problem, q, k, v, chosen, lse, gated)
        return o_sel, selected.empty_inverse(problem)
    inverse = selected.invert(problem, chosen)
    return selected.forward_by_block(problem, q, k, v, chosen, inverse, lse, gated), inverse


def _gate_backward(
    problem: Problem, saved: Saved, dout: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, 3], [3, B, Hq, S, 4] fp32
    dgates = problem.empty(*gates.shape, dtype=gates.dtype)
    stats = problem.empty(*saved.lse.shape, 4, dtype=torch.float32)
    num_rows = problem.batch * problem.seq_len * problem.num_heads
    start(
        problem.memo,
        "gates",
        gate.gate_backward,
        (saved.o_cmp, saved.o_sel, saved.o_win, dout, saved.lse, gates, dgates, stats),
        lambda: Launch(
            (ceil_div(num_rows, ROWS_PER_GATE_PROGRAM),),
            (
                num_rows, problem.num_heads, problem.seq_len,
                *dout.stride()[:3], *gates.stride()[:3],
            ),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v), "ROWS": ROWS_PER_GATE_PROGRAM},
        ),
    )  # fmt: skip
    return dgates, stats
