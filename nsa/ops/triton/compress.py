"""Mean compression through the Triton kernels, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nsa.ops.spec import BlockSpec
from nsa.ops.triton.documents import index_documents
from nsa.ops.triton.kernels.mean import mean_backward, mean_forward
from nsa.ops.triton.launch import rows_contiguous
from nsa.ops.triton.tiles import padded

ROWS = 32
"""Blocks or tokens of one program."""


def compress(x: Tensor, spec: BlockSpec, *, doc_lens: list[int]) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D]."""
    return _Mean.apply(x, spec, doc_lens)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
        ctx.shape, ctx.spec, ctx.doc_lens = x.shape, spec, doc_lens
        x = rows_contiguous(x)
        batch, _, num_heads, dim = x.shape
        num_cmp = sum(spec.num_cmp(length) for length in doc_lens)
        out = torch.empty(batch, num_cmp, num_heads, dim, dtype=x.dtype, device=x.device)
        packed = len(doc_lens) > 1
        first = index_documents(doc_lens, spec, x.device).cmp_first if packed else x
        if num_cmp:
            mean_forward[(triton.cdiv(num_cmp, ROWS), batch * num_heads)](
                x, out, first, num_cmp, num_heads, *x.stride()[:3],
                L=spec.l, STRIDE=spec.d, D=dim, D_PAD=padded(dim), HAS_DOCS=packed, BLOCKS=ROWS,
            )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        dout = rows_contiguous(dout)
        batch, seq_len, num_heads, dim = ctx.shape
        dx = torch.empty(ctx.shape, dtype=dout.dtype, device=dout.device)
        packed = len(ctx.doc_lens) > 1
        index = (dout, dout, dout)
        if packed:
            docs = index_documents(ctx.doc_lens, ctx.spec, dout.device)
            index = (docs.row_start, docs.row_cmp, docs.raw_last)
        mean_backward[(triton.cdiv(seq_len, ROWS), batch * num_heads)](
            dout, dx, *index, seq_len, dout.shape[1], num_heads, *dout.stride()[:3],
            L=ctx.spec.l, STRIDE=ctx.spec.d, D=dim, D_PAD=padded(dim), HAS_DOCS=packed, ROWS=ROWS,
        )  # fmt: skip
        return dx, None, None
