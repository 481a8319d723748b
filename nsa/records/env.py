"""env.json: machine, versions, command line and environment variables of a run.

Schema, version 1: the fields of RunEnvironment as one JSON object; unknown values are null. Values
of variables and arguments whose names look like secrets are replaced by ***.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsa.config import env
from nsa.config.env import HIDDEN
from nsa.files import MIB, best_effort, read_text, write_text
from nsa.records.heartbeat import iso

if TYPE_CHECKING:
    import torch

VERSION = 1
ENV_FILE = "env.json"
# Only these variables are recorded: the full environment may hold secrets of other programs.
NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "CONFIG")
PREFIXES = ("NSA_", "NCCL_", "TORCH_", "CUDA_", "PYTORCH_")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
GIT_TIMEOUT_S = 5


@dataclass(frozen=True, kw_only=True)
class RunEnvironment:
    """Where and how a run was started."""

    version: int = VERSION
    time: str
    """UTC."""
    python: str
    torch: str
    triton: str | None
    cuda_available: bool
    cuda_device_count: int
    gpu_name: str | None
    """Model of the first visible GPU; cuda_capability is of the same one."""
    cuda_capability: list[int] | None
    cuda: str | None
    """The CUDA version that torch was built with."""
    driver: str | None
    platform: str
    hostname: str
    git_commit: str | None
    """Commit of the folder that holds the package; ends in `-dirty` if tracked files differ."""
    argv: list[str]
    env: dict[str, str]


def write_env(out_dir: Path | str, argv: Sequence[str] | None = None) -> Path:
    """Write env.json of this process; on a full disk, warn and continue."""
    path = Path(out_dir) / ENV_FILE
    content = dataclasses.asdict(collect(argv))
    with best_effort(path):
        write_text(path, json.dumps(content, indent=2) + "\n")
    return path


def read_env(out_dir: Path | str) -> RunEnvironment:
    """Read env.json of a run folder."""
    path = Path(out_dir) / ENV_FILE
    content = json.loads(read_text(path))
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r}; this program reads version "
            f"{VERSION}; use the program that wrote it"
        )
    return RunEnvironment(**content)


def collect(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> RunEnvironment:
    """Collect the facts of this process and its machine."""
    import torch  # imported here because readers of run folders must not need it

    has_cuda = torch.cuda.is_available()
    return RunEnvironment(
        time=iso(time.time()),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cuda_available=has_cuda,
        cuda_device_count=torch.cuda.device_count(),
        gpu_name=torch.cuda.get_device_name(0) if has_cuda else None,
        cuda_capability=list(torch.cuda.get_device_capability(0)) if has_cuda else None,
        cuda=torch.version.cuda,
        driver=driver_version(),
        platform=platform.platform(),
        hostname=platform.node(),
        git_commit=git_commit(Path(__file__).resolve().parents[2]),
        argv=hide_arguments(sys.argv if argv is None else argv),
        env={
            name: HIDDEN if _is_secret(name) else value
            for name, value in env.recorded(NAMES, PREFIXES, environ).items()
        },
    )


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`; None without git or outside a repository."""
    try:
        # git would also find a repository further up, which may just contain the virtualenv.
        if not (folder / ".git").exists():
            return None
        commit = _git(folder, "rev-parse", "HEAD")
        is_dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if is_dirty else commit


def altered_files(folder: Path) -> list[str]:
    """Modified and untracked files in `folder`, as `git status --porcelain` lists them."""
    try:
        if not (folder / ".git").exists():
            return []
        lines = _git(folder, "status", "--porcelain", "--untracked-files=all").splitlines()
        return [line.strip() for line in lines]
    except (OSError, subprocess.SubprocessError):
        return []


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=GIT_TIMEOUT_S,
    ).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_secret(name: str) -> bool:
    return any(word in name.upper() for word in SECRETS)


def hide_arguments(argv: Sequence[str]) -> list[str]:
    """Hide the values of arguments such as `--api-key VALUE` and `api_key=VALUE`.

    Matches whole words only: data.tokenizer is not a secret.
    """
    shown: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        # Split at everything but letters: --api-key and api_key both contain the word KEY.
        is_secret = bool({*re.split(r"[^A-Z]+", name.upper())} & {*SECRETS})
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if is_secret and equals else argument)
        hide_next = is_secret and not equals and argument.startswith("-")
    return shown


# --- The GPUs of the machine: load from NVML, memory from torch ---


# --- NVML: GPU load, temperature and driver version ---
# Called by ctypes: libnvidia-ml comes with the driver, so no Python package is needed. Without the
# library all values are None.

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
GPU_SENSOR = 0
VERSION_BYTES = 80


class Load(NamedTuple):
    """Utilization and temperature of a GPU."""

    util_pct: int | None
    temp_c: int | None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_load(uuid: str) -> Load:
    """Load of the GPU with this UUID. NVML and CUDA may number GPUs differently."""
    library = _library()
    if library is None:
        return Load(None, None)
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != SUCCESS:
        return Load(None, None)
    rates, degrees = _Utilization(), ctypes.c_uint()
    has_rates = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) == SUCCESS
    has_degrees = (
        library.nvmlDeviceGetTemperature(device, GPU_SENSOR, ctypes.byref(degrees)) == SUCCESS
    )
    return Load(rates.gpu if has_rates else None, degrees.value if has_degrees else None)


def driver_version() -> str | None:
    """Version of the installed driver."""
    library = _library()
    text = ctypes.create_string_buffer(VERSION_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(text, VERSION_BYTES) != SUCCESS:
        return None
    return text.value.decode("ascii", errors="replace")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:  # no driver on this machine
        return None
    return library if library.nvmlInit_v2() == SUCCESS else None


# --- the device of a run, for its heartbeat ---


class GpuReading(NamedTuple):
    """One sample of the GPU; all None on a CPU."""

    gpu_mem_alloc: int | None = None
    """MiB allocated to tensors by torch."""
    gpu_mem_reserved: int | None = None
    """MiB reserved by torch's caching allocator."""
    gpu_util_pct: int | None = None
    """Percent of recent time in which a kernel ran; None without NVML."""
    gpu_temp_c: int | None = None


def read_gpu(device: torch.device | str | None) -> GpuReading:
    """Sample the device without synchronizing it; NVML takes about a millisecond."""
    import torch  # imported here because readers of run folders must not need it

    device = torch.device(device or "cpu")
    if device.type != "cuda":
        return GpuReading()
    load = read_load(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return GpuReading(
        torch.cuda.memory_allocated(device) // MIB,
        torch.cuda.memory_reserved(device) // MIB,
        load.util_pct,
        load.temp_c,
    )
