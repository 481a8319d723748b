"""Queries, keys, values and gates of a layer from the columns of one product, and its gradient.

In training a compiled layer has one matrix product for all of them. One kernel reads its columns:
it rotates queries and keys by position, copies values and makes gates of logits. The kernel of the
backward pass writes the gradient of the product as the next two products read it. The compiler made
seven kernels of that, and between two of them the heads lay in memory in fp32.

Columns of the product are Hq heads of q, Hkv of each of k_sel, k_win and k_cmp, and of v_cmp, v_sel
and v_win, then the logits of cmp, sel and win of every query head, then any, which are not read.
Below: kernels, launchers, operators with their fake twins and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, Memo, ceil_div, form, start
from nsa.ops.triton.tiles import padded

COUNTS = ("NUM_TOKENS", "S")
"""Numbers that change no code."""


@triton.jit(do_not_specialize=COUNTS)
def split_product(
    p_x, p_cos, p_sin, p_bias, p_q, p_k_sel, p_k_win, p_k_cmp, p_v_cmp, p_v_sel, p_v_win, p_gates,
    NUM_TOKENS, S,
    COLUMNS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SOFTMAX: tl.constexpr, HALF_PAD: tl.constexpr, DV_PAD: tl.constexpr, HQ_PAD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS_Q: tl.constexpr, ROWS_KV: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of the product [B * S, COLUMNS] -> heads and gates, contiguous."""
    _turn(
        p_x, COLUMNS, p_q, HQ * DK, p_cos, p_sin, NUM_TOKENS, S,
        HQ, DK, HALF_PAD, False, TOKENS, ROWS_Q,
    )  # fmt: skip
    p_x += HQ * DK
    for i in tl.static_range(3):
        p_k = p_k_sel if i == 0 else p_k_win if i == 1 else p_k_cmp
        _turn(
            p_x + i * HKV * DK, COLUMNS, p_k, HKV * DK, p_cos, p_sin, NUM_TOKENS, S,
            HKV, DK, HALF_PAD, False, TOKENS, ROWS_KV,
        )  # fmt: skip
    p_x += 3 * HKV * DK
    for i in tl.static_range(3):
        p_v = p_v_cmp if i == 0 else p_v_sel if i == 1 else p_v_win
        _copy(
            p_x + i * HKV * DV, COLUMNS, p_v, HKV * DV, NUM_TOKENS,
            HKV, DV, DV_PAD, TOKENS, ROWS_KV,
        )  # fmt: skip
    p_x += 3 * HKV * DV
    # Logits of a branch: [TOKENS, HQ_PAD].
    t, o_h, mask = _columns(NUM_TOKENS, HQ, HQ_PAD, TOKENS)
    b_cmp, b_sel, b_win = _load_three(p_x + t * COLUMNS + o_h * 3, mask)
    bias_cmp, bias_sel, bias_win = _load_three(p_bias + o_h * 3, o_h < HQ)
    b_cmp += bias_cmp
    b_sel += bias_sel
    b_win += bias_win
    if SOFTMAX:
        top = tl.maximum(tl.maximum(b_cmp, b_sel), b_win)
        b_cmp, b_sel, b_win = tl.exp(b_cmp - top), tl.exp(b_sel - top), tl.exp(b_win - top)
        total = b_cmp + b_sel + b_win
        b_cmp, b_sel, b_win = b_cmp / total, b_sel / total, b_win / total
    else:
        b_cmp, b_sel, b_win = tl.sigmoid(b_cmp), tl.sigmoid(b_sel), tl.sigmoid(b_win)
    _store_three(p_gates + t * (HQ * 3) + o_h * 3, b_cmp, b_sel, b_win, mask)


@triton.jit(do_not_specialize=COUNTS)
def join_gradients(
    p_dx, p_cos, p_sin, p_gates, p_dq, p_dk_sel, p_dk_win, p_dk_cmp, p_dv_cmp, p_dv_sel, p_dv_win,
    p_dgates, NUM_TOKENS, S,
    COLUMNS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SOFTMAX: tl.constexpr, HALF_PAD: tl.constexpr, DV_PAD: tl.constexpr, HQ_PAD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS_Q: tl.constexpr, ROWS_KV: tl.constexpr, REST_PAD: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of the gradient of the product [B * S, COLUMNS]; 0 in the columns that nobody
    reads."""
    _turn(
        p_dq, HQ * DK, p_dx, COLUMNS, p_cos, p_sin, NUM_TOKENS, S,
        HQ, DK, HALF_PAD, True, TOKENS, ROWS_Q,
    )  # fmt: skip
    p_dx += HQ * DK
    for i in tl.static_range(3):
        p_dk = p_dk_sel if i == 0 else p_dk_win if i == 1 else p_dk_cmp
        _turn(
            p_dk, HKV * DK, p_dx + i * HKV * DK, COLUMNS, p_cos, p_sin, NUM_TOKENS, S,
            HKV, DK, HALF_PAD, True, TOKENS, ROWS_KV,
        )  # fmt: skip
    p_dx += 3 * HKV * DK
    for i in tl.static_range(3):
        p_dv = p_dv_cmp if i == 0 else p_dv_sel if i == 1 else p_dv_win
        _copy(
            p_dv, HKV * DV, p_dx + i * HKV * DV, COLUMNS, NUM_TOKENS,
            HKV, DV, DV_PAD, TOKENS, ROWS_KV,
        )  # fmt: skip
    p_dx += 3 * HKV * DV
    t, o_h, mask = _columns(NUM_TOKENS, HQ, HQ_PAD, TOKENS)
    at = t * (HQ * 3) + o_h * 3
    b_cmp, b_sel, b_win = _load_three(p_gates + at, mask)
    d_cmp, d_sel, d_win = _load_three(p_dgates + at, mask)
    # Softmax: d logit = gate * (d gate - sum of gate * d gate). Sigmoid: gate (1 - gate) d gate.
    if SOFTMAX:
        total = b_cmp * d_cmp + b_sel * d_sel + b_win * d_win
        d_cmp, d_sel, d_win = d_cmp - total, d_sel - total, d_win - total
    else:
        d_cmp, d_sel, d_win = d_cmp * (1 - b_cmp), d_sel * (1 - b_sel), d_win * (1 - b_win)
    p_logits = p_dx + t * COLUMNS + o_h * 3
    _store_three(p_logits, b_cmp * d_cmp, b_sel * d_sel, b_win * d_win, mask)
    REST: tl.constexpr = COLUMNS - (HQ + 3 * HKV) * DK - 3 * HKV * DV - 3 * HQ
    if REST > 0:
        t, o_c, mask = _columns(NUM_TOKENS, REST, REST_PAD, TOKENS)
        b_none = tl.zeros([TOKENS, REST_PAD], p_dx.dtype.element_ty)
        tl.store(p_dx + 3 * HQ + t * COLUMNS + o_c, b_none, mask=mask)


@triton.jit
def _turn(
    p_from, s_from, p_to, s_to, p_cos, p_sin, NUM_TOKENS, S,
    HEADS: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, BACK: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of TOKENS tokens, ROWS of them at a time; BACK: by the negative angle."""
    half: tl.constexpr = D // 2
    o_d = tl.arange(0, HALF_PAD)[None, :]
    for r0 in tl.static_range(0, TOKENS * HEADS, ROWS):
        t, head, mask = _rows(r0, NUM_TOKENS, HEADS, TOKENS, ROWS)
        mask = mask & (o_d < half)
        # Both halves of the heads, [ROWS, D / 2] each: the half-split layout of nsa/model/rope.py.
        p_rows = p_from + t.to(tl.int64) * s_from + head * D + o_d
        b_first = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
        b_second = tl.load(p_rows + half, mask=mask, other=0.0).to(tl.float32)
        angle = t % S * half + o_d
        b_cos = tl.load(p_cos + angle, mask=mask, other=1.0)
        b_sin = tl.load(p_sin + angle, mask=mask, other=0.0)
        if BACK:
            b_sin = -b_sin
        # x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin.
        p_rows = p_to + t.to(tl.int64) * s_to + head * D + o_d
        dtype = p_to.dtype.element_ty
        tl.store(p_rows, (b_first * b_cos - b_second * b_sin).to(dtype), mask=mask)
        tl.store(p_rows + half, (b_second * b_cos + b_first * b_sin).to(dtype), mask=mask)


@triton.jit
def _copy(
    p_from, s_from, p_to, s_to, NUM_TOKENS,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the heads of TOKENS tokens."""
    o_d = tl.arange(0, D_PAD)[None, :]
    for r0 in tl.static_range(0, TOKENS * HEADS, ROWS):
        t, head, mask = _rows(r0, NUM_TOKENS, HEADS, TOKENS, ROWS)
        mask = mask & (o_d < D)
        p_rows = p_from + t.to(tl.int64) * s_from + head * D + o_d
        b_x = tl.load(p_rows, mask=mask, other=0.0)
        p_rows = p_to + t.to(tl.int64) * s_to + head * D + o_d
        tl.store(p_rows, b_x.to(p_to.dtype.element_ty), mask=mask)


@triton.jit
def _rows(r0, NUM_TOKENS, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Token and head of rows of this program, [ROWS, 1]."""
    o_r = (r0 + tl.arange(0, ROWS))[:, None]
    t = tl.program_id(0) * TOKENS + o_r // HEADS
    return t, o_r % HEADS, (o_r < TOKENS * HEADS) & (t < NUM_TOKENS)


@triton.jit
def _columns(NUM_TOKENS, WIDTH: tl.constexpr, PAD: tl.constexpr, TOKENS: tl.constexpr):
    """Token [TOKENS, 1], int64, and column [1, PAD] of what a token has WIDTH numbers of."""
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    o_c = tl.arange(0, PAD)[None, :]
    return t, o_c, (t < NUM_TOKENS) & (o_c < WIDTH)


@triton.jit
def _load_three(p, mask):
    """Numbers of cmp, sel and win, which lie side by side."""
    b_cmp = tl.load(p, mask=mask, other=0.0).to(tl.float32)
    b_sel = tl.load(p + 1, mask=mask, other=0.0).to(tl.float32)
    return b_cmp, b_sel, tl.load(p + 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_three(p, b_cmp, b_sel, b_win, mask):
    dtype = p.dtype.element_ty
    tl.store(p, b_cmp.to(dtype), mask=mask)
    tl.store(p + 1, b_sel.to(dtype), mask=mask)
    tl.store(p + 2, b_win.to(dtype), mask=mask)


# --- Launchers ---

TOKENS, MAX_ROWS = 16, 64
"""Tokens of a program, and rows (token, head) that it loads at a time."""
MAX_CACHED = 1024
"""Cached launches; a full cache is cleared."""
_memo: Memo = {}


class Sizes(NamedTuple):
    """What the columns of a product are; plain numbers, as operators take them."""

    num_heads: int
    num_groups: int
    d_k: int
    d_v: int
    softmax: int
    """Whether the gates of a head are a softmax; else each is a sigmoid."""

    def shapes(self, batch: int, seq_len: int) -> list[tuple[int, ...]]:
        """Of q, three keys, three values, and gates."""
        keys, values = (self.num_groups, self.d_k), (self.num_groups, self.d_v)
        each = [(self.num_heads, self.d_k), *3 * [keys], *3 * [values], (self.num_heads, 3)]
        return [(batch, seq_len, *size) for size in each]

    @property
    def first_logit(self) -> int:
        return self.num_heads * self.d_k + 3 * self.num_groups * (self.d_k + self.d_v)


def split(
    product: Tensor,  # [B, S, columns]
    cos: Tensor,  # [S, Dk / 2] fp32
    sin: Tensor,
    bias: Tensor,  # [3 Hq], of the logits
    *sizes: int,
) -> tuple[Tensor, ...]:  # of the shapes of Sizes
    """q, k_sel, k_win, k_cmp, v_cmp, v_sel, v_win, gates."""
    streams: tuple[Tensor, ...] = torch.ops.nsa.split_product(
        product, cos, sin, bias, [int(size) for size in sizes]
    )
    return streams


def _new_streams(product: Tensor, sizes: Sizes) -> list[Tensor]:
    """Gates of bf16 heads are fp32."""
    *shapes, of_gates = sizes.shapes(*product.shape[:2])
    wide = torch.float32 if product.dtype == torch.bfloat16 else product.dtype
    return [*(product.new_empty(size) for size in shapes), product.new_empty(of_gates, dtype=wide)]


def _split(
    product: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """nsa::split_product."""
    sized = Sizes(*sizes)
    given = [x.contiguous() for x in (product, cos, sin, bias)]
    streams = _new_streams(product, sized)
    _start(split_product, (*given, *streams), product, sized, {})
    return tuple(streams)


def _join(
    grads: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    gates: Tensor,
    columns: int,
    sizes: Sequence[int],
) -> Tensor:
    """nsa::join_gradients."""
    sized, dq = Sizes(*sizes), grads[0]
    d_product = dq.new_empty(*dq.shape[:2], columns)
    tensors = (d_product, *(x.contiguous() for x in (cos, sin, gates, *grads)))
    rest = columns - sized.first_logit - 3 * sized.num_heads
    _start(join_gradients, tensors, d_product, sized, {"REST_PAD": padded(rest)})
    return d_product


def _start(
    kernel: Any, tensors: tuple[Tensor, ...], product: Tensor, sizes: Sizes, more: dict[str, int]
) -> None:
    if len(_memo) >= MAX_CACHED:
        _memo.clear()
    batch, seq_len, columns = product.shape
    heads, groups, d_k, d_v, softmax = sizes
    rows = [min(MAX_ROWS, padded(TOKENS * number)) for number in (heads, groups)]
    start(
        _memo,
        (kernel.__name__, form(*tensors), sizes),
        kernel,
        tensors,
        lambda: Launch.plain(
            (ceil_div(batch * seq_len, TOKENS),),
            (batch * seq_len, seq_len),
            {"COLUMNS": columns, "HQ": heads, "HKV": groups, "DK": d_k, "DV": d_v}
            | {"SOFTMAX": bool(softmax), "HALF_PAD": padded(d_k // 2), "DV_PAD": padded(d_v)}
            | {"HQ_PAD": padded(heads), "TOKENS": TOKENS, "ROWS_Q": rows[0], "ROWS_KV": rows[1]}
            | more,
        ),
    )


# --- Operators ---


def _split_fake(
    product: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    return tuple(_new_streams(product, Sizes(*sizes)))


def _join_fake(
    grads: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    gates: Tensor,
    columns: int,
    sizes: Sequence[int],
) -> Tensor:
    return grads[0].new_empty(*grads[0].shape[:2], columns)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    product, cos, sin, bias, sizes = inputs
    ctx.save_for_backward(cos, sin, output[-1])
    ctx.columns, ctx.bias_dtype, ctx.sizes = product.shape[2], bias.dtype, sizes


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    d_product = torch.ops.nsa.join_gradients(
        list(grads), *ctx.saved_tensors, ctx.columns, ctx.sizes
    )
    sizes = Sizes(*ctx.sizes)
    logits = d_product[..., sizes.first_logit : sizes.first_logit + 3 * sizes.num_heads]
    d_bias = logits.sum(dim=(0, 1), dtype=torch.float32).to(ctx.bias_dtype)
    return d_product, None, None, d_bias, None


torch.library.define(
    "nsa::split_product",
    "(Tensor product, Tensor cos, Tensor sin, Tensor bias, int[] sizes) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "nsa::join_gradients",
    "(Tensor[] grads, Tensor cos, Tensor sin, Tensor gates, int columns, int[] sizes) -> Tensor",
)
torch.library.impl("nsa::split_product", "default", _split)
torch.library.impl("nsa::join_gradients", "default", _join)
torch.library.register_fake("nsa::split_product", _split_fake)
torch.library.register_fake("nsa::join_gradients", _join_fake)
torch.library.register_autograd("nsa::split_product", _gradients, setup_context=_context)
