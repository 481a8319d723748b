"""The plan of a call: which backend and which kernels run, and why.

Decided from static facts (device, dtype, head dims, environment), never from data. str() of
a plan is one line for people.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from nsa.config.env import raw, read
from nsa.ops.fallbacks import LOGGER
from nsa.ops.machine import Machine, interpreted, machine_obstacle, machine_of

BACKENDS = ("auto", "reference", "torch", "triton")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_MAX_DIM = 256
"""Largest head dim of the kernels."""
OWN, FLASH = "own kernels", "flash: torch"
"""What computes a branch: this package, or torch's built-in flash kernels."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_MAX_DIM = 256
FLASH_DIM_STEP = 8
"""Other head dims are padded with zeros up to a multiple of this."""


@dataclass(frozen=True)
class Plan:
    """The resolved choices for calls of one kind."""

    requested: str
    """What the caller asked for: one of BACKENDS."""
    backend: str
    """What runs: reference, torch or triton."""
    reason: str
    """Why, in a sentence."""
    selection: str
    """Which function chooses the blocks: `fast` is the backend's own, `reference` the oracle's."""
    cmp: str = OWN
    """What computes the compressed branch: OWN or FLASH."""
    win: str = OWN
    """What computes the window branch: OWN or FLASH."""
    sdpa: str = "any"
    """Backends of scaled_dot_product_attention that may run: any, no flash, or flash only."""
    audit: bool = False
    """Log which of those backends can run."""
    nvtx: bool = False
    """Mark the parts of attention with NVTX ranges."""
    fallbacks: tuple[tuple[str, str], ...] = ()
    """What does not run as requested: the branch (`all`: the whole backend) and the reason."""

    def __str__(self) -> str:
        reasons = dict(self.fallbacks)
        cmp, win = (
            f"{name}: {how} (no flash: {reasons[name]})" if name in reasons else f"{name}: {how}"
            for name, how in (("cmp", self.cmp), ("win", self.win))
        )
        parts = [
            f"attention backend: {self.backend} (asked for: {self.requested}; {self.reason})",
            f"selection: {self.selection}",
            *(cmp, win),
        ]
        if self.sdpa != "any":
            parts.append(f"SDPA backends: {self.sdpa}")
        parts += ["SDPA audited"] * self.audit + ["NVTX ranges"] * self.nvtx
        return ", ".join(parts)


class Switches(NamedTuple):
    """The environment variables that a plan depends on, parsed."""

    fast_selection: bool
    flash_cmp: bool
    flash_win: bool
    no_flash: bool
    flash_only: bool
    audit: bool
    nvtx: bool


def plan_attention(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    head_dims: tuple[int, ...] = (64,),
    *,
    packed: bool = False,
    machine: Machine | None = None,
) -> Plan:
    """Resolve `backend` for tensors of this kind; an explicit backend runs or raises.

    `head_dims` are Dk and Dv; `packed`: several documents share a row. `machine` defaults to that
    of `device`; tests pass others.
    """
    machine = machine or machine_of(torch.device(device))
    return _plan(machine, dtype, backend, head_dims, packed, read_switches())


def read_switches() -> Switches:
    """The switches as the environment sets them now."""
    no_flash, flash_only = read("NSA_SDPA_NO_FLASH"), read("NSA_SDPA_FLASH_ONLY")
    if no_flash and flash_only:
        raise ValueError(
            "NSA_SDPA_NO_FLASH=1 and NSA_SDPA_FLASH_ONLY=1 contradict each other; one forbids "
            "flash kernels, the other everything else: unset one"
        )
    flash_cmp, flash_win = flash_asked()
    return Switches(
        fast_selection=read("NSA_SEL_RANGES_V2"),
        flash_cmp=flash_cmp,
        flash_win=flash_win,
        no_flash=no_flash,
        flash_only=flash_only,
        audit=read("NSA_SDPA_AUDIT"),
        nvtx=read("NSA_NVTX"),
    )


def flash_asked() -> tuple[bool, bool]:
    """Whether flash kernels are requested for the compressed and for the window branch."""
    # The raw text tells unset from 0, and takes half the time of parsing: this runs in every call.
    master = raw("NSA_USE_FA2")
    if master and not read("NSA_USE_FA2"):
        return False, False
    cmp, win = raw("NSA_USE_FA2_CMP"), raw("NSA_USE_FA2_WIN")
    return (
        bool(cmp) and read("NSA_USE_FA2_CMP"),
        read("NSA_USE_FA2_WIN") if win else bool(master),
    )


@lru_cache(maxsize=256)
def _plan(
    machine: Machine,
    dtype: torch.dtype,
    backend: str,
    head_dims: tuple[int, ...],
    packed: bool,
    switches: Switches,
) -> Plan:
    # A named backend runs or raises, so only `auto` can fall back.
    chosen, reason = choose_backend(machine, dtype, backend, head_dims)
    fallbacks = []
    if backend == "auto" and machine.kind == "cuda" and chosen != "triton":
        fallbacks.append(("all", reason))
    obstacle = _flash_obstacle(chosen, machine, dtype, head_dims, packed, switches)
    # Flash kernels by branch; a branch that cannot use them falls back to OWN.
    asked = {"cmp": switches.flash_cmp, "win": switches.flash_win}
    routes = {name: FLASH if asked[name] and not obstacle else OWN for name in asked}
    for name in (name for name in asked if asked[name] and obstacle):
        if switches.flash_only:
            raise ValueError(
                f"NSA_SDPA_FLASH_ONLY=1 and the {name} branch is asked to go through flash "
                f"kernels, but cannot: {obstacle}; unset NSA_SDPA_FLASH_ONLY to use this "
                f"package's own kernels there, or the NSA_USE_FA2 switch that asks for it"
            )
        fallbacks.append((name, obstacle))
    return Plan(
        requested=backend,
        backend=chosen,
        reason=reason,
        selection="fast" if switches.fast_selection and chosen != "reference" else "reference",
        **routes,
        sdpa="no flash" if switches.no_flash else "flash only" if switches.flash_only else "any",
        audit=switches.audit,
        nvtx=switches.nvtx,
        fallbacks=tuple(fallbacks),
    )


@lru_cache(maxsize=256)
def choose_backend(
    machine: Machine, dtype: torch.dtype, backend: str, head_dims: tuple[int, ...]
) -> tuple[str, str]:
    """The backend that runs, and why; no switch changes it."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)} "
            f"(auto takes the fastest that can run)"
        )
    if backend == "reference":
        return backend, "named by the caller; float64 and quadratic, for checking only"
    if backend == "torch":
        return backend, "named by the caller"
    obstacle = _triton_obstacle(machine, dtype, head_dims, interpreter=backend == "triton")
    if backend == "triton" and obstacle:
        raise cannot_run(obstacle)
    if backend == "triton":
        return backend, "named by the caller"
    return (
        ("torch", f"Triton cannot run: {obstacle}")
        if obstacle
        else (
            "triton",
            f"the fastest on {machine.kind}",
        )
    )


def cannot_run(obstacle: str) -> ValueError:
    """The error for a caller who named the Triton backend."""
    return ValueError(
        f"backend='triton' cannot run: {obstacle}; use backend='torch', or 'auto' to take "
        f"the best there is"
    )


def _triton_obstacle(
    machine: Machine, dtype: torch.dtype, head_dims: tuple[int, ...], *, interpreter: bool
) -> str:
    """Why the Triton kernels cannot take such tensors; empty when they can."""
    if machine.kind == "cuda":
        obstacle = machine_obstacle(machine)
        if obstacle:
            return obstacle
    elif not (interpreter and interpreted()):
        return f"the tensors are on {machine.kind}, the kernels need a CUDA device"
    if dtype not in TRITON_DTYPES:
        return f"the kernels have no {dtype}"
    for dim in head_dims:
        if dim > TRITON_MAX_DIM:
            return f"a head dim is {dim}, the kernels take up to {TRITON_MAX_DIM}"
    return ""


def _flash_obstacle(
    backend: str,
    machine: Machine,
    dtype: torch.dtype,
    head_dims: tuple[int, ...],
    packed: bool,
    switches: Switches,
) -> str:
    """Why a branch cannot go through flash kernels; empty when it can."""
    dims = {-(-dim // FLASH_DIM_STEP) * FLASH_DIM_STEP for dim in head_dims}
    if switches.no_flash:
        return "NSA_SDPA_NO_FLASH=1 forbids it"
    if machine.kind != "cuda":
        return f"the tensors are on {machine.kind}, flash kernels need a CUDA device"
    if backend != "triton":
        return f"only the triton backend can hand a branch over, and {backend} runs"
    if dtype not in FLASH_DTYPES:
        return f"flash kernels have no {dtype}"
    if len(dims) > 1:
        return f"the head dims of keys and values differ: {', '.join(map(str, head_dims))}"
    if max(dims) > FLASH_MAX_DIM:
        return f"a head dim is {max(dims)}, flash kernels take up to {FLASH_MAX_DIM}"
    if packed:
        return "documents are packed"
    return ""


@cache
def audit_sdpa(kind: str, dtype: torch.dtype, head_dims: tuple[int, ...]) -> None:
    """Log, once for each kind of call, which backends of scaled_dot_product_attention can run.

    Logged as a warning, so that it is shown without any logging setup.
    """
    LOGGER.warning(
        "SDPA on %s, %s, head dims %s: %s",
        *(kind, dtype, " and ".join(map(str, head_dims)), _sdpa_backends(kind, dtype, head_dims)),
    )


def _sdpa_backends(kind: str, dtype: torch.dtype, head_dims: tuple[int, ...]) -> str:
    if kind != "cuda":
        return "only math and, on a CPU, its own flash exist here; no CUDA kernels"
    q, v = (torch.empty(1, 1, 64, dim, dtype=dtype, device=kind) for dim in _both(head_dims))
    params = torch.backends.cuda.SDPAParams(q, q, v, None, 0.0, True, False)
    found = ["math: yes"]
    # torch gives its reasons as Python warnings or, in torch 2.11 on a GPU, writes them to stderr.
    elsewhere = "torch writes the reason to stderr, if any"
    for name in ("flash", "efficient", "cudnn"):
        can_use = getattr(torch.backends.cuda, f"can_use_{name}_attention", None)
        if can_use is None:
            found.append(f"{name}: this torch cannot say")
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            usable = can_use(params, True)
        reasons = "; ".join(str(one.message).split(" (Triggered")[0] for one in caught)
        found.append(f"{name}: {'yes' if usable else f'no ({reasons or elsewhere})'}")
    return ", ".join(found)


def _both(head_dims: tuple[int, ...]) -> tuple[int, int]:
    return head_dims[0], head_dims[-1]
