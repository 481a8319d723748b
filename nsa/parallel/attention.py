"""The attention layers where every rank has some parts of the sequence: queries stay, keys arrive.

Each class is the layer of the model with another `forward`: the same weights under the same names.
ContextParallel (style.py) turns one into the other.

    NSA     gathers the K and V of the selected branch and compressed tokens; takes the window's
            K and V, and raw tokens for blocks that begin further left, from the left neighbours
    sparse  gathers its one K and V, and the index keys of a learned rule
    dense   gathers its one K and V

Then each part attends on its own, as queries at an offset in their documents. In each class that
is `attend`. A compiled layer is one graph with its exchanges, except where `attend` needs numbers
on the host: for packed documents, for chosen blocks (chosen.py), and in sparse layers, which have
it so on one rank too. Then it is called outside of the graphs, and projections are two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention import NSAAttention
from nsa.model.dense import DenseAttention
from nsa.model.rope import Rope, Rotary
from nsa.model.rules import MSARule, NSARule, Rule, Span
from nsa.model.sparse import (
    Attended,
    SparseAttention,
    all_blocks,
    given_index,
    outside_graphs,
)
from nsa.model.stats import AttentionStats
from nsa.ops import BlockSpec, attend_far, attend_near, nsa_attention, sparse_attention
from nsa.ops.fallbacks import in_layer
from nsa.parallel.chosen import ask_all, fetch, num_row_blocks
from nsa.parallel.exchange import Context, received_rows_of_gather, received_rows_of_halo
from nsa.parallel.split import (
    Piece,
    Split,
    block_starts,
    num_blocks,
    visible_blocks,
    window_starts,
)

Pair = tuple[Tensor, ...]
"""K and V."""


class Keys(NamedTuple):
    """What the queries of a rank read."""

    compressed: Pair  # [B, N, Hkv, D]
    selected: Pair  # [B, S, Hkv, D]
    windows: list[Pair] | None
    """Of each own part: [B, its tokens and those of its halo, Hkv, D]. None: the window branch is
    computed apart."""

    def of(self, place: int) -> tuple[Pair, Pair, Pair | None]:
        """Those of one of the rank's parts."""
        return self.compressed, self.selected, self.windows[place] if self.windows else None


class _Arriving(NamedTuple):
    """What is in flight: each is waited for by its call."""

    compressed: Callable[[], Pair]
    selected: Callable[[], Pair]
    windows: Callable[[], list[Pair]]
    selection: Tensor | None  # [B, T, Hkv, n_sel] int32, where it had to be made before


class ContextNSA(NSAAttention):
    """NSAAttention on this rank's parts: [B, T, dim] -> [B, T, dim]."""

    context: Context
    wanted: list[int] | None = None
    """Where chosen blocks may be sent, by rank: the tokens that it wanted in the last pass."""

    def forward(
        self,
        x: Tensor,  # [B, T, dim]
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32, of the whole row
        rope: Rope | None = None,  # tables of this rank's positions; None: computed here
        stats: AttentionStats | None = None,
        layer: int | None = None,
    ) -> Tensor:  # [B, T, dim]
        if not self._batched:
            raise ValueError(
                "NSA_PREFILL_BATCHED=0 under context parallelism: it steps through a cache, which "
                "holds whole sequences; unset it, or run on one rank"
            )
        rope = rope or _rope(self, self.context, x, cu_seqlens)
        given = (*self._project(x, rope), cu_seqlens, stats, layer)
        if self.is_one_graph and cu_seqlens is None:
            return self.out(self.attend(*given))
        return self.out(outside_graphs(self.attend, *given))

    @property
    def is_one_graph(self) -> bool:  # type: ignore[override]
        """Which blocks are sent is decided on the host, outside of graphs."""
        return self.context.is_traced and self.context.selected == "gather"

    def attend(
        self,
        q: Tensor,  # [B, T, Hq, Dk]
        k: tuple[Tensor, ...],  # of cmp, sel, win: [B, T, Hkv, Dk]
        v: tuple[Tensor, ...],
        gates: Tensor,  # [B, T, Hq, 3]
        cu_seqlens: Tensor | None,
        stats: AttentionStats | None,
        layer: int | None,
    ) -> Tensor:  # [B, T, Hq * Dv]
        split, rank = self.context.split(q.shape[0], q.shape[1], cu_seqlens), self.context.rank
        arriving = self._exchange(split, q, k, v)
        with in_layer(layer):
            windows = arriving.windows()
            # All other keys are still in flight.
            near = attend_windows(split, rank, q, windows, gates, self.spec, self.backend)
            keys = Keys(arriving.compressed(), arriving.selected(), None)
            if self.context.keep is not None:
                raw = self.context.extend(split, window_starts(split, self.spec.l), k[0], v[0])()
                self.context.keep(self, (*keys[:2], windows[-1], raw[-1]))
            out, chosen = attend_parts(
                split, rank, q, keys, gates, self.spec, arriving.selection, self.backend
            )
        if stats is not None:
            where = split.positions(rank, q.device), split.num_tokens
            stats.record(layer or 0, gates, chosen, block_tokens=self.spec.l_sel, where=where)
        return (near + out).flatten(2)

    def _exchange(
        self, split: Split, q: Tensor, k: tuple[Tensor, ...], v: tuple[Tensor, ...]
    ) -> _Arriving:
        """Start all that has to arrive. Halos first: they are small, and needed first."""
        context, size = self.context, self.spec.l_sel
        halo = context.extend(split, block_starts(split, self.spec), k[0], v[0])
        windows = context.extend(split, window_starts(split, self.spec.w), k[2], v[2])
        if context.selected == "gather":
            # In flight while the compressed tokens are made.
            selected = context.gather(split, k[1], v[1])
            return _Arriving(self._compress_parts(split, halo()), selected, windows, None)
        k_cmp, v_cmp = self._compress_parts(split, halo())()
        selection = self._select(split, q, k_cmp)
        wanted = ask_all(context, split, selection, size)
        self.wanted = wanted.tokens
        if wanted.is_less(split):
            selected = fetch(context, split, wanted, size, k[1], v[1])
        else:
            selected = context.gather(split, k[1], v[1])
        return _Arriving(lambda: (k_cmp, v_cmp), selected, windows, selection)

    def _select(self, split: Split, q: Tensor, k_cmp: Tensor) -> Tensor:  # [B, T, Hkv, n_sel]
        """The blocks of this rank's queries, document by document."""
        rule = NSARule(self.spec)
        rule.backend = self.backend
        chosen, row = [], 0
        for part in split.parts_of(self.context.rank):
            place = visible_blocks(split, self.spec)[part].start
            for piece in split.pieces[part]:
                stop = place + self.spec.num_cmp(piece.num_keys)
                queries, keys = q[:, row : row + piece.num_tokens], k_cmp[:, place:stop]
                chosen.append(rule.choose(queries, keys, self.num_groups, Span(piece.offset)))
                row, place = row + piece.num_tokens, stop
        return torch.cat(chosen, dim=1)

    def _compress_parts(self, split: Split, raw: list[Pair]) -> Callable[[], tuple[Tensor, ...]]:
        """Compressed tokens of the whole row, from the raw K and V of each own part and its halo:
        [B, tokens, Hkv, D]."""
        starts = block_starts(split, self.spec)
        made = []
        parts = split.parts_of(self.context.rank)
        for part, (raw_k, raw_v) in zip(parts, raw, strict=True):
            made += self._compress_part(split.pieces[part], starts[part], raw_k, raw_v)
        k_cmp, v_cmp = (torch.cat(found, dim=1) for found in zip(*made, strict=True))
        counts = num_blocks(split, self.spec)
        return self.context.gather(split, k_cmp, v_cmp, counts=counts)

    def _compress_part(
        self, pieces: list[Piece], start: int, k: Tensor, v: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Of tokens from `start` on: the first document goes on there, all others begin here."""
        length = pieces[0].stop - start
        first_block = (start - pieces[0].start) // self.spec.d
        made = [self._compress(k[:, :length], v[:, :length], first_block)]
        if len(pieces) > 1:
            lens = [piece.num_tokens for piece in pieces[1:]]
            made.append(self._compress(k[:, length:], v[:, length:], 0, lens, _bounds(lens)))
        return made


def attend_windows(
    split: Split,
    rank: int,
    q: Tensor,  # [B, T, Hq, Dk], of the rank's parts
    windows: list[Pair],  # as in Keys
    gates: Tensor,  # [B, T, Hq, 3]
    spec: BlockSpec,
    backend: str = "auto",
) -> Tensor:  # [B, T, Hq, Dv]
    """The window branch times its gate, from the parts and their halos alone.

    Keys count from the halo's first token: where blocks would begin does not matter here.
    """
    outs = []
    for place, part in enumerate(split.parts_of(rank)):
        own = slice(place * split.part_len, (place + 1) * split.part_len)
        first, *others = split.pieces[part]
        pieces = [first._replace(start=window_starts(split, spec.w)[part]), *others]
        places = [torch.arange(p.offset, p.num_keys, device=q.device) for p in pieces]
        blocks = (torch.cat(places) // spec.l_sel).to(torch.int32)  # [tokens of the part]
        groups = windows[place][0].shape[2]
        selection = blocks[:, None, None].expand(q.shape[0], -1, groups, 1)
        options: Any = {**_places(pieces), "backend": backend}
        near = attend_near(q[:, own], windows[place], gates[:, own], spec, selection, **options)
        outs.append(near)
    return torch.cat(outs, dim=1)


def attend_parts(
    split: Split,
    rank: int,
    q: Tensor,  # [B, T, Hq, Dk], of the rank's parts
    keys: Keys,
    gates: Tensor,  # [B, T, Hq, 3]
    spec: BlockSpec,
    selection: Tensor | None = None,  # [B, T, Hkv, n_sel] int32
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # [B, T, Hq, Dv], [B, T, Hkv, n_sel] int32
    """What a rank computes once its keys have arrived: one call of the operator for each part.

    Without the keys of windows it is the sum of the two other branches.
    """
    done = []
    for place, part in enumerate(split.parts_of(rank)):
        own = slice(place * split.part_len, (place + 1) * split.part_len)
        given = None if selection is None else selection[:, own]
        options: Any = {**_places(split.pieces[part]), "backend": backend, "selection": given}
        far, window = _streams(split, part, keys.of(place), spec)
        if window is None:
            done.append(attend_far(q[:, own], *far, gates[:, own], spec, **options))
        else:
            (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win) = (*far, window)
            streams = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
            options["return_selection"] = True
            done.append(nsa_attention(q[:, own], *streams, gates[:, own], spec, **options))
    out, chosen = (torch.cat(found, dim=1) for found in zip(*done, strict=True))
    return out, chosen


def _streams(
    split: Split, part: int, keys: tuple[Pair, Pair, Pair | None], spec: BlockSpec
) -> tuple[tuple[Pair, Pair], Pair | None]:
    """K and V of the compressed and selected branch, and of the window, as the operator takes
    them."""
    compressed, selected, window = keys
    blocks = visible_blocks(split, spec)[part]
    start, stop = split.pieces[part][0].start, split.pieces[part][-1].stop
    far = tuple(x[:, blocks] for x in compressed), tuple(x[:, start:stop] for x in selected)
    if window is None:
        return far, None
    # The operator counts keys from the document's start. No query of this part reads the
    # window's keys before its halo, so zeros stand in for them.
    unread = window_starts(split, spec.w)[part] - start
    return far, tuple(F.pad(x, (0, 0, 0, 0, unread, 0)) for x in window)


class ContextDense(DenseAttention):
    """DenseAttention on this rank's parts: [B, T, dim] -> [B, T, dim]."""

    context: Context
    mask_rows = 1024
    """Queries at a time: a mask of all of a part would be larger than its keys."""

    def forward(
        self,
        x: Tensor,  # [B, T, dim]
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32, of the whole row
        rope: Rope | None = None,
        stats: AttentionStats | None = None,
        layer: int | None = None,
    ) -> Tensor:  # [B, T, dim]
        projected = self._project(x, rope or _rope(self, self.context, x, cu_seqlens))
        if cu_seqlens is None:
            return self._merge(self.attend(*projected, None))
        return self._merge(outside_graphs(self.attend, *projected, cu_seqlens))

    def attend(
        self,
        q: Tensor,  # [B, Hq, T, Dk]
        k: Tensor,  # [B, Hkv, T, Dk]
        v: Tensor,  # [B, Hkv, T, Dv]
        cu_seqlens: Tensor | None,
    ) -> Tensor:  # [B, Hq, T, Dv]
        split = self.context.split(q.shape[0], q.shape[2], cu_seqlens)
        gathered = self.context.gather(split, k.transpose(1, 2), v.transpose(1, 2))()
        k, v = (t.transpose(1, 2) for t in gathered)  # [B, Hkv, S, D]
        if self.context.keep is not None:
            self.context.keep(self, (k, v))
        outs, row = [], 0
        for part in split.parts_of(self.context.rank):
            for piece in split.pieces[part]:
                queries = q[:, :, row : row + piece.num_tokens]
                seen = slice(piece.start, piece.stop)
                outs.append(self._attend_piece(queries, k[:, :, seen], v[:, :, seen], piece))
                row += piece.num_tokens
        return torch.cat(outs, dim=2)

    def _attend_piece(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Tensor:
        if piece.offset == 0:
            return self._attend(q, k, v, is_causal=True)
        # is_causal would align the mask with the first key, not with the last.
        key = torch.arange(piece.num_keys, device=q.device)
        outs: list[Tensor] = []
        for rows in q.split(self.mask_rows, dim=2):
            first = piece.offset + self.mask_rows * len(outs)
            seen = slice(0, first + rows.shape[2])
            mask = key[seen] <= key[first : seen.stop, None]
            outs.append(self._attend(rows, k[:, :, seen], v[:, :, seen], attn_mask=mask))
        return torch.cat(outs, dim=2)


class ContextSparse(SparseAttention):
    """SparseAttention on this rank's parts: [B, T, dim] -> the same, index and loss beside it.

    The loss of an indexer is the mean over this rank's tokens. Every rank has as many, so the mean
    over the ranks is that over all tokens.
    """

    context: Context

    def forward(  # type: ignore[override]
        self,
        x: Tensor,  # [B, T, dim]
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32, of the whole row
        rope: Rope | None = None,
        stats: AttentionStats | None = None,
        layer: int | None = None,
        index: Tensor | None = None,  # [B, T, H, n_sel] int32, of an earlier layer
        warm_up: bool = False,
    ) -> Attended:
        # [B, T, H, D]
        rope = rope or _rope(self, self.context, x, cu_seqlens)
        q, k, v = (t.transpose(1, 2) for t in self._project(x, rope))
        given = (q, k, v, x, Span(0, cu_seqlens), index, warm_up, stats, layer)
        out, blocks, loss = outside_graphs(self.attend, *given)
        return self.out(out), blocks, loss

    def attend(
        self,
        q: Tensor,  # [B, T, Hq, Dk]
        k: Tensor,  # [B, T, Hkv, Dk]
        v: Tensor,  # [B, T, Hkv, Dv]
        x: Tensor,  # [B, T, dim]
        span: Span,  # the documents of the whole row
        index: Tensor | None,
        warm_up: bool,
        stats: AttentionStats | None,
        layer: int | None,
    ) -> Attended:  # its output: [B, T, Hq * Dv]
        cu_seqlens = span.cu_seqlens
        split = self.context.split(q.shape[0], q.shape[1], cu_seqlens)
        keys = self.context.gather(split, k, v)
        asked, learned = self._ask(split, q, k, x, cu_seqlens)
        gathered = (*keys(), *learned())
        if self.context.keep is not None:
            self.context.keep(self, gathered)
        outs, chosen, losses = [], [], []
        for place, part in enumerate(split.parts_of(self.context.rank)):
            own = slice(place * split.part_len, (place + 1) * split.part_len)
            given = None if index is None else index[:, own]
            with in_layer(layer):
                out, blocks, loss = self._attend_part(
                    split.pieces[part], q[:, own], asked[:, own], gathered, given, warm_up
                )
            outs.append(out)
            chosen.append(blocks)
            losses += [] if loss is None else [loss]
        index = torch.cat(chosen, dim=1)
        if stats is not None:
            where = split.positions(self.context.rank, q.device), split.num_tokens
            stats.record(layer or 0, None, index, block_tokens=self.spec.l_sel, where=where)
        loss = torch.stack(losses).mean() if losses else None
        return torch.cat(outs, dim=1).flatten(2), index, loss

    def _ask(
        self, split: Split, q: Tensor, k: Tensor, x: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        """What is compared with summaries; and index keys of the row, where the rule has them."""
        if not isinstance(self.rule, MSARule):
            return q, lambda: ()
        asked, learned = [], []
        tokens = zip(*(t.split(split.part_len, dim=1) for t in (q, k, x)), strict=True)
        for part, (own_q, own_k, own_x) in zip(
            split.parts_of(self.context.rank), tokens, strict=True
        ):
            span = Span(split.tokens(part).start, cu_seqlens)
            asked.append(self.rule.queries(own_q, own_x, span))
            learned.append(self.rule.summarize(own_k, own_x, span))
        return torch.cat(asked, dim=1), self.context.gather(split, torch.cat(learned, dim=1))

    def _attend_part(
        self,
        pieces: list[Piece],
        q: Tensor,  # [B, tokens of the part, Hq, Dk]
        asked: Tensor,  # [B, tokens of the part, heads, D]
        gathered: tuple[Tensor, ...],  # k, v, and index keys, of the whole row
        index: Tensor | None,
        warm_up: bool,
    ) -> Attended:
        seen = slice(pieces[0].start, pieces[-1].stop)
        k, v, *learned = (x[:, seen] for x in gathered)
        if self.rule is not None:
            index = self._choose(self.rule, pieces, asked, learned[0] if learned else k)
        index = given_index(index)
        longest = max(piece.num_keys for piece in pieces)
        read = all_blocks(index, self.spec.num_blocks(longest)) if warm_up else index
        options: dict[str, Any] = {**_places(pieces), "backend": self.backend}
        out, lse = sparse_attention(
            q, k, v, read, block=self.spec.l_sel, **options, return_lse=True
        )
        loss = None
        if isinstance(self.rule, MSARule) and self.training and torch.is_grad_enabled():
            loss = self.rule.loss(q, k, read, lse, asked, learned[0], **options)
        return out, index, loss

    def _choose(
        self, rule: Rule, pieces: list[Piece], asked: Tensor, keys: Tensor
    ) -> Tensor:  # [B, tokens of the part, H, n_sel] int32
        """The blocks of a part, document by document; each rank summarizes the keys that it has."""
        chosen, row, place = [], 0, 0
        for piece in pieces:
            summary = keys[:, place : place + piece.num_keys]
            if not rule.learns:
                summary = rule.summarize(summary, summary, Span())
            queries = asked[:, row : row + piece.num_tokens]
            chosen.append(rule.choose(queries, summary, self.num_groups, Span(piece.offset)))
            row, place = row + piece.num_tokens, place + piece.num_keys
        return torch.cat(chosen, dim=1)


CONTEXT_CLASSES: dict[type, type] = {
    NSAAttention: ContextNSA,
    DenseAttention: ContextDense,
    SparseAttention: ContextSparse,
}
"""The layers of the model, and what they become."""


def _rope(layer: Rotary, context: Context, x: Tensor, cu_seqlens: Tensor | None) -> Rope:
    split = context.split(x.shape[0], x.shape[1], cu_seqlens)
    return layer.rope(split.positions(context.rank, x.device), x.dtype)


def _places(pieces: list[Piece]) -> dict[str, Any]:
    """Where the queries of a part are in its documents, as the operators take it."""
    if len(pieces) == 1:
        return {"q_offset": pieces[0].offset}
    places = {"cu_seqlens": _bounds([piece.num_tokens for piece in pieces])}
    if pieces[0].offset == 0:
        return places  # queries and keys are the same tokens
    offsets = torch.tensor([piece.offset for piece in pieces], dtype=torch.int32)
    keys = _bounds([piece.num_keys for piece in pieces])
    return {**places, "cu_seqlens_k": keys, "q_offset": offsets}


def _bounds(lens: list[int]) -> Tensor:  # [docs + 1] int32, on the host
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def received_bytes(
    layer: nn.Module,
    split: Split,
    rank: int,
    *,
    batch: int = 1,
    number_bytes: int = 2,
    wanted: int | None = None,
) -> int:
    """Bytes that a rank receives from others in the forward pass of one layer.

    With P ranks, N compressed tokens and borders at multiples of d in one document, it is at most
    number_bytes * B * Hkv * (Dk + Dv) * ((P - 1) / P * (S + S / d) + parts * (w - 1 + l - d))
    for NSA whose selected keys are gathered. Backward moves as much over all ranks; recomputation
    gathers again.

    Where chosen blocks are sent (`selected="chosen"`), `wanted` are the tokens that this rank gets
    of them; every rank also tells all others which blocks it reads, a byte for each of the row.
    """
    tokens = received_rows_of_gather(split, [split.part_len] * split.num_parts)
    if isinstance(layer, NSAAttention):
        told = 0
        if wanted is not None:
            tokens, told = wanted, (split.num_ranks - 1) * num_row_blocks(split, layer.spec.l_sel)
        rows = tokens + received_rows_of_gather(split, num_blocks(split, layer.spec))
        for starts in (window_starts(split, layer.spec.w), block_starts(split, layer.spec)):
            rows += received_rows_of_halo(split, rank, starts)
        return number_bytes * batch * rows * layer.num_groups * (layer.d_k + layer.d_v) + told
    if not isinstance(layer, DenseAttention):
        raise ValueError(f"{type(layer).__name__} is not an attention layer of nsa; give one")
    width = layer.num_groups * (layer.d_k + layer.d_v)
    if isinstance(layer, SparseAttention) and isinstance(layer.rule, MSARule):
        width += layer.rule.d_index
    return number_bytes * batch * tokens * width
