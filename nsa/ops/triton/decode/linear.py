"""Matrix products of a decode step: a few rows times a matrix, with what stands before and after.

A product of one row only reads the matrix. Libraries take a launch for the norm before it, for the
product, for the activation, for the residual. Here they are one launch, which reads its part of the
matrix while the kernel before it still runs (programmatic dependent launch).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.machine import interpreted
from nsa.ops.triton.launcher import Launch, Memo, ceil_div, form, start
from nsa.ops.triton.tile import _let_next_come, _wait
from nsa.ops.triton.tiles import capability_of, padded

MAX_ROWS = 4
MAX_PRODUCTS = 1 << 25
"""Products of numbers up to which several rows are faster here; beyond, tensor cores pay. One row
is bound by reading the matrix, however large it is."""
MAX_WIDTH = 4096
"""Columns of a matrix: a program holds whole rows of it in registers."""
TILE = 8192
"""Elements of a matrix that a program holds."""
WARPS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _rows_of(p_w, o_n, NUM, s_w, WIDTH: tl.constexpr, BK: tl.constexpr):
    """Rows o_n of a matrix [NUM, WIDTH], as stored: [BN, BK]."""
    o_k = tl.arange(0, BK)
    mask = (o_n < NUM)[:, None] & (o_k < WIDTH)[None, :]
    # Past L1: a kernel that has waited for nobody may find old lines there.
    p = p_w + o_n.to(tl.int64)[:, None] * s_w + o_k[None, :]
    return tl.load(p, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _times(b_w, b_x, p_bias, o_n, m_n, kind: tl.constexpr):
    """b_w times b_x [BK], plus the bias if there is one: [BN] fp32, rounded as `kind`."""
    b_y = tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    return b_y.to(kind).to(tl.float32)


@triton.jit
def _columns(
    i_n, p_x, p_norm, p_w, p_bias, p_gate, p_more, p_out,
    NUM, eps, s_x, s_w, s_more, s_out,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BN columns of out [ROWS, NUM] = act(norm(x) w^T + bias) + more.

    Every sum is rounded where the operations of torch, one by one, round it.
    """
    o_n, o_k = i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_n, m_k = o_n < NUM, o_k < WIDTH
    kind: tl.constexpr = p_x.dtype.element_ty
    # No kernel writes weights: they are read before the wait.
    b_w = _rows_of(p_w, o_n, NUM, s_w, WIDTH, BK)
    if p_gate is not None:
        b_gate = _rows_of(p_gate, o_n, NUM, s_w, WIDTH, BK)
    if p_norm is not None:
        b_norm = tl.load(p_norm + o_k, mask=m_k, other=0.0, cache_modifier=".cg").to(tl.float32)
    _wait(EARLY)
    _let_next_come(EARLY)
    for i_row in tl.static_range(ROWS):
        b_x = tl.load(p_x + i_row * s_x + o_k, mask=m_k, other=0.0).to(tl.float32)
        if p_norm is not None:
            mean = tl.sum(b_x * b_x, axis=0) / WIDTH
            b_x = (b_x * tl.rsqrt(mean + eps) * b_norm).to(kind).to(tl.float32)
        b_y = _times(b_w, b_x, p_bias, o_n, m_n, kind)
        if SILU:
            b_y = b_y / (1.0 + tl.exp(-b_y))
        if p_gate is not None:
            b_g = _times(b_gate, b_x, None, o_n, m_n, kind)
            b_y *= (b_g / (1.0 + tl.exp(-b_g))).to(kind).to(tl.float32)
        if p_more is not None:
            b_y = b_y.to(kind).to(tl.float32)
            b_y += tl.load(p_more + i_row * s_more + o_n, mask=m_n, other=0.0).to(tl.float32)
        tl.store(p_out + i_row * s_out + o_n, b_y.to(kind), mask=m_n)


@triton.jit
def few_rows(
    p_x, p_norm, p_w, p_bias, p_gate, p_more, p_out, p_w2, p_bias2, p_out2,
    NUM, NUM2, FIRST2, eps, s_x, s_w, s_more, s_out, s_w2, s_out2,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A product, and from program FIRST2 on the product of the same rows and a second matrix."""
    i_n = tl.program_id(0)
    if i_n < FIRST2:
        _columns(
            i_n, p_x, p_norm, p_w, p_bias, p_gate, p_more, p_out,
            NUM, eps, s_x, s_w, s_more, s_out, WIDTH, ROWS, SILU, EARLY, BN, BK,
        )  # fmt: skip
    elif p_w2 is not None:
        _columns(
            i_n - FIRST2, p_x, p_norm, p_w2, p_bias2, None, None, p_out2,
            NUM2, eps, s_x, s_w2, 0, s_out2, WIDTH, ROWS, False, EARLY, BN, BK,
        )  # fmt: skip


# --- Launcher ---

_memo: Memo = {}


class Matrix(NamedTuple):
    """A linear layer: y = x weight^T + bias."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]


class Norm(NamedTuple):
    """x / rms(x) * weight."""

    weight: Tensor  # [in]
    eps: float


def fits(x: Tensor, *weights: Tensor) -> bool:
    """Whether `product` takes rows x [B, 1, in] and these matrices and vectors."""
    num_rows, width = x.shape[0] * x.shape[1], x.shape[2]
    if x.dtype not in DTYPES or num_rows > MAX_ROWS or width > MAX_WIDTH:
        return False
    if num_rows > 1 and num_rows * max(w.numel() for w in weights) > MAX_PRODUCTS:
        return False
    return all(w.dtype == x.dtype and w.is_contiguous() for w in weights)


def product(
    x: Tensor,  # [B, 1, in]
    first: Matrix,
    *,
    norm: Norm | None = None,
    silu: bool = False,
    gate: Tensor | None = None,  # [out, in]
    more: Tensor | None = None,  # [B, 1, out]
    second: Matrix | None = None,
) -> tuple[Tensor, Tensor | None]:  # [B, 1, out], [B, 1, out of the second]
    """act(norm(x) first) + more, and norm(x) second.

    act is silu, or with `gate` y * silu(norm(x) gate).
    """
    rows = x.flatten(0, 1).contiguous()
    out = rows.new_empty(len(rows), len(first.weight))
    out2 = None if second is None else rows.new_empty(len(rows), len(second.weight))
    added = None if more is None else more.flatten(0, 1).contiguous()
    tensors = (
        rows, norm and norm.weight, *first, gate, added, out, *(second or (None, None)), out2
    )  # fmt: skip
    key = form(*(t for t in tensors if t is not None)), tuple(t is None for t in tensors), silu
    start(
        _memo, (key, norm and norm.eps), few_rows, tensors,
        lambda: _launch(rows, first, norm, silu, added, second, (out, out2)),
    )  # fmt: skip
    batch = x.shape[:2]
    return out.view(*batch, -1), None if out2 is None else out2.view(*batch, -1)


def _launch(
    rows: Tensor, first: Matrix, norm: Norm | None, silu: bool, added: Tensor | None,
    second: Matrix | None, outs: tuple[Tensor, Tensor | None],
) -> Launch:  # fmt: skip
    width, num = rows.shape[1], len(first.weight)
    num2 = 0 if second is None else len(second.weight)
    BK = padded(width)
    BN = max(TILE // BK, 1)
    early = not interpreted() and capability_of(rows.device) >= (9, 0)
    numbers = (
        num, num2, ceil_div(num, BN), 0.0 if norm is None else norm.eps,
        rows.stride(0), first.weight.stride(0), 0 if added is None else added.stride(0),
        outs[0].stride(0), 0 if second is None else second.weight.stride(0),
        0 if outs[1] is None else outs[1].stride(0),
    )  # fmt: skip
    constants = {"WIDTH": width, "ROWS": len(rows), "SILU": silu, "EARLY": early}
    constants |= {"BN": BN, "BK": BK}
    grid = (ceil_div(num, BN) + ceil_div(num2, BN),)
    return Launch(grid, numbers, constants, {"num_warps": WARPS, "launch_pdl": early})
