"""Input validation of the operator.

Every error says what was given, what is allowed and what to do. Errors for the user's input are
ValueErrors; `assert_selection` checks our own promise.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from nsa.ops.spec import BlockSpec

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_attention(
    tensors: dict[str, Tensor],  # q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
    spec: BlockSpec,
    scale: float | None,
    cu_seqlens: Tensor | None,
    selection: Tensor | None,
) -> list[int]:
    """Refuse wrong arguments of nsa_attention; return the lengths of the documents."""
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
    doc_lens = check_documents(cu_seqlens, batch, seq_len, q.device)
    # Blocks do not cross documents, so each document has its own number of them.
    num_cmp = sum(spec.num_cmp(length) for length in doc_lens)
    sizes = {
        "k_cmp": (batch, num_cmp, num_groups[0], d_k),
        "v_cmp": (batch, num_cmp, num_groups[0], d_v[0]),
        "k_sel": (batch, seq_len, num_groups[0], d_k),
        "v_sel": (batch, seq_len, num_groups[0], d_v[0]),
        "k_win": (batch, seq_len, num_groups[0], d_k),
        "v_win": (batch, seq_len, num_groups[0], d_v[0]),
        "gates": (batch, seq_len, num_heads, 3),
    }
    for name, size in sizes.items():
        hint = ""
        if name in ("k_cmp", "v_cmp"):
            hint = f"; nsa.compress gives the {num_cmp} complete blocks of {seq_len} tokens"
        check_shape(tensors[name], name, size, hint)
    if selection is not None:
        check_selection(selection, (batch, seq_len, num_groups[0], spec.n_sel), q.device)
    return doc_lens


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
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        given = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens is {given}; give an int32 tensor [docs + 1]")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; give [docs + 1] with docs >= 1, "
            f"for example [0, {seq_len}]"
        )
    if cu_seqlens.device != device and cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and q on {device}; move it there, or keep it on "
            f"the CPU, where it is read without waiting for the device"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens is given with B={batch}; packed documents need B=1: put the rows one "
            f"after another and extend cu_seqlens"
        )
    # A host sync for bounds on the GPU: every later decision needs the lengths on the host.
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}; it must start at 0 and end at "
            f"S={seq_len}: make it cover every token"
        )
    doc_lens = [stop - start for start, stop in pairwise(bounds)]
    if min(doc_lens) < 1:
        at = next(i for i, length in enumerate(doc_lens) if length < 1)
        raise ValueError(
            f"cu_seqlens is not strictly increasing at {bounds[at]}, {bounds[at + 1]}; "
            f"leave out empty documents"
        )
    return doc_lens


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
            "packed documents in a CUDA graph that is being captured; their borders are read on "
            "the host and would be frozen in the graph: run packed documents without a graph, or "
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
