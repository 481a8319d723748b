"""Where the tokens of a forward pass lie, and the sizes of blocks: what a mask says to attention.

transformers calls a mask function once for each forward pass, and hands what it returns to every
layer. Ours returns a Layout: no mask of S x S exists. Rows with padding, and rows of packed
documents, become documents one after another without padding. A pattern that is not causal
attention within documents is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from nsa.ops import BlockSpec


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the blocks, in tokens where nothing else is said. Field x of a model's config is
    `nsa_x`."""

    block: int = 64
    """A block that is read or left as a whole: a multiple of 16 up to 256."""
    n: int = 16
    """Blocks that each query reads, the forced ones included."""
    num_first: int = 1
    """Forced blocks at the start of the sequence."""
    num_local: int = 2
    """Forced blocks up to the query's own, which is one of them."""
    pool: int = 32
    """Keys behind one pooled key (nsa-pooled, nsa-mean)."""
    stride: int = 16
    """Keys from one pool to the next; divides `pool` and `block`."""
    moba_block: int = 512
    """Keys behind one mean of nsa-moba, a multiple of `block`; n * block is a multiple of it."""
    backend: str = "auto"
    """Of the operators: auto, torch, triton or reference."""

    def spec(self) -> BlockSpec:
        """The same sizes under the letters of the paper."""
        return BlockSpec(
            l=self.pool, d=self.stride, l_sel=self.block, n_sel=self.n,
            num_first=self.num_first, num_local=self.num_local,
        )  # fmt: skip


_given: ContextVar[dict[str, Any] | None] = ContextVar("nsa_sizes", default=None)


@contextmanager
def sizes(**given: Any) -> Iterator[None]:
    """Sizes for every forward pass that starts inside; what is not given comes from the config.

    A pass keeps its sizes for its backward pass, which may run outside.
    """
    names = [field.name for field in fields(Sizes)]
    for name in given:
        if name not in names:
            raise ValueError(
                f"sizes({name}=...) is unknown; the sizes are {', '.join(names)}: use one of them"
            )
    token = _given.set((_given.get() or {}) | given)
    try:
        yield
    finally:
        _given.reset(token)


def sizes_of(config: Any) -> Sizes:
    """The sizes of a model: those of `sizes(...)`, then its config's `nsa_*` fields."""
    names = [field.name for field in fields(Sizes)]
    own = {name: getattr(config, f"nsa_{name}", None) for name in names}
    chosen = {name: value for name, value in own.items() if value is not None}
    return replace(Sizes(), **chosen | (_given.get() or {}))


class Packed(NamedTuple):
    """The tokens of a call as documents in one row, without padding."""

    query_rows: Tensor  # [Tq] int64: row of [B * Sq] of each query
    key_rows: Tensor  # [Tk] int64: row of [B * Sk] of each key, Sk that of Layout.num_keys
    query_lens: list[int]
    """Queries of each document, at least 1."""
    key_lens: list[int]
    """Keys of each document: those before its queries, and theirs."""

    @property
    def firsts(self) -> list[int]:
        """Position of each document's first query."""
        pairs = zip(self.key_lens, self.query_lens, strict=True)
        return [num_keys - num_queries for num_keys, num_queries in pairs]


@dataclass
class Layout:
    """What every layer of a forward pass needs to know; transformers takes it for a mask."""

    sizes: Sizes
    batch: int
    first: int
    """Column of the first query; its position, where nothing is packed."""
    num_queries: int
    num_keys: int
    """Columns that hold tokens; a static cache has more, which are empty."""
    packed: Packed | None = None
    """None: every row is one document without padding."""
    padded: bool = False
    """Whether documents are rows of a padded batch."""
    window: int | None = None
    """A sliding window or chunk that hides tokens. Models make its mask also where no layer has
    one, so only a layer that gets it is refused."""
    _known: tuple[Any, Packed | None] | None = None
    """Bounds of documents that a layer was given, and what they made: layers give the same."""

    ndim = 2
    """transformers asks whether a mask is one of tokens, [B, Sk], or ready, [B, 1, Sq, Sk]."""

    def to(self, *place: Any, **options: Any) -> Layout:
        """Itself, on a device: what accelerate calls between layers on several devices."""
        device = options.get("device", next((x for x in place if not isinstance(x, bool)), None))
        if self.packed is None or device is None or isinstance(device, torch.dtype):
            return self
        rows = {name: getattr(self.packed, name).to(device) for name in ("query_rows", "key_rows")}
        return replace(self, packed=self.packed._replace(**rows), _known=None)

    def contiguous(self) -> Layout:
        """Itself: generate() asks masks for static caches to be so."""
        return self

    def documents(
        self, position_ids: Tensor | None, bounds: Tensor | None
    ) -> Packed | None:  # [B, Sq] or [1, Sq], [docs + 1]
        """The documents of a layer's call, which may also be given by positions or by bounds."""
        given = bounds if bounds is not None else position_ids
        if given is None or self.num_queries == 1:
            return self.packed
        if self._known is None or self._known[0] is not given:
            found = self._from_bounds(given) if given is bounds else self._from_positions(given)
            self._known = (given, found)
        return self._known[1]

    def _from_bounds(self, bounds: Tensor) -> Packed | None:
        ends = bounds.long().cpu()
        lens = ends.diff()
        fits = ends[0] == 0 and ends[-1] == self.num_keys and bool((lens > 0).all())
        if self.batch > 1 or self.first or not fits:
            refuse(
                f"cu_seq_lens_q {ends.tolist()[:8]} with {self.batch} rows, {self.num_queries} "
                f"queries and {self.num_keys} keys",
                "ascending bounds of documents that are whole, in one row",
                "call the model without past_key_values, with the batch flattened to one row",
            )
        numbers = torch.arange(1, len(ends)).repeat_interleave(lens)[None]
        found = pack(numbers, 0, bounds.device)
        if self.packed is not None and found.key_lens != self.packed.key_lens:
            refuse(
                f"cu_seq_lens_q gives documents of {found.key_lens} tokens, and the mask or "
                f"position_ids of {self.packed.key_lens}",
                "one of them, or two that agree",
                "leave one out",
            )
        return found

    def _from_positions(self, positions: Tensor) -> Packed | None:
        if positions.ndim != 2:
            refuse(
                f"position_ids of shape {list(positions.shape)}",
                "[B, S]: they also tell where packed documents begin",
                "use another attn_implementation for this model",
            )
        places = positions.long().cpu().expand(self.batch, -1)
        if self.packed is not None:
            self._check_positions(places)
            return self.packed
        numbers = torch.diff(places, prepend=places[:, :1] - 1).ne(1).cumsum(1) + 1
        if bool((numbers == 1).all()):
            return None
        if self.first:
            refuse(
                "position_ids of packed documents with keys of an earlier call",
                "packed documents that are whole",
                "call the model with use_cache=False and without past_key_values",
            )
        return pack(_unique(numbers), 0, positions.device)

    def _check_positions(self, places: Tensor) -> None:
        """Refuse padded rows whose positions begin anew: padding says nothing of documents."""
        assert self.packed is not None
        if not self.padded:
            return
        found = places.flatten()[self.packed.query_rows.cpu()].split(self.packed.query_lens)
        if any(bool((doc.diff() <= 0).any()) for doc in found):
            refuse(
                "position_ids of packed documents and an attention_mask with padding",
                "one of them",
                "leave the attention_mask out, or put one document into each row",
            )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Layout | None = None,  # [B, columns] bool
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: Any,  # of other attentions: dtype, allow_is_causal_skip, ...
) -> Layout:
    """The mask function of our attentions."""
    if isinstance(attention_mask, Layout):
        return attention_mask  # generate() makes masks ahead for static caches
    first = int(q_offset)
    layout = Layout(sizes_of(config), batch_size, first, q_length, first + q_length)
    # A window that hides nothing is no window. A cache with an offset has dropped keys.
    if kv_offset or (local_size is not None and local_size < layout.num_keys):
        layout.window = kv_length if local_size is None else local_size
        return layout
    where = torch.device(device)
    numbers = _probe(mask_function, layout, batch_size, use_vmap, where)  # [B, Sq] or None
    if attention_mask is not None:
        tokens = _tokens(attention_mask, layout)
        if not bool(tokens.all()):
            layout.padded = True
            rows = torch.arange(1, batch_size + 1)[:, None]
            layout.packed = pack(tokens * rows, first, where)
    elif numbers is not None:
        layout.packed = pack(_unique(numbers), first, where)
    return layout


def pack(
    numbers: Tensor, first: int, device: torch.device
) -> Packed:  # [B, Sk] on the CPU: a document's number, different in every row; 0 for padding
    """Documents in one row. Queries are the columns from `first` on."""
    queries, keys = numbers[:, first:].flatten(), numbers.flatten()
    query_rows, asked = queries.nonzero()[:, 0], queries[queries > 0]
    if not len(query_rows):
        refuse(
            "an attention_mask that hides every token of this call",
            "at least one token",
            "leave rows of padding alone out",
        )
    # Documents without queries here are not read.
    key_rows = (torch.isin(keys, asked)).nonzero()[:, 0]
    lens = [torch.unique_consecutive(x, return_counts=True) for x in (asked, keys[key_rows])]
    (query_docs, query_lens), (key_docs, key_lens) = lens
    assert torch.equal(query_docs, key_docs)
    return Packed(
        query_rows.to(device), key_rows.to(device), query_lens.tolist(), key_lens.tolist()
    )


def _unique(numbers: Tensor) -> Tensor:
    """Numbers of documents [B, S], which count in every row, made different between rows."""
    return numbers + torch.arange(len(numbers))[:, None] * (int(numbers.max()) + 1)


def _tokens(given: Tensor, layout: Layout) -> Tensor:
    """Which columns up to the last query hold tokens: [B, num_keys] bool, on the CPU."""
    if given.ndim != 2:
        refuse(
            f"an attention_mask of shape {list(given.shape)}",
            "a mask of tokens, [B, S]",
            "pass the padding alone; attention is causal anyway",
        )
    tokens = given.bool().cpu()
    if tokens.shape[1] < layout.num_keys or bool(tokens[:, layout.num_keys :].any()):
        refuse(
            f"an attention_mask of {tokens.shape[1]} columns for {layout.first} tokens of the "
            f"cache and {layout.num_queries} new ones",
            f"a mask of {layout.num_keys} columns",
            "give the mask of all tokens, those of the cache first",
        )
    return tokens[:, : layout.num_keys]


def check_window(window: int | None, num_keys: int) -> None:
    """Refuse a window that hides tokens."""
    if window is not None and window < num_keys:
        refuse(
            f"a sliding window or chunk of {window} tokens for {num_keys}",
            "layers that see all tokens before them",
            "set config.sliding_window = None (and config.layer_types to 'full_attention'), or "
            "use another attn_implementation",
        )


def _probe(
    function: Callable[..., Any] | None,
    layout: Layout,
    batch: int,
    use_vmap: bool,
    device: torch.device,
) -> Tensor | None:  # [B, Sq] on the CPU: number of each query's document, from 1 on
    """What pattern a mask function of transformers describes; None for plain causal attention.

    Its value is asked for a few keys of every query: the one before it, itself, the one after it,
    the first of its document and the one before that. Those of transformers combine causality with
    documents, windows, chunks and blocks of images, which these keys tell apart.
    """
    if function is None or function is causal_mask_function:
        return None
    if use_vmap:
        _refuse_pattern("a pattern of its own (or_mask_function or and_mask_function)")
    place = torch.arange(layout.first, layout.num_keys, device=device)
    rows = torch.arange(batch, device=device)[:, None]

    def sees(keys: Tensor) -> Tensor:  # [B, Sq] or [Sq] -> [B, Sq]
        inside = keys.clamp(layout.first, layout.num_keys - 1)
        found = torch.as_tensor(function(rows, 0, place, inside), device=device)
        return found.expand(batch, len(place)) & (keys == inside)

    begins = ~sees(place - 1)
    begins[:, 0] = True
    numbers = begins.cumsum(1)
    start = torch.where(begins, place, 0).cummax(1).values
    if not bool((sees(place) & sees(start)).all()):
        _refuse_pattern("a pattern in which a query does not see its whole document")
    if bool((sees(place + 1) | sees(start - 1)).any()):
        _refuse_pattern("attention that is not causal")
    return None if bool((numbers == 1).all()) else numbers.cpu()


def _refuse_pattern(what: str) -> NoReturn:
    refuse(what, "causal attention within documents", "use another attn_implementation")


def refuse(given: str, allowed: str, remedy: str) -> NoReturn:
    """The error of what our attention cannot do."""
    raise ValueError(f"NSA's attention got {given}; it takes {allowed}: {remedy}")
