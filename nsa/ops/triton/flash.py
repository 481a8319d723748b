"""Window and compressed branch through flash kernels of another library.

The window is a causal band, which they know. The compressed branch they do not: query t sees the
compressed tokens i with i*d + l - 1 <= t. With u = t - (l - 1) that is i <= u // d, so that the
queries of one residue u % d see one token more from each to the next: a causal square. The residues
become rows of the batch; all of them share the keys.

Kernels take [B, S, H, D] with fewer heads of keys than of queries; their log-sum-exp is [B, Hq, S].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.ops.spec import BlockSpec

LOG2_E = math.log2(math.e)


class Kernel(NamedTuple):
    """Causal attention within a window: `window` keys up to the query's own; None is all."""

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
    if branch == 2:
        out, natural = kernel.forward(q, k, v, scale, _window(spec, q))
        torch.mul(natural, LOG2_E, out=lse)
        return out.contiguous()
    rows, keys, values = _by_residue(q, spec), _for_residues(k, spec), _for_residues(v, spec)
    out, natural = kernel.forward(rows, keys, values, scale, None)
    lse.fill_(torch.inf)
    by_token = _by_token(natural.transpose(1, 2).unsqueeze(-1), q, spec).squeeze(-1)  # [B, S, Hq]
    lse[:, :, spec.l - 1 :] = by_token[:, spec.l - 1 :].transpose(1, 2) * LOG2_E
    return _by_token(out, q, spec)


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
    """Gradients of q, k and v."""
    kernel = kernel or TORCH
    natural = lse / LOG2_E
    if branch == 2:
        dq, dk, dv = kernel.backward(dout, q, k, v, out, natural, scale, _window(spec, q))
        return dq, dk.contiguous(), dv.contiguous()
    keys, values = _for_residues(k, spec), _for_residues(v, spec)
    rows, out, dout = (_by_residue(x, spec) for x in (q, out, dout))
    # Rows of padding see keys, but have no gradient; their log-sum-exp must only be finite.
    natural = _by_residue(natural.transpose(1, 2).unsqueeze(-1), spec).squeeze(-1).transpose(1, 2)
    dq, dk, dv = kernel.backward(
        *(dout, rows, keys, values, out, natural.contiguous(), scale, None),
    )
    dk, dv = (x.unflatten(0, (-1, spec.d)).sum(dim=1) for x in (dk, dv))
    return _by_token(dq, q, spec), dk, dv


def _window(spec: BlockSpec, q: Tensor) -> int | None:
    return spec.w if spec.w < q.shape[1] else None


def _by_residue(x: Tensor, spec: BlockSpec) -> Tensor:
    """[B, S, H, D] -> [B * d, N, H, D]: the queries that see something, by residue; zeros after."""
    num_queries = x.shape[1] - (spec.l - 1)
    x = F.pad(x[:, spec.l - 1 :], (0, 0, 0, 0, 0, -num_queries % spec.d))
    return x.unflatten(1, (-1, spec.d)).transpose(1, 2).flatten(0, 1).contiguous()


def _for_residues(x: Tensor, spec: BlockSpec) -> Tensor:
    """[B, N, H, D] -> [B * d, N, H, D]: the same keys for every residue."""
    return x[:, None].expand(-1, spec.d, -1, -1, -1).flatten(0, 1)


def _by_token(x: Tensor, q: Tensor, spec: BlockSpec) -> Tensor:
    """[B * d, N, H, D] -> [B, S, H, D], the way back; 0 for the queries that see nothing."""
    x = x.unflatten(0, (-1, spec.d)).transpose(1, 2).flatten(1, 2)
    first = spec.l - 1
    return F.pad(x[:, : q.shape[1] - first], (0, 0, 0, 0, first, 0)).contiguous()


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
