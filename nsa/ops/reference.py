"""The oracle: NSA written from the equations, with explicit masks, in float64.

Slow and quadratic on purpose. It shares no code with the fast paths, so that a bug there cannot
hide here. One document at a time; gradients come from autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa.ops.checks import Layout
from nsa.ops.spec import BlockSpec


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
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, S, Hkv, n_sel] int32
    """Gated sum of compressed, selected and sliding attention (Eq. 5), and the selection used."""
    outs, selections = [], []
    row, raw, cmp = 0, 0, 0
    lens = zip(layout.query_lens, layout.key_lens, strict=True)
    for place, (num_rows, length) in enumerate(lens):
        rows, tokens = slice(row, row + num_rows), slice(raw, raw + length)
        blocks = slice(cmp, cmp + _num_cmp(spec, length))
        row, raw, cmp = rows.stop, tokens.stop, blocks.stop
        if num_rows == 0:
            continue
        out, chosen = _one_document(
            q[:, rows].double(),
            k_cmp[:, blocks].double(),
            v_cmp[:, blocks].double(),
            k_sel[:, tokens].double(),
            v_sel[:, tokens].double(),
            k_win[:, tokens].double(),
            v_win[:, tokens].double(),
            gates[:, rows].double(),
            spec,
            scale,
            None if selection is None else selection[:, rows],
            layout.offset_of(0, place),
        )
        outs.append(out)
        selections.append(chosen)
    return torch.cat(outs, dim=1).to(q.dtype), torch.cat(selections, dim=1)


def compress(x: Tensor, spec: BlockSpec, *, doc_lens: list[int]) -> Tensor:
    """phi = avg: mean of each complete block of l tokens: [B, S, H, D] -> [B, N, H, D]."""
    blocks, start = [], 0
    for length in doc_lens:
        for i in range(_num_cmp(spec, length)):
            first = start + i * spec.d
            blocks.append(x[:, first : first + spec.l].double().mean(dim=1))
        start += length
    if not blocks:
        return x[:, :0].clone()
    return torch.stack(blocks, dim=1).to(x.dtype)


def select_blocks(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    spec: BlockSpec,
    *,
    scale: float,
    doc_lens: list[int],
) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """The blocks each KV head reads (Eq. 11, 12)."""
    scores = block_scores(q, k_cmp, spec, scale=scale, doc_lens=doc_lens)
    return torch.cat([_top_blocks(score, spec) for score in scores], dim=1)


def block_scores(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    spec: BlockSpec,
    *,
    scale: float,
    doc_lens: list[int],
) -> list[Tensor]:  # per document: [B, S_doc, Hkv, blocks of the document] float64
    """Block scores of Eq. 9 and 10, before anything is forced or ranked."""
    scores, raw, cmp = [], 0, 0
    with torch.no_grad():
        for length in doc_lens:
            rows, blocks = slice(raw, raw + length), slice(cmp, cmp + _num_cmp(spec, length))
            t = torch.arange(length, device=q.device)[:, None]
            visible = _cmp_visible(t, blocks.stop - blocks.start, spec)
            probs = _softmax(q[:, rows].double(), k_cmp[:, blocks].double(), visible, scale)
            scores.append(_scores_from_probs(probs, k_cmp.shape[2], length, spec))
            raw, cmp = rows.stop, blocks.stop
    return scores


def sparse_attention(
    q: Tensor,  # [B, Sq, Hq, Dk]
    k: Tensor,  # [B, Sk, Hkv, Dk]
    v: Tensor,  # [B, Sk, Hkv, Dv]
    index: Tensor,  # [B, Sq, H, n] int32, H = 1, Hkv or Hq
    *,
    block: int,
    scale: float,
    sink: Tensor | None,  # [Hq]
    layout: Layout,
) -> tuple[Tensor, Tensor]:  # [B, Sq, Hq, Dv], [B, Sq, Hq]
    """Attention to the tokens of the chosen blocks up to the query, and its log-sum-exp."""
    outs, lses = [], []
    for b in range(q.shape[0]):
        first_row, first_key = 0, 0
        parts: list[tuple[Tensor, Tensor]] = []
        lens = zip(layout.query_lens, layout.key_lens, strict=True)
        for place, (num_rows, num_keys) in enumerate(lens):
            rows = slice(first_row, first_row + num_rows)
            keys = slice(first_key, first_key + num_keys)
            first_row, first_key = rows.stop, keys.stop
            offset = layout.offset_of(b, place)
            parts.append(
                _chosen_tokens(
                    q[b, rows].double(), k[b, keys].double(), v[b, keys].double(), index[b, rows],
                    block, scale, None if sink is None else sink.double(), offset,
                )
            )  # fmt: skip
        outs.append(torch.cat([out for out, _ in parts]))
        lses.append(torch.cat([lse for _, lse in parts]))
    return torch.stack(outs).to(q.dtype), torch.stack(lses)


def _chosen_tokens(
    q: Tensor,  # [T, Hq, Dk]
    k: Tensor,  # [K, Hkv, Dk]
    v: Tensor,  # [K, Hkv, Dv]
    index: Tensor,  # [T, H, n]
    block: int,
    scale: float,
    sink: Tensor | None,  # [Hq]
    offset: int,  # position of the first query
) -> tuple[Tensor, Tensor]:  # [T, Hq, Dv], [T, Hq]
    """One document of one batch element."""
    num_rows, num_heads, _ = q.shape
    t = offset + torch.arange(num_rows, device=q.device)[:, None, None]  # [T, 1, 1]
    token = torch.arange(k.shape[0], device=q.device)  # [K]
    in_chosen = (token // block == index[..., None]).any(dim=2)  # [T, H, K]
    visible = (in_chosen & (token <= t)).repeat_interleave(num_heads // index.shape[1], dim=1)
    k_per_head, v_per_head = (
        x.repeat_interleave(num_heads // k.shape[1], dim=1) for x in (k, v)
    )  # [K, Hq, D]
    # A non-finite key makes the rows that see it NaN, and no other row, in gradients neither.
    bad_key = ~k_per_head.isfinite().all(dim=-1)  # [K, Hq]
    k_per_head = k_per_head.masked_fill(bad_key[..., None], 0.0)
    logits = torch.einsum("thd,khd->thk", q, k_per_head) * scale
    logits = logits.masked_fill(visible & bad_key.t(), math.nan)
    sees_any = visible.any(dim=-1, keepdim=True)
    # Rows without a visible key keep their logits: neither value nor gradient is NaN; zeroed below.
    logits = logits.masked_fill(~visible & sees_any, -math.inf)
    if sink is not None:
        logits = torch.cat([logits, sink[None, :, None].expand(num_rows, -1, 1)], dim=-1)
    if logits.shape[-1] == 0:
        logits = logits.new_zeros(num_rows, num_heads, 1)
    lse = logits.logsumexp(dim=-1)
    probs = (logits - lse[..., None]).exp()[..., : k.shape[0]]
    probs = torch.where(visible, probs, torch.zeros_like(probs))
    # A non-finite value makes the rows that see it NaN, and no other row.
    bad = ~v_per_head.isfinite().all(dim=-1)  # [K, Hq]
    finite = v_per_head.masked_fill(bad[..., None], 0.0)
    out = torch.einsum("thk,khd->thd", probs, finite)
    bad_seen = (visible & bad.t()).any(dim=-1)
    out = out.masked_fill(bad_seen[..., None], math.nan)
    return out, lse.masked_fill(~sees_any[..., 0], -math.inf)


def _one_document(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: BlockSpec,
    scale: float,
    selection: Tensor | None,
    offset: int,  # position of the first query
) -> tuple[Tensor, Tensor]:
    num_tokens, num_groups = k_sel.shape[1:3]
    # Query and key positions, [S, 1] and [1, K].
    t = offset + torch.arange(q.shape[1], device=q.device)[:, None]
    token = torch.arange(num_tokens, device=q.device)[None, :]

    # Compressed branch: p_cmp [B, Hq, S, N].
    cmp_visible = _cmp_visible(t, k_cmp.shape[1], spec)
    p_cmp = _softmax(q, k_cmp, cmp_visible, scale)
    out_cmp = _weighted_sum(p_cmp, v_cmp, cmp_visible)

    # Selected branch: every token of the chosen blocks up to the query (Eq. 11, 12).
    scores = _scores_from_probs(p_cmp.detach(), num_groups, num_tokens, spec)
    chosen = _top_blocks(scores, spec, offset) if selection is None else selection
    block_of_token = token // spec.l_sel
    in_chosen = (block_of_token == chosen[..., None]).any(dim=3)  # [B, S, Hkv, K]
    sel_visible = in_chosen.transpose(1, 2) & (token <= t)
    out_sel = _weighted_sum(_softmax(q, k_sel, sel_visible, scale), v_sel, sel_visible)
    if selection is None:
        # The ranking depends on p_cmp of every head: a NaN there makes all heads of the group NaN.
        lost = scores.isnan().any(dim=-1).repeat_interleave(q.shape[2] // num_groups, dim=2)
        out_sel = out_sel.masked_fill(lost[..., None], math.nan)

    # Window branch: the latest w tokens, the query included.
    win_visible = (token <= t) & (token > t - spec.w)
    out_win = _weighted_sum(_softmax(q, k_win, win_visible, scale), v_win, win_visible)

    # Eq. 5.
    branches = torch.stack([out_cmp, out_sel, out_win], dim=3)  # [B, S, Hq, 3, Dv]
    return (gates[..., None] * branches).sum(dim=3), chosen


def _softmax(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Probabilities over the visible keys, [B, Hq, S, K]; a row that sees nothing is all zero."""
    heads_per_group = q.shape[2] // k.shape[2]
    k_per_head = k.repeat_interleave(heads_per_group, dim=2)
    logits = torch.einsum("bshd,bkhd->bhsk", q, k_per_head) * scale
    visible = _per_head(visible, heads_per_group).expand_as(logits)
    sees_any = visible.any(dim=-1, keepdim=True)
    # Rows without a visible key keep their logits: neither value nor gradient is NaN; zeroed below.
    probs = logits.masked_fill(~visible & sees_any, -math.inf).softmax(dim=-1)
    return torch.where(visible & sees_any, probs, torch.zeros_like(probs))


def _weighted_sum(probs: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """sum_k p v, [B, S, Hq, Dv]; a row that sees a non-finite value is NaN, no other row is."""
    heads_per_group = probs.shape[1] // v.shape[2]
    # Non-finite values are taken out of the product: a probability of 0 times NaN would be NaN.
    bad_token = ~v.isfinite().all(dim=-1)  # [B, K, Hkv]
    v_finite = torch.where(bad_token[..., None], torch.zeros_like(v), v)
    out = torch.einsum("bhsk,bkhd->bshd", probs, v_finite.repeat_interleave(heads_per_group, 2))
    bad_seen = (_per_head(visible, 1) & bad_token.permute(0, 2, 1)[:, :, None, :]).any(dim=-1)
    bad_row = bad_seen.repeat_interleave(heads_per_group, dim=1).transpose(1, 2)  # [B, S, Hq]
    return out.masked_fill(bad_row[..., None], math.nan)


def _per_head(visible: Tensor, heads_per_group: int) -> Tensor:
    """[S, K] or [B, Hkv, S, K] -> broadcastable to [B, Hq, S, K]."""
    if visible.dim() == 2:
        return visible[None, None]
    return visible.repeat_interleave(heads_per_group, dim=1)


def _cmp_visible(t: Tensor, num_cmp: int, spec: BlockSpec) -> Tensor:
    """[S, N]: the query at t [S, 1] sees block i once the block's last token has happened."""
    i = torch.arange(num_cmp, device=t.device)[None, :]
    return i * spec.d + spec.l - 1 <= t


def _scores_from_probs(probs: Tensor, num_groups: int, num_tokens: int, spec: BlockSpec) -> Tensor:
    """Sum over the heads of a group of p_cmp times overlap / d (Eq. 9, 10): [B, S, Hkv, blocks].

    The terms are added one by one in the order of i, so that blocks with equal terms tie exactly.
    """
    batch, num_heads, num_rows, num_cmp = probs.shape
    # Eq. 10: sum over the heads of a group.
    heads = probs.reshape(batch, num_groups, num_heads // num_groups, num_rows, num_cmp)
    group_probs = torch.zeros_like(heads[:, :, 0])  # [B, Hkv, S, N]
    for head in heads.unbind(dim=2):
        group_probs = group_probs + head
    # Eq. 9: weight = tokens that both blocks share, in units of d.
    scores = probs.new_zeros(batch, num_groups, num_rows, math.ceil(num_tokens / spec.l_sel))
    for j in range(scores.shape[-1]):
        for i in range(num_cmp):
            first = max(i * spec.d, j * spec.l_sel)
            last = min(i * spec.d + spec.l, (j + 1) * spec.l_sel)
            if last > first:
                scores[..., j] += group_probs[..., i] * ((last - first) / spec.d)
    return scores.transpose(1, 2)


def _top_blocks(scores: Tensor, spec: BlockSpec, offset: int = 0) -> Tensor:
    """Forced blocks, then the best scores, a tie to the lower index; ascending, then -1."""
    batch, seq_len, num_groups, _ = scores.shape
    chosen = torch.full((batch, seq_len, num_groups, spec.n_sel), -1, dtype=torch.int32)
    # Plain Python over lists: slow, and hard to get wrong. NaN scores rank last.
    table = scores.tolist()
    for b in range(batch):
        for t in range(seq_len):
            current = (offset + t) // spec.l_sel
            first = set(range(min(spec.num_first, current + 1)))
            local = set(range(max(current - spec.num_local + 1, 0), current + 1))
            forced = sorted(first | local)
            for g in range(num_groups):
                row = [-math.inf if math.isnan(s) else s for s in table[b][t][g][: current + 1]]
                others = [j for j in range(current + 1) if j not in forced]
                ranked = sorted(others, key=lambda j: (-row[j], j))
                ids = sorted(forced + ranked[: spec.n_sel - len(forced)])
                chosen[b, t, g, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return chosen.to(scores.device)


def _num_cmp(spec: BlockSpec, length: int) -> int:
    """Complete compression blocks in `length` tokens, counted one by one."""
    return sum(1 for first in range(0, length, spec.d) if first + spec.l <= length)
