"""The plan of a call: which backend and which kernels run, and why.

Decided from static facts (device, dtype, head dims, environment), never from data. str() of
a plan is one line for people. `read_switches` is the only place of the operator that reads the
environment; what is below it gets `Flags`.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import TracebackType
from typing import NamedTuple

import torch

from nsa.config.env import read, texts, texts_key
from nsa.ops.fallbacks import LOGGER, record
from nsa.ops.machine import Machine, interpreted, machine_obstacle, machine_of
from nsa.ops.spec import BlockSpec

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
class Flags:
    """What a plan tells the operators: plain bools, which torch.library operators can take."""

    flash_cmp: bool = False
    """The compressed branch runs on torch's flash kernels."""
    flash_win: bool = False
    """The window branch does."""
    strict: bool = False
    """Assert that every selection is causal (NSA_STRICT_ASSERTS)."""
    nvtx: bool = False
    """Mark the parts of attention with NVTX ranges (NSA_NVTX)."""
    no_sel: bool = False
    """The gates of the selected branch are 0: its kernels do not run."""
    no_win: bool = False
    """The gates of the window branch are."""


NO_FLAGS = Flags()


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
    flags: Flags = NO_FLAGS
    """What the operators are told of this."""
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
        parts += ["SDPA audited"] * self.audit + ["selections checked"] * self.flags.strict
        parts += ["NVTX ranges"] * self.flags.nvtx
        return ", ".join(parts)


class Switches(NamedTuple):
    """The environment variables that a plan depends on, parsed."""

    fast_selection: bool
    flash_cmp: bool
    flash_win: bool
    no_flash: bool
    flash_only: bool
    audit: bool
    strict: bool
    nvtx: bool


def plan_call(
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    head_dims: tuple[int, ...],
    packed: bool,
    without: str = "",
) -> Plan:
    """The plan of one call of nsa_attention, perhaps without "sel" or "win"; records its
    fallbacks."""
    plan = plan_attention(device, dtype, backend, head_dims, packed=packed)
    for branch, reason in plan.fallbacks:
        record(branch, reason)
    if plan.audit:
        audit_sdpa(device.type, dtype, head_dims)
    if without:
        skipped = {f"no_{without}": True, "flash_win": plan.flags.flash_win and without != "win"}
        return replace(plan, flags=replace(plan.flags, **skipped))
    return plan


def plan_scoring(
    device: torch.device, dtype: torch.dtype, backend: str, head_dims: tuple[int, ...]
) -> tuple[str, Flags]:
    """The backend whose select_blocks runs, and its flags."""
    runs, switches = plan_compression(device, dtype, backend, head_dims), read_switches()
    flags = Flags(strict=switches.strict, nvtx=switches.nvtx)
    return (runs if switches.fast_selection else "reference"), flags


def plan_compression(
    device: torch.device, dtype: torch.dtype, backend: str, head_dims: tuple[int, ...]
) -> str:
    """The backend whose compress runs."""
    return choose_backend(machine_of(device), dtype, backend, head_dims)[0]


class SparseCall(NamedTuple):
    """What decides, beside the tensors' kind, whether kernels can run a sparse_attention."""

    per_group: int
    """Query heads that share an index and a KV head."""
    block: int
    num_ids: int


def plan_sparse(
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    head_dims: tuple[int, ...],
    call: SparseCall,
) -> str:
    """The backend whose sparse_attention runs."""
    runs = choose_backend(machine_of(device), dtype, backend, head_dims)[0]
    if runs != "triton":
        return runs
    from nsa.ops.triton.tiles import capability_of, sparse_obstacle, sparse_spec

    spec = sparse_spec(call.block, call.num_ids)
    obstacle = sparse_obstacle(head_dims, call.per_group, spec, dtype, capability_of(device))
    if not obstacle:
        return "triton"
    if backend == "triton":
        raise cannot_run(obstacle)
    record("all", obstacle)
    return "torch"


def plan_offset(
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, ...],
    per_group: int,
    spec: BlockSpec,
) -> str:
    """The backend of a call whose queries have an offset, where Triton runs the others: there the
    kernels read selected blocks, and never mask the whole past."""
    from nsa.ops.triton.tiles import capability_of, sparse_obstacle

    obstacle = sparse_obstacle(head_dims, per_group, spec, dtype, capability_of(device))
    if not obstacle:
        return "triton"
    if plan.requested == "triton":
        raise cannot_run(obstacle)
    record("all", obstacle)
    return "torch"


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


SWITCHES = (
    *("NSA_SEL_RANGES_V2", "NSA_USE_FA2", "NSA_USE_FA2_CMP", "NSA_USE_FA2_WIN"),
    *("NSA_SDPA_NO_FLASH", "NSA_SDPA_FLASH_ONLY", "NSA_SDPA_AUDIT"),
    *("NSA_STRICT_ASSERTS", "NSA_NVTX"),
)
"""The variables behind Switches."""


def read_switches() -> Switches:
    """The switches as the environment sets them now; equal texts are parsed once."""
    return _parse_switches(texts(SWITCHES))


switch_key = texts_key(SWITCHES)
"""The switches as they are written: plans of equal ones are equal."""


@lru_cache(maxsize=64)
def _parse_switches(values: tuple[str | None, ...]) -> Switches:
    # An empty text counts as unset.
    environ = {name: text for name, text in zip(SWITCHES, values, strict=True) if text}
    no_flash, flash_only = read("NSA_SDPA_NO_FLASH", environ), read("NSA_SDPA_FLASH_ONLY", environ)
    if no_flash and flash_only:
        raise ValueError(
            "NSA_SDPA_NO_FLASH=1 and NSA_SDPA_FLASH_ONLY=1 contradict each other; one forbids "
            "flash kernels, the other everything else: unset one"
        )
    # NSA_USE_FA2=1 asks for the window branch; 0, written out, forbids both.
    master = read("NSA_USE_FA2", environ)
    forbidden = "NSA_USE_FA2" in environ and not master
    flash_win = read("NSA_USE_FA2_WIN", environ) if "NSA_USE_FA2_WIN" in environ else master
    return Switches(
        fast_selection=read("NSA_SEL_RANGES_V2", environ),
        flash_cmp=not forbidden and read("NSA_USE_FA2_CMP", environ),
        flash_win=not forbidden and flash_win,
        no_flash=no_flash,
        flash_only=flash_only,
        audit=read("NSA_SDPA_AUDIT", environ),
        strict=read("NSA_STRICT_ASSERTS", environ),
        nvtx=read("NSA_NVTX", environ),
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
        flags=Flags(
            flash_cmp=routes["cmp"] == FLASH,
            flash_win=routes["win"] == FLASH,
            strict=switches.strict,
            nvtx=switches.nvtx,
        ),
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


# --- NVTX ranges around the parts of attention, for profilers ---

# One shared object: a range that is off must cost nothing in every call.
_OFF = nullcontext()


class _Range:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.cuda.nvtx.range_pop()


def nvtx(name: str, on: bool) -> AbstractContextManager[None]:
    """A range of this name; a no-op when off, without CUDA, or while torch.compile traces."""
    if not on or torch.compiler.is_compiling() or not _has_cuda():
        return _OFF
    return _Range(name)


def _has_cuda() -> bool:
    return torch.cuda.is_available()
