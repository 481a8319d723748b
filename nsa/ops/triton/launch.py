"""The Triton path of nsa_attention: order of the kernels, grids and strides, autograd."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa.config.env import read
from nsa.ops.checks import assert_selection
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import by_block
from nsa.ops.triton.documents import Documents, index_documents
from nsa.ops.triton.inverse import index_blocks
from nsa.ops.triton.kernels import band, gate, score
from nsa.ops.triton.tiles import backward_tiles, forward_tiles, padded

INTERPRETED = not isinstance(band.band_forward, triton.runtime.jit.JITFunction)
"""Whether TRITON_INTERPRET=1 was set at import: kernels then run on the CPU, in Python."""
PROBS_BYTES = 256 << 20
"""Workspace for the probabilities that score the blocks; longer sequences go in chunks."""
BY_BLOCK_BEYOND = 4
"""The selected branch goes by key blocks once a document is this many times longer than what a
query selects; below, masking the whole past is faster (docs/kernels.md)."""
LOG2_E = math.log2(math.e)
ROWS_PER_GATE_PROGRAM = 16


class Band(NamedTuple):
    """One branch as the band kernels see it."""

    OFF: int
    STEP: int
    W: int
    SELECT: bool


class Problem(NamedTuple):
    """The part of the arguments that is not a tensor."""

    spec: BlockSpec
    scale: float
    doc_lens: list[int]

    @property
    def bands(self) -> tuple[Band, Band, Band]:
        """Compressed, selected, window."""
        spec = self.spec
        return (
            Band(spec.l - 1, spec.d, 0, False),
            Band(0, 1, 0, True),
            Band(0, 1, spec.w, False),
        )

    @property
    def by_block(self) -> bool:
        """The order of the selected branch: by key blocks, or by queries over the masked past."""
        return max(self.doc_lens) > BY_BLOCK_BEYOND * self.spec.n_sel * self.spec.l_sel

    def documents(self, device: torch.device) -> Documents | None:
        if len(self.doc_lens) == 1:
            return None
        return index_documents(self.doc_lens, self.spec, device)


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
    doc_lens: list[int],
    selection: Tensor | None,  # [B, S, Hkv, n_sel] int32
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, S, Hkv, n_sel] int32
    """Gated sum of the three branches, and the selection used."""
    problem = Problem(spec, scale, doc_lens)
    tensors = [rows_contiguous(x) for x in (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)]
    return _Attention.apply(*tensors, selection, problem)


@torch.no_grad()
def select_blocks(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    spec: BlockSpec,
    *,
    scale: float,
    doc_lens: list[int],
) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """The blocks each KV head reads."""
    problem = Problem(spec, scale, doc_lens)
    q, k_cmp = rows_contiguous(q), rows_contiguous(k_cmp)
    docs = problem.documents(q.device)
    _, lse = _band_forward(q, k_cmp, k_cmp, None, problem.bands[0], problem, docs)
    return _select(q, k_cmp, lse, problem, docs)[0]


class _Attention(torch.autograd.Function):
    """Saves the inputs, the three branch outputs and log-sum-exps, and the selection as bits."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, selection, problem = args
        docs = problem.documents(q.device)
        bands = problem.bands
        out_cmp, lse_cmp = _band_forward(q, k_cmp, v_cmp, None, bands[0], problem, docs)
        if selection is None:
            selection, bits = _select(q, k_cmp, lse_cmp, problem, docs)
            legal = selection
        else:
            bits = _pack(selection, problem, docs)
            legal = _legal(selection, problem, docs) if problem.by_block else selection
        if problem.by_block:
            blocks = index_blocks(problem.doc_lens, problem.spec, q.device)
            scale_log2 = problem.scale * LOG2_E
            out_sel, lse_sel = by_block.forward(
                q, k_sel, v_sel, legal, blocks, scale_log2, INTERPRETED, problem.spec
            )
        else:
            out_sel, lse_sel = _band_forward(q, k_sel, v_sel, bits, bands[1], problem, docs)
        out_win, lse_win = _band_forward(q, k_win, v_win, None, bands[2], problem, docs)
        outs, lses = (out_cmp, out_sel, out_win), (lse_cmp, lse_sel, lse_win)
        ctx.save_for_backward(*args[:8], *outs, *lses, bits, legal)
        ctx.problem = problem
        ctx.mark_non_differentiable(selection)
        return _gated_sum(outs, gates), selection

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q, gates, outs, lses = saved[0], saved[7], saved[8:11], saved[11:14]
        bits, legal = saved[14:]
        dout = rows_contiguous(dout)
        docs = ctx.problem.documents(q.device)
        dgates, delta = _gate_backward(outs, dout, gates)
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        grads: list[Tensor] = []
        for i, shape in enumerate(ctx.problem.bands):
            k, v = saved[1 + 2 * i], saved[2 + 2 * i]
            branch = _Branch(q, k, v, dout, lses[i], delta[i], gates[..., i], bits, i)
            # By key blocks, sums meet in memory in any order; masking the past has a fixed one.
            fixed_order = torch.are_deterministic_algorithms_enabled()
            if shape.SELECT and ctx.problem.by_block and not fixed_order:
                blocks = index_blocks(ctx.problem.doc_lens, ctx.problem.spec, q.device)
                scale, spec = ctx.problem.scale, ctx.problem.spec
                grads += by_block.backward(
                    branch, legal, blocks, dq, scale, scale * LOG2_E, INTERPRETED, spec
                )
                continue
            _band_dq(branch, dq, shape, ctx.problem, docs)
            grads += _band_dkv(branch, shape, ctx.problem, docs)
        return (dq.to(q.dtype), *grads, dgates, None, None)


class _Branch(NamedTuple):
    """What the backward kernels of one branch read."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor  # [B, Hq, S]
    delta: Tensor  # [B, Hq, S]
    gates: Tensor  # [B, S, Hq]
    bits: Tensor  # [B, Hkv, S, words] int32
    number: int  # 0 cmp, 1 sel, 2 win


def _band_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor | None,
    shape: Band,
    problem: Problem,
    docs: Documents | None,
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, Hq, S] fp32
    batch, seq_len, num_heads, d_k = q.shape
    num_keys, num_groups, d_v = v.shape[1:]
    out = torch.empty(batch, seq_len, num_heads, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seq_len, dtype=torch.float32, device=q.device)
    tiles = forward_tiles(d_k, d_v, q.dtype)
    band.band_forward[(triton.cdiv(seq_len, tiles.BM), batch * num_heads)](
        q, k, v, out, lse, q if bits is None else bits, *_row_index(docs, shape, q),
        seq_len, num_keys, num_heads, num_heads // num_groups, problem.scale * LOG2_E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        *shape[:3], 0 if bits is None else bits.shape[-1],
        **_constants(d_k, d_v, problem, shape, docs), **_launch(tiles),
    )  # fmt: skip
    return out, lse


def _band_dq(
    branch: _Branch, dq: Tensor, shape: Band, problem: Problem, docs: Documents | None
) -> None:
    q, k, v = branch.q, branch.k, branch.v
    batch, seq_len, num_heads, d_k = q.shape
    tiles = backward_tiles(d_k, v.shape[3], q.dtype)
    band.band_dq[(triton.cdiv(seq_len, tiles.BM), batch * num_heads)](
        q, k, v, branch.dout, branch.lse, branch.delta, branch.gates, dq, branch.bits,
        *_row_index(docs, shape, q),
        seq_len, k.shape[1], num_heads, num_heads // k.shape[2],
        problem.scale, problem.scale * LOG2_E, *_strides(branch),
        *shape[:3], branch.bits.shape[-1],
        **_constants(d_k, v.shape[3], problem, shape, docs), ADD=branch.number > 0,
        **_launch(tiles),
    )  # fmt: skip


def _band_dkv(
    branch: _Branch, shape: Band, problem: Problem, docs: Documents | None
) -> tuple[Tensor, Tensor]:
    q, k, v = branch.q, branch.k, branch.v
    batch, seq_len, num_heads, d_k = q.shape
    num_keys, num_groups, d_v = v.shape[1:]
    if num_keys == 0:
        return torch.zeros_like(k), torch.zeros_like(v)
    per_group = num_heads // num_groups
    tiles = backward_tiles(d_k, d_v, q.dtype)
    # Compressed tokens are few and each is seen by many queries: share the work by heads.
    heads = 1 if branch.number == 0 else per_group
    num_splits = 1
    parts = per_group // heads * num_splits
    dk = torch.empty(batch, num_groups, parts, num_keys, d_k, dtype=torch.float32, device=q.device)
    dv = torch.empty(batch, num_groups, parts, num_keys, d_v, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(num_keys, tiles.BN), batch * num_groups, parts)
    band.band_dkv[grid](
        q, k, v, branch.dout, branch.lse, branch.delta, branch.gates, dk, dv, branch.bits,
        *_row_index(docs, shape, q), *_key_index(docs, branch.number, q),
        seq_len, num_keys, num_groups, per_group,
        problem.scale, problem.scale * LOG2_E, *_strides(branch),
        *shape[:3], branch.bits.shape[-1], heads, num_splits,
        **_constants(d_k, d_v, problem, shape, docs), **_launch(tiles),
    )  # fmt: skip
    return _sum_parts(dk, k), _sum_parts(dv, v)


def _select(
    q: Tensor, k_cmp: Tensor, lse: Tensor, problem: Problem, docs: Documents | None
) -> tuple[Tensor, Tensor]:  # [B, S, Hkv, n_sel] int32, [B, Hkv, S, words] int32
    """Score and choose, a bounded chunk of queries at a time."""
    spec, shape = problem.spec, problem.bands[0]
    batch, seq_len, num_heads, d_k = q.shape
    num_cmp, num_groups = k_cmp.shape[1:3]
    selection, bits = _empty_selection(q, num_groups, problem)
    width = max(num_cmp, 1)
    chunk = max(PROBS_BYTES // (4 * batch * num_groups * width), 64)
    chunk = min(triton.cdiv(seq_len, triton.cdiv(seq_len, chunk)), seq_len)
    probs = torch.empty(batch, num_groups, chunk, width, dtype=torch.float32, device=q.device)
    num_blocks = padded(max(spec.num_blocks(max(problem.doc_lens)), 32))
    row_index = _row_index(docs, shape, q)
    constants = _constants(d_k, d_k, problem, shape, docs)
    for first in range(0, seq_len, chunk):
        stop = min(first + chunk, seq_len)
        grid = (triton.cdiv(num_cmp, 64), triton.cdiv(stop - first, 64), batch * num_groups)
        if num_cmp:
            score.group_probs[grid](
                q, k_cmp, lse, probs, *row_index,
                first, stop, seq_len, num_cmp, num_groups, num_heads // num_groups,
                problem.scale * LOG2_E, *q.stride()[:3], *k_cmp.stride()[:3], *probs.stride()[:3],
                shape.OFF, shape.STEP,
                DK=d_k, DK_PAD=padded(d_k), HAS_DOCS=docs is not None, UPCAST=constants["UPCAST"],
                BM=64, BN=64, num_warps=4,
            )  # fmt: skip
        score.choose_blocks[(stop - first, batch * num_groups)](
            probs, selection, bits, *row_index, first, seq_len, num_groups, *probs.stride()[:3],
            shape.OFF, shape.STEP, bits.shape[-1],
            L_SEL=spec.l_sel, N_SEL=spec.n_sel, N_SEL_PAD=padded(spec.n_sel),
            STRIDES=spec.l_sel // spec.d, OVERLAP=spec.l // spec.d,
            NB=num_blocks, NW=num_blocks // 32, HAS_DOCS=docs is not None, num_warps=1,
        )  # fmt: skip
    if read("NSA_STRICT_ASSERTS"):
        position = _positions(seq_len, docs, q.device)
        assert_selection(selection.transpose(1, 2), position, spec)
    return selection, bits


def _pack(selection: Tensor, problem: Problem, docs: Documents | None) -> Tensor:
    """The bits of a given selection."""
    selection = selection.contiguous()
    batch, seq_len, num_groups, n_sel = selection.shape
    bits = _empty_selection(selection, num_groups, problem)[1]
    score.pack_selection[(seq_len, batch * num_groups)](
        selection, bits, selection if docs is None else docs.row_start, seq_len, num_groups,
        bits.shape[-1], L_SEL=problem.spec.l_sel, N_SEL=n_sel, N_SEL_PAD=padded(n_sel),
        NW=padded(bits.shape[-1]), HAS_DOCS=docs is not None, num_warps=1,
    )  # fmt: skip
    return bits


def _legal(selection: Tensor, problem: Problem, docs: Documents | None) -> Tensor:
    """A given selection without repeated blocks and blocks of the future."""
    position = _positions(selection.shape[1], docs, selection.device)
    current = (position // problem.spec.l_sel)[:, None, None]
    before = torch.nn.functional.pad(selection[..., :-1], (1, 0), value=-1)
    keep = (selection <= current) & ((selection != before) | (selection < 0))
    return torch.where(keep, selection, -1).contiguous()


def _positions(seq_len: int, docs: Documents | None, device: torch.device) -> Tensor:
    """Position of each row in its document: [S]."""
    token = torch.arange(seq_len, device=device)
    return token if docs is None else token - docs.row_start


def _empty_selection(q: Tensor, num_groups: int, problem: Problem) -> tuple[Tensor, Tensor]:
    batch, seq_len = q.shape[:2]
    num_words = triton.cdiv(problem.spec.num_blocks(max(problem.doc_lens)), 32)
    ids = (batch, seq_len, num_groups, problem.spec.n_sel)
    return (
        torch.empty(ids, dtype=torch.int32, device=q.device),
        torch.empty((batch, num_groups, seq_len, num_words), dtype=torch.int32, device=q.device),
    )


def _gated_sum(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    out = torch.empty_like(outs[0])
    _, seq_len, num_heads, d_v = out.shape
    num_rows = out[..., 0].numel()
    gate.gated_sum[(triton.cdiv(num_rows, ROWS_PER_GATE_PROGRAM),)](
        *outs, gates, out, num_rows, num_heads, seq_len, *gates.stride()[:3],
        DV=d_v, DV_PAD=padded(d_v), ROWS=ROWS_PER_GATE_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out


def _gate_backward(
    outs: tuple[Tensor, ...], dout: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, 3], [3, B, Hq, S] fp32
    batch, seq_len, num_heads, d_v = outs[0].shape
    dgates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    delta = torch.empty(3, batch, num_heads, seq_len, dtype=torch.float32, device=gates.device)
    num_rows = batch * seq_len * num_heads
    gate.gate_backward[(triton.cdiv(num_rows, ROWS_PER_GATE_PROGRAM),)](
        *outs, dout, dgates, delta, num_rows, num_heads, seq_len, *dout.stride()[:3],
        DV=d_v, DV_PAD=padded(d_v), ROWS=ROWS_PER_GATE_PROGRAM, num_warps=4,
    )  # fmt: skip
    return dgates, delta


def _constants(
    d_k: int, d_v: int, problem: Problem, shape: Band, docs: Documents | None
) -> dict[str, Any]:
    return {
        "DK": d_k,
        "DV": d_v,
        "DK_PAD": padded(d_k),
        "DV_PAD": padded(d_v),
        "L_SEL": problem.spec.l_sel,
        "SELECT": shape.SELECT,
        "HAS_DOCS": docs is not None,
        "UPCAST": INTERPRETED,
    }


def _launch(tiles: Any) -> dict[str, int]:
    return dict(tiles._asdict())


def _row_index(docs: Documents | None, shape: Band, q: Tensor) -> tuple[Tensor, Tensor]:
    """Start of each row's document and of its keys; without documents nobody reads them."""
    if docs is None:
        return q, q
    return docs.row_start, docs.row_cmp if shape.STEP > 1 or shape.OFF > 0 else docs.row_start


def _key_index(docs: Documents | None, branch: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """First and last query that sees each key."""
    if docs is None:
        return q, q
    return (
        (docs.cmp_first, docs.cmp_last),
        (docs.raw_first, docs.raw_last),
        (docs.raw_first, docs.win_last),
    )[branch]


def _strides(branch: _Branch) -> tuple[int, ...]:
    return (
        *branch.q.stride()[:3],
        *branch.k.stride()[:3],
        *branch.v.stride()[:3],
        *branch.dout.stride()[:3],
        *branch.gates.stride()[:3],
    )


def _sum_parts(parts: Tensor, like: Tensor) -> Tensor:
    """[B, Hkv, parts, K, D] fp32 -> [B, K, Hkv, D] in the dtype of the input."""
    total = parts.squeeze(2) if parts.shape[2] == 1 else parts.sum(dim=2)
    return total.transpose(1, 2).to(like.dtype)


def rows_contiguous(x: Tensor) -> Tensor:
    """The kernels take any strides but that of the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
