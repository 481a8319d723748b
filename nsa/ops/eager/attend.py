"""Softmax attention over the visible keys, forward and backward, for one chunk of queries.

The one primitive of the torch path: every branch and order of work, prefill and decode go through
it. Leading dimensions (written `*`) are batch and KV head, and the query too where every query
has keys of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MANY_ROWS = 64
"""From here on a copy of the keys costs little beside the product with them."""


class KeyValues(NamedTuple):
    """Keys and values of one branch."""

    k: Tensor  # [*, K, Dk]
    v: Tensor  # [*, K, Dv]
    bad: Tensor | None = None  # [*, K] bool  tokens whose value was not finite and is now 0


def clean(k: Tensor, v: Tensor) -> KeyValues:
    """Take non-finite values out, so that 0 * NaN cannot reach a query that does not see them."""
    bad = ~v.isfinite().all(dim=-1)
    return KeyValues(k, v.masked_fill(bad[..., None], 0.0), bad)


def attend(
    q: Tensor,  # [*, T, G, Dk]
    kv: KeyValues,
    visible: Tensor,  # broadcastable to [*, T, K] bool
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [*, T, G, Dv], [*, T, G], [*, T, G, K]
    """Output, log-sum-exp and probabilities, in q's dtype; a query that sees nothing gets 0."""
    probs, lse = probabilities(q, kv.k, visible, scale)
    out = (_rows(probs) @ kv.v.to(q.dtype)).unflatten(-2, q.shape[-3:-1])
    if kv.bad is not None:
        sees_bad = (visible & kv.bad[..., None, :]).any(dim=-1)  # [*, T]
        out.masked_fill_(sees_bad[..., None, None], math.nan)
    return out, lse, probs


def probabilities(
    q: Tensor,  # [*, T, G, Dk]
    k: Tensor,  # [*, K, Dk]
    visible: Tensor,  # broadcastable to [*, T, K] bool
    scale: float,
) -> tuple[Tensor, Tensor]:  # [*, T, G, K], [*, T, G]
    """Softmax over the visible keys and its log-sum-exp; a query that sees none: 0 and +inf."""
    logits = _masked_logits(q, k, visible, scale)
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], math.inf)
    top = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    probs = logits.sub_(top).exp_()
    total = probs.sum(dim=-1, keepdim=True)
    sees_none = total == 0
    probs.div_(total.masked_fill(sees_none, 1.0))
    lse = (top + total.log()).masked_fill(sees_none, math.inf)
    return probs, lse.squeeze(-1)


def attend_backward(
    q: Tensor,  # [*, T, G, Dk]
    kv: KeyValues,
    visible: Tensor,  # broadcastable to [*, T, K] bool
    scale: float,
    lse: Tensor,  # [*, T, G]
    gate: Tensor,  # [*, T, G]  weight of this branch in the sum
    dout: Tensor,  # [*, T, G, Dv]  gradient of the sum
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # dq, dk, dv, dgate with the shapes of q, k, v, gate
    """Gradients of gate * attend(...), with the probabilities recomputed from the log-sum-exp."""
    probs = _masked_logits(q, kv.k, visible, scale).sub_(lse[..., None]).exp_()
    dprobs = _times_transposed(_rows(dout), kv.v).view_as(probs)
    dgate = torch.linalg.vecdot(probs, dprobs)
    probs.mul_(gate[..., None])
    dv = _rows(probs).mT @ _rows(dout)
    dlogits = _rows(dprobs.sub_(dgate[..., None]).mul_(probs))
    dq = (dlogits @ kv.k).mul_(scale).view_as(q)
    dk = (dlogits.mT @ _rows(q)).mul_(scale)
    return dq, dk, dv, dgate


def _masked_logits(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q.k * scale where visible, -inf elsewhere: [*, T, G, K]."""
    logits = _times_transposed(_rows(q) * scale, k.to(q.dtype))
    logits = logits.unflatten(-2, q.shape[-3:-1])
    return logits.masked_fill_(~visible[..., :, None, :], -math.inf)


def _times_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x @ y.mT: [*, R, D], [*, K, D] -> [*, R, K].

    oneDNN multiplies by a transposed view up to three times slower than by a contiguous matrix at
    small head dims on ARM; beside many rows the copy is cheap.
    """
    return x @ (y.mT.contiguous() if x.shape[-2] >= MANY_ROWS else y.mT)


def _rows(x: Tensor) -> Tensor:
    """[*, T, G, D] -> [*, T * G, D]."""
    return x.flatten(-3, -2)
