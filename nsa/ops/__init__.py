"""The NSA operator: compress, select blocks, attend in three branches and add them by gates.

Shape letters of the whole package:
    B   batch                       S   sequence (raw tokens)      T   queries of one chunk
    Hq  query heads                 Hkv KV heads ("groups")        G   query heads per KV head
    Dk  head dim of q and k         Dv  head dim of v              N   compressed tokens
    K   keys of one branch          V   vocabulary
    l, d, l_sel, n_sel, w           sizes of the blocks: see BlockSpec
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from nsa.ops import checks, reference
from nsa.ops import plan as planning
from nsa.ops.eager import attention as torch_path
from nsa.ops.eager import sparse as torch_sparse
from nsa.ops.plan import Plan, SparseCall, plan_attention
from nsa.ops.spec import BlockSpec

__all__ = [
    "BlockSpec",
    "Plan",
    "compress",
    "nsa_attention",
    "plan_attention",
    "select_blocks",
    "sparse_attention",
]

NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
"""The tensors of nsa_attention."""
PATHS = {"reference": reference, "torch": torch_path}
"""Modules that implement nsa_attention, select_blocks and compress; Triton's is imported late. The
oracle knows no flags."""


@overload
def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: BlockSpec,
    *,
    scale: float | None = ...,
    q_offset: int | Tensor = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    backend: str = ...,
    selection: Tensor | None = ...,
    return_selection: Literal[False] = ...,
) -> Tensor: ...
@overload
def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: BlockSpec,
    *,
    scale: float | None = ...,
    q_offset: int | Tensor = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    backend: str = ...,
    selection: Tensor | None = ...,
    return_selection: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def nsa_attention(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    v_cmp: Tensor,  # [B, N, Hkv, Dv]
    k_sel: Tensor,  # [B, S, Hkv, Dk]; [B, Sk, Hkv, Dk] with q_offset, as all keys and values
    v_sel: Tensor,  # [B, S, Hkv, Dv]
    k_win: Tensor,  # [B, S, Hkv, Dk]
    v_win: Tensor,  # [B, S, Hkv, Dv]
    gates: Tensor,  # [B, S, Hq, 3]  weights of cmp, sel, win
    spec: BlockSpec,
    *,
    scale: float | None = None,
    q_offset: int | Tensor = 0,  # or [B] int32, or [docs] int32 with cu_seqlens
    cu_seqlens: Tensor | None = None,  # [docs + 1] int32
    cu_seqlens_k: Tensor | None = None,  # [docs + 1] int32, of the keys, where they differ
    backend: str = "auto",
    selection: Tensor | None = None,  # [B, S, Hkv, n_sel] int32
    return_selection: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], and [B, S, Hkv, n_sel] int32
    """Native Sparse Attention: the gated sum of compressed, selected and sliding attention.

    The output has q's dtype. `scale` defaults to 1/sqrt(Dk). A given `selection` replaces scoring
    and top-n; no gradient flows through either. A row that sees a NaN is NaN. With `q_offset`,
    queries are at positions q_offset, q_offset + 1, ... of their document, and keys from 0 on.
    """
    given = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    places = (q_offset, cu_seqlens, cu_seqlens_k)
    form = None
    # The usual call: whether it is allowed and what runs follow from the form of its tensors.
    is_usual = all(x is None for x in (cu_seqlens, cu_seqlens_k, selection))
    if is_usual and type(q_offset) is int and q_offset == 0:
        form = _form("attention", given, spec, scale, backend, planning.switch_key)
        if form is not None and (done := _operators.repeat_attention(form, given)) is not None:
            return done if return_selection else done[0]
    tensors = dict(zip(NAMES, given, strict=True))
    out, chosen = _attend_checked(tensors, spec, scale, places, selection, backend, form=form)
    return (out, chosen) if return_selection else out


def attend_far(
    q: Tensor,  # [B, S, Hq, Dk]
    cmp: tuple[Tensor, ...],  # k, v [B, N, Hkv, D]
    sel: tuple[Tensor, ...],  # [B, Sk, Hkv, D]
    gates: Tensor,  # [B, S, Hq, 3]; the third is not read
    spec: BlockSpec,
    *,
    q_offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str = "auto",
    selection: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, S, Hkv, n_sel] int32
    """nsa_attention without its window branch, and the selection.

    Its kernels do not run on Triton. The other backends compute a window of one token times 0.
    """
    gates = torch.cat([gates[..., :2], torch.zeros_like(gates[..., 2:])], dim=-1)
    given = (q, *cmp, *sel, *(x.detach() for x in sel), gates)
    tensors = dict(zip(NAMES, given, strict=True))
    places = (q_offset, cu_seqlens, cu_seqlens_k)
    rest = (places, selection, backend)
    return _attend_checked(tensors, replace(spec, w=1), None, *rest, without="win")


def attend_near(
    q: Tensor,  # [B, S, Hq, Dk]
    win: tuple[Tensor, ...],  # k, v [B, Sk, Hkv, D]
    gates: Tensor,  # [B, S, Hq, 3]; only the third is read
    spec: BlockSpec,
    selection: Tensor,  # [B, S, Hkv, 1] int32: the block of each query
    *,
    q_offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # [B, S, Hq, Dv]
    """The window branch of nsa_attention alone, times its gate.

    Compression blocks longer than the keys leave no compressed token. The kernels of the selected
    branch do not run on Triton. The other backends compute the own block times 0.
    """
    k, v = win
    gates = torch.cat([torch.zeros_like(gates[..., :2]), gates[..., 2:]], dim=-1)
    longer = spec.d << (k.shape[1] // spec.d).bit_length()
    near = replace(spec, l=longer, n_sel=1, num_first=0, num_local=1)
    given = (q, k[:, :0], v[:, :0], k.detach(), v.detach(), k, v, gates)
    tensors = dict(zip(NAMES, given, strict=True))
    places = (q_offset, cu_seqlens, cu_seqlens_k)
    return _attend_checked(tensors, near, None, places, selection, backend, without="sel")[0]


def _attend_checked(
    tensors: dict[str, Tensor],
    spec: BlockSpec,
    scale: float | None,
    places: tuple[int | Tensor, Tensor | None, Tensor | None],  # q_offset, cu_seqlens, of the keys
    selection: Tensor | None,
    backend: str,
    *,
    without: str = "",
    form: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and selection. Check, plan, run: only `checks` meets an input that was not checked.

    `form` names calls that need neither the next time.
    """
    q, v_sel = tensors["q"], tensors["v_sel"]
    q_offset, cu_seqlens, cu_seqlens_k = places
    layout = checks.check_attention(
        tensors, spec, scale, cu_seqlens, selection, q_offset, cu_seqlens_k
    )
    head_dims = (q.shape[-1], v_sel.shape[-1])
    packed = len(layout.key_lens) > 1
    plan: Plan = _planner().plan_call(q.device, q.dtype, backend, head_dims, packed, without)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    backend = plan.backend
    if backend == "triton" and not layout.whole:
        per_group = q.shape[2] // v_sel.shape[2]
        backend = planning.plan_offset(plan, q.device, q.dtype, head_dims, per_group, spec)
    together = backend == "triton" and plan.selection != "reference" and not plan.flags.strict
    if not isinstance(layout.offset, Tensor) or packed or together:
        form = None if plan.fallbacks else form  # every fallback is counted
        return _attend(tensors, spec, scale, layout, selection, plan, backend, form)
    parts = [
        _attend(
            {name: x[i : i + 1] for name, x in tensors.items()},
            spec,
            scale,
            layout._replace(offset=layout.offset_of(i, 0)),
            None if selection is None else selection[i : i + 1],
            plan,
            backend,
        )
        for i in range(q.shape[0])
    ]
    out, chosen = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, chosen


def _attend(
    tensors: dict[str, Tensor],
    spec: BlockSpec,
    scale: float,
    layout: checks.Layout,
    selection: Tensor | None,
    plan: Plan,
    backend: str,
    form: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and selection; batch elements have offsets of their own on Triton alone."""
    q = tensors["q"]
    if selection is not None and plan.flags.strict:
        checks.assert_selection(selection.transpose(1, 2), layout.positions(q.device), spec)
    # NSA_SEL_RANGES_V2=0: the oracle chooses the blocks, the backend attends to them.
    if selection is None and backend != "reference" and plan.selection == "reference":
        if layout.whole:
            selection = reference.select_blocks(
                q, tensors["k_cmp"], spec, scale=scale, doc_lens=layout.key_lens
            )
        else:
            with torch.no_grad():
                _, selection = reference.nsa_attention(
                    **tensors, spec=spec, scale=scale, layout=layout, selection=None
                )
    rest: dict[str, Any] = {"spec": spec, "scale": scale, "layout": layout}
    if backend != "reference":
        rest["flags"] = plan.flags
    if backend == "triton":
        rest["form"] = form
    out, chosen = _path(backend).nsa_attention(**tensors, **rest, selection=selection)
    return out, chosen


def compress(
    x: Tensor,  # [B, S, H, D]
    spec: BlockSpec,
    *,
    cu_seqlens: Tensor | None = None,  # [docs + 1] int32
    backend: str = "auto",
) -> Tensor:  # [B, N, H, D]
    """Compressed tokens by phi = avg: the mean of every complete block of l tokens, stride d."""
    form = None
    if cu_seqlens is None:
        form = _form("compress", (x,), spec, None, backend)
    if form is not None and (done := _operators.repeat_mean(form, x)) is not None:
        return done
    doc_lens = checks.check_compress(x, spec, cu_seqlens)
    runs = _planner().plan_compression(x.device, x.dtype, backend, (x.shape[-1],))
    rest = {"form": form} if runs == "triton" else {}
    return _path(runs).compress(x, spec, doc_lens=doc_lens, **rest)


def select_blocks(
    q: Tensor,  # [B, S, Hq, Dk]
    k_cmp: Tensor,  # [B, N, Hkv, Dk]
    spec: BlockSpec,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,  # [docs + 1] int32
    backend: str = "auto",
) -> Tensor:  # [B, S, Hkv, n_sel] int32  block ids ascending, then -1
    """The blocks each KV head reads: the forced ones, then the best scores."""
    doc_lens = checks.check_scoring(q, k_cmp, spec, scale, cu_seqlens)
    runs, switched = _planner().plan_scoring(q.device, q.dtype, backend, (q.shape[-1],))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    flags = {} if runs == "reference" else {"flags": switched}
    return _path(runs).select_blocks(q, k_cmp, spec, scale=scale, doc_lens=doc_lens, **flags)


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    block: int,
    q_offset: int | Tensor = ...,
    scale: float | None = ...,
    sink: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    block: int,
    q_offset: int | Tensor = ...,
    scale: float | None = ...,
    sink: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def sparse_attention(
    q: Tensor,  # [B, Sq, Hq, Dk]
    k: Tensor,  # [B, Sk, Hkv, Dk]
    v: Tensor,  # [B, Sk, Hkv, Dv]
    index: Tensor,  # [B, Sq, H, n] int32, H = 1, Hkv or Hq: block ids in any order, -1 for none
    *,
    block: int,
    q_offset: int | Tensor = 0,  # or [B] int32, or [docs] int32 with cu_seqlens
    scale: float | None = None,
    sink: Tensor | None = None,  # [Hq]
    cu_seqlens: Tensor | None = None,  # [docs + 1] int32, of the queries
    cu_seqlens_k: Tensor | None = None,  # [docs + 1] int32, of the keys, where they differ
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # [B, Sq, Hq, Dv], and [B, Sq, Hq] fp32
    """Attention of each query to the tokens of its blocks, whatever rule chose them.

    Block b is tokens b * block to (b + 1) * block - 1 of the query's document. Query i is at
    position q_offset + i and sees key j if j <= q_offset + i. An id that occurs twice counts once;
    one without a visible token counts for nothing. A query that sees no key gives 0, without a
    gradient. `sink` is the logit of a key whose value is 0. The log-sum-exp is natural, includes
    the sink, is -inf where no key is visible (float64 for float64 inputs), and has a gradient.
    """
    tensors = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    layout = checks.check_sparse(tensors, index, block, scale, q_offset, cu_seqlens, cu_seqlens_k)
    per_group = q.shape[2] // max(index.shape[2], k.shape[2])
    call = SparseCall(per_group, block, index.shape[3])
    runs = _planner().plan_sparse(q.device, q.dtype, backend, (q.shape[-1], v.shape[-1]), call)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse = _sparse_path(runs).sparse_attention(
        q, k, v, index, block=block, scale=scale, sink=sink, layout=layout
    )
    lse = lse if q.dtype == torch.float64 else lse.float()
    return (out, lse) if return_lse else out


def _form(
    name: str,
    tensors: tuple[Tensor, ...],
    spec: BlockSpec,
    scale: float | None,
    backend: str,
    *read: Callable[[], Any],  # what else decides, read where it is needed
) -> tuple[Any, ...] | None:
    """Key of calls that the Triton path may know; None: it does not."""
    if _operators is None or checks.is_intercepted():
        return None
    return checks.form_of(name, tensors, spec, scale, backend, *(one() for one in read))


def _planner() -> Any:
    """The module that plans a call; under torch.compile plans become constants of the graph."""
    if torch.compiler.is_compiling():
        from nsa.ops import traced  # only here: it loads torch._dynamo

        return traced
    return planning


_operators: Any = None
"""The module of the Triton path, once it has run."""


def _path(backend: str) -> Any:
    """The module of a backend; Triton is optional and imported on first use."""
    global _operators
    if backend == "triton":
        from nsa.ops.triton import operators

        _operators = operators
        return operators
    return PATHS[backend]


def _sparse_path(backend: str) -> Any:
    """The module of a backend that has sparse_attention."""
    if backend == "triton":
        from nsa.ops.triton import sparse

        return sparse
    return reference if backend == "reference" else torch_sparse
