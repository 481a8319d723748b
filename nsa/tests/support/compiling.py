"""Compiling kernels for GPUs that are not here: by hand, or as the package launches them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, nvidia
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa.ops import machine
from nsa.ops.triton import launcher, problem

MAX_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
MAX_SHARED_BYTES |= {100: 227 << 10, 120: 99 << 10}
"""By compute capability; from NVIDIA's table of them, not from the code that is tested."""
MAX_TENSOR_MEMORY = 512
"""Columns, on the GPUs that have one."""
POINTERS = {
    "*bf16": (
        "p_part",
        "p_q",
        "p_k",
        "p_v",
        "p_o",
        "p_out",
        "p_dout",
        "p_x",
        "p_dx",
        "p_dq",
        "p_clean",
    )
    + ("p_o_cmp", "p_o_sel", "p_o_win", "p_dcmp", "p_dwin", "p_dq_more", "p_more", "p_logits")
    + ("p_k_sel", "p_k_win", "p_k_cmp", "p_v_cmp", "p_v_sel", "p_v_win")
    + ("p_dk_sel", "p_dk_win", "p_dk_cmp", "p_dv_cmp", "p_dv_sel", "p_dv_win"),
    "*fp32": ("p_part_lse", "p_lse", "p_stats", "p_gates", "p_scores", "p_dgates")
    + (
        "p_cos",
        "p_sin",
        "p_bias",
        "p_dk",
        "p_dv",
        "p_dk_parts",
        "p_dv_parts",
        "p_slots",
        "p_sum",
        "p_losses",
    ),
    "*i16": ("p_places",),
    "*i64": ("p_targets",),
}
"""Types of the pointers; the others are indices."""


def compile_kernel(
    kernel: Any,
    capability: int,
    constants: dict[str, object],
    dtype: str = "bf16",
    pointers: dict[str, str] | None = None,
    strides_aligned: bool = True,
    **options: int,
) -> Any:
    """Compile for a GPU that is not here; every argument gets the type that the launcher gives.

    `pointers` are the types of those that differ from the table. Strides are multiples of 16, as
    Triton then knows, or `strides_aligned` is False.
    """
    types = {name: kind for kind, names in POINTERS.items() for name in names}
    types = {name: kind.replace("bf16", dtype) for name, kind in types.items()}
    types |= {name: "*i32" for name in kernel.arg_names if name.startswith("p_")} | types
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    types |= pointers or {}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    constants = dict(constants)
    for name in kernel.arg_names:
        if name.startswith("t_"):
            signature[name] = descriptor(name, constants, dtype)
        if signature[name] == "constexpr" and name.startswith("t_"):
            constants[name] = None
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (strides_aligned and name.startswith("s_"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def descriptor(name: str, constants: dict[str, object], dtype: str) -> str:
    """Type of a tensor descriptor by its name: t_k2_win reads the second part of the keys.

    t_q_heads reads a tensor whose heads come before its rows.
    """
    what = name.split("_")[1]
    rows = constants["BM"] if what in ("q", "q2", "dout") else constants["BN"]
    width = {"2": "DK2", "v": "DV_PAD", "t": "DV_PAD"}.get(what[-1], "DK1")
    if not constants[width]:
        return "constexpr"
    sizes = f"1, {rows}" if name.endswith("_heads") else f"{rows}, 1"
    return f"tensordesc<{dtype}[1, {sizes}, {constants[width]}]>"


def stack_bytes(compiled: Any) -> int:
    """Stack of a thread, as the tool that comes with Triton reads it from the binary."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", output)
    return int(stack)


def ptxas_report(ptx: str) -> str:
    """What ptxas has to say: spilled registers, and warnings that it serialized wgmma."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def spilled_bytes(report: str) -> int:
    """The most bytes that ptxas stored to or loaded from a thread's stack for want of registers."""
    return max(int(size) for size in re.findall(r"(\d+) bytes spill", report))


def shared_addresses(compiled: Any) -> list[str]:
    """Addresses that wgmma operands of two layouts share, as registers of the PTX.

    A descriptor is an address of shared memory plus a constant whose upper half names the layout:
    its two highest bits are the swizzle, which every tile has, and the ten below them are 0. Other
    large constants are added to indices.
    ptxas 12.8 (in Triton 3.6 and 3.7) computes some of the second operand's descriptors from a
    register that does not hold the address: docs/log/faults.md, "Miscompilation".
    """
    assert compiled.asm["ptx"], "compiled until the memory is laid out"
    layouts: dict[str, set[int]] = {}
    made = r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{10,});"
    for base, text in re.findall(made, compiled.asm["ptx"]):
        constant = int(text) % (1 << 64)
        if constant >> 62 and not constant >> 52 & 0x3FF:
            layouts.setdefault(base, set()).add(constant >> 32)
    return [base for base, kinds in layouts.items() if len(kinds) > 1]


ADDED = re.compile(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);")
"""Where an address is, relative to another one."""
BARRIER = re.compile(r"mbarrier\.init\.shared(?:::cta)?\.b64 \[(%r\d+)(?:\+(\d+))?\]")
CAPTURE = re.compile(
    r"(?:st|ld)\.shared(?:\.v(\d))?\.b(\d+)\s+(?:\{[^}]*\}, |%\w+, )?\[global_smem(?:\+(\d+))?\]"
)
"""What warps leave for others at a fixed place: how many numbers, of how many bits, and where."""


def reused_barriers(ptx: str) -> list[int]:
    """Places of mbarriers in shared memory that other values use, too.

    Triton takes a barrier that nobody waits for as free once it is initialised, and puts what warps
    leave for others there. The hardware may initialise it after that: docs/log/faults.md, "A
    barrier that nobody waits for".
    """
    bases = set(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx))
    sums = {to: (base, int(offset)) for to, base, offset in ADDED.findall(ptx)}

    def place(register: str) -> int:
        offset = 0
        while register not in bases:
            register, more = sums[register]
            offset += more
        return offset

    barriers = {place(register) + int(more or 0) for register, more in BARRIER.findall(ptx)}
    assert barriers, "not a kernel with mbarriers"
    captures = [
        (int(at or 0), int(count or 1) * int(bits) // 8) for count, bits, at in CAPTURE.findall(ptx)
    ]
    return sorted(at for at in barriers if any(c < at + 8 and at < c + n for c, n in captures))


@contextmanager
def compiling_until(stage: str) -> Iterator[None]:
    """Compilations within stop early; what they made is kept in a cache of its own.

    At "ptx" they leave out ptxas. At "memory" they know shared and tensor memory, which Triton
    lays out before it turns to LLVM; the later stages take four fifths of the time.
    """
    assert stage in ("memory", "ptx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", f"{knobs.cache.dir}/until-{stage}")
        patch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
        if stage == "memory":
            patch.setattr(CUDABackend, "make_llir", _lay_out_memory)
            patch.setattr(CUDABackend, "make_ptx", lambda *_: "")
        yield


_make_llir = CUDABackend.make_llir


def _lay_out_memory(
    backend: CUDABackend, module: Any, metadata: dict[str, Any], options: Any, capability: int
) -> str:
    """The passes that Triton's make_llir puts before the step to LLVM, and what they found."""

    class Done(Exception):
        pass

    def run_so_far(passes: Any, *_: Any) -> None:
        passes.run(module, "memory")
        raise Done

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Done):
        patch.setattr(nvidia.passes.ttgpuir, "add_to_llvmir", run_so_far)
        _make_llir(backend, module, metadata, options, capability)
    metadata["shared"] = module.get_int_attr("ttg.shared")
    metadata["tmem_size"] = module.get_int_attr("ttg.tensor_memory_size")
    metadata["name"] = ""
    return ""


class Started(NamedTuple):
    """A kernel that the package wanted to start."""

    name: str
    constants: dict[str, Any]
    compiled: Any  # None: not asked for


class _Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> object:
        # Compiled kernels are kept by device; those that stopped early are not for others.
        return self.capability, knobs.cache.dir

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def starting_on(capability: int, kernels: Collection[str] | None = None) -> Iterator[list[Started]]:
    """Launches within are for a GPU that is not here, with CPU tensors: what would be started is
    compiled as it would be there (`kernels`: only those of these names) and noted, not run."""
    started: list[Started] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        asked = kernels is None or self.__name__ in kernels
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs) if asked else None
        started.append(Started(self.__name__, kwargs, compiled))

    pretended = machine.Machine("cuda", divmod(capability, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _Driver(capability))
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(machine, "_machine_of", lambda device: pretended)
        # Nothing is remembered, before or after: a memo holds what the driver has loaded, and a
        # problem the tiles of its GPU.
        patch.setattr(launcher, "interpreted", lambda: True)
        patch.setattr(problem, "_kept", {})
        yield started


def assert_fits(started: Started, capability: int) -> None:
    """The compiled kernel asks for no more than the GPU has."""
    metadata = started.compiled.metadata
    told = {key: started.constants[key] for key in TOLD if key in started.constants}
    assert metadata.shared <= MAX_SHARED_BYTES[capability], (started.name, told, metadata.shared)
    assert (metadata.tmem_size or 0) <= MAX_TENSOR_MEMORY, (started.name, told, metadata.tmem_size)


TOLD = ("BM", "BN", "num_warps", "num_stages", "SELECT", "NB")
