"""Environment variables: the table (name, type, default, who reads it, meaning) and its readers.

This is the only module that reads os.environ.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nsa.config.check import ConfigError, nearest

Value = bool | int | float | str | None
HIDDEN = "***"
"""Replaces the value of a secret."""
Honoured = Literal["code", "external", "planned"]


# --- the table ---


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    kind: type
    """bool, int, float or str; numbers are never negative."""
    default: Value
    """Value if the variable is unset or empty; None means "not set"."""
    honoured: Honoured
    """code: this package reads it. external: another program does. planned: not implemented."""
    meaning: str
    sets: tuple[str, ...] = ()
    """Config overrides that it sets; `{}` is its value. Applied only for a non-default value."""
    choices: tuple[str, ...] = ()
    """Allowed words; empty allows any text."""
    secret: bool = False
    """The value is never shown."""


# Overrides of config keys.
_CONFIG = (
    Variable(
        "CONFIG",
        str,
        None,
        "code",
        "config file or bundled name; default: quickstart, and configs/train_showcase.yaml for "
        "scripts/train_showcase.py",
    ),
    Variable("NSA_SEQ_LEN", int, None, "code", "tokens per training row", ("train.seq_len={}",)),
    Variable(
        "NSA_BATCH_SIZE",
        int,
        None,
        "code",
        "rows per micro-batch and rank",
        ("train.batch_size={}",),
    ),
    Variable(
        "NSA_ACCUM",
        int,
        None,
        "code",
        "micro-batches per optimizer update",
        ("train.accumulate_grad_batches={}",),
    ),
    Variable("NSA_LR", float, None, "code", "peak learning rate", ("train.lr={}",)),
    Variable(
        "NSA_NO_GC",
        bool,
        False,
        "code",
        "1 turns gradient checkpointing off",
        ("runtime.gradient_checkpointing=false", "runtime.gc_layers="),
    ),
    Variable(
        "NSA_GC_RANGE",
        str,
        "",
        "code",
        "A:B turns gradient checkpointing on for layers A to B-1",
        ("runtime.gradient_checkpointing=true", "runtime.gc_layers={}"),
    ),
    Variable(
        "NSA_ROPE_SCALE",
        float,
        None,
        "code",
        "RoPE positions are divided by this",
        ("model.rope_scale={}",),
    ),
)

_ATTENTION = (
    Variable("NSA_STRICT_ASSERTS", bool, False, "code", "1 asserts that every selection is causal"),
    Variable("NSA_SEL_RANGES_V2", bool, True, "code", "0 selects blocks with the slow reference"),
    Variable(
        "NSA_PREFILL_BATCHED",
        bool,
        True,
        "code",
        "0 prefills token by token through decode; refused in training",
    ),
    Variable(
        "NSA_PREFILL_TILE",
        int,
        0,
        "code",
        "tokens per chunk of prefill; 0: all at once, 2048 in generation",
    ),
    Variable(
        "NSA_FORCE_BRANCH",
        str,
        "",
        "code",
        "use only this branch: its gate is 1",
        choices=("cmp", "sel", "win"),
    ),
    Variable(
        "NSA_USE_FA2",
        bool,
        False,
        "code",
        "1: flash kernels for the window branch; an explicit 0: for no branch",
    ),
    Variable("NSA_USE_FA2_WIN", bool, False, "code", "flash kernels for the window branch"),
    Variable("NSA_USE_FA2_CMP", bool, False, "code", "flash kernels for the compressed branch"),
    Variable("NSA_USE_TRITON_SEL", bool, False, "planned", "Triton kernel, selected branch"),
    Variable("NSA_SDPA_AUDIT", bool, False, "code", "1 logs once which SDPA backends can run"),
    Variable("NSA_SDPA_NO_FLASH", bool, False, "code", "1 forbids flash kernels"),
    Variable(
        "NSA_SDPA_FLASH_ONLY", bool, False, "code", "1: error if requested flash kernels cannot run"
    ),
    Variable("NSA_NVTX", bool, False, "code", "1 adds NVTX ranges around the parts of attention"),
    Variable("NSA_DEBUG_LOG", bool, False, "planned", "detailed log of kernel routing"),
    Variable("NSA_TEST_FA2", bool, False, "planned", "run the flash parity tests on a GPU"),
)

_TELEMETRY = (
    Variable("NSA_DISABLE_CSV_LOGS", bool, False, "code", "1 writes no training.csv and val.csv"),
    Variable(
        "NSA_DISABLE_AUX_STATS", bool, False, "code", "1 collects no gate and selection statistics"
    ),
    Variable("NSA_TB_DISABLE", bool, False, "code", "1 writes no TensorBoard events"),
    Variable("NSA_MEM_DUMP_EVERY", int, 0, "code", "memory snapshot every N steps; 0: never"),
    Variable("NSA_HEARTBEAT_EVERY", int, 1, "code", "heartbeat line every N steps"),
    Variable("NSA_LOG_GRAD_NORM", bool, False, "code", "1 adds the gradient norm to the step line"),
)

_DISTRIBUTED = (
    Variable(
        "NSA_DDP_COMPRESS",
        str,
        "auto",
        "code",
        "dtype of exchanged gradients; auto: bf16 with runtime.precision=bf16, else off (fp32)",
        choices=("auto", "bf16", "fp16", "off"),
    ),
    Variable("NSA_DDP_BUCKET_MB", int, 0, "code", "DDP bucket size in MB; 0: torch's default"),
    Variable("NSA_DDP_DISABLE_GC", bool, True, "code", "1: no gradient checkpointing under DDP"),
    Variable("NSA_DDP_FIND_UNUSED", bool, False, "code", "DDP find_unused_parameters"),
    Variable("NSA_DDP_STATIC_GRAPH", bool, False, "code", "DDP static_graph"),
    Variable(
        "NSA_DDP_SAFE_GC_LAYERS",
        str,
        "",
        "code",
        "A:B: gradient checkpointing of these layers in DDP",
    ),
    Variable(
        "NSA_DDP_SAFE_MODE",
        bool,
        False,
        "code",
        "1: 2 MB buckets, no bucket views, no compression, no static graph, no flash kernels",
    ),
    Variable("NSA_PG_TIMEOUT_MIN", float, 15.0, "code", "process group timeout in minutes"),
    Variable(
        "NSA_START_TIMEOUT_MIN",
        float,
        15.0,
        "code",
        "minutes that a starting rank waits for the others",
    ),
    Variable(
        "NSA_HANG_LEAST_S",
        float,
        180.0,
        "code",
        "seconds in one span that never count as a hang; 0: no hang detection",
    ),
    Variable("NSA_SCALER_INIT_SCALE", float, 65536.0, "code", "fp16: initial loss scale"),
    Variable(
        "NSA_SCALER_GROWTH_INTERVAL",
        int,
        2000,
        "code",
        "fp16: steps without overflow before the scale grows",
    ),
    Variable("NSA_SCALER_GROWTH_FACTOR", float, 2.0, "code", "fp16: growth factor of the scale"),
    Variable("NSA_SCALER_BACKOFF_FACTOR", float, 0.5, "code", "fp16: factor after an overflow"),
    Variable("WORLD_SIZE", int, 1, "code", "number of ranks; set by torchrun"),
    Variable("RANK", int, 0, "code", "index of this rank; set by torchrun"),
    Variable(
        "LOCAL_RANK", int, 0, "code", "index on this machine, selects the GPU; set by torchrun"
    ),
    Variable("MASTER_ADDR", str, None, "code", "rendezvous address; set by torchrun"),
    Variable("MASTER_PORT", int, None, "code", "rendezvous port; set by torchrun"),
    Variable(
        "TORCHELASTIC_RUN_ID", str, None, "code", "set by torchrun; its ranks stop if it dies"
    ),
    Variable(
        "TORCHELASTIC_RESTART_COUNT",
        int,
        0,
        "code",
        "set by torchrun; above 0 the run is a restart",
    ),
    Variable(
        "TORCH_BACKEND",
        str,
        "",
        "code",
        "process group backend; unset: nccl on GPUs, gloo on CPUs",
        choices=("nccl", "gloo"),
    ),
    Variable("IB_DISABLE", str, None, "code", "old name of NCCL_IB_DISABLE"),
    Variable("NCCL_ASYNC_ERROR_HANDLING", str, None, "code", "old TORCH_NCCL_ name, translated"),
    Variable("NCCL_BLOCKING_WAIT", str, None, "code", "old TORCH_NCCL_ name, translated"),
)

_DATA = (
    Variable("NSA_FWE_DOC_BATCH", int, 64, "code", "stream: documents tokenized at a time"),
    Variable("NSA_FWE_PREFETCH", bool, True, "code", "0 turns prefetching off, for every source"),
    Variable("NSA_FWE_Q", int, 4, "code", "prefetch queue length in batches, for every source"),
    Variable("NSA_FWE_WARMUP_BATCHES", int, 0, "code", "batches to prefetch before the first step"),
    Variable(
        "NSA_FWE_WARMUP_TIMEOUT",
        float,
        0.0,
        "code",
        "seconds to wait for them; 0: --loader-timeout",
    ),
)

_WATCHDOG = (
    Variable("NSA_WATCH_HALT", bool, True, "code", "0: nsa watch does not write .HALT"),
    Variable("NSA_WATCH_INTERVAL_S", float, 30.0, "code", "nsa watch: seconds between checks"),
    Variable("NSA_WATCH_HEARTBEAT_STALL_S", float, None, "code", "nsa watch: limit stall_s"),
    Variable("NSA_WATCH_FLATLINE_N", int, None, "code", "nsa watch: limit flatline_n"),
    Variable("NSA_WATCH_GATE_COLLAPSE_N", int, None, "code", "nsa watch: limit gate_n"),
    Variable(
        "NSA_DASHBOARD_TOKEN",
        str,
        "",
        "code",
        "access token of nsa dashboard; --token-file wins",
        secret=True,
    ),
    Variable("NSA_PRICE_PER_H", float, None, "code", "price per hour, for nsa preflight"),
)

_LAUNCHERS = (
    # Strings, not numbers: another program may use the same name with a value we cannot parse.
    Variable("NP", str, None, "code", "nsa launch: processes on this machine"),
    Variable("DATASET", str, None, "code", "nsa launch: data.dataset"),
    Variable("LOCAL_PATH", str, "", "code", "nsa launch: data.local_path"),
    Variable(
        "OUT_DIR",
        str,
        "artifacts/m7c_125m_2xa100_prod",
        "code",
        "nsa monitor: the run folder; nsa launch: replaces train.out_dir",
    ),
    Variable(
        "NSA_PHASE_STEPS", str, "", "code", "nsa launch: steps of each phase, as 1,300,1000,all"
    ),
    Variable(
        "NSA_RESTART_COUNT",
        int,
        0,
        "code",
        "set by nsa launch at a restart; above 0 the run moves no files aside",
    ),
    Variable("TMUX", str, None, "external", "set inside tmux; nsa launch then opens no session"),
    Variable("PORT", int, 6006, "external", "scripts/run_tensorboard.sh: port"),
    Variable("HOST", str, "127.0.0.1", "external", "scripts/run_tensorboard.sh: address"),
)

_EXTERNAL = (
    Variable("NCCL_ALGO", str, None, "external", "NCCL: algorithm; Ring on PCIe"),
    Variable("NCCL_PROTO", str, None, "external", "NCCL: protocol; Simple on PCIe"),
    Variable("NCCL_IB_DISABLE", str, None, "external", "NCCL: 1 disables InfiniBand"),
    Variable("NCCL_P2P_DISABLE", str, None, "external", "NCCL: 1 disables peer-to-peer"),
    Variable("NCCL_DEBUG", str, None, "external", "NCCL: log level; WARN or INFO"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", str, None, "external", "torch: fail fast"),
    Variable("TORCH_NCCL_BLOCKING_WAIT", str, None, "external", "torch: collectives time out"),
    Variable("TORCH_DISTRIBUTED_DEBUG", str, None, "external", "torch: DETAIL for triage"),
    Variable("TORCH_LOGS", str, None, "external", "torch: log channels"),
    Variable("PYTORCH_CUDA_ALLOC_CONF", str, None, "external", "torch: CUDA allocator settings"),
    Variable("CUDA_LAUNCH_BLOCKING", str, None, "external", "CUDA: 1 makes launches synchronous"),
    Variable("HF_ENDPOINT", str, None, "external", "hub client: address of the hub"),
    Variable("HF_HOME", str, None, "external", "hub client: cache folder"),
    Variable(
        "HF_HUB_DOWNLOAD_TIMEOUT", str, None, "external", "hub client: read timeout in s (10)"
    ),
    Variable("HF_DATASETS_CACHE", str, None, "external", "datasets: cache folder"),
    Variable(
        "TOKENIZERS_PARALLELISM", str, None, "external", "tokenizers: multithreading on or off"
    ),
    Variable("WANDB_MODE", str, None, "external", "wandb: offline stores runs on disk"),
    Variable("WANDB_PROJECT", str, None, "external", "wandb: project name (nsa)"),
    Variable("TRACKIO_DIR", str, None, "external", "trackio: database folder"),
    Variable("TRITON_INTERPRET", str, None, "external", "Triton: 1 interprets kernels on the CPU"),
    Variable("PYTHONPATH", str, None, "external", "Python: import path; not needed here"),
)

TABLE: dict[str, Variable] = {
    variable.name: variable
    for group in (
        _CONFIG,
        _ATTENTION,
        _TELEMETRY,
        _DISTRIBUTED,
        _DATA,
        _WATCHDOG,
        _LAUNCHERS,
        _EXTERNAL,
    )
    for variable in group
}


# --- reading variables ---

BOOLEANS = {"1": True, "true": True, "yes": True, "on": True}
BOOLEANS |= {"0": False, "false": False, "no": False, "off": False}
"""Spellings of booleans in variables and overrides; case-insensitive."""


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Typed value of a variable in the table; its default if unset or empty."""
    if name not in TABLE:
        raise KeyError(f"{name} is not in nsa/config/env.py; add a row for it there")
    text = _environ(environ).get(name, "")
    return _parse(TABLE[name], text) if text else TABLE[name].default


def raw(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The raw text of a variable, or None; use it to ask whether the user set it."""
    return _environ(environ).get(name)


def texts(names: Sequence[str]) -> tuple[str | None, ...]:
    """The raw texts of several variables: a cheap key for what was parsed from them."""
    return tuple(map(os.environ.get, names))


def texts_key(names: Sequence[str]) -> Callable[[], tuple[Any, ...]]:
    """A function with equal results where `texts(names)` are equal: a cheaper key.

    os.environ encodes the name and decodes the text in every look-up, 1 us each; here neither is.
    """
    inner: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    encoded = tuple(map(os.environ.encodekey, names))
    return lambda: tuple(map(inner.get, encoded))


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Reject unknown NSA_* names, values that do not parse, and variables not implemented yet."""
    environ = _environ(environ)
    for name in sorted(environ):
        if name in TABLE:
            _check_known(TABLE[name], environ)
        elif name.startswith("NSA_"):
            known = nearest(name, (n for n in TABLE if n.startswith("NSA_")))
            raise ConfigError(
                f"{name}={environ[name]!r}: no such environment variable; the nearest known one is "
                f"{known}; unset it, or see all with `nsa env`"
            )


def config_overrides(environ: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (variable, "group.key=value") for each config key set by the environment."""
    environ = _environ(environ)
    # Applied in table order, one would silently undo the other.
    if read("NSA_NO_GC", environ) and read("NSA_GC_RANGE", environ):
        raise ConfigError(
            f"NSA_NO_GC={environ['NSA_NO_GC']} and NSA_GC_RANGE={environ['NSA_GC_RANGE']} "
            "contradict each other; one turns gradient checkpointing off, the other on; unset one"
        )
    for variable in TABLE.values():
        if read(variable.name, environ) != variable.default:
            for override in variable.sets:
                yield variable.name, override.format(environ[variable.name])


def in_effect(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables read by this package that differ from their default; secrets are masked."""
    environ = _environ(environ)
    return {
        name: HIDDEN if variable.secret else environ[name]
        for name, variable in TABLE.items()
        if variable.honoured == "code" and read(name, environ) != variable.default
    }


def recorded(
    names: Sequence[str], prefixes: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Raw variables with these names or prefixes, for env.json."""
    environ = _environ(environ)
    chosen = (name for name in environ if name in names or name.startswith(tuple(prefixes)))
    return {name: environ[name] for name in sorted(chosen)}


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    # A parameter, so that tests and the launcher can ask about another environment.
    return os.environ if environ is None else environ


def _check_known(variable: Variable, environ: Mapping[str, str]) -> None:
    ours = variable.name.startswith("NSA_") or variable.honoured == "code"
    if not ours:  # HOST or PORT may belong to another program and mean something else
        return
    value = read(variable.name, environ)
    if variable.honoured == "planned" and value != variable.default:
        raise ConfigError(
            f"{variable.name}={environ[variable.name]!r}: not supported by this version "
            f"({variable.meaning}); only its default {variable.default!r} is allowed; unset it"
        )


def _parse(variable: Variable, text: str) -> Value:
    if variable.kind is bool:
        if text.lower() not in BOOLEANS:
            raise _bad_value(variable, text, "0 or 1")
        return BOOLEANS[text.lower()]
    if variable.kind is str:
        if variable.choices and text not in variable.choices:
            raise _bad_value(variable, text, " or ".join(variable.choices))
        return text
    return _parse_number(variable, text)


def _parse_number(variable: Variable, text: str) -> Value:
    allowed = "a whole number >= 0" if variable.kind is int else "a number >= 0"
    try:
        value: float = variable.kind(text)
    except ValueError:
        raise _bad_value(variable, text, allowed) from None
    # Also rejects NaN: every comparison with it is false.
    if not 0 <= value < float("inf"):
        raise _bad_value(variable, text, allowed)
    return value


def _bad_value(variable: Variable, text: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{variable.name}={text!r} is not allowed; use {allowed}, or unset it ({variable.meaning})"
    )


def set_default(name: str, value: str) -> None:
    """Set a variable that a library reads at import, unless the user has set it."""
    os.environ.setdefault(name, value)


def translate_torch_logs() -> None:
    """Remove the old channel `sdp` from TORCH_LOGS and turn on NSA_SDPA_AUDIT instead.

    torch raises on that channel at import, so entry points call this first. If something (e.g. a
    sitecustomize) already tried to import torch, a half-imported torch is left behind; then the
    process re-executes itself.
    """
    channels = os.environ.get("TORCH_LOGS", "").split(",")
    kept = [channel for channel in channels if channel.strip().lstrip("+-") != "sdp"]
    if kept == channels:
        return
    os.environ["TORCH_LOGS"] = ",".join(kept)
    if not os.environ["TORCH_LOGS"]:
        del os.environ["TORCH_LOGS"]
    os.environ.setdefault("NSA_SDPA_AUDIT", "1")
    text = "[boot] TORCH_LOGS: torch has no channel `sdp`; NSA_SDPA_AUDIT=1 logs the routes instead"
    print(text, file=sys.stderr, flush=True)
    # execv replaces the process: same pid, same arguments, fresh interpreter.
    if any(name.partition(".")[0] == "torch" for name in sys.modules):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def with_package() -> dict[str, str]:
    """The environment with this package's folder first on PYTHONPATH, for subprocesses."""
    folder = str(Path(__file__).resolve().parents[2])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *others])}


def changed(values: Mapping[str, str]) -> dict[str, str]:
    """The environment with some variables replaced, for subprocesses."""
    return {**os.environ, **values}
