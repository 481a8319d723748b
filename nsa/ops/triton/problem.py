"""A call without its tensors: sizes, documents, and the loop orders that follow from them.

Everything here is static: no decision depends on data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import refuse_captured_documents
from nsa.ops.machine import interpreted, machine_of
from nsa.ops.plan import NO_FLAGS, Flags
from nsa.ops.spec import BlockSpec
from nsa.ops.triton.documents import Documents, index_documents
from nsa.ops.triton.launcher import Memo, Rows, ceil_div, form
from nsa.ops.triton.tiles import (
    H200,
    Capability,
    capability_of,
    fits_selected,
    in_query_order,
    needs_words,
    padded,
    parts_of,
    read_spec,
)

MAX_TOKENS = 1 << 24
"""The backward kernels read the index of a row as fp32, which is exact up to here."""
LOG2_E = math.log2(math.e)
BY_BLOCK_BEYOND = 2
"""The selected branch masks the whole past up to this many times n_sel * l_sel tokens; beyond, it
reads the selected blocks only (docs/kernels.md)."""
LONG_FROM = 49152
"""Keys from which cuDNN computes the compressed branch (docs/log/choice.md)."""
LONG_GRADIENTS = 131072
"""Keys from which it computes the gradients, too, where the kernels in hopper/ could; where they
cannot run, it does from LONG_FROM on."""
MANY_QUERIES = 4096
"""Queries with an offset from which cuDNN computes its backward pass: their residues must fill its
tiles."""
FEW_QUERIES = 2048
"""Fewer queries with an offset go by queries: lists of the blocks' queries would not pay."""
HOPPER: bool | None = None
"""Whether the kernels in hopper/ run: None where they were measured to be faster, False nowhere.
True takes that of the selected branch wherever it can run; tests and measurements set it."""
HOPPER_DIMS = (64, 128)
"""Head dims of these kernels."""
GLUON_VERSIONS = ((3, 6), (3, 7))
"""Versions of Triton whose Gluon they were compiled with: it changes between versions."""
H200_PROCESSORS = 132
FULL_ENOUGH = 0.75
"""Share of the multiprocessors that the window's kernels must keep busy: their programs are long,
and with fewer the band kernels, whose programs are short, are faster."""
COMPRESSED_FROM, COMPRESSED_DIMS = 2048, (128,)
"""Tokens from which the kernels of the compressed branch were faster, and head dims at which its
forward was."""
MASKED_DIMS, MASKED_TILES = (64,), 16
"""Head dims and tiles of queries and heads, for each multiprocessor, from which the kernels of a
selected branch that masks the past are taken, and next to it that of the compressed forward. They
were faster at 47; fewer programs of such different lengths were not timed."""
ONE_PASS_FROM = 8192
"""Tokens from which, at D 64 and outside of deterministic mode, one pass over window and compressed
keys gives the gradients of queries, keys and values (hopper/dq_sums.py): it was faster."""
TILES_PER_PROGRAM = 6
"""Tiles of queries, at least, for which a program of its dk and dv is worth its start."""
SELECTED_FROM = {(128, 16): 4096, (64, 6): 4096, (128, 4): 4096}
"""By head dim and group, the tokens from which its gradients in Gluon were faster."""
SELECTED_FORWARD = {(64, 6): 4096, (128, 4): 4096}
"""By head dim and group, the tokens from which its forward in Gluon, by blocks, was faster."""
SELECTED_BLOCK, SELECTED_GROUP = 64, 64
"""Tokens of the blocks that it takes, and heads of a group, at most. Where the past is masked,
blocks may be multiples of these."""
AHEAD_LENGTHS = tuple(1 << power for power in range(6, 18))
"""Lengths for which kernels are compiled at the first call of a kind: in between, nothing else is
needed. Up to AHEAD_BLOCKS blocks."""
AHEAD_BLOCKS = 2048
MAX_CACHED = 1024
"""Cached problems and tapes; a full cache is cleared."""


_kept: dict[tuple[Any, ...], Any] = {}
_compiled: set[tuple[Any, ...]] = set()
"""Kinds of calls whose kernels have been compiled."""


class Band(NamedTuple):
    """One branch as the band kernels see it; tile.py defines the letters."""

    OFF: int
    STEP: int
    W: int
    SELECT: bool


class Hopper(NamedTuple):
    """Which kernels of the window and the compressed branch run in Gluon; the band kernels do the
    others."""

    forward: bool = False
    keys: bool = False
    """Gradients of keys and values."""
    queries: bool = False
    """Gradient of queries from the window alone."""
    cmp_forward: bool = False
    cmp_keys: bool = False
    both_queries: bool = False
    """Gradient of queries from both."""
    sel_forward: bool = False
    """The selected branch, where it masks the past."""
    sel_keys: bool = False
    all_queries: bool = False
    """Gradient of queries from all three."""


BANDS_ALONE = Hopper()


def takes_gluon(capability: Capability, device: torch.device) -> bool:
    """Whether the kernels in hopper/ run on this machine: they were written for one GPU, and no
    other can run them."""
    if HOPPER is False or interpreted() or capability != H200:
        return False
    return machine_of(device).triton in GLUON_VERSIONS


class Problem:
    """Sizes, block sizes and documents of calls of one form, and the memo of their launches."""

    def __init__(
        self,
        q: Tensor,  # [B, S, Hq, Dk]
        v: Tensor,  # [B, any, Hkv, Dv]
        spec: BlockSpec,
        scale: float,
        doc_lens: list[int],
        flags: Flags = NO_FLAGS,
        query_lens: Sequence[int] = (),
        offsets: Sequence[int] = (),
        win_first: int = 0,
    ) -> None:
        """`doc_lens` are the keys of each document. Its queries are the same tokens, or as many as
        `query_lens` says from the position in `offsets` on. `win_first` is the first token that
        the window's tensors hold, for the forward pass of one document."""
        self.memo: Memo = {}
        self.flags = flags
        self.spec, self.scale, self.doc_lens = spec, scale, doc_lens
        self.query_lens, self.offsets, self.win_first = query_lens, offsets, win_first
        self.batch, self.seq_len, self.num_heads, self.d_k = q.shape
        self.num_groups, self.d_v = v.shape[2:]
        self.dtype, self.device = q.dtype, q.device
        self.memory = q.device  # where `empty` allocates
        most = max(self.seq_len, sum(doc_lens))
        if most > MAX_TOKENS:
            raise ValueError(
                f"S={most} is beyond the {MAX_TOKENS} tokens of the Triton kernels; "
                f"split the sequence, or use backend='torch'"
            )
        # G, and the segments: one per (batch element, KV head).
        self.per_group = self.num_heads // self.num_groups
        self.num_segments = self.batch * self.num_groups
        self.shifted = len(query_lens) > 0
        self.packed = self.shifted or len(doc_lens) > 1
        # Blocks of one document lie as in a row without documents, wherever its queries begin.
        self.aligned = len(doc_lens) == 1
        self.offset = offsets[0] if self.shifted and self.aligned else 0
        # exp(x) = exp2(x * log2(e)): the kernels use base 2.
        self.scale_log2 = scale * LOG2_E
        self._count()

    def _count(self) -> None:
        """Blocks and compressed tokens of all documents, and words of one document's bits."""
        self.num_blocks = sum(self.spec.num_blocks(length) for length in self.doc_lens)
        self.num_words = ceil_div(self.spec.num_blocks(max(self.doc_lens)), 32)
        self.num_cmp = sum(self.spec.num_cmp(length) for length in self.doc_lens)

    small_parts = True
    """Whether few partial results are kept at a time: less memory, and 1 to 3 % more time."""
    largest = False
    """Whether a block's score is the largest of what its compressed tokens give it, not the sum."""

    @cached_property
    def reader(self) -> Problem:
        """The problem of the kernels that read the selected blocks: this one, or the same with
        shorter blocks, where a tile cannot hold a whole one."""
        spec = read_spec(*self.sizes, self.capability)
        if spec is self.spec:
            return self
        twin = self._twin()
        twin.spec = spec
        twin._count()
        if self.memory.type == "meta":
            twin.__dict__["documents"] = self.documents  # see on_meta
        return twin

    def _twin(self) -> Problem:
        """A copy without what was derived from its sizes."""
        twin = copy.copy(self)
        for name in ("bands", "masked", "by_query", "hopper", "documents", "reader"):
            twin.__dict__.pop(name, None)
        twin.memo = {}
        return twin

    @cached_property
    def bands(self) -> tuple[Band, Band, Band]:
        """Compressed, selected, window."""
        spec = self.spec
        return (
            Band(spec.l - 1, spec.d, 0, False),
            Band(0, 1, 0, True),
            Band(0, 1, spec.w, False),
        )

    @cached_property
    def masked(self) -> bool:
        """Whether the selected branch masks the whole past instead of reading its blocks."""
        if self.shifted:  # the plan runs it only where blocks fit
            return False
        if not self._fits(by_query=self._large):
            return True
        return max(self.doc_lens) <= BY_BLOCK_BEYOND * self.spec.n_sel * self.spec.l_sel

    @property
    def long(self) -> bool:
        """Whether cuDNN computes the compressed branch; not cached, see cudnn_runs."""
        if not self.aligned or sum(self.doc_lens) < LONG_FROM or self.num_cmp == 0:
            return False
        if self.shifted and self.seq_len < MANY_QUERIES:
            return False
        return cudnn_runs(self.device, self.dtype, self.d_k, self.d_v)

    @property
    def long_gradients(self) -> bool:
        """Whether cuDNN computes the gradients of the compressed branch."""
        ours = self.hopper.cmp_keys and self.hopper.both_queries
        return self.long and (not ours or sum(self.doc_lens) >= LONG_GRADIENTS)

    @cached_property
    def by_query(self) -> bool:
        if not self.shifted:
            return self._large and not self.masked
        if self.seq_len < FEW_QUERIES and self._fits(by_query=True):
            return True
        # Where blocks do not fit, the plan lets only a forward pass by queries through.
        return self._large or not self._fits(by_query=False)

    @cached_property
    def hopper(self) -> Hopper:
        """The kernels in hopper/ that run for the window and the compressed branch: where they can,
        and where they were measured to be faster (docs/log/kernels.md)."""
        if not self._takes_hopper or self.packed:
            return BANDS_ALONE
        # Consumers hold two heads of a group or, in the forward pass of narrow heads, three.
        tiles, whole = self.batch * ceil_div(self.seq_len, 64), self.per_group % 2 == 0
        forward = (whole or self.consumers == 3) and self._fills(
            tiles * (self.num_heads // self.consumers)
        )
        queries = whole and self._fills(tiles * (self.num_heads // 2))
        has_cmp = self.num_cmp > 0 and self.seq_len >= COMPRESSED_FROM
        # A tile of keys lies within a block, and a query's bits in one word.
        masked = (
            self.masked
            and self.spec.l_sel % SELECTED_BLOCK == 0
            and self.num_words == 1
            and self.d_k in MASKED_DIMS
            and tiles * self.num_heads >= MASKED_TILES * self.processors
        )
        programs = tiles * self.num_heads // TILES_PER_PROGRAM
        return Hopper(
            forward=forward,
            keys=self._fills(self.num_segments * ceil_div(self.seq_len, 128)),
            queries=queries and self.d_k == 128,
            cmp_forward=forward
            and ((has_cmp and self.d_k in COMPRESSED_DIMS) or (masked and self.num_cmp > 0)),
            cmp_keys=has_cmp and programs >= FULL_ENOUGH * self.processors,
            both_queries=has_cmp and queries,
            sel_forward=masked and forward,
            sel_keys=masked,
            all_queries=masked and queries,
        )

    @property
    def one_pass(self) -> bool:
        """Whether what window and compressed keys give the queries is added in memory beside the
        gradients of the keys, where sums need no order."""
        able = self.hopper.cmp_keys and self.hopper.keys and not self.masked
        return able and self.d_k == 64 and self.seq_len >= ONE_PASS_FROM

    @property
    def in_gluon(self) -> bool:
        """Whether hopper/selected.py or selected_rows.py computes the gradients of the selected
        branch."""
        if not self._takes_hopper or self.shifted or self.masked:
            return False
        if self.per_group > SELECTED_GROUP or self.spec.l_sel != SELECTED_BLOCK:
            return False
        tokens = SELECTED_FROM.get((self.d_k, self.per_group), MAX_TOKENS)
        return bool(HOPPER) or (self.seq_len >= tokens and not self.packed)

    @property
    def forward_in_gluon(self) -> bool:
        """Whether hopper/selected_forward.py computes the outputs of the selected branch: in block
        order, also where the backward pass is in query order."""
        if not self._takes_hopper or self.masked or self.spec.l_sel != SELECTED_BLOCK:
            return False
        if self.shifted and self.by_query:  # few queries
            return False
        since = SELECTED_FORWARD.get((self.d_k, self.per_group), MAX_TOKENS + 1)
        return bool(HOPPER) or (self.seq_len >= since and not self.packed)

    @property
    def _takes_hopper(self) -> bool:
        """Whether the kernels in hopper/ take such heads on this machine."""
        if not takes_gluon(self.capability, self.device):
            return False
        is_half = self.dtype in (torch.bfloat16, torch.float16)
        return is_half and self.d_k == self.d_v and self.d_k in HOPPER_DIMS

    def _fills(self, items: int) -> bool:
        """Whether so many equal pieces of work keep most multiprocessors busy to the end."""
        rounds = ceil_div(items, self.processors)
        return items >= FULL_ENOUGH * rounds * self.processors

    @property
    def processors(self) -> int:
        """Multiprocessors of the GPU: as many programs as stay for the whole launch."""
        if self.device.type != "cuda":  # compiled for a GPU that is not here
            return H200_PROCESSORS
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def consumers(self) -> int:
        """Heads of a group that a program of the window's forward takes at a time."""
        return 3 if self.d_k == 64 and self.per_group % 3 == 0 else 2

    def _fits(self, *, by_query: bool) -> bool:
        return fits_selected(*self.reader.sizes, self.capability, by_query=by_query)

    @property
    def has_lists(self) -> bool:
        """Whether the forward pass lists the queries of each block."""
        in_blocks = not self.by_query or self.reader.forward_in_gluon
        return in_blocks and not (self.masked or self.flags.no_sel)

    @property
    def _large(self) -> bool:
        return in_query_order(self.d_k, self.d_v, self.per_group)

    @property
    def sizes(self) -> tuple[int, int, int, BlockSpec, torch.dtype]:
        """What the tiles of the selected branch depend on, beside the GPU."""
        return self.d_k, self.d_v, self.per_group, self.spec, self.dtype

    @property
    def heads(self) -> tuple[int, int, torch.dtype]:
        """What the tiles of the band kernels depend on, beside the GPU and `words`."""
        return self.d_k, self.d_v, self.dtype

    @property
    def words(self) -> bool:
        """Whether the mask of the selected branch loads a word for every (query, key) pair."""
        return needs_words(self.spec, packed=self.packed)

    @cached_property
    def capability(self) -> Capability:
        return capability_of(self.device)

    @cached_property
    def documents(self) -> Documents | None:
        if not self.packed:
            return None
        places = (self.query_lens, self.offsets, self.win_first)
        return index_documents(self.doc_lens, self.spec, self.device, *places)

    def dims(self, d_v: int | None = None) -> dict[str, int]:
        """The constants that open the argument list of every attention kernel."""
        d_v = d_v or self.d_v
        d_k1, d_k2 = parts_of(self.d_k)
        return {"DK": self.d_k, "DV": d_v, "DK1": d_k1, "DK2": d_k2, "DV_PAD": padded(d_v)}

    def branch_constants(self, select: bool) -> dict[str, Any]:
        """The constants that follow them in the band kernels; `select`: the selected branch."""
        return {
            "L_SEL": self.spec.l_sel,
            "SELECT": select,
            "HAS_DOCS": self.packed,
            "UPCAST": self.upcast,
        }

    def rows_k(
        self, x: Tensor, num_rows: int, *, by_head: bool = False
    ) -> tuple[Rows, Rows | None]:
        """Tiles of q or of keys, for the two parts of a head; None: the head has no rest."""
        make, (main, rest) = Rows.by_head if by_head else Rows, parts_of(self.d_k)
        return make(x, num_rows, main), make(x, num_rows, rest) if rest else None

    def rows_v(self, x: Tensor, num_rows: int) -> Rows:
        """Tiles of values or of the gradient of the output."""
        return Rows(x, num_rows, padded(x.shape[3]))

    def keys(self, k: Tensor, v: Tensor, num_rows: int) -> tuple[Rows | None, ...]:
        """Tiles of the keys and values of a branch."""
        return *self.rows_k(k, num_rows), self.rows_v(v, num_rows)

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.dtype, device=self.memory)

    def on_meta(self) -> Problem:
        """The same problem with tensors that have no memory: its kernels are only compiled."""
        twin = self._twin()
        twin.__dict__["documents"] = self.documents  # only their dtypes are looked at
        twin.memory = torch.device("meta")
        twin.flags = replace(self.flags, strict=False)  # no values to check
        return twin

    def is_first_of_kind(self, *more: str | bool) -> bool:
        """Whether kernels of such calls have not been compiled ahead yet; now they count as such.

        A kind is what decides about the code; `more` is what the problem does not know. Kernels
        that it does not foresee (an odd stride, another batch) are compiled when launched.
        """
        if self.memo or self.device.type != "cuda":
            return False
        ordered = torch.are_deterministic_algorithms_enabled()
        sizes = (type(self), self.device, *self.sizes, self.packed, self.shifted, self.flags)
        kind = (*sizes, *self._route, ordered, *more)
        if kind in _compiled or torch.cuda.is_current_stream_capturing():
            return False  # before a capture, all was compiled in the warm-up
        _compiled.add(kind)
        return True

    def at_other_lengths(self) -> list[Problem]:
        """Problems without memory that differ in their length alone and run the same kernels, if
        for some of them in another form."""
        twins = []
        for length in AHEAD_LENGTHS:
            twin = self.on_meta()
            twin.doc_lens = [length] if self.aligned else [length, 1]
            twin.seq_len = sum(twin.doc_lens)
            twin._count()
            if twin.num_blocks <= AHEAD_BLOCKS + (not self.aligned) and twin._route == self._route:
                twins.append(twin)
        return twins

    def lengths_at(self, twin: Problem) -> dict[int, int]:
        """Rows of the twin's tensors, by the rows of this problem's."""
        keys, twin_keys = sum(self.doc_lens), sum(twin.doc_lens)
        return {self.num_cmp: twin.num_cmp, keys: twin_keys, self.seq_len: twin.seq_len}

    @property
    def _route(self) -> tuple[bool, ...]:
        """Which kernels run."""
        in_gluon = (not self.masked and self.reader.in_gluon, self.reader.forward_in_gluon)
        more = (self.long, self.long_gradients, self.num_cmp > 0, self.one_pass)
        return self.masked, self.by_query, *more, *in_gluon, *self.hopper

    def row_index(self, branch: int, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        """Start of each row's document and of its keys; unread without documents."""
        if self.documents is None:
            return placeholder, placeholder
        docs = self.documents.queries
        return docs.row_start, (docs.row_cmp, docs.row_key, docs.row_win)[branch]

    def row_block(self, placeholder: Tensor) -> Tensor:
        """First block of each row's document; unread without documents."""
        return placeholder if self.documents is None else self.documents.queries.row_block

    @property
    def row_shift(self) -> Tensor | None:
        """What is added to a row to get the key of its position; None: nothing."""
        return self.documents.queries.row_shift if self.shifted and self.documents else None

    def key_index(self, branch: int, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        """First and last query that sees each key."""
        if self.documents is None:
            return placeholder, placeholder
        docs = self.documents.keys
        return (
            (docs.cmp_first, docs.cmp_last),
            (docs.raw_first, docs.raw_last),
            (docs.raw_first, docs.win_last),
        )[branch]

    def block_index(self, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        if self.documents is None:
            return placeholder, placeholder
        return self.documents.queries.block_start, self.documents.queries.block_stop

    @property
    def upcast(self) -> bool:
        """The interpreter cannot multiply bf16."""
        return interpreted()


def cudnn_runs(device: torch.device, dtype: torch.dtype, d_k: int, d_v: int) -> bool:
    """Whether cuDNN has faster attention kernels for such heads here; for D=64 it does not.

    The answer also depends on switches of torch that a caller may change between two calls
    (torch.backends.cuda.enable_cudnn_sdp, sdpa_kernel), so it is never cached.
    """
    if device.type != "cuda" or capability_of(device) < (9, 0):
        return False
    if dtype not in (torch.bfloat16, torch.float16) or not d_k == d_v == 128:
        return False
    q = torch.empty(1, 1, 64, d_k, dtype=dtype, device=device)
    params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def problem_of(
    tensors: tuple[Tensor, ...],
    q: Tensor,
    v: Tensor,
    spec: BlockSpec,
    scale: float,
    doc_lens: list[int],
    flags: Flags,
    query_lens: Sequence[int] = (),
    offsets: Sequence[int] = (),
    kind: type[Problem] = Problem,
    win_first: int = 0,
) -> Problem:
    """The problem of a call; cached, so that calls of the same form share their launches.

    Packed documents differ from batch to batch, and their index takes memory: not cached.
    """
    rest = (q, v, spec, scale, doc_lens, flags, query_lens, offsets, win_first)
    if len(doc_lens) > 1:
        return kind(*rest)
    key: tuple[Any, ...] = (kind, form(*tensors), spec, scale, flags)
    if query_lens:
        # The index of the queries lies on the device: another stream could read it too early.
        key = (*key, *doc_lens, *query_lens, *offsets, win_first, _stream_of(q.device))
    problem: Problem | None = kept(key)
    if problem is None:
        problem = kind(*rest)
        keep(key, problem)
    return problem


def kept(key: tuple[Any, ...] | None) -> Any:
    """What was kept for calls of a form: a problem, or what was recorded; None: nothing."""
    return None if key is None else _kept.get(key)


def keep(key: tuple[Any, ...], value: Any) -> None:
    if len(_kept) >= MAX_CACHED:
        _kept.clear()
    _kept[key] = value


def forget() -> None:
    """Drop problems and recorded calls: they know the constants above as they were."""
    _kept.clear()


def _stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    refuse_captured_documents(device)
    return torch.cuda.current_stream(device).cuda_stream
