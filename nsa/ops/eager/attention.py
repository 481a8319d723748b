"""The torch path of nsa_attention, select_blocks and compress: documents, chunks, autograd.

Nothing of size S x S or S x N exists at once: queries are processed a chunk at a time, and the
backward pass recomputes the probabilities of a chunk from the saved log-sum-exps. The end of the
file continues cached sequences (prefill, decode) with the same rows, and has mean compression.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import Layout
from nsa.ops.eager.rows import (
    Branches,
    KeyValues,
    backward_rows,
    choose_from_probs,
    clean,
    compressed_keys,
    distinct_blocks,
    forward_rows,
    probabilities,
)
from nsa.ops.plan import NO_FLAGS, Flags, nvtx
from nsa.ops.spec import BlockSpec

CHUNK_LOGITS = 1 << 21
"""Logits of one chunk and branch: few enough for the cache of a CPU core, enough for efficient
matrix products."""
MIN_CHUNK, MAX_CHUNK = 32, 128
"""Bounds of the queries per chunk."""


class Problem(NamedTuple):
    """The arguments that are not tensors."""

    spec: BlockSpec
    scale: float
    layout: Layout
    flags: Flags


class Document(NamedTuple):
    """One document's slices of the packed tensors: queries, raw tokens, compressed tokens."""

    rows: slice
    tokens: slice
    blocks: slice
    first: int
    """Position of the first query."""


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
    flags: Flags,
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, S, Hkv, n_sel] int32
    """Gated sum of the three branches, and the selection used."""
    problem = Problem(spec, scale, layout, flags)
    # Autocast would round the fp32 products of this path to 16 bit.
    with torch.autocast(q.device.type, enabled=False):
        out, chosen = _Attention.apply(
            q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, selection, problem
        )
    return out, chosen if selection is None else selection


@torch.no_grad()
def select_blocks(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    spec: BlockSpec,
    *,
    scale: float,
    doc_lens: list[int],
    flags: Flags,
) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """The blocks each KV head reads."""
    batch, seq_len, num_heads, _ = q.shape
    num_groups = k_cmp.shape[2]
    dtype = compute_dtype(q.dtype)
    selection = q.new_empty((batch, seq_len, num_groups, spec.n_sel), dtype=torch.int32)
    with torch.autocast(q.device.type, enabled=False):
        for doc in documents(Layout(doc_lens, doc_lens, 0), spec):
            k = to_groups(k_cmp[:, doc.blocks], dtype)
            for chunk, first in chunks(doc, batch * num_heads):
                rows = split_heads(q[:, chunk], num_groups, dtype)
                keys, visible = compressed_keys(KeyValues(k, k), first, rows.shape[2], spec)
                probs, _ = probabilities(rows, keys.k, visible, scale)
                chosen, _ = choose_from_probs(probs, first, spec, flags)
                selection[:, chunk] = chosen.transpose(1, 2)
    return selection


class _Attention(torch.autograd.Function):
    """Forward and backward over chunks; saves the inputs, the selection and three log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, selection, problem = args
        out, chosen, lses = _forward(tensors, selection, problem)
        ctx.save_for_backward(*tensors, chosen, lses)
        ctx.problem = problem
        ctx.mark_non_differentiable(chosen)
        return out, chosen

    @staticmethod
    # A second gradient is refused: backward is not differentiable itself.
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        *tensors, chosen, lses = ctx.saved_tensors
        with torch.autocast(dout.device.type, enabled=False):
            grads = _backward(tensors, chosen, lses, dout, ctx.problem)
        return (*grads, None, None)


def _forward(
    tensors: list[Tensor], selection: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, selection, and log-sum-exps [3, B, Hkv, S, G]."""
    # tensors are q, k and v of cmp, sel, win, gates; tensors[4] is v_sel [B, S, Hkv, Dv].
    q, gates = tensors[0], tensors[-1]
    num_groups, d_v = tensors[4].shape[2:]
    batch, seq_len, num_heads, _ = q.shape
    dtype, spec, flags = compute_dtype(q.dtype), problem.spec, problem.flags
    out = q.new_empty((batch, seq_len, num_heads, d_v))
    chosen = q.new_empty((batch, seq_len, num_groups, spec.n_sel), dtype=torch.int32)
    per_group = num_heads // num_groups
    lses = q.new_empty((3, batch, num_groups, seq_len, per_group), dtype=dtype)
    for doc in documents(problem.layout, spec):
        branches = _branches(tensors, doc, dtype)
        for rows, first in chunks(doc, batch * num_heads):
            given = None
            if selection is not None:
                given = distinct_blocks(selection[:, rows].transpose(1, 2))
            q_rows = split_heads(q[:, rows], num_groups, dtype)
            chunk = forward_rows(q_rows, branches, first, spec, problem.scale, given, flags)
            gate = split_heads(gates[:, rows], num_groups, dtype)
            out[:, rows] = merge_heads(gated_sum(chunk.outs, gate, flags))
            chosen[:, rows] = chunk.chosen.transpose(1, 2)
            lses[:, :, :, rows] = torch.stack(chunk.lses)
    return out, chosen, lses


def _backward(
    tensors: list[Tensor], chosen: Tensor, lses: Tensor, dout: Tensor, problem: Problem
) -> list[Tensor]:
    """Gradients of the eight tensors, in their order."""
    q, gates = tensors[0], tensors[-1]
    num_groups, dtype = tensors[4].shape[2], compute_dtype(q.dtype)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    # Keys and values are read by many chunks: their gradients are summed over a document, in the
    # compute dtype, and rounded once. q and gates belong to one chunk and are written directly.
    for doc in documents(problem.layout, problem.spec):
        branches = _branches(tensors, doc, dtype)
        sums = Branches(
            _zeros_like(branches.cmp), _zeros_like(branches.sel), _zeros_like(branches.win)
        )
        for rows, first in chunks(doc, q.shape[0] * q.shape[2]):
            dq, dgates = backward_rows(
                split_heads(q[:, rows], num_groups, dtype),
                branches,
                sums,
                first,
                problem.spec,
                problem.scale,
                chosen[:, rows].transpose(1, 2),
                tuple(lses[:, :, :, rows]),
                split_heads(gates[:, rows], num_groups, dtype),
                split_heads(dout[:, rows], num_groups, dtype),
            )
            grads[0][:, rows] = merge_heads(dq)
            grads[7][:, rows] = merge_heads(dgates)
        for i, kv in enumerate((sums.cmp, sums.sel, sums.win)):
            span = doc.blocks if i == 0 else doc.tokens
            grads[1 + 2 * i][:, span] = kv.k.transpose(1, 2)
            grads[2 + 2 * i][:, span] = kv.v.transpose(1, 2)
    return grads


def gated_sum(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor, flags: Flags) -> Tensor:
    """Eq. 5: each [..., Dv] weighted by its gate of [..., 3]."""
    with nvtx("branch_attn+gate", flags.nvtx):
        total = outs[0] * gates[..., 0, None]
        total += outs[1] * gates[..., 1, None]
        return total.add_(outs[2] * gates[..., 2, None])


def documents(layout: Layout, spec: BlockSpec) -> Iterator[Document]:
    """Slices of each document in turn."""
    row, raw, cmp = 0, 0, 0
    for i, (num_rows, length) in enumerate(zip(layout.query_lens, layout.key_lens, strict=True)):
        rows, tokens = slice(row, row + num_rows), slice(raw, raw + length)
        blocks = slice(cmp, cmp + spec.num_cmp(length))
        yield Document(rows, tokens, blocks, layout.offset_of(0, i))
        row, raw, cmp = rows.stop, tokens.stop, blocks.stop


def chunks(doc: Document, num_heads: int) -> Iterator[tuple[slice, int]]:
    """Chunks of a document's rows, with the position of the first query in the document."""
    num_rows = doc.rows.stop - doc.rows.start
    size = chunk_size(max(doc.tokens.stop - doc.tokens.start, 1), num_heads)
    for start in range(0, num_rows, size):
        stop = min(start + size, num_rows)
        yield slice(doc.rows.start + start, doc.rows.start + stop), doc.first + start


def chunk_size(length: int, num_heads: int) -> int:
    """Queries per chunk for a document of `length` tokens and B * Hq heads."""
    return min(max(CHUNK_LOGITS // (length * num_heads), MIN_CHUNK), MAX_CHUNK)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_heads(x: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """[B, T, Hq, D] -> [B, Hkv, T, G, D]."""
    return x.unflatten(2, (num_groups, -1)).transpose(1, 2).to(dtype).contiguous()


def merge_heads(x: Tensor) -> Tensor:
    """[B, Hkv, T, G, D] -> [B, T, Hq, D]."""
    return x.transpose(1, 2).flatten(2, 3)


def to_groups(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, K, Hkv, D] -> [B, Hkv, K, D], one KV head's tokens next to each other."""
    return x.transpose(1, 2).to(dtype).contiguous()


def _branches(tensors: list[Tensor], doc: Document, dtype: torch.dtype) -> Branches:
    def branch(i: int, span: slice) -> KeyValues:
        k, v = tensors[1 + 2 * i][:, span], tensors[2 + 2 * i][:, span]
        return clean(to_groups(k, dtype), to_groups(v, dtype))

    return Branches(branch(0, doc.blocks), branch(1, doc.tokens), branch(2, doc.tokens))


def _zeros_like(kv: KeyValues) -> KeyValues:
    return KeyValues(torch.zeros_like(kv.k), torch.zeros_like(kv.v))


# --- Cached sequences: chunked prefill and decode run the same rows as training ---


@torch.no_grad()
def attend_cached(
    q: Tensor,  # [B, T, Hq, Dk]
    branches: Branches,  # keys and values of the sequence, these T tokens included
    gates: Tensor,  # [B, T, Hq, 3]
    first: int,  # position of the first query
    spec: BlockSpec,
    scale: float,
    flags: Flags = NO_FLAGS,
) -> tuple[Tensor, Tensor]:  # [B, T, Hq, Dv], [B, Hkv, 3] int64
    """Output, and the tokens read by each KV head in each branch, counted from the masks used."""
    batch, num_queries, num_heads, _ = q.shape
    num_groups = branches.sel.k.shape[1]
    dtype = compute_dtype(q.dtype)
    out = q.new_empty((batch, num_queries, num_heads, branches.sel.v.shape[-1]))
    reads = torch.zeros((batch, num_groups, 3), dtype=torch.int64, device=q.device)
    size = chunk_size(first + num_queries, batch * num_heads)
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, num_queries, size):
            rows = slice(start, start + size)
            q_rows = split_heads(q[:, rows], num_groups, dtype)
            chunk = forward_rows(q_rows, branches, first + start, spec, scale, None, flags)
            gate = split_heads(gates[:, rows], num_groups, dtype)
            out[:, rows] = merge_heads(gated_sum(chunk.outs, gate, flags))
            for branch, visible in enumerate(chunk.visible):
                reads[..., branch] += _tokens_read(visible, batch, num_groups)
    return out, reads


def _tokens_read(visible: Tensor, batch: int, num_groups: int) -> Tensor:
    """Visible keys summed over the queries of a chunk: [B, Hkv]."""
    if visible.dim() == 2:  # the same for every batch element and KV head
        return visible.sum().expand(batch, num_groups)
    return visible.flatten(2).sum(dim=-1)


# --- Mean compression (phi = avg) ---


def compress(x: Tensor, spec: BlockSpec, *, doc_lens: list[int]) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D]."""
    docs = x.split(doc_lens, dim=1)
    return torch.cat([_one_document(doc, spec) for doc in docs], dim=1)


def _one_document(x: Tensor, spec: BlockSpec) -> Tensor:
    num_cmp = spec.num_cmp(x.shape[1])
    if num_cmp == 0:
        return x[:, :0]
    strides_per_block = spec.l // spec.d
    # Sum each stride of d tokens once, then add the l / d strides of every block.
    num_strides = num_cmp + strides_per_block - 1
    strides = x[:, : num_strides * spec.d].to(compute_dtype(x.dtype))
    sums = strides.unflatten(1, (num_strides, spec.d)).sum(dim=2)
    total = sums[:, :num_cmp]
    for offset in range(1, strides_per_block):
        total = total + sums[:, offset : offset + num_cmp]
    return (total / spec.l).to(x.dtype)
