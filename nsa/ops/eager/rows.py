"""Softmax attention over visible keys, and one chunk of queries through all three branches.

`attend` and `attend_backward` are the one primitive of the torch path: every branch, prefill and
decode use it. `forward_rows` and `backward_rows` give it the keys of each branch. Leading
dimensions (written `*`) are batch and KV head, and the query too where every query has keys of its
own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import assert_selection
from nsa.ops.plan import NO_FLAGS, Flags, nvtx
from nsa.ops.spec import BlockSpec

MANY_ROWS = 64
"""From this many rows on, a transposed copy of the keys costs little beside the product."""


class KeyValues(NamedTuple):
    """Keys and values of one branch."""

    k: Tensor  # [*, K, Dk]
    v: Tensor  # [*, K, Dv]
    bad: Tensor | None = None  # [*, K] bool  tokens whose value was not finite and is now 0


def clean(k: Tensor, v: Tensor) -> KeyValues:
    """Replace non-finite values by 0: 0 * NaN would reach queries that do not see them."""
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
    # Put NaN back into the rows that saw a token with a non-finite value.
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
    # Clamped: a row that sees nothing has a maximum of -inf, and -inf - -inf is NaN.
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
    # P = exp(s - lse), dP = dout V^T, d gate = <P, dP> = <dout, out>.
    probs = _masked_logits(q, kv.k, visible, scale).sub_(lse[..., None]).exp_()
    dprobs = _times_transposed(_rows(dout), kv.v).view_as(probs)
    dgate = torch.linalg.vecdot(probs, dprobs)
    # With P' = gate * P: dV = P'^T dout, dS = P' * (dP - d gate), dQ = scale * dS K,
    # dK = scale * dS^T Q. In place where a tensor is not needed again.
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


# --- One chunk of queries of one document ---
# The selected branch has two orders of work with the same result. Prefix: all earlier tokens,
# masked down to the selected blocks; large matrix products, but quadratic. Gather: only the
# selected tokens, fetched for each query. The position of the chunk alone decides (`use_gather`),
# so that neither data nor the future can change a rounding.

FETCH_COST = 32
"""Fetching a key for one query costs about as much as a masked product for this many query heads;
decides between the two orders (measured on two CPU cores, docs/torch-path.md)."""


class Branches(NamedTuple):
    """Keys and values of the three branches of one document, [B, Hkv, tokens, D]."""

    cmp: KeyValues
    sel: KeyValues
    win: KeyValues
    win_first: int = 0
    """Position of the first key in `win`: a cache keeps only the latest w."""


class Chunk(NamedTuple):
    """Results of a chunk: outputs and log-sum-exps by branch, and the selection."""

    outs: tuple[Tensor, Tensor, Tensor]  # each [B, Hkv, T, G, Dv]
    lses: tuple[Tensor, Tensor, Tensor]  # each [B, Hkv, T, G]
    chosen: Tensor  # [B, Hkv, T, n_sel] int32
    visible: tuple[Tensor, Tensor, Tensor]  # by branch: which of its keys were read


def forward_rows(
    q: Tensor,  # [B, Hkv, T, G, Dk]
    branches: Branches,
    first: int,  # position of the first query
    spec: BlockSpec,
    scale: float,
    chosen: Tensor | None,  # [B, Hkv, T, n_sel] int32: given, it replaces scoring and top-n
    flags: Flags = NO_FLAGS,
) -> Chunk:
    """All three branches for queries first .. first + T - 1."""
    num_queries = q.shape[2]
    cmp, cmp_visible = compressed_keys(branches.cmp, first, num_queries, spec)
    with nvtx("pcmp_all", flags.nvtx):
        out_cmp, lse_cmp, probs = attend(q, cmp, cmp_visible, scale)
    # Compressed branch first: its probabilities score the blocks.
    lost = None
    if chosen is None:
        with nvtx("nsa.sel.ranges_v2", flags.nvtx):
            chosen, lost = choose_from_probs(probs, first, spec, flags)
    del probs
    with nvtx("branch_attn+gate", flags.nvtx):
        sel_q, sel, sel_visible = selected_keys(q, branches.sel, chosen, first, spec)
        out_sel, lse_sel, _ = attend(sel_q, sel, sel_visible, scale)
        win, win_visible = window_keys(branches, first, num_queries, spec)
        out_win, lse_win, _ = attend(q, win, win_visible, scale)
    out_sel, lse_sel = out_sel.view(*q.shape[:-1], -1), lse_sel.view(q.shape[:-1])
    if lost is not None:  # a NaN score: no ranking, so the output is NaN as in the oracle
        out_sel.masked_fill_(lost[..., None, None], torch.nan)
    return Chunk(
        outs=(out_cmp, out_sel, out_win),
        lses=(lse_cmp, lse_sel, lse_win),
        chosen=chosen,
        visible=(cmp_visible, sel_visible, win_visible),
    )


def backward_rows(
    q: Tensor,  # [B, Hkv, T, G, Dk]
    branches: Branches,
    grads: Branches,  # gradients of the keys and values, added to in place
    first: int,
    spec: BlockSpec,
    scale: float,
    chosen: Tensor,  # [B, Hkv, T, n_sel] int32
    lses: tuple[Tensor, Tensor, Tensor],  # each [B, Hkv, T, G]
    gates: Tensor,  # [B, Hkv, T, G, 3]
    dout: Tensor,  # [B, Hkv, T, G, Dv]
) -> tuple[Tensor, Tensor]:  # dq [B, Hkv, T, G, Dk], dgates [B, Hkv, T, G, 3]
    """Gradients of the gated sum of the three branches."""
    num_queries = q.shape[2]
    cmp, visible = compressed_keys(branches.cmp, first, num_queries, spec)
    dq_cmp, dk, dv, dgate_cmp = attend_backward(
        q, cmp, visible, scale, lses[0], gates[..., 0], dout
    )
    span = slice(0, visible.shape[-1])
    _accumulate(grads.cmp, span, dk, dv)

    dq_sel, dgate_sel = _selected_backward(
        q, branches, grads, chosen, first, spec, scale, lses[1], gates[..., 1], dout
    )

    win, visible = window_keys(branches, first, num_queries, spec)
    dq_win, dk, dv, dgate_win = attend_backward(
        q, win, visible, scale, lses[2], gates[..., 2], dout
    )
    _accumulate(grads.win, window_span(branches, first, num_queries, spec), dk, dv)
    dgates = torch.stack([dgate_cmp, dgate_sel, dgate_win], dim=-1)
    return dq_cmp.add_(dq_sel).add_(dq_win), dgates


def compressed_keys(
    cmp: KeyValues, first: int, num_queries: int, spec: BlockSpec
) -> tuple[KeyValues, Tensor]:
    """Compressed tokens the last query of the chunk sees, and who sees which: [T, N]."""
    num_cmp = spec.num_cmp(first + num_queries)
    t = torch.arange(first, first + num_queries, device=cmp.k.device)[:, None]
    i = torch.arange(num_cmp, device=cmp.k.device)
    return _span(cmp, slice(0, num_cmp)), i * spec.d + spec.l - 1 <= t


def choose_from_probs(
    probs: Tensor,  # [B, Hkv, T, G, N]
    first: int,
    spec: BlockSpec,
    flags: Flags = NO_FLAGS,
) -> tuple[Tensor, Tensor]:  # [B, Hkv, T, n_sel] int32, [B, Hkv, T] bool
    """The chunk's selection, and the queries whose ranking was lost to a NaN."""
    num_blocks = spec.num_blocks(first + probs.shape[2])
    with nvtx("map_pcmp_to_pslc", flags.nvtx):
        scores = score_blocks(probs, num_blocks, spec)
    with nvtx("topk+ranges", flags.nvtx):
        chosen = choose_blocks(scores, first, spec)
    if flags.strict:
        positions = torch.arange(first, first + chosen.shape[2], device=chosen.device)
        assert_selection(chosen, positions, spec)
    return chosen, scores.isnan().any(dim=-1)


def selected_keys(
    q: Tensor,  # [B, Hkv, T, G, Dk]
    sel: KeyValues,
    chosen: Tensor,  # [B, Hkv, T, n_sel] int32
    first: int,
    spec: BlockSpec,
) -> tuple[Tensor, KeyValues, Tensor]:
    """Queries, keys and visibility for `attend`, in the order of work that fits the position.

    Prefix order: q as given, keys [B, Hkv, K, D], visible [B, Hkv, T, K].
    Gather order: every query alone, q [B, Hkv, T, 1, G, Dk], keys [B, Hkv, T, K, D].
    """
    if use_gather(first, q.shape[2], q.shape[3], spec):
        index, used = gather_index(chosen, first, spec)
        return q[:, :, :, None], gather(sel, index), used[..., None, :]
    visible = _selected_visible(chosen, first, spec)
    return q, _span(sel, slice(0, visible.shape[-1])), visible


def window_keys(
    branches: Branches, first: int, num_queries: int, spec: BlockSpec
) -> tuple[KeyValues, Tensor]:
    """Tokens of the chunk's windows, and who sees which: [T, K]."""
    span = window_span(branches, first, num_queries, spec)
    t = torch.arange(first, first + num_queries, device=branches.win.k.device)[:, None]
    token = torch.arange(span.start, span.stop, device=branches.win.k.device) + branches.win_first
    return _span(branches.win, span), (token <= t) & (token > t - spec.w)


def window_span(branches: Branches, first: int, num_queries: int, spec: BlockSpec) -> slice:
    """Where in `win` the tokens first - w + 1 .. first + T - 1 are."""
    start = max(first - spec.w + 1, 0) - branches.win_first
    return slice(start, first + num_queries - branches.win_first)


def use_gather(first: int, num_queries: int, heads_per_group: int, spec: BlockSpec) -> bool:
    """Whether the selected branch fetches tokens instead of masking the whole past."""
    masked_cost, fetch_cost = first * heads_per_group, spec.n_sel * spec.l_sel * FETCH_COST
    return num_queries == 1 or masked_cost >= fetch_cost


def gather_index(
    chosen: Tensor,  # [B, Hkv, T, n_sel] int32
    first: int,
    spec: BlockSpec,
) -> tuple[Tensor, Tensor]:  # [B, Hkv, T, n_sel * l_sel] int64, the same as bool
    """Positions of the selected tokens, and which places of the list are used.

    Unused places (no block, or a token after the query) point at the query's own token, which
    the query reads anyway: nothing outside the selection is ever touched.
    """
    t = torch.arange(first, first + chosen.shape[2], device=chosen.device)[:, None]
    inside = torch.arange(spec.l_sel, device=chosen.device)
    token = (chosen.long()[..., None] * spec.l_sel + inside).flatten(-2)
    used = (chosen >= 0).repeat_interleave(spec.l_sel, dim=-1) & (token <= t)
    return torch.where(used, token, t), used


def gather(kv: KeyValues, index: Tensor) -> KeyValues:
    """Keys and values at `index` [B, Hkv, T, K] for every query: leading dims [B, Hkv, T]."""
    flat = _flat_index(index, kv.k.shape[2]).flatten()

    def fetch(x: Tensor) -> Tensor:
        return x.flatten(0, 2).index_select(0, flat).unflatten(0, index.shape)

    return KeyValues(fetch(kv.k), fetch(kv.v), None if kv.bad is None else fetch(kv.bad))


def _selected_backward(
    q: Tensor,
    branches: Branches,
    grads: Branches,
    chosen: Tensor,
    first: int,
    spec: BlockSpec,
    scale: float,
    lse: Tensor,
    gate: Tensor,
    dout: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the gate; those of the keys and values are added to `grads`."""
    sel_q, sel, visible = selected_keys(q, branches.sel, chosen, first, spec)
    rows = sel_q.shape[:-1]
    dq, dk, dv, dgate = attend_backward(
        sel_q, sel, visible, scale, lse.view(rows), gate.reshape(rows), dout.view(*rows, -1)
    )
    if sel_q is q:
        _accumulate(grads.sel, slice(0, visible.shape[-1]), dk, dv)
    else:
        index, _ = gather_index(chosen, first, spec)
        flat = _flat_index(index, grads.sel.k.shape[2]).flatten()
        grads.sel.k.view(-1, dk.shape[-1]).index_add_(0, flat, dk.flatten(0, -2))
        grads.sel.v.view(-1, dv.shape[-1]).index_add_(0, flat, dv.flatten(0, -2))
    return dq.view_as(q), dgate.view(q.shape[:-1])


def _selected_visible(chosen: Tensor, first: int, spec: BlockSpec) -> Tensor:
    """Which of the tokens 0 .. first + T - 1 each query of the chunk selects: [B, Hkv, T, K]."""
    num_queries = chosen.shape[2]
    num_tokens = first + num_queries
    num_blocks = spec.num_blocks(num_tokens)
    current = current_block(first, num_queries, spec, chosen.device)[:, None]
    legal = (chosen >= 0) & (chosen <= current)
    # One block more than there are: ids that are not legal go there and are cut off. All tokens of
    # a block are written: where a mask of blocks is repeated and cut instead, inductor's C++ (torch
    # 2.13) reads it wrong if l_sel does not divide the length, and gradients are wrong.
    rows = chosen.new_zeros(chosen[..., 0].numel(), num_blocks + 1, spec.l_sel, dtype=torch.bool)
    first_block = torch.arange(len(rows), device=chosen.device)[:, None] * (num_blocks + 1)
    ids = torch.where(legal, chosen, num_blocks).flatten(0, 2) + first_block
    rows.view(-1, spec.l_sel).index_fill_(0, ids.flatten(), True)
    visible = rows.view(*chosen.shape[:3], -1)[..., :num_tokens]
    t = torch.arange(first, num_tokens, device=chosen.device)[:, None]
    if torch.compiler.is_compiling():
        # One pass: of the assignment below, inductor's C++ (torch 2.13) can make a type error.
        return visible & (torch.arange(num_tokens, device=chosen.device) <= t)
    recent = first // spec.l_sel * spec.l_sel  # only blocks from here on hold tokens after a query
    visible[..., recent:] &= torch.arange(recent, num_tokens, device=chosen.device) <= t
    return visible


def _span(kv: KeyValues, span: slice) -> KeyValues:
    bad = None if kv.bad is None else kv.bad[:, :, span]
    return KeyValues(kv.k[:, :, span], kv.v[:, :, span], bad)


def _accumulate(grad: KeyValues, span: slice, dk: Tensor, dv: Tensor) -> None:
    grad.k[:, :, span] += dk
    grad.v[:, :, span] += dv


def _flat_index(index: Tensor, num_tokens: int) -> Tensor:
    """[B, Hkv, T, K] positions -> rows of the tensor with its first three dims flattened."""
    batch, num_groups = index.shape[:2]
    base = torch.arange(batch * num_groups, device=index.device) * num_tokens
    return index + base.view(batch, num_groups, 1, 1)


# --- Block scores and the choice of blocks (Eq. 9 to 12) ---


def score_blocks(
    probs: Tensor,  # [B, Hkv, T, G, N]  p_cmp
    num_blocks: int,
    spec: BlockSpec,
) -> Tensor:  # [B, Hkv, T, num_blocks]
    """Sum over the heads of a group, and over blocks, of p_cmp * overlap / d.

    In units of the stride d, compression block i covers strides i .. i + l/d - 1 and selection
    block j covers l_sel/d strides: add p_cmp to every stride it covers, then add up the strides of
    each selection block. Whole tensors are added one after another, never reduced along a
    dimension: equal probabilities give bit-equal scores at any index, so ties are exact.
    """
    # Eq. 10: sum over the heads of a group.
    per_head = probs.unbind(dim=3)
    group_probs = per_head[0].clone()
    for head in per_head[1:]:
        group_probs += head
    *lead, num_cmp = group_probs.shape
    # Eq. 9, first spread over the strides, then summed by block.
    strides_per_block = spec.l_sel // spec.d
    per_stride = group_probs.new_zeros(*lead, num_blocks * strides_per_block)
    for offset in range(spec.l // spec.d):
        width = min(num_cmp, per_stride.shape[-1] - offset)
        per_stride[..., offset : offset + width] += group_probs[..., :width]
    scores = per_stride[..., ::strides_per_block].clone()
    for offset in range(1, strides_per_block):
        scores += per_stride[..., offset::strides_per_block]
    return scores


def choose_blocks(
    scores: Tensor,  # [B, Hkv, T, num_blocks]
    first: int,  # position of the chunk's first query in its document
    spec: BlockSpec,
) -> Tensor:  # [B, Hkv, T, n_sel] int32  ids ascending, then -1
    """Forced blocks first, then the best scores; a tie goes to the lower block."""
    num_queries, num_blocks = scores.shape[-2:]
    block = torch.arange(num_blocks, device=scores.device)
    current = current_block(first, num_queries, spec, scores.device)[:, None]
    forced = (block < spec.num_first) | (block > current - spec.num_local)
    rank = scores.masked_fill(scores.isnan(), -math.inf)
    rank = rank.masked_fill(forced, math.inf).masked_fill(block > current, -math.inf)
    # A stable sort keeps equal scores in block order. Blocks of the future rank last, at -inf.
    best = rank.sort(dim=-1, descending=True, stable=True).indices[..., : spec.n_sel]
    chosen = torch.where(best <= current, best, num_blocks).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == num_blocks, -1).to(torch.int32)
    missing = spec.n_sel - chosen.shape[-1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1) if missing else chosen


def distinct_blocks(
    selection: Tensor,  # [..., n_sel] int32, in any order
) -> Tensor:  # [..., n_sel] int32
    """A given selection without repeated blocks: repetitions become -1."""
    ordered = selection.sort(dim=-1).values
    again = ordered[..., 1:] == ordered[..., :-1]
    return ordered.masked_fill(torch.nn.functional.pad(again, (1, 0)), -1)


def current_block(first: int, num_queries: int, spec: BlockSpec, device: torch.device) -> Tensor:
    """Block of each query of a chunk: [T]."""
    return torch.arange(first, first + num_queries, device=device) // spec.l_sel
