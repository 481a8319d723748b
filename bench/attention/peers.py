"""The implementations that run side by side: ours, dense causal SDPA, flash-linear-attention.

nsa     nsa.compress of raw K and V, then nsa.nsa_attention
cudnn   dense causal scaled_dot_product_attention through cuDNN; flash, math: likewise
fla     parallel_nsa of flash-linear-attention (PyPI: flash-linear-attention 0.6.0).
        It has one K and V for all branches, compresses with l = d = l' = 64, so a quarter of
        our compressed tokens, and runs without its window, which needs the flash-attn package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from bench.attention.cases import Case

DENSE = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS = (*DENSE, "fla")
DENSE_MAX_LENGTH = 32768
"""Dense attention is quadratic: above this it is measured only when asked for."""
FLA_BLOCK = 64
FLA_MIN_GROUP = 16
FLA_MAX_DIM = 256
FLA_MAX_SELECTED = 32


class CannotRun(Exception):
    """An implementation cannot take a case; the message is the reason."""


class Attention(NamedTuple):
    """One implementation with its inputs in place."""

    name: str
    call: Callable[[], Tensor]
    leaves: list[Tensor]
    """What gets gradients."""
    note: str
    """What is compared, where the name does not say it."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Held open around the calls, so that it costs them nothing."""


def build_nsa(
    inputs: list[Tensor], spec: nsa.BlockSpec, selection: Tensor | None, backend: str
) -> Attention:
    """Ours; a given selection replaces the scores and the choice."""
    call = partial(call_nsa, inputs, spec, selection=selection, backend=backend)
    return Attention("nsa", call, inputs, "compress of raw K and V, then nsa_attention")


def build_peer(
    name: str, inputs: list[Tensor], case: Case, spec: nsa.BlockSpec, selection: Tensor | None
) -> Attention:
    """A peer on the same tensors; raises CannotRun with the reason."""
    if name == "fla":
        return _build_fla(inputs, case, spec, selection)
    context = partial(sdpa_kernel, DENSE[name])
    note = f"dense causal SDPA, {name} backend"
    return Attention(name, partial(call_dense, inputs), inputs[:3], note, context)


def call_nsa(
    inputs: list[Tensor],
    spec: nsa.BlockSpec,
    *,
    selection: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # [B, S, Hq, Dv]
    """Mean compression of raw K and V, then all three branches."""
    q, k_raw, v_raw, k_sel, v_sel, k_win, v_win, gates = inputs
    k_cmp = nsa.compress(k_raw, spec, backend=backend)
    v_cmp = nsa.compress(v_raw, spec, backend=backend)
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    return nsa.nsa_attention(*tensors, spec, backend=backend, selection=selection)


def call_dense(inputs: list[Tensor]) -> Tensor:  # [B, Hq, S, Dv]
    """Causal attention of q to the raw K and V of the first branch."""
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def fla_obstacle(case: Case, spec: nsa.BlockSpec, device: str) -> str:
    """Why flash-linear-attention cannot take a case; empty when it can."""
    shape = case.shape
    group = shape.Hq // shape.Hkv
    if device != "cuda":
        return f"needs a CUDA device, the run is on {device}"
    if group < FLA_MIN_GROUP or not _power_of_two(group):
        return f"needs G a power of two >= {FLA_MIN_GROUP}, the shape has G={group}"
    if spec.l_sel != FLA_BLOCK:
        return f"is measured with blocks of {FLA_BLOCK}, the run has l_sel={spec.l_sel}"
    if spec.n_sel > FLA_MAX_SELECTED or not _power_of_two(spec.n_sel):
        limit = f"a power of two <= {FLA_MAX_SELECTED}"
        return f"needs n_sel {limit}, the run has n_sel={spec.n_sel}"
    if max(shape.Dk, shape.Dv) > FLA_MAX_DIM:
        return f"takes head dims up to {FLA_MAX_DIM}, the shape has {shape.Dk}, {shape.Dv}"
    return ""


def load_fla() -> tuple[Callable[..., Any], str]:
    """parallel_nsa and the version of its package; raises CannotRun where it is missing."""
    try:
        module, package = import_module("fla.ops.nsa.parallel"), import_module("fla")
    except ImportError as error:
        raise CannotRun(
            f"fla cannot be imported ({error}); install flash-linear-attention 0.6.0 from PyPI"
        ) from error
    return module.parallel_nsa, package.__version__


def _build_fla(
    inputs: list[Tensor], case: Case, spec: nsa.BlockSpec, selection: Tensor | None
) -> Attention:
    obstacle = fla_obstacle(case, spec, inputs[0].device.type)
    if obstacle:
        raise CannotRun(obstacle)
    parallel_nsa, version = load_fla()
    q, k, v, *_, gates = inputs
    # One gate per branch and in q's dtype: beside fp32 gates its output would become fp32.
    g_cmp, g_slc, _ = (gate.to(q.dtype) for gate in gates.detach().unbind(dim=-1))
    leaves = [q, k, v, *(gate.contiguous().requires_grad_() for gate in (g_cmp, g_slc))]

    def call() -> Tensor:
        return parallel_nsa(
            q=q,
            k=k,
            v=v,
            g_cmp=leaves[3],
            g_slc=leaves[4],
            block_indices=selection,
            block_counts=spec.n_sel,
            block_size=FLA_BLOCK,
            window_size=0,
        )

    note = (
        f"flash-linear-attention {version} parallel_nsa: compression l=d=l'={FLA_BLOCK}, one K "
        f"and V for all branches, window_size=0 (its window needs flash-attn)"
    )
    return Attention("fla", call, leaves, note)


def _power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
