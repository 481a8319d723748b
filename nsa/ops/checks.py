"""Input validation of the operator.

Every error says what was given, what is allowed and what to do. Errors for the user's input are
ValueErrors; `assert_selection` checks our own promise.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.config.schema import BLOCK_STEP, MAX_BLOCK
from nsa.ops.spec import BlockSpec

PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor types without a dispatch of their own."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Layout(NamedTuple):
    """Where the queries and keys of a call lie: documents of a row, and offsets."""

    query_lens: list[int]
    """Queries of each document; 0 where a document has none here."""
    key_lens: list[int]
    """Keys of each document."""
    offset: int | Tensor
    """Position of a document's first query: for all, for each batch element, or each document."""

    @property
    def whole(self) -> bool:
        """Whether queries and keys are the same tokens."""
        at_start = not isinstance(self.offset, Tensor) and self.offset == 0
        return at_start and self.query_lens == self.key_lens and min(self.key_lens) > 0

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the queries [S], where all batch elements have the same offset."""
        parts = [
            self.offset_of(0, i) + torch.arange(n, device=device)
            for i, n in enumerate(self.query_lens)
        ]
        return torch.cat(parts)

    def in_one_row(self, batch: int) -> Layout:
        """The same places where batch elements are documents, one after another, and offsets are
        numbers of the host. A host sync for offsets on the GPU, which are checked here."""
        copies = batch if len(self.query_lens) == 1 else 1
        layout = Layout(self.query_lens * copies, self.key_lens * copies, self.offset)
        if not isinstance(self.offset, Tensor):
            return layout
        layout = layout._replace(offset=self.offset.cpu())
        _check_offset(layout, 1, torch.device("cpu"))
        return layout

    def up_to_last_query(self) -> Layout:
        """One document without the keys that no query sees; its offset is a number."""
        assert len(self.query_lens) == 1 and not isinstance(self.offset, Tensor)
        return self._replace(key_lens=[self.offset + self.query_lens[0]])

    def offsets(self) -> list[int]:
        """Of each document, as numbers of the host."""
        count = len(self.query_lens)
        if isinstance(self.offset, Tensor):
            return [int(first) for first in self.offset.tolist()]
        return [self.offset] * count

    def offset_of(self, batch: int, document: int) -> int:
        """As a number of the host."""
        if not isinstance(self.offset, Tensor):
            return self.offset
        return int(self.offset[document if len(self.query_lens) > 1 else batch])


def form_of(
    name: str,
    tensors: tuple[Tensor, ...],
    spec: BlockSpec,
    scale: float | None,
    backend: str,
    *rest: Any,
) -> tuple[Any, ...] | None:
    """Key of calls that differ only in the values of their tensors: if one of them passes the
    checks, all do. None: the call has to be checked itself.

    `rest` is what else decides about the call.
    """
    if type(spec) is not BlockSpec or type(scale) not in SCALES or type(backend) is not str:
        return None
    key = [name, spec, scale, backend, *rest]
    for x in tensors:
        if type(x) not in PLAIN:
            return None
        key.append((x.dtype, x.device, x.shape, x.stride()))
    return tuple(key)


SCALES = (float, int, type(None))


def is_intercepted() -> bool:
    """Whether a compiler or a dispatch mode has to see operators."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def check_attention(
    tensors: dict[str, Tensor],  # q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
    spec: BlockSpec,
    scale: float | None,
    cu_seqlens: Tensor | None,
    selection: Tensor | None,
    q_offset: int | Tensor = 0,
    cu_seqlens_k: Tensor | None = None,
) -> Layout:
    """Refuse wrong arguments of nsa_attention; return where queries and keys lie."""
    check_spec(spec)
    q = tensors["q"]
    check_floats(tensors, lenient="gates")
    check_scale(scale)
    batch, seq_len, num_heads, d_k = check_rank(q, "q", "[B, S, Hq, Dk]")
    # Slices, not indices: a tensor of too few dims gives an empty one, and check_rank names it.
    num_groups, d_v = tensors["k_sel"].shape[2:3], tensors["v_sel"].shape[3:4]
    if not num_groups or not d_v:
        check_rank(tensors["k_sel"], "k_sel", "[B, S, Hkv, Dk]")
        check_rank(tensors["v_sel"], "v_sel", "[B, S, Hkv, Dv]")
    check_heads(num_heads, num_groups[0])
    # Without an offset and more keys than queries, both are the same tokens.
    at_start = not isinstance(q_offset, Tensor) and q_offset == 0 and cu_seqlens_k is None
    lengths = {tensors[name].shape[1:2] for name in ("k_sel", "v_sel", "k_win", "v_win")}
    same = at_start and (len(lengths) > 1 or min(lengths) <= (seq_len,))
    num_keys = seq_len if same else tensors["k_sel"].shape[1]
    if same:
        doc_lens = check_documents(cu_seqlens, batch, seq_len, q.device)
        layout = Layout(doc_lens, doc_lens, 0)
    else:
        layout = _check_layout(batch, seq_len, num_keys, q_offset, cu_seqlens, cu_seqlens_k, q)
    # Blocks do not cross documents, so each document has its own number of them.
    num_cmp = sum(spec.num_cmp(length) for length in layout.key_lens)
    sizes = {
        "k_cmp": (batch, num_cmp, num_groups[0], d_k),
        "v_cmp": (batch, num_cmp, num_groups[0], d_v[0]),
        "k_sel": (batch, num_keys, num_groups[0], d_k),
        "v_sel": (batch, num_keys, num_groups[0], d_v[0]),
        "k_win": (batch, num_keys, num_groups[0], d_k),
        "v_win": (batch, num_keys, num_groups[0], d_v[0]),
        "gates": (batch, seq_len, num_heads, 3),
    }
    for name, size in sizes.items():
        hint = ""
        if name in ("k_cmp", "v_cmp"):
            hint = f"; nsa.compress gives the {num_cmp} complete blocks of {num_keys} tokens"
        check_shape(tensors[name], name, size, hint)
    if selection is not None:
        check_selection(selection, (batch, seq_len, num_groups[0], spec.n_sel), q.device)
    return layout


def check_scoring(
    q: Tensor, k_cmp: Tensor, spec: BlockSpec, scale: float | None, cu_seqlens: Tensor | None
) -> list[int]:
    """Refuse wrong arguments of select_blocks; return the lengths of the documents."""
    check_spec(spec)
    check_floats({"q": q, "k_cmp": k_cmp})
    check_scale(scale)
    batch, seq_len, num_heads, d_k = check_rank(q, "q", "[B, S, Hq, Dk]")
    num_groups = check_rank(k_cmp, "k_cmp", "[B, N, Hkv, Dk]")[2]
    check_heads(num_heads, num_groups)
    doc_lens = check_documents(cu_seqlens, batch, seq_len, q.device)
    num_cmp = sum(spec.num_cmp(length) for length in doc_lens)
    hint = f"; nsa.compress gives the {num_cmp} complete blocks of {seq_len} tokens"
    check_shape(k_cmp, "k_cmp", (batch, num_cmp, num_groups, d_k), hint)
    return doc_lens


def check_compress(x: Tensor, spec: BlockSpec, cu_seqlens: Tensor | None) -> list[int]:
    """Refuse wrong arguments of compress; return the lengths of the documents."""
    check_spec(spec)
    check_floats({"x": x})
    batch, seq_len, _, _ = check_rank(x, "x", "[B, S, H, D]")
    return check_documents(cu_seqlens, batch, seq_len, x.device)


def check_sparse(
    tensors: dict[str, Tensor],  # q, k, v, sink if there is one
    index: Tensor,
    block: int,
    scale: float | None,
    q_offset: int | Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Layout:
    """Refuse wrong arguments of sparse_attention; return where queries and keys lie."""
    q, k, v = (tensors[name] for name in "qkv")
    check_floats(tensors, lenient="sink")
    check_scale(scale)
    check_block(block, "block", ", and an index that counts such blocks")
    batch, num_queries, num_heads, d_k = check_rank(q, "q", "[B, Sq, Hq, Dk]")
    num_keys, num_groups = check_rank(k, "k", "[B, Sk, Hkv, Dk]")[1:3]
    d_v = check_rank(v, "v", "[B, Sk, Hkv, Dv]")[3]
    check_heads(num_heads, num_groups)
    check_shape(k, "k", (batch, num_keys, num_groups, d_k))
    check_shape(v, "v", (batch, num_keys, num_groups, d_v))
    if "sink" in tensors:
        check_shape(tensors["sink"], "sink", (num_heads,), ": one logit for each query head")
    _check_index(index, (batch, num_queries), (1, num_groups, num_heads), q.device)
    return _check_layout(batch, num_queries, num_keys, q_offset, cu_seqlens, cu_seqlens_k, q)


def check_block(block: int, name: str, hint: str = "") -> None:
    """Refuse tokens of a block that sparse_attention does not take."""
    if isinstance(block, bool) or not isinstance(block, int):
        raise ValueError(f"{name}={block!r} is not an integer; give the tokens of a block")
    if not BLOCK_STEP <= block <= MAX_BLOCK or block % BLOCK_STEP:
        near = min(max(round(block / BLOCK_STEP), 1) * BLOCK_STEP, MAX_BLOCK)
        raise ValueError(
            f"{name}={block} is not a multiple of {BLOCK_STEP} up to {MAX_BLOCK}; use {near}{hint}"
        )


def _check_layout(
    batch: int,
    num_queries: int,
    num_keys: int,
    q_offset: int | Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q: Tensor,
) -> Layout:
    """Refuse documents and offsets that do not fit; return where queries and keys lie."""
    query_lens = _check_parts(cu_seqlens, "cu_seqlens", batch, num_queries, q.device)
    key_lens = _check_parts(cu_seqlens_k, "cu_seqlens_k", batch, num_keys, q.device)
    if cu_seqlens_k is None and cu_seqlens is not None:
        key_lens = query_lens
        if num_keys != num_queries:
            raise ValueError(
                f"cu_seqlens is given with {num_queries} queries and {num_keys} keys; give "
                f"cu_seqlens_k, the bounds of the documents among the keys"
            )
    if len(key_lens) != len(query_lens):
        raise ValueError(
            f"cu_seqlens has {len(query_lens)} documents and cu_seqlens_k {len(key_lens)}; give "
            f"both a bound for every document, repeated where a document has no queries here"
        )
    layout = Layout(query_lens, key_lens, q_offset)
    _check_offset(layout, batch, q.device)
    return layout


def _check_index(
    index: Tensor, size: tuple[int, int], heads: tuple[int, ...], device: torch.device
) -> None:
    if not isinstance(index, Tensor) or index.dtype != torch.int32:
        given = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise ValueError(f"index is {given}; give int32 block ids, -1 for none")
    if index.device != device:
        raise ValueError(f"index is on {index.device} and q on {device}; move it there")
    fits = index.dim() == 4 and tuple(index.shape[:2]) == size and index.shape[2] in heads
    if not fits or index.shape[3] < 1:
        allowed = ", ".join(str(n) for n in sorted(set(heads)))
        raise ValueError(
            f"index has shape {list(index.shape)}; [{size[0]}, {size[1]}, H, n] is needed to fit q "
            f"and k, with H one of {allowed} and n >= 1: check its batch, length and heads"
        )


def _check_parts(
    bounds: Tensor | None, name: str, batch: int, length: int, device: torch.device
) -> list[int]:
    """Lengths of the documents among queries or keys; a document may have none."""
    if bounds is None:
        return [length]
    found = _read_bounds(bounds, name, batch, length, device)
    lens = [stop - start for start, stop in pairwise(found)]
    if min(lens) < 0:
        at = next(i for i, n in enumerate(lens) if n < 0)
        raise ValueError(
            f"{name} falls from {found[at]} to {found[at + 1]}; give bounds in ascending order"
        )
    return lens


def _check_offset(layout: Layout, batch: int, device: torch.device) -> None:
    """Every query must be at a position that has a key; values on a GPU are not read."""
    offset, count = layout.offset, len(layout.query_lens)
    if not isinstance(offset, Tensor):
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ValueError(f"q_offset={offset!r} is not an integer or an int32 tensor")
        offsets = [offset] * count
    else:
        size = count if count > 1 else batch
        if offset.dtype != torch.int32 or tuple(offset.shape) != (size,):
            raise ValueError(
                f"q_offset is {offset.dtype} of shape {list(offset.shape)}; give an integer, or "
                f"int32 [{size}]: one for each {'document' if count > 1 else 'batch element'}"
            )
        if offset.device not in (device, torch.device("cpu")):
            raise ValueError(f"q_offset is on {offset.device} and q on {device}; move it there")
        if offset.device.type != "cpu":
            return
        offsets = offset.tolist()
    lens = zip(layout.query_lens, layout.key_lens, strict=True)
    places = lens if count > 1 else [*lens] * len(offsets)
    for first, (num_queries, num_keys) in zip(offsets, places, strict=True):
        if first < 0 or (num_queries and first + num_queries > num_keys):
            raise ValueError(
                f"q_offset={first} with {num_queries} queries and {num_keys} keys; the last query "
                f"is at q_offset + Sq - 1 and must have a key: use 0 to {num_keys - num_queries}"
            )


def check_spec(spec: BlockSpec) -> None:
    if not isinstance(spec, BlockSpec):
        raise ValueError(f"spec is a {type(spec).__name__}; give a nsa.BlockSpec")


def check_scale(scale: float | None) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ValueError(f"scale={scale!r} is not a number; give a float, or None for 1/sqrt(Dk)")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite; give a float, or None for 1/sqrt(Dk)")


def check_floats(tensors: dict[str, Tensor], lenient: str = "") -> None:
    """All tensors: floating point, one dtype, one device; `lenient` may be fp32 beside bf16."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; give a torch.Tensor")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; allowed are bfloat16, float16, float32 and "
                f"float64: convert it with .to(...)"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first_name} on {first.device}; "
                f"move all tensors to one device"
            )
        fp32_beside_bf16 = (first.dtype, tensor.dtype) == (torch.bfloat16, torch.float32)
        if tensor.dtype == first.dtype or (name == lenient and fp32_beside_bf16):
            continue
        extra = f" ({lenient} may be float32 beside bfloat16)" if lenient else ""
        raise ValueError(
            f"{name} has dtype {tensor.dtype} and {first_name} {first.dtype}; nothing is cast "
            f"silently: give all tensors the dtype of {first_name}{extra}"
        )


def check_rank(tensor: Tensor, name: str, letters: str) -> tuple[int, int, int, int]:
    """Four dimensions, none empty except the compressed tokens."""
    if tensor.dim() != 4:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {letters}")
    for letter, size in zip(letters.strip("[]").split(", "), tensor.shape, strict=True):
        if size == 0 and letter != "N":
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} with {letter}=0; every size of {letters} "
                f"must be at least 1: leave out empty inputs before the call"
            )
    batch, length, heads, dim = tensor.shape
    return batch, length, heads, dim


def check_heads(num_heads: int, num_groups: int) -> None:
    if num_groups == 0 or num_heads % num_groups:
        raise ValueError(
            f"q has Hq={num_heads} heads and k_* have Hkv={num_groups}; Hq must be a multiple of "
            f"Hkv: give every KV head the same number of query heads"
        )


def check_shape(tensor: Tensor, name: str, size: tuple[int, ...], hint: str = "") -> None:
    if tuple(tensor.shape) != size:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; {list(size)} is needed to fit the other "
            f"arguments{hint or ': check its batch, length, heads and head dim'}"
        )


def check_selection(selection: Tensor, size: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(selection, Tensor) or selection.dtype != torch.int32:
        given = selection.dtype if isinstance(selection, Tensor) else type(selection).__name__
        raise ValueError(f"selection is {given}; give int32 block ids as select_blocks returns")
    if selection.device != device:
        raise ValueError(f"selection is on {selection.device} and q on {device}; move it there")
    check_shape(selection, "selection", size)


def check_documents(
    cu_seqlens: Tensor | None, batch: int, seq_len: int, device: torch.device
) -> list[int]:
    """Lengths of the packed documents; without cu_seqlens the row is one document."""
    if cu_seqlens is None:
        return [seq_len]
    bounds = _read_bounds(cu_seqlens, "cu_seqlens", batch, seq_len, device)
    doc_lens = [stop - start for start, stop in pairwise(bounds)]
    if min(doc_lens) < 1:
        at = next(i for i, length in enumerate(doc_lens) if length < 1)
        raise ValueError(
            f"cu_seqlens is not strictly increasing at {bounds[at]}, {bounds[at + 1]}; "
            f"leave out empty documents"
        )
    return doc_lens


def _read_bounds(
    bounds: Tensor, name: str, batch: int, length: int, device: torch.device
) -> list[int]:
    """Bounds of documents as numbers of the host: from 0 to the number of tokens."""
    if not isinstance(bounds, Tensor) or bounds.dtype != torch.int32:
        given = bounds.dtype if isinstance(bounds, Tensor) else type(bounds).__name__
        raise ValueError(f"{name} is {given}; give an int32 tensor [docs + 1]")
    if bounds.dim() != 1 or len(bounds) < 2:
        raise ValueError(
            f"{name} has shape {list(bounds.shape)}; give [docs + 1] with docs >= 1, "
            f"for example [0, {length}]"
        )
    if bounds.device != device and bounds.device.type != "cpu":
        raise ValueError(
            f"{name} is on {bounds.device} and q on {device}; move it there, or keep it on "
            f"the CPU, where it is read without waiting for the device"
        )
    if batch != 1:
        raise ValueError(
            f"{name} is given with B={batch}; packed documents need B=1: put the rows one "
            f"after another and extend {name}"
        )
    # A host sync for bounds on the GPU: every later decision needs the lengths on the host.
    found: list[int] = bounds.tolist()
    if found[0] != 0 or found[-1] != length:
        raise ValueError(
            f"{name} goes from {found[0]} to {found[-1]}; it must start at 0 and end at "
            f"S={length}: make it cover every token"
        )
    return found


def refuse_captured_documents(device: torch.device) -> None:
    """Refuse packed documents while a CUDA graph is being captured on a device.

    Their bounds are copied from host memory that is freed at once: every replay would copy whatever
    is there by then.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ValueError(
            "packed documents or an offset in a CUDA graph that is being captured; borders are "
            "read on the host and would be frozen in the graph: run them without a graph, or "
            "capture one document without cu_seqlens"
        )


def assert_selection(
    selection: Tensor,  # [B, Hkv, T, n_sel] int32
    positions: Tensor,  # [T]
    spec: BlockSpec,
) -> None:
    """Assert that a selection is causal and ascending, with -1 only at the end.

    Called under NSA_STRICT_ASSERTS=1; it costs a host sync.
    """
    current = (positions // spec.l_sel)[:, None]
    illegal = (selection > current) | (selection < -1)
    assert not illegal.any(), (
        f"selection names a block outside [0, t // {spec.l_sel}] at (b, group, row, place) "
        f"{illegal.nonzero()[0].tolist()}: it would read the future"
    )
    # [..., 1:] and [..., :-1]: each id is larger than the one before, or -1 from there on.
    after, before = selection[..., 1:], selection[..., :-1]
    disorder = ~(((after > before) & (before >= 0)) | (after == -1))
    assert not disorder.any(), (
        f"selection is not strictly ascending, then -1, at (b, group, row, place) "
        f"{disorder.nonzero()[0].tolist()}"
    )
