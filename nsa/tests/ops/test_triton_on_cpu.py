"""The kernels without a GPU: interpreted, and compiled for sm_80 and sm_90."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
import triton.language as tl

from nsa.ops.spec import BlockSpec
from nsa.ops.triton import compress as compression
from nsa.ops.triton import (
    cross_entropy,
    documents,
    heads,
    problem,
    tile,
)
from nsa.ops.triton.bands import banded_backward, banded_forward
from nsa.ops.triton.choice import best, selection
from nsa.ops.triton.choice.scores import group_scores, token_scores
from nsa.ops.triton.selected import block_index, by_block_backward, by_block_forward, by_query
from nsa.ops.triton.tiles import (
    block_tiles,
    dkv_tiles,
    dq_tiles,
    fits_blocks,
    fits_dq,
    forward_tiles,
    padded,
    parts_of,
    query_tiles,
    score_tiles,
    token_tiles,
)
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    compile_kernel,
    compiling_until,
    shared_addresses,
    stack_bytes,
)

WGMMA = "ttng.warp_group_dot"
"""Its name in Triton's own code, from which the instruction is made."""
MAX_STACK_BYTES = {(64, 64): 160, (128, 128): 256, (192, 128): 512}
"""Registers that do not fit and live in slow memory, per thread: measured limits, not wishes."""


INTERPRETED = {
    "training": [
        "ops/test_triton.py",
        "ops/test_choice.py",
        "ops/test_triton_sparse.py",
        "ops/test_replay.py",
    ],
    "decode, loss and routes": [
        "ops/test_triton_decode.py",
        "ops/test_decode_ways.py",
        "ops/test_launch_device.py",
        "ops/test_loss_kernel.py",
        "ops/test_heads.py",
        "ops/test_routes.py",
        "model/test_fused.py",
        "parallel/test_windows.py",
    ],
    "Gluon": ["ops/test_gluon_on_cpu.py"],
}


@pytest.mark.parametrize("files", INTERPRETED.values(), ids=INTERPRETED)
def test_kernels_equal_the_oracle_in_the_interpreter(files):
    """A process of its own: the switch counts at import, and a bad pointer would be a crash."""
    paths = [f"nsa/tests/{file}" for file in files]
    command = ["env", "TRITON_INTERPRET=1", "OMP_NUM_THREADS=1", sys.executable, "-m", "pytest"]
    command += ["-q", "-rp", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Division by zero in numpy is how the interpreter computes log2(0) = -inf.
    command += ["-W", "ignore::RuntimeWarning", *paths]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in paths:
        assert f"PASSED {path}::" in done.stdout, f"no test of {path} ran"


def attention_cases(heads, dtype=torch.bfloat16, l_sel=64, selects=(False, True)):
    """Kernel, constants and tiles of the attention kernels for (Dk, Dv, G)."""
    spec = BlockSpec(l_sel=l_sel)
    for d_k, d_v, per_group in heads:
        main, rest = parts_of(d_k)
        dims = dict(DK=d_k, DV=d_v, DK1=main, DK2=rest, DV_PAD=padded(d_v))
        for select in selects:
            branch = dims | dict(L_SEL=l_sel, SELECT=select, HAS_DOCS=False, UPCAST=False)
            for number in (1,) if select else (0, 2):
                yield banded_forward.band_forward, branch, forward_tiles(d_k, d_v, dtype, number)
            yield banded_backward.band_dkv, branch, dkv_tiles(d_k, d_v, dtype)
            walked = branch | dict(HAS_CMP=True, HAS_WIN=True)
            yield banded_backward.band_dq, walked, dq_tiles(d_k, d_v, dtype)
        flags = dict(HAS_DOCS=False, UPCAST=False)
        scores = dict(DK1=main, DK2=rest, STRIDES=4, OVERLAP=2, LEVELS=2, LARGEST=False) | flags
        yield group_scores, scores, score_tiles(d_k, dtype)
        if l_sel == 128:
            tokens = dict(DK1=main, DK2=rest, L_SEL=l_sel, TILES=16, UPCAST=False)
            yield token_scores, tokens, token_tiles(d_k, l_sel, dtype)
        if not fits_blocks(d_k, d_v, spec, dtype):
            continue
        sizes = (d_k, d_v, per_group, spec, dtype)
        chosen = dims | dict(N_SEL=16, L_SEL=l_sel)
        if per_group < 9 and fits_dq(d_k, d_v):
            blocks = chosen | flags | dict(NARROW=True)
            yield by_block_forward.block_forward, blocks, block_tiles(*sizes, "forward")
            for ordered in (False, True):
                flagged = blocks | dict(WITH_DQ=True, ORDERED=ordered)
                yield by_block_backward.block_backward, flagged, block_tiles(*sizes, "backward")
        else:
            yield by_query.query_forward, chosen | flags, query_tiles(*sizes)
            added = chosen | flags | dict(ADDS=True)
            yield by_query.query_dq, added, query_tiles(*sizes, backward=True)
            blocks = chosen | flags | dict(NARROW=True, WITH_DQ=False, ORDERED=False)
            yield by_block_backward.block_backward, blocks, block_tiles(*sizes, "dkv")


def named(cases):
    return {
        f"{kernel.__name__}-{tiles.BM}x{tiles.BN}-" + "-".join(map(str, constants.values())): case
        for case in cases
        for kernel, constants, tiles in [case]
    }


CASES = named(
    [
        *attention_cases(((64, 64, 6),), selects=(False,)),
        *attention_cases(((128, 128, 4), (128, 128, 16))),
        *attention_cases(((192, 128, 16),), selects=(True,)),
        *attention_cases(((128, 128, 4),), l_sel=128, selects=()),
    ]
)
"""The heads of the paper, of the 125M model and of 192 and 128 numbers."""


def once_ordered(cases):
    """Names of cases; sums in a fixed order for the first shape, the others in `make sweep`."""
    ordered = [name for name, (_, constants, _) in cases.items() if constants.get("ORDERED")]
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow if name in ordered[1:] else ()) for name in cases]


@pytest.mark.parametrize("name", once_ordered(CASES))
def test_attention_kernels_compile_and_fit(name):
    """For sm_90; test_triton_fits.py has the other GPUs."""
    kernel, constants, tiles = CASES[name]
    sized = constants | dict(BM=tiles.BM, BN=tiles.BN)
    compiled = compile_kernel(kernel, 90, sized, **tiles.options)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES[90]
    instruction = "mma.sync" if tiles.BM < 64 and kernel in ROWS_FIRST else "wgmma.mma_async"
    assert instruction in compiled.asm["ptx"]
    assert ("wgmma" in compiled.asm["ptx"]) == (WGMMA in compiled.asm["ttgir"])
    assert not shared_addresses(compiled)
    dims = (constants.get("DK", 64), constants.get("DV", 64))
    allowed = MAX_STACK_BYTES.get(dims, 512)
    assert stack_bytes(compiled) <= max(allowed, 256 if tiles.max_registers else 0)


def once_each(cases):
    """The first form of each kernel."""
    first = {}
    for case in cases:
        first.setdefault(case[0], case)
    return named(first.values())


@pytest.mark.parametrize("name", OLDER := once_each(CASES.values()))
def test_attention_kernels_fit_the_oldest_gpu(name):
    kernel, constants, tiles = OLDER[name]
    sized = constants | dict(BM=tiles.BM, BN=tiles.BN)
    with compiling_until("memory"):
        compiled = compile_kernel(kernel, 80, sized, **tiles.options)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES[80]


NARROW = once_each(
    [
        *attention_cases(((16, 16, 6), (16, 16, 16)), selects=(False,)),
        *attention_cases(((16, 16, 4),), l_sel=128, selects=()),
    ]
)
"""Narrow heads: the oldest instruction takes many lines for wide ones."""


def test_attention_kernels_compile_for_the_oldest_gpu():
    assert {case[0] for case in NARROW.values()} == {case[0] for case in OLDER.values()}
    for name, (kernel, constants, tiles) in NARROW.items():
        sized = constants | dict(BM=tiles.BM, BN=tiles.BN)
        assert compile_kernel(kernel, 80, sized, **tiles.options).asm["cubin"], name


def some_of(kernels, heads, l_sel, kind):
    """Of the forms of these heads, those of some kernels; sums in a fixed order in bf16 alone."""
    cases = attention_cases((heads,), kind, l_sel, selects=(True,))
    ordered = kind == torch.bfloat16
    return [case for case in cases if case[0] in kernels and case[1].get("ORDERED", 0) <= ordered]


BANDS = (
    banded_forward.band_forward,
    banded_backward.band_dkv,
    banded_backward.band_dq,
    group_scores,
)
BLOCKS = (by_block_forward.block_forward, by_block_backward.block_backward)
ROWS_FIRST = (by_query.query_forward, by_query.query_dq)
"""Kernels whose products have the rows first: fewer than 64 take the older instruction."""
WIDEST = {
    "bf16": named(
        [
            *some_of(BANDS, (256, 256, 8), 128, torch.bfloat16),
            *some_of(BLOCKS, (64, 64, 8), 128, torch.bfloat16),
            *some_of(ROWS_FIRST, (128, 128, 64), 64, torch.bfloat16),
        ]
    ),
    # Wide heads in fp32 take the longest to compile; `make sweep` has them.
    "fp32": named(
        [
            *some_of(BANDS[:2], (256, 256, 8), 128, torch.float32),
            *some_of((*BANDS[2:], *BLOCKS), (32, 32, 4), 128, torch.float32),
            *some_of(ROWS_FIRST, (64, 64, 64), 64, torch.float32),
        ]
    ),
}


@pytest.mark.parametrize(
    ("dtype", "name"), [(dtype, name) for dtype, cases in WIDEST.items() for name in cases]
)
def test_the_widest_heads_and_blocks_fit_shared_memory(dtype, name):
    """In fp32 there is no wgmma, so that no layouts of its operands can share an address."""
    kernel, constants, tiles = WIDEST[dtype][name]
    sized = constants | dict(BM=tiles.BM, BN=tiles.BN)
    with compiling_until("memory" if dtype == "fp32" else "ptx"):
        compiled = compile_kernel(kernel, 90, sized, dtype, **tiles.options)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES[90]
    if dtype == "fp32":
        assert "tt.dot" in compiled.asm["ttgir"] and WGMMA not in compiled.asm["ttgir"]
    else:
        assert not shared_addresses(compiled)


BACKWARD = (
    banded_backward.band_dkv,
    banded_backward.band_dq,
    by_block_backward.block_backward,
)
FORWARD = (banded_forward.band_forward, by_block_forward.block_forward, by_query.query_forward)
UNEQUAL = named(
    (kernel, constants | dict(HAS_DOCS=docs), tiles)
    for heads, kernels, docs in (
        (((16, 64, 4), (40, 128, 4)), BACKWARD, True),
        (((24, 16, 4), (64, 32, 16)), FORWARD, False),
    )
    for case in attention_cases(heads, selects=(False,))
    for kernel, constants, tiles in [case]
    if kernel in kernels
)
"""Operands of several layouts in one kernel."""


@pytest.mark.parametrize("name", once_ordered(UNEQUAL))
def test_operands_of_two_layouts_never_share_an_address(name):
    kernel, constants, tiles = UNEQUAL[name]
    sized = constants | dict(BM=tiles.BM, BN=tiles.BN)
    with compiling_until("ptx"):
        assert not shared_addresses(compile_kernel(kernel, 90, sized, **tiles.options))


@triton.jit  # type: ignore[untyped-decorator]
def one_pass_backward(
    p_q, p_k, p_v, p_dout, p_dq, p_dk, p_dv, N,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients of attention to BN keys, as small as shows what ptxas 12.8 does to it."""
    o_d = tl.arange(0, D)
    at = tl.arange(0, BN)[:, None] * D + o_d[None, :]
    b_k, b_v = tl.load(p_k + at), tl.load(p_v + at)
    b_dk, b_dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    for i in range(0, N, BM):
        row = (i + tl.arange(0, BM))[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q + row)
        b_p = tl.math.exp2(tl.dot(b_k, tl.trans(b_q)))
        b_dout = tl.load(p_dout + row)
        b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv)
        b_ds = (b_p * tl.dot(b_v, tl.trans(b_dout))).to(b_q.dtype)  # at the address of dout
        b_dk = tl.dot(b_ds, b_q, b_dk)
        tl.store(p_dq + row, tl.trans(tl.dot(tl.trans(b_k), b_ds)).to(b_q.dtype))
    tl.store(p_dk + at, b_dk)
    tl.store(p_dv + at, b_dv)


def test_the_check_finds_what_ptxas_compiles_to_wrong_code():
    sizes = dict(BM=16, BN=128, D=64)
    with compiling_until("ptx"):
        once, twice = (
            compile_kernel(one_pass_backward, 90, sizes, num_warps=4, num_stages=stages)
            for stages in (1, 2)
        )
    assert len(shared_addresses(once)) == 1
    assert not shared_addresses(twice)
    indices = "add.s64 %rd2, %rd1, 52776558133248; add.s64 %rd3, %rd1, 59373627899904;"
    assert not shared_addresses(SimpleNamespace(asm={"ptx": indices}))


LAYER = dict(COLUMNS=1600, HQ=12, HKV=2, DK=64, DV=64, SOFTMAX=True, HALF_PAD=32, DV_PAD=64)
LAYER |= dict(HQ_PAD=16, TOKENS=16, ROWS_Q=64, ROWS_KV=32)
PACKED = dict(L_SEL=64, NW=32, HAS_DOCS=True)
SMALL_KERNELS = [
    (
        best.choose_blocks,
        dict(L_SEL=64, N_SEL=16, N_SEL_PAD=16, STRIDES=4, OVERLAP=2, LEVELS=2, NB=1024, NW=32)
        | dict(HAS_DOCS=True, HAS_BITS=True, LARGEST=True, BQ=1),
    ),
    (selection.pack_selection, PACKED | dict(N_SEL=16, N_SEL_PAD=16, HAS_BITS=True, BQ=16)),
    (selection.pack_selection, PACKED | dict(N_SEL=32, N_SEL_PAD=32, HAS_BITS=False, BQ=1)),
    (by_block_forward.merge_parts, dict(DV=128, DV_PAD=128, N_SEL=16, N_PAD=16, G_PAD=4)),
    (by_block_backward.sum_places, dict(DK=128, DK_PAD=128, N_SEL=16, G_PAD=4)),
    (by_block_backward.sum_items, dict(D=128, D_PAD=128, L_SEL=64, HAS_DOCS=True, BN=64)),
    (block_index.count_choices, dict(N_SEL=16, N_SEL_PAD=16, HAS_DOCS=True, BQ=64)),
    (block_index.cut_bins, dict(BLOCK=8192, NB=1024)),
    (block_index.list_choices, dict(N_SEL=16, N_SEL_PAD=16, HAS_DOCS=True, BQ=4)),
    (banded_backward.sum_parts, dict(BLOCK=1024)),
    (cross_entropy.softmax_loss, dict(IGNORED=-100, BLOCK=4096, WITH_GRAD=True)),
    (
        tile.gate_backward,
        dict(DV=128, DV_PAD=128, BY_TOKEN=True, BT=8, BH=4, p_dcmp=None, p_dwin=None),
    ),
    (tile.gate_backward, dict(DV=128, DV_PAD=128, BY_TOKEN=False, BT=8, BH=4)),
    (heads.split_product, LAYER),
    (heads.join_gradients, LAYER | dict(REST_PAD=32)),
    (documents.finite_rows, dict(D=80, D_PAD=128, ARE_KEYS=True, BM=16)),
    (
        compression.mean_forward,
        dict(L=32, STRIDE=16, D=128, D_PAD=128, HAS_DOCS=True, BLOCKS=4, TILE=32),
    ),
    (compression.mean_backward, dict(L=32, STRIDE=16, D=128, D_PAD=128, HAS_DOCS=True, ROWS=32)),
]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("kernel", "constants"), SMALL_KERNELS, ids=lambda x: getattr(x, "__name__", "")
)
def test_small_kernels_compile(kernel, constants, capability):
    assert compile_kernel(kernel, capability, constants).asm["cubin"]


def test_what_only_moves_numbers_moves_16_bytes_at_a_time():
    sums = dict.fromkeys(("p_x", "p_y"), "*fp32")
    zeros = compile_kernel(block_index.zero_two, 90, dict(BLOCK=4096), pointers=sums).asm["ptx"]
    # 32 numbers of a thread in full blocks; what is behind a mask is for the last one.
    assert len(re.findall(r"st\.global\.v4", zeros)) >= 8
    for kernel, constants in ((heads.split_product, {}), (heads.join_gradients, dict(REST_PAD=32))):
        ptx = compile_kernel(kernel, 90, LAYER | constants).asm["ptx"]
        # 8 numbers of a row: of 12 heads of q 3 times 2 x 2, of each key 2, of each value 2.
        assert len(re.findall(r"st\.global\.v4", ptx)) == 12 + 3 * 2 + 3 * 2, kernel


def test_queries_with_an_offset_choose_among_many_blocks_in_registers():
    """Of 262144 tokens, by scores that are folded into blocks; one warp would spill."""
    folded = dict(STRIDES=4, OVERLAP=2, LEVELS=2, LARGEST=False, HAS_DOCS=True)
    chosen = dict(L_SEL=64, N_SEL=16, N_SEL_PAD=16, NUM_FIRST=1, NUM_LOCAL=2, NB=4096, NW=128)
    chosen |= dict(HAS_BITS=False, BQ=1)
    warps = 4096 // best.BLOCKS_PER_WARP
    compiled = compile_kernel(best.choose_blocks, 90, chosen | folded, num_warps=warps)
    assert stack_bytes(compiled) == 0
    tiles = score_tiles(128, torch.bfloat16)
    sizes = dict(DK1=128, DK2=0, UPCAST=False, BM=tiles.BM, BN=tiles.BN) | folded
    compiled = compile_kernel(group_scores, 90, sizes, **tiles.options)
    assert stack_bytes(compiled) <= MAX_STACK_BYTES[128, 128]


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_selection_and_index_are_linear_in_the_tokens(packed, monkeypatch):
    """Bytes of a token, of the bits where they are the mask, and of the temporary counts, too."""
    for module in (block_index, selection):
        monkeypatch.setattr(module, "start", lambda *_: None)
    monkeypatch.setattr(problem, "capability_of", lambda _: (9, 0))
    counts = []
    monkeypatch.setattr(block_index, "fill_zeros", lambda *given: counts.append(given[2]))
    per_token = []
    for length in (1 << 16, 1 << 18, 1 << 20, 1 << 23):
        docs = [1 << 11] * (length >> 11) if packed else [length]
        q, v = (torch.empty(1, length, h, 64, device="meta") for h in (12, 2))
        one = problem.Problem(q, v, BlockSpec(), 0.125, docs)
        assert one.masked == packed
        ids = torch.empty(1, length, 2, 16, dtype=torch.int32, device="meta")
        one.__dict__["documents"] = None  # they are linear, and need memory
        chosen = selection.pack_given(one, ids, has_bits=one.masked)
        kept = [*chosen, *([] if packed else block_index.list_queries(one, chosen)), *counts]
        assert len(counts) == (not packed)
        per_token.append(sum(x.nbytes for x in kept) / length)
        counts.clear()
    # Of a KV head and choice: an id, its query and place; half a count; a few bins.
    assert max(per_token) <= 2 * 16 * (4 + 4 + 2 + 2 + 2)
    assert per_token[-1] <= 1.1 * per_token[0]
