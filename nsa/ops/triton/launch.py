"""The Triton path of the public functions: bring the inputs into form, call the operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.ops.spec import BlockSpec
from nsa.ops.triton.operators import call_attention, call_mean

MAX_GRID = 65535
"""Largest second and third side of a grid: batch times heads lies there, larger batches are cut."""
DIM_STEP = 8
"""Head dims that the kernels take are multiples of this, so that rows of 16 bit are aligned."""


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
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    most = MAX_GRID // q.shape[2]
    if q.shape[0] <= most:
        return _attend(tensors, spec, scale, doc_lens, selection)
    outs, chosen = [], []
    for first in range(0, q.shape[0], most):
        part = slice(first, first + most)
        ids = None if selection is None else selection[part]
        out, used = _attend(tuple(x[part] for x in tensors), spec, scale, doc_lens, ids)
        outs.append(out)
        chosen.append(used)
    return torch.cat(outs), torch.cat(chosen)


def _attend(
    tensors: tuple[Tensor, ...],
    spec: BlockSpec,
    scale: float,
    doc_lens: list[int],
    selection: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, *keys, gates = tensors
    d_v = keys[1].shape[3]
    q, scale = _positive_scale(q, scale)
    aligned = (padded_head(x) for x in (q, *keys))
    out, chosen = call_attention(*aligned, gates, selection, _blocks(spec), scale, doc_lens)
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
) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """The blocks each KV head reads."""
    q, scale = _positive_scale(q, scale)
    most = MAX_GRID // q.shape[2]
    pairs = zip(_batches(padded_head(q), most), _batches(padded_head(k_cmp), most), strict=True)
    done = [torch.ops.nsa.select(*pair, _blocks(spec), scale, doc_lens) for pair in pairs]
    return done[0] if len(done) == 1 else torch.cat(done)


def compress(x: Tensor, spec: BlockSpec, *, doc_lens: list[int]) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D]."""
    batches = _batches(x, MAX_GRID // x.shape[2])
    done = [call_mean(part, _blocks(spec), doc_lens) for part in batches]
    return done[0] if len(done) == 1 else torch.cat(done)


def _batches(x: Tensor, most: int) -> list[Tensor]:
    """x, cut along the batch into pieces of at most `most`."""
    return [x] if x.shape[0] <= most else list(x.split(most))


def _blocks(spec: BlockSpec) -> list[int]:
    return [spec.l, spec.d, spec.l_sel, spec.n_sel, spec.w]


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take the maximum before they scale: a scale that is not positive goes into q."""
    return (q, scale) if scale > 0 else (q * scale, 1.0)


def padded_head(x: Tensor) -> Tensor:
    """Zeros up to the next head dim that the kernels take change no product."""
    missing = -x.shape[-1] % DIM_STEP
    return F.pad(x, (0, missing)) if missing else x
