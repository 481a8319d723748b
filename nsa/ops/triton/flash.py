"""Window and compressed branch on attention kernels of torch or cuDNN.

The window is a causal band, which those kernels support. The compressed branch is not: query t sees
the compressed tokens i with i*d + l - 1 <= t. With u = t - (l - 1) that is i <= u // d, so among
the queries of one residue u % d each sees one token more than the one before: a causal square. The
residues become rows of the batch, as views of the tensors, and share the keys. The last queries,
fewer than d, see every key: plain products.

Kernels take [B, S, H, D] with fewer heads of keys than of queries; their log-sum-exp is [B, Hq, S],
base e, while that of this package is base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.spec import BlockSpec

LOG2_E = math.log2(math.e)
WIDEST = torch.complex128
"""A dtype of 16 bytes, to copy as many at a time."""
RESIDUE_BYTES = 256 << 20
"""Limit of the queries in one call; kernels need several times as much memory."""


class Kernel(NamedTuple):
    """Causal attention within a window: the last `window` keys, its own included; None: all."""

    forward: Callable[[Tensor, Tensor, Tensor, float, int | None], tuple[Tensor, Tensor]]
    """(q, k, v, scale, window) -> output and log-sum-exp, base e."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(dout, q, k, v, out, log-sum-exp, scale, window) -> gradients of q, k, v."""


def forward(
    branch: int,  # 0 compressed, 2 window
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, N or S, Hkv, D]
    v: Tensor,  # [B, N or S, Hkv, D]
    spec: BlockSpec,
    scale: float,
    lse: Tensor,  # [B, Hq, S] fp32, written: base 2, +inf for a query that sees nothing
    kernel: Kernel | None = None,
) -> Tensor:  # [B, S, Hq, D]
    """Output of a branch; there is at least one key."""
    kernel = kernel or TORCH
    if q.is_meta:  # kernels are being compiled ahead: these need no compilation
        return q.new_empty(*q.shape[:3], v.shape[3])
    if branch == 2:
        out, natural = kernel.forward(q, k, v, scale, _window(spec, q))
        torch.mul(natural, LOG2_E, out=lse)
        return out.contiguous()
    return _compressed_forward(kernel, q, k, v, spec, scale, lse)


def backward(
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # [B, S, Hq, D]
    lse: Tensor,  # [B, Hq, S] fp32, base 2
    dout: Tensor,  # [B, S, Hq, D]  gradient of this branch, its gate included
    spec: BlockSpec,
    scale: float,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous."""
    kernel = kernel or TORCH
    if q.is_meta:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    natural = lse / LOG2_E
    if branch == 2:
        dq, dk, dv = kernel.backward(dout, q, k, v, out, natural, scale, _window(spec, q))
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    return _compressed_backward(kernel, q, k, v, out, natural, dout, spec, scale)


def _window(spec: BlockSpec, q: Tensor) -> int | None:
    return spec.w if spec.w < q.shape[1] else None


def _compressed_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: BlockSpec, scale: float, lse: Tensor
) -> Tensor:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    first, num_groups = spec.l - 1, (q.shape[1] - spec.l + 1) // spec.d
    # The first l - 1 queries see nothing.
    out[:, :first], lse[:, :, :first] = 0.0, torch.inf
    for i, some in _calls(q, spec, num_groups):
        square = _square(q[i], k[i], v[i], spec, num_groups, some)
        part, natural = kernel.forward(*square, scale, None)
        _copy_rows(_by_residue(out[i], spec, num_groups)[some], part)
        by_row = _by_residue(lse[i].t(), spec, num_groups)[some]
        by_row.transpose(1, 2).copy_(natural * LOG2_E)
    # The rest sees every key: plain products.
    rest = first + num_groups * spec.d
    logits = _logits(q[:, rest:], k, scale)
    lse[:, :, rest:] = logits.logsumexp(dim=-1).flatten(1, 2) * LOG2_E
    last = torch.einsum("bhgtn,bnhd->bthgd", logits.softmax(dim=-1), v.to(logits.dtype))
    out[:, rest:] = last.flatten(2, 3)
    return out


def _compressed_backward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    natural: Tensor,  # [B, Hq, S], base e
    dout: Tensor,
    spec: BlockSpec,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    first, num_groups = spec.l - 1, (q.shape[1] - spec.l + 1) // spec.d
    rest = first + num_groups * spec.d
    # The rest, with plain products: dS = P * (dP - delta), delta = <dout, out>.
    logits = _logits(q[:, rest:], k, scale)
    wide_q, wide_k, wide_v, wide_out, wide_dout = (
        x.to(logits.dtype) for x in (q[:, rest:], k, v, out[:, rest:], dout[:, rest:])
    )
    wide_q, wide_out, wide_dout = (
        x.unflatten(2, (k.shape[2], -1)) for x in (wide_q, wide_out, wide_dout)
    )
    probs = logits.softmax(dim=-1)
    dv = torch.einsum("bhgtn,bthgd->bnhd", probs, wide_dout)
    dlogits = torch.einsum("bthgd,bnhd->bhgtn", wide_dout, wide_v)
    delta = torch.einsum("bthgd,bthgd->bhgt", wide_out, wide_dout)
    dlogits = probs * (dlogits - delta.unsqueeze(-1)) * scale
    # dq = scale * dS K, dk = scale * dS^T Q; the first l - 1 queries have no gradient.
    dq = q.new_empty(q.shape)
    dq[:, :first] = 0.0
    dq[:, rest:] = torch.einsum("bhgtn,bnhd->bthgd", dlogits, wide_k).flatten(2, 3)
    dk = torch.einsum("bhgtn,bthgd->bnhd", dlogits, wide_q)
    # Residues share the keys, so their dk and dv are summed, in fp32 or wider.
    for i, some in _calls(q, spec, num_groups):
        square = _square(q[i], k[i], v[i], spec, num_groups, some)
        part_out, part_dout = (_by_residue(x[i], spec, num_groups)[some] for x in (out, dout))
        lse = _by_residue(natural[i].t(), spec, num_groups)[some].transpose(1, 2).contiguous()
        grads = kernel.backward(part_dout, *square, part_out, lse, scale, None)
        _copy_rows(_by_residue(dq[i], spec, num_groups)[some], grads[0])
        dk[i, :num_groups] += grads[1].sum(dim=0, dtype=dk.dtype)
        dv[i, :num_groups] += grads[2].sum(dim=0, dtype=dv.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _copy_rows(to: Tensor, source: Tensor) -> None:
    """Copy strided rows, 16 bytes at a time where alignment allows; torch copies them one number
    at a time.
    """
    step = WIDEST.itemsize // to.element_size()
    places = [n for x in (to, source) for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])]
    if to.dtype == source.dtype and all(n % step == 0 for n in places):
        to, source = to.view(WIDEST), source.view(WIDEST)
    to.copy_(source)


def _calls(q: Tensor, spec: BlockSpec, num_groups: int) -> Iterator[tuple[int, slice]]:
    """Batch element and residues of every kernel call, within RESIDUE_BYTES."""
    size = num_groups * q.shape[2] * q.shape[3] * q.element_size()
    together = max(min(RESIDUE_BYTES // max(size, 1), spec.d), 1)
    for i in range(q.shape[0] if num_groups else 0):
        for residue in range(0, spec.d, together):
            yield i, slice(residue, min(residue + together, spec.d))


def _square(
    q: Tensor, k: Tensor, v: Tensor, spec: BlockSpec, num_groups: int, some: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of some residues, and the keys and values repeated for each: the residues' batch."""
    rows = _by_residue(q, spec, num_groups)[some]
    keys, values = (x[:num_groups].expand(len(rows), -1, -1, -1).contiguous() for x in (k, v))
    return rows, keys, values


def _by_residue(x: Tensor, spec: BlockSpec, num_groups: int) -> Tensor:
    """[S, ...] -> [d, num_groups, ...]: a view of the queries that see something, by residue."""
    first = spec.l - 1
    return x[first : first + num_groups * spec.d].unflatten(0, (num_groups, spec.d)).transpose(0, 1)


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:  # [B, Hkv, G, S, N]
    """Logits of queries that see every key, in fp32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    return torch.einsum("bthgd,bnhd->bhgtn", grouped, k.to(dtype)) * scale


def _torch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False),
        scale=scale,
        **_sides(window),
    )
    return out, lse


def _torch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, True),
        *(no_dropout, no_dropout),
        scale=scale,
        **_sides(window),
    )
    return dq, dk, dv


def _sides(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


TORCH = Kernel(_torch_forward, _torch_backward)
"""The flash kernels that are built into torch."""


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    _refuse_window(window)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, True, False, scale=scale
    )
    return out.transpose(1, 2), lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_window(window)
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
    no_bounds = None, None, q.shape[1], k.shape[1]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
        *(lse.unsqueeze(-1), no_dropout[0], no_dropout[1], None, *no_bounds, 0.0, True),
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _refuse_window(window: int | None) -> None:
    if window is not None:
        raise ValueError(f"cuDNN attention is causal without a window, not of {window} keys")


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)
"""The attention of cuDNN, as torch calls it."""
