"""Window and compressed branch on attention kernels of torch or cuDNN.

The window is a causal band, which those kernels support. The compressed branch is not: query t sees
the compressed tokens i with i*d + l - 1 <= t. With u = t - (l - 1) that is i <= u // d, so among
the queries of one residue u % d each sees one token more than the one before: a causal square. The
residues become rows of the batch, as views of the tensors, and share the keys. Where the number of
queries is not a multiple of d, the first residues have one query more: calls of their own.

Queries with an offset also see all compressed tokens before that square. In the backward pass those
are a call of their own, without a mask, for which residues do not matter; dq is the sum of both. In
the forward pass two outputs would have to be merged, and our own kernels are faster.

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
RESIDUE_BYTES, FLAT_BYTES = 256 << 20, 1 << 30
"""Limits of the queries in one call, by residue or all of them; kernels need several times as much
memory."""

COUNTABLE = 1 << 31
"""The first distance, in numbers, that cuDNN does not reach."""


class Kernel(NamedTuple):
    """Causal attention within a window: the last `window` keys, its own included; None: all."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, scale, window) -> output and log-sum-exp, base e."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(dout, q, k, v, out, log-sum-exp, scale, window, causal=True) -> gradients of q, k, v."""


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
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous. `offset`: position of the first query, of the compressed
    branch alone."""
    kernel = kernel or TORCH
    if q.is_meta:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    natural = lse / LOG2_E
    if branch == 2:
        dq, dk, dv = kernel.backward(dout, q, k, v, out, natural, scale, _window(spec, q))
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    return _compressed_backward(kernel, q, k, v, out, natural, dout, spec, scale, offset)


def _window(spec: BlockSpec, q: Tensor) -> int | None:
    return spec.w if spec.w < q.shape[1] else None


class _Rows(NamedTuple):
    """The queries of the compressed branch: some first ones, then groups of d, the last of which
    may be incomplete."""

    first: int
    """Queries before the groups; they see the tokens `before`, which may be none."""
    num_groups: int
    """Complete ones. Group g sees one token more than group g - 1, and g + 1 more than `before`."""
    rest: int
    """Queries of the incomplete group."""
    before: int
    """Compressed tokens that all of them see."""
    residues: int

    @classmethod
    def of(cls, spec: BlockSpec, num_queries: int, offset: int) -> _Rows:
        # Query r sees u // d + 1 tokens, where u = offset + r - (l - 1).
        start = offset - spec.l + 1
        first = -start if start < 0 else -start % spec.d
        groups = divmod(max(num_queries - first, 0), spec.d)
        return cls(min(first, num_queries), *groups, (start + first) // spec.d, spec.d)

    @property
    def num_keys(self) -> int:
        """Tokens that the last query sees beyond `before`."""
        return self.num_groups + (self.rest > 0)

    def flat(self, row_bytes: int) -> list[slice]:
        """The queries in groups, in pieces within FLAT_BYTES; none where they see nothing before
        the square."""
        stop = self.first + self.num_groups * self.residues + self.rest
        step = max(FLAT_BYTES // row_bytes, 1)
        firsts = range(self.first, stop, step) if self.before else ()
        return [slice(first, min(first + step, stop)) for first in firsts]

    def of_residues(self, x: Tensor, some: slice, count: int) -> Tensor:
        """[S, ...] -> [residues, count, ...]: a view of the first queries of some residues."""
        step, *strides = x.stride()
        size = (some.stop - some.start, count, *x.shape[1:])
        place = x.storage_offset() + (self.first + some.start) * step
        return x.as_strided(size, (step, step * self.residues, *strides), place)


def _compressed_forward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: BlockSpec,
    scale: float,
    lse: Tensor,
) -> Tensor:
    out, rows = q.new_empty(*q.shape[:3], v.shape[3]), _Rows.of(spec, q.shape[1], 0)
    out[:, : rows.first], lse[:, :, : rows.first] = 0.0, torch.inf
    for i, calls in _calls(q, rows):
        keys = _repeated(k[i], v[i], slice(0, rows.num_keys), calls)
        for some, count in calls:
            queries = rows.of_residues(q[i], some, count)
            shared = (x[: len(queries), :count] for x in keys)
            part, natural = kernel.forward(queries, *shared, scale, None)
            _copy_rows(rows.of_residues(out[i], some, count), part)
            by_row = rows.of_residues(lse[i].t(), some, count)
            torch.mul(natural, LOG2_E, out=by_row.transpose(1, 2))
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
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, wide = _Rows.of(spec, q.shape[1], offset), torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = q.new_empty(q.shape), *(torch.zeros_like(x, dtype=wide) for x in (k, v))
    if rows.before:
        seen = k[:, : rows.before], v[:, : rows.before]
        early = slice(0, rows.first)
        grads = _edge_gradients(q[:, early], *seen, out[:, early], dout[:, early], scale)
        dq[:, early] = grads[0]
        dk[:, : rows.before] += grads[1]
        dv[:, : rows.before] += grads[2]
    else:
        dq[:, : rows.first] = 0.0  # they see nothing
    for i, piece in _pieces(q, rows):
        seen = k[i : i + 1, : rows.before], v[i : i + 1, : rows.before]
        given, queries, part_out = (x[i : i + 1, piece] for x in (dout, q, out))
        part_lse = natural[i : i + 1, :, piece].contiguous()
        grads = kernel.backward(given, queries, *seen, part_out, part_lse, scale, None, False)
        dq[i : i + 1, piece] = grads[0]
        dk[i, : rows.before] += grads[1][0]
        dv[i, : rows.before] += grads[2][0]
    for i, calls in _calls(q, rows):
        keys = _repeated(k[i], v[i], slice(rows.before, rows.before + rows.num_keys), calls)
        for some, count in calls:
            queries, part_out, given = (rows.of_residues(x[i], some, count) for x in (q, out, dout))
            part_lse = rows.of_residues(natural[i].t(), some, count).transpose(1, 2).contiguous()
            shared = (x[: len(queries), :count] for x in keys)
            grads = kernel.backward(given, queries, *shared, part_out, part_lse, scale, None)
            rows_dq = rows.of_residues(dq[i], some, count)
            _copy_rows(rows_dq, grads[0] + rows_dq if rows.before else grads[0])
            # Residues share the keys, so their dk and dv are summed, in fp32 or wider.
            square = slice(rows.before, rows.before + count)
            dk[i, square] += grads[1].sum(dim=0, dtype=wide)
            dv[i, square] += grads[2].sum(dim=0, dtype=wide)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _edge_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries that see all of the given keys, with plain products."""
    # dS = P * (dP - delta), delta = <dout, out>.
    logits = _logits(q, k, scale)
    q, k, v, out, dout = (x.to(logits.dtype) for x in (q, k, v, out, dout))
    q, out, dout = (x.unflatten(2, (k.shape[2], -1)) for x in (q, out, dout))
    probs = logits.softmax(dim=-1)
    dv = torch.einsum("bhgtn,bthgd->bnhd", probs, dout)
    dlogits = torch.einsum("bthgd,bnhd->bhgtn", dout, v)
    delta = torch.einsum("bthgd,bthgd->bhgt", out, dout)
    dlogits = probs * (dlogits - delta.unsqueeze(-1)) * scale
    # dq = scale * dS K, dk = scale * dS^T Q.
    dq = torch.einsum("bhgtn,bnhd->bthgd", dlogits, k).flatten(2, 3)
    return dq, torch.einsum("bhgtn,bthgd->bnhd", dlogits, q), dv


def _copy_rows(to: Tensor, source: Tensor) -> None:
    """Copy strided rows, 16 bytes at a time where alignment allows; torch copies them one number
    at a time.
    """
    step = WIDEST.itemsize // to.element_size()
    places = [n for x in (to, source) for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])]
    if to.dtype == source.dtype and all(n % step == 0 for n in places):
        to, source = to.view(WIDEST), source.view(WIDEST)
    to.copy_(source)


def _calls(q: Tensor, rows: _Rows) -> Iterator[tuple[int, list[tuple[slice, int]]]]:
    """Every batch element, and the residues and queries of its kernel calls, within RESIDUE_BYTES.

    Gradients of keys are made for every head of the queries, so that keys count like queries.
    """
    calls = []
    longer = (0, rows.rest, rows.num_groups + 1)
    for first, stop, count in (longer, (rows.rest, rows.residues, rows.num_groups)):
        size = count * q.shape[2] * q.shape[3] * q.element_size()
        together = max(RESIDUE_BYTES // max(size, 1), 1)
        firsts = range(first, stop, together) if count else ()
        calls += [(slice(at, min(at + together, stop)), count) for at in firsts]
    yield from ((i, calls) for i in range(q.shape[0] if calls else 0))


def _pieces(q: Tensor, rows: _Rows) -> Iterator[tuple[int, slice]]:
    """Batch element and queries of every call without a mask."""
    for i in range(q.shape[0]):
        yield from ((i, piece) for piece in rows.flat(q[0, 0].numel() * q.element_size()))


def _repeated(
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,
    some: slice,
    calls: list[tuple[slice, int]],
) -> list[Tensor]:  # [residues, some, Hkv, D] each
    """Some keys and values for each residue of the longest call."""
    most = max(residues.stop - residues.start for residues, _ in calls)
    pairs = [(x[some].new_empty(most, *x[some].shape), x[some]) for x in (k, v)]
    for to, source in pairs:
        _copy_rows(to, source.expand(to.shape))
    return [to for to, _ in pairs]


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
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal),
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
        *(_near(x).transpose(1, 2) for x in (q, k, v)), None, True, 0.0, True, False, scale=scale
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
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_window(window)
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
    no_bounds = None, None, q.shape[1], k.shape[1]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_near(x).transpose(1, 2) for x in (dout, q, k, v, out)),
        *(lse.unsqueeze(-1), no_dropout[0], no_dropout[1], None, *no_bounds, 0.0, causal),
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _near(x: Tensor) -> Tensor:
    """x, or a copy where cuDNN would have to reach 2^31 numbers far: dq of such rows was wrong."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if reach < COUNTABLE else x.contiguous()


def _refuse_window(window: int | None) -> None:
    if window is not None:
        raise ValueError(f"cuDNN attention is causal without a window, not of {window} keys")


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)
"""The attention of cuDNN, as torch calls it."""
