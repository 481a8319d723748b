"""Launching mean compression and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.spec import BlockSpec
from nsa.ops.triton.documents import index_documents
from nsa.ops.triton.kernels.mean import mean_backward, mean_forward
from nsa.ops.triton.start import Launch, Memo, ceil_div, form, start
from nsa.ops.triton.tiles import padded

ROWS = 32
"""Blocks or tokens of one program."""
MAX_KEPT = 1024
"""Launches remembered; beyond, all are forgotten."""

_memo: Memo = {}
_memo_backward: Memo = {}


def forward(x: Tensor, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D]."""
    if len(_memo) >= MAX_KEPT:
        _memo.clear()
    batch, _, num_heads, dim = x.shape
    num_cmp = sum(spec.num_cmp(length) for length in doc_lens)
    out = torch.empty(batch, num_cmp, num_heads, dim, dtype=x.dtype, device=x.device)
    packed = len(doc_lens) > 1
    first = index_documents(doc_lens, spec, x.device).cmp_first if packed else x
    start(
        _memo,
        (form(x), spec, tuple(doc_lens)),
        mean_forward,
        (x, out, first),
        lambda: Launch.plain(
            (ceil_div(num_cmp, ROWS), batch * num_heads),
            (num_cmp, num_heads, *x.stride()[:3]),
            dict(L=spec.l, STRIDE=spec.d, D=dim, D_PAD=padded(dim), HAS_DOCS=packed, BLOCKS=ROWS),
        ),
    )
    return out


def backward(dout: Tensor, seq_len: int, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
    """Gradient of x: [B, N, H, D] -> [B, S, H, D]."""
    if len(_memo_backward) >= MAX_KEPT:
        _memo_backward.clear()
    batch, num_cmp, num_heads, dim = dout.shape
    dx = torch.empty(batch, seq_len, num_heads, dim, dtype=dout.dtype, device=dout.device)
    packed = len(doc_lens) > 1
    index: tuple[Tensor, Tensor, Tensor] = (dout, dout, dout)
    if packed:
        docs = index_documents(doc_lens, spec, dout.device)
        index = (docs.row_start, docs.row_cmp, docs.raw_last)
    start(
        _memo_backward,
        (form(dout), spec, tuple(doc_lens)),
        mean_backward,
        (dout, dx, *index),
        lambda: Launch.plain(
            (ceil_div(seq_len, ROWS), batch * num_heads),
            (seq_len, num_cmp, num_heads, *dout.stride()[:3]),
            dict(L=spec.l, STRIDE=spec.d, D=dim, D_PAD=padded(dim), HAS_DOCS=packed, ROWS=ROWS),
        ),
    )
    return dx
