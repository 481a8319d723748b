"""The Triton kernels without a GPU: run by Triton's interpreter, compiled for sm_80 and sm_90."""

import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa.ops.triton.kernels import band, by_block, gate, mean, score
from nsa.ops.triton.tiles import backward_tiles, block_tiles, forward_tiles, padded
from nsa.tests.conftest import REPOSITORY

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
BF16 = ("p_part", "p_q", "p_k", "p_v", "p_out", "p_dout", "p_cmp", "p_sel", "p_win", "p_x", "p_dx")
FP32 = ("p_part_lse", "p_lse", "p_delta", "p_gates", "p_dq", "p_dk", "p_dv", "p_probs", "p_dgates")
POINTERS = {"*bf16": BF16, "*fp32": FP32}
"""Types of the pointers; the others are indices."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_equal_the_oracle_in_the_interpreter():
    """A process of its own: the switch counts at import, and a bad pointer would be a crash."""
    command = ["env", "TRITON_INTERPRET=1", "OMP_NUM_THREADS=1", sys.executable, "-m", "pytest"]
    command += ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Division by zero in numpy is how the interpreter computes log2(0) = -inf.
    command += ["-W", "ignore::RuntimeWarning", "nsa/tests/test_triton.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def compile_kernel(kernel, capability: int, constants: dict[str, object], **options: int):
    """Compile for a GPU that is not here; every argument gets the type that the launcher gives."""
    types = {name: kind for kind, names in POINTERS.items() for name in names}
    types |= {name: "*i32" for name in kernel.arg_names if name.startswith("p_")} | types
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("s_")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def band_cases():
    """Name, kernel, constants, launch options of the attention kernels for the usual head dims."""
    for d_k, d_v, per_group in ((64, 64, 6), (128, 128, 16), (192, 128, 4)):
        forward = forward_tiles(d_k, d_v, torch.bfloat16)
        backward = backward_tiles(d_k, d_v, torch.bfloat16)
        common = dict(DK=d_k, DV=d_v, DK_PAD=padded(d_k), DV_PAD=padded(d_v), L_SEL=64)
        common |= dict(SELECT=True, HAS_DOCS=False, UPCAST=False)
        for kernel, tiles, extra in (
            (band.band_forward, forward, {}),
            (band.band_dq, backward, dict(ADD=True)),
            (band.band_dkv, backward, {}),
        ):
            constants = {**common, **extra, "BM": tiles.BM, "BN": tiles.BN}
            options = dict(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
            yield f"{kernel.__name__}-{d_k}-{d_v}", kernel, constants, options
        common = dict(DK=d_k, DV=d_v, DK_PAD=padded(d_k), DV_PAD=padded(d_v), N_SEL=16)
        for kernel in (by_block.block_forward, by_block.block_backward):
            is_backward = kernel is by_block.block_backward
            tiles = block_tiles(d_k, d_v, per_group, 64, torch.bfloat16, backward=is_backward)
            constants = {**common, "UPCAST": False, "BM": tiles.BM, "BN": tiles.BN}
            options = dict(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
            yield f"{kernel.__name__}-{d_k}-{d_v}", kernel, constants, options


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", list(band_cases()), ids=lambda case: case[0])
def test_attention_kernels_compile_and_fit(case, capability):
    _, kernel, constants, options = case
    compiled = compile_kernel(kernel, capability, constants, **options)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES[capability]
    rows = constants["BM"]
    instruction = "wgmma.mma_async" if capability == 90 and rows >= 64 else "mma.sync"
    assert instruction in compiled.asm["ptx"]


SMALL_KERNELS = [
    (
        score.group_probs,
        dict(DK=128, DK_PAD=128, HAS_DOCS=True, UPCAST=False, BM=64, BN=64),
    ),
    (
        score.choose_blocks,
        dict(L_SEL=64, N_SEL=16, N_SEL_PAD=16, STRIDES=4, OVERLAP=2, NB=1024, NW=32, HAS_DOCS=True),
    ),
    (score.pack_selection, dict(L_SEL=64, N_SEL=16, N_SEL_PAD=16, NW=32, HAS_DOCS=True)),
    (by_block.merge_parts, dict(DV=128, DV_PAD=128, N_SEL=16, N_SEL_PAD=16)),
    (gate.gated_sum, dict(DV=128, DV_PAD=128, ROWS=16)),
    (gate.gate_backward, dict(DV=128, DV_PAD=128, ROWS=16)),
    (mean.mean_forward, dict(L=32, STRIDE=16, D=128, D_PAD=128, HAS_DOCS=True, BLOCKS=32)),
    (mean.mean_backward, dict(L=32, STRIDE=16, D=128, D_PAD=128, HAS_DOCS=True, ROWS=32)),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("kernel", "constants"), SMALL_KERNELS, ids=lambda x: getattr(x, "__name__", "")
)
def test_small_kernels_compile(kernel, constants, capability):
    assert compile_kernel(kernel, capability, constants).asm["cubin"]
