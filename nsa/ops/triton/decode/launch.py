"""Decoder: one decode step of a layer, one new token per sequence, in four launches or in one.

Three for sequences of at most n_sel blocks, all of which are read: there is nothing to score. On
Hopper one for few sequences, whose programs are all on the GPU at once (resident.py), and one where
each segment can have a multiprocessor (hopper/decode.py).

No host sync, and no size depends on data: a step can be captured in a CUDA graph and replayed while
the sequences grow, up to the length that their caches were allocated for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import assert_selection
from nsa.ops.eager.rows import KeyValues
from nsa.ops.machine import interpreted
from nsa.ops.plan import read_switches
from nsa.ops.spec import BlockSpec
from nsa.ops.triton.decode import attend, merge, resident, score
from nsa.ops.triton.decode.tiles import (
    SEGMENT_HEADS,
    SEGMENT_ROWS,
    DecodeTiles,
    Workspace,
    decode_tiles,
    reads_pass_l1,
    takes_segments,
)
from nsa.ops.triton.launcher import Launch, Memo, ceil_div, form, start
from nsa.ops.triton.problem import LOG2_E, takes_gluon
from nsa.ops.triton.tiles import capability_of, padded, parts_of

LOGITS_STEP = 32
"""Row lengths of the logits are multiples of this, so that 16-byte accesses are aligned."""


class Caches(NamedTuple):
    """The caches of one layer; `table` None: not paged."""

    cmp: KeyValues  # [B, Hkv, N, D], or [pages, Hkv, l_sel / d, D]
    sel: KeyValues  # [B, Hkv, tokens, D], or [pages, Hkv, l_sel, D]
    win: KeyValues  # [B, Hkv, min(w, tokens), D], a ring
    raw: KeyValues  # [B, Hkv, l, D], a ring
    lengths: Tensor  # [B] int32, tokens of each sequence
    table: Tensor | None  # [B, blocks] int32
    reads: Tensor  # [B, Hkv, 3] int64, added to
    last_reads: Tensor  # [B, Hkv, 3] int64, written


class Token(NamedTuple):
    """The projections of the new token of each sequence."""

    q: Tensor  # [B, 1, Hq, Dk]
    k: Sequence[Tensor]  # of cmp (raw), sel, win: [B, 1, Hkv, Dk], of equal strides
    v: Sequence[Tensor]  # [B, 1, Hkv, Dv]
    gates: Tensor  # [B, 1, Hq, 3]
    made: tuple[Tensor, Tensor] | None = None
    """Compressed k, v [B, 1, Hkv, D] of the block that ends here, if one does; None: the mean."""


class Decoder:
    """Decode steps of one layer: `step` appends a token to every sequence and attends."""

    def __init__(
        self, caches: Caches, spec: BlockSpec, max_len: int, num_heads: int, scale: float,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        assert all(x.is_contiguous() for kv in caches[:4] for x in kv[:2])
        self.caches, self.spec, self.max_len, self.scale = caches, spec, max_len, scale
        self.batch, self.num_groups = caches.win.k.shape[:2]
        self.per_group = num_heads // self.num_groups
        self.d_k, self.d_v = caches.sel.k.shape[3], caches.sel.v.shape[3]
        self.dtype, self.device = caches.sel.k.dtype, caches.sel.k.device
        self.segments = self.batch * self.num_groups
        self.num_cmp = max(spec.num_cmp(max_len), 1)
        self.num_blocks = spec.num_blocks(max_len)
        self.window = caches.win.k.shape[2]
        self.whole = self.num_blocks <= spec.n_sel
        """Every block is read: none is scored, and none counts as forced."""
        self.num_forced = 0 if self.whole else spec.num_forced
        self.tiles = self._tiles()
        self.by_segment = self._takes_segments()
        """One launch with a program for each segment (hopper/decode.py)."""
        # Parts of a segment, in the order in which they are stored and merged.
        self.cmp_parts = ceil_div(self.num_cmp, self.tiles.CMP_PART)
        self.win_parts = ceil_div(self.window, self.tiles.WIN_PART)
        self.forced_parts = ceil_div(self.num_forced, self.tiles.PER_PART)
        num_free = min(spec.n_sel, self.num_blocks) - self.num_forced
        # At least one, even where all blocks are forced: it counts the reads.
        self.free_parts = max(ceil_div(num_free, self.tiles.PER_PART), 1)
        self.token_parts = self.win_parts + self.forced_parts + self.free_parts
        self.num_parts = self.cmp_parts + self.token_parts
        # A token that starts in block j reaches up to block j + levels - 1.
        self.levels = 1 + ceil_div(spec.l // spec.d - 1, spec.l_sel // spec.d)
        self.memo: Memo = {}
        self.strict = read_switches().strict
        self._allocate(workspace)

    def _tiles(self) -> DecodeTiles:
        return decode_tiles(
            *(self.d_k, self.d_v, self.per_group, self.dtype, capability_of(self.device)),
            segments=self.segments, num_cmp=self.num_cmp, window=self.window, spec=self.spec,
            whole=self.whole, processors=self._processors,
        )  # fmt: skip

    def _takes_segments(self) -> bool:
        if self._paged or not takes_gluon(capability_of(self.device), self.device):
            return False
        heads = (self.d_k, self.d_v, self.dtype), self.per_group
        return takes_segments(*heads, self.spec, self.max_len, self.segments, self._processors)

    @property
    def _processors(self) -> int:
        """Multiprocessors of the GPU; 0 where programs of a launch do not wait for each other."""
        if not self.early or self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _allocate(self, workspace: Workspace) -> None:
        """Buffers between the launches: parts, scores, choice. Layers share them by name."""

        def wide(name: str, *size: int) -> Tensor:
            return workspace.get(name, *size, dtype=torch.float32, device=self.device)

        def whole(name: str, *size: int) -> Tensor:
            return workspace.get(name, *size, dtype=torch.int32, device=self.device)

        if self.by_segment:
            tiles = self.segments, ceil_div(self.num_cmp, SEGMENT_ROWS)
            self.carried = wide("carried", *tiles, SEGMENT_HEADS)
            self.tops = wide("tops", *tiles, SEGMENT_HEADS)
            self.tickets = workspace.zeros(
                f"tickets of {self.num_groups}", self.batch, dtype=torch.int64, device=self.device
            )
        else:
            rows = (self.segments, self.num_parts, self.per_group)
            self.part, self.part_lse = wide("part", *rows, self.d_v), wide("part_lse", *rows)
            self.logits, self.tops = self._score_buffers(wide)
        # A program that chooses reads whole rows; the one launch by segment does not.
        row = self.num_blocks if self.by_segment else padded(self.num_blocks)
        self.scores = wide("scores", self.segments, self.levels, row)
        self.current = whole("current", self.batch)
        self.selection = whole("selection", self.batch, self.num_groups, self.spec.n_sel)
        """Blocks that the latest step has read, ascending, then -1."""
        # Programs of a segment in one launch. They count how many have arrived, in steps of that
        # many, and all segments of a sequence count the same steps. So counters are shared by
        # layers only where both numbers are equal.
        self.programs = self.tiles.programs
        self.counters = workspace.zeros(
            f"counters of {self.programs} programs", self.batch, self.num_groups,
            resident.NUM_COUNTERS, dtype=torch.int64, device=self.device,
        )  # fmt: skip

    def _score_buffers(self, wide: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Logits, or sums by block and the maxima of their tiles (score.py)."""
        tiles, strides = self.tiles, self.spec.l_sel // self.spec.d
        assert tiles.CMP_PART % tiles.BN == 0 and tiles.WIN_PART % tiles.TOKENS == 0, tiles
        if tiles.SUMS:
            assert tiles.BN % strides == 0 and tiles.BLOCKS * strides % tiles.BN == 0, tiles
            size = self.segments, ceil_div(self.num_cmp, tiles.BN), self.levels, self.per_group
            tops = wide("tops", *size[:2], self.per_group)
            return wide("sums", *size, tiles.BN // strides), tops
        # Rows hold whole tiles of every kernel that writes or reads them: no mask by token.
        scored = ceil_div(self.num_blocks, tiles.BLOCKS) * tiles.BLOCKS * strides
        row = max(scored, self.cmp_parts * tiles.CMP_PART)
        row = ceil_div(row, LOGITS_STEP) * LOGITS_STEP
        logits = wide("logits", self.segments, self.per_group, row)
        return logits, logits  # the second is a placeholder: tops are not read

    def step(self, token: Token, *, advance: bool = True) -> Tensor:  # [B, 1, Hq, Dv]
        """Append the token of every sequence and attend; `advance`: lengths grow by one."""
        out = torch.empty(
            self.batch, 1, self.num_groups * self.per_group, self.d_v,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        # Part of every launch key: the same decoder may see tensors of another form.
        key = form(token.q, *token.k, *token.v, token.gates, *(token.made or ()))
        if self.by_segment:
            from nsa.ops.triton.hopper import decode  # Gluon: only where it runs

            decode.start_step(self, token, out, key, advance)
            self._check_selection()
            return out
        if self.programs and self._step_resident(token, out, key, advance):
            return out
        self._attend_compressed(token, key)
        if not self.whole:
            self._score(key)
        self._attend_tokens(token, key)
        self._check_selection()
        self._merge(token.gates, out, key, advance)
        return out

    def _check_selection(self) -> None:
        if not self.strict or torch.cuda.is_current_stream_capturing():
            return
        for i, length in enumerate(self.current):
            assert_selection(self.selection[i : i + 1, :, None], length[None], self.spec)

    def _attend_compressed(self, token: Token, key: Any) -> None:
        # Without MADE the kernel does not read the last two pointers; any tensor stands for them.
        made = token.made or (token.k[0], token.v[0])
        news = (x for pair in zip(token.k, token.v, strict=True) for x in pair)
        caches, tiles, spec = self.caches, self.tiles, self.spec
        buffers = (x for kv in caches[:4] for x in kv[:2])
        start(
            self.memo, ("compressed", key), attend.attend_compressed,
            (
                token.q, *news, *made, *buffers, self.logits, self.tops, self.part,
                self.part_lse, caches.lengths, self.current, self._table,
            ),
            lambda: Launch(
                (self.cmp_parts, self.segments),
                (
                    self.num_groups, self.per_group, self.num_cmp, self.num_parts,
                    self.max_len, self.window, self.scale * LOG2_E,
                    self._table_width, self.logits.stride(1),
                    *(x.stride(i) for x in (token.q, token.k[0], token.v[0]) for i in (0, 2)),
                    *(self.num_groups * kv.k.shape[2] for kv in (caches.cmp, caches.sel)),
                    caches.cmp.k.shape[2], caches.sel.k.shape[2],
                ),
                self._dims()
                | {"L": spec.l, "STEP": spec.d, "L_SEL": spec.l_sel, "PAGED": self._paged}
                | {"MADE": token.made is not None}
                | {"CMP_PART": tiles.CMP_PART, "LEVELS": self.levels, "SUMS": tiles.SUMS}
                | {"EARLY": self.early, "UPCAST": interpreted(), "BM": tiles.BM, "BN": tiles.BN},
                self._options(tiles.cmp_warps, tiles.cmp_stages),
            ),
        )  # fmt: skip

    def _score(self, key: Any) -> None:
        tiles = self.tiles
        start(
            self.memo, ("score", key), score.score_blocks,
            (self.logits, self.tops, self.part_lse, self.scores, self.caches.lengths),
            lambda: Launch(
                (ceil_div(self.num_blocks, tiles.BLOCKS), self.segments),
                (
                    self.num_groups, self.per_group, self.num_cmp, self.num_parts,
                    self.max_len, self.logits.stride(1), self.scores.stride(1),
                ),
                {"L": self.spec.l, "STEP": self.spec.d, "L_SEL": self.spec.l_sel}
                | {"CMP_PART": tiles.CMP_PART, "PARTS": padded(self.cmp_parts)}
                | {"STRIDES_PAD": self._strides_pad, "LEVELS": self.levels, "SUMS": tiles.SUMS}
                | {"EARLY": self.early, "BESIDE": tiles.BESIDE, "BM": tiles.BM, "BN": tiles.BN}
                | {"NB": tiles.BLOCKS},
                self._options(4),
            ),
        )  # fmt: skip

    def _attend_tokens(self, token: Token, key: Any) -> None:
        caches, tiles, spec = self.caches, self.tiles, self.spec
        news = (token.k[1], token.v[1], token.k[2], token.v[2])
        start(
            self.memo, ("tokens", key), attend.attend_tokens,
            (
                token.q, *news, *caches.sel[:2], *caches.win[:2], self.scores,
                self.part, self.part_lse, self.selection,
                caches.reads, caches.last_reads, caches.lengths, self._table,
            ),
            lambda: Launch(
                (self.segments, self.token_parts),
                (
                    self.num_groups, self.per_group, self.num_parts, self.cmp_parts,
                    self.win_parts, self.win_parts + self.forced_parts,
                    self.max_len, self.window,
                    self.scale * LOG2_E, self._table_width, self.scores.stride(1),
                    *(x.stride(i) for x in (token.q, token.k[1], token.v[1]) for i in (0, 2)),
                    self.num_groups * caches.sel.k.shape[2], caches.sel.k.shape[2],
                ),
                self._dims()
                | {"L": spec.l, "STEP": spec.d, "L_SEL": spec.l_sel, "N_SEL": spec.n_sel}
                | {"N_SEL_PAD": padded(spec.n_sel)}
                | {"NUM_FIRST": 0 if self.whole else spec.num_first}
                | {"NUM_LOCAL": 0 if self.whole else spec.num_local}
                | {"PER_PAGE": spec.l_sel if self._paged else 0, "PER_PART": tiles.PER_PART}
                | {"WIN_PART": tiles.WIN_PART, "STAGES": tiles.tok_stages, "LEVELS": self.levels}
                | {"NB": padded(self.num_blocks), "WHOLE": self.whole, "AHEAD": self.reads_ahead}
                | {"EARLY": self.early, "UPCAST": interpreted()}
                | {"BM": tiles.BM, "BN": tiles.TOKENS},
                self._options(tiles.tok_warps, tiles.tok_stages),
            ),
        )  # fmt: skip

    def _merge(self, gates: Tensor, out: Tensor, key: Any, advance: bool) -> None:
        tiles, spec = self.tiles, self.spec
        start(
            self.memo, ("merge", key, advance), merge.merge_parts,
            (self.part, self.part_lse, gates, out, self.caches.lengths, self.current),
            lambda: Launch(
                (self.per_group, self.segments),
                (
                    self.num_groups, self.per_group, self.num_parts, self.cmp_parts,
                    self.win_parts, self.win_parts + self.forced_parts,
                    self.num_cmp, self.max_len, self.window,
                    gates.stride(0), gates.stride(2), out.stride(0), out.stride(2),
                ),
                {"DV": self.d_v, "DV_PAD": padded(self.d_v), "L": spec.l, "STEP": spec.d}
                | {"L_SEL": spec.l_sel, "N_SEL": spec.n_sel, "FORCED": self.num_forced}
                | {"PER_PART": tiles.PER_PART}
                | {"CMP_PART": tiles.CMP_PART, "WIN_PART": tiles.WIN_PART}
                | {"CMP_PADDED": power_of_2(self.cmp_parts), "PARTS": power_of_2(self.token_parts)}
                | {"EARLY": self.early, "ADVANCE": advance},
                self._options(tiles.merge_warps),
            ),
        )  # fmt: skip

    def _step_resident(self, token: Token, out: Tensor, key: Any, advance: bool) -> bool:
        """The whole step in one launch; False if the GPU does not hold its programs at once."""
        try:
            for phase in (1, 2, 3, 4) if interpreted() else (0,):
                self._launch_resident(token, out, key, advance, phase)
        except RuntimeError as error:
            if "cooperative" not in str(error):
                raise
            self.programs = 0
            return False
        self._check_selection()
        return True

    def _launch_resident(
        self, token: Token, out: Tensor, key: Any, advance: bool, phase: int
    ) -> None:
        made = token.made or (token.k[0], token.v[0])
        news = (x for pair in zip(token.k, token.v, strict=True) for x in pair)
        caches, gates = self.caches, token.gates
        start(
            self.memo, ("resident", key, advance, phase), resident.step_resident,
            (
                token.q, *news, *made, *(x for kv in caches[:4] for x in kv[:2]),
                self.part, self.part_lse, caches.lengths, self.current, self._table, self.scores,
                self.selection, caches.reads, caches.last_reads,
                gates, out, self.counters,
            ),
            lambda: Launch(
                (self.programs, self.segments),
                (
                    self.num_groups, self.per_group, self.num_cmp, self.num_parts,
                    self.cmp_parts, self.win_parts, self.win_parts + self.forced_parts,
                    self.free_parts, self.max_len, self.window, self.scale * LOG2_E,
                    self._table_width, self.scores.stride(1),
                    *(x.stride(i) for x in (token.q, token.k[0], token.v[0]) for i in (0, 2)),
                    *(self.num_groups * kv.k.shape[2] for kv in (caches.cmp, caches.sel)),
                    caches.cmp.k.shape[2], caches.sel.k.shape[2],
                    gates.stride(0), gates.stride(2), out.stride(0), out.stride(2),
                ),
                self._resident_constants(token.made is not None)
                | {"ADVANCE": advance, "PHASE": phase},
                self._options(self.tiles.cmp_warps, self.tiles.cmp_stages)
                | {"launch_cooperative_grid": not interpreted()},
            ),
        )  # fmt: skip

    def _resident_constants(self, made: bool) -> dict[str, Any]:
        tiles, spec = self.tiles, self.spec
        # Where there is room, parts that need no score have programs of their own.
        room = self.programs >= self.cmp_parts + self.token_parts
        first_ahead = self.cmp_parts if room else 0
        # Chosen blocks are read last, so by programs that have none of these and merge no head.
        first_free = max(first_ahead + self.win_parts + self.forced_parts, self.per_group)
        return (
            self._dims()
            | {"L": spec.l, "STEP": spec.d, "L_SEL": spec.l_sel, "PAGED": self._paged}
            | {"MADE": made, "CMP_PART": tiles.CMP_PART, "LEVELS": self.levels}
            | {"EARLY": self.early, "UPCAST": interpreted(), "BM": tiles.BM}
            | {"N_SEL": spec.n_sel, "N_SEL_PAD": padded(spec.n_sel)}
            | {"NUM_FIRST": spec.num_first, "NUM_LOCAL": spec.num_local}
            | {"PER_PART": tiles.PER_PART, "WIN_PART": tiles.WIN_PART}
            | {"NB": padded(self.num_blocks), "TOKENS": tiles.TOKENS}
            | {"CMP_PADDED": power_of_2(self.cmp_parts), "PARTS": power_of_2(self.token_parts)}
            | {"STAGES": tiles.tok_stages, "NUM": self.programs}
            | {"FIRST_AHEAD": first_ahead, "FIRST_FREE": first_free % self.programs}
        )

    @cached_property
    def early(self) -> bool:
        """Whether programmatic dependent launch is available (sm_90 and later)."""
        return not interpreted() and capability_of(self.device) >= (9, 0)

    def _options(self, num_warps: int, num_stages: int = 1) -> dict[str, int]:
        """Launch options under Triton's names."""
        return {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": self.early}

    @cached_property
    def reads_ahead(self) -> bool:
        """Whether the window and the forced blocks are read before the wait."""
        return reads_pass_l1(self.d_k, self.d_v, self.dtype, self.tiles)

    @property
    def _strides_pad(self) -> int:
        """Compressed tokens that start in a block, rounded up to a power of two."""
        return 1 << (self.spec.l_sel // self.spec.d - 1).bit_length()

    def _dims(self) -> dict[str, Any]:
        main, rest = parts_of(self.d_k)
        dims = {"DK": self.d_k, "DV": self.d_v, "DK1": main, "DK2": rest}
        return dims | {"DV_PAD": padded(self.d_v)}

    @property
    def _paged(self) -> bool:
        return self.caches.table is not None

    @property
    def _table(self) -> Tensor:
        """The page table; without one, a placeholder that the kernels do not read."""
        return self.caches.lengths if self.caches.table is None else self.caches.table

    @property
    def _table_width(self) -> int:
        return 0 if self.caches.table is None else self.caches.table.stride(0)


def power_of_2(size: int) -> int:
    """`size`, rounded up to a power of two."""
    return 1 << (size - 1).bit_length()
