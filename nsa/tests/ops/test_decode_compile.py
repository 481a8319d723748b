"""The decode kernels compile for sm_80 and sm_90, fit, and read past L1 before they wait."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.ops.spec import BlockSpec
from nsa.ops.triton import rope_and_gate
from nsa.ops.triton.decode import attend, linear, merge, resident, score
from nsa.ops.triton.decode.launch import power_of_2
from nsa.ops.triton.decode.linear import MAX_ROWS
from nsa.ops.triton.decode.tiles import decode_tiles, reads_pass_l1
from nsa.ops.triton.tiles import padded, parts_of
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    compile_kernel,
    compiling_until,
    shared_addresses,
    stack_bytes,
)

SPEC = BlockSpec()
CASES = [  # heads, segments, compute capability: the pairs that occur, in few compilations
    (64, 64, 6, 4, 90),
    (128, 128, 16, 128, 90),
    (128, 128, 16, 4, 80),
    (128, 128, 16, 4, 90),
    (32, 16, 64, 2, 90),
    (192, 128, 16, 4, 90),
    (256, 256, 4, 128, 90),
]
MAX_STACK_BYTES = 32
POINTERS = {
    **{
        f"p_{x}_{branch}{new}": "*bf16"
        for x in "kv"
        for branch in ("cmp", "sel", "win", "raw")
        for new in ("", "_new")
    },
    **dict.fromkeys(("p_k_made", "p_v_made", "p_heads", "p_rotated"), "*bf16"),
    **dict.fromkeys(("p_logits", "p_tops", "p_part", "p_part_lse", "p_cos", "p_sin"), "*fp32"),
    **dict.fromkeys(("p_reads", "p_last_reads", "p_counters"), "*i64"),
}
"""Those whose types are not those of the other kernels."""


def tiles_of(
    d_k: int, d_v: int, per_group: int, segments: int, dtype=torch.bfloat16, spec=SPEC, whole=False
):
    return decode_tiles(
        *(d_k, d_v, per_group, dtype),
        segments=segments,
        num_cmp=spec.num_cmp(65536),
        window=spec.w,
        spec=spec,
        whole=whole,
        processors=132,
    )


def constants_of(
    d_k: int, d_v: int, per_group: int, segments: int, early: bool, paged: bool,
    dtype=torch.bfloat16, spec=SPEC, whole=False,
):  # fmt: skip
    """By kernel: its constants and options."""
    num_cmp, num_blocks = spec.num_cmp(65536), spec.num_blocks(65536)
    tiles = tiles_of(d_k, d_v, per_group, segments, dtype, spec, whole)
    main, rest = parts_of(d_k)
    dims = dict(DK=d_k, DV=d_v, DK1=main, DK2=rest, DV_PAD=padded(d_v))
    blocks = dict(L=spec.l, STEP=spec.d, L_SEL=spec.l_sel)
    num_parts = -(-num_cmp // tiles.CMP_PART)
    num_more = -(-spec.w // tiles.WIN_PART) + -(-spec.num_forced // tiles.PER_PART)
    num_more += -(-(spec.n_sel - spec.num_forced) // tiles.PER_PART)
    last = dict(EARLY=early, BM=tiles.BM)
    choice = dict(N_SEL=16, N_SEL_PAD=16, LEVELS=2)
    choice |= dict(NUM_FIRST=0, NUM_LOCAL=0) if whole else dict(NUM_FIRST=1, NUM_LOCAL=2)
    yield (
        attend.attend_compressed,
        dims
        | blocks
        | dict(PAGED=paged, MADE=False, LEVELS=2, SUMS=tiles.SUMS, CMP_PART=tiles.CMP_PART)
        | last
        | dict(UPCAST=False, BN=tiles.BN),
        dict(num_warps=tiles.cmp_warps, num_stages=tiles.cmp_stages),
    )
    yield (
        score.score_blocks,
        blocks
        | dict(PARTS=padded(num_parts), STRIDES_PAD=4, NB=tiles.BLOCKS, SUMS=tiles.SUMS)
        | dict(CMP_PART=tiles.CMP_PART, LEVELS=2, BESIDE=tiles.BESIDE)
        | last
        | dict(BN=tiles.BN),
        dict(num_warps=4),
    )
    each = dict(PER_PAGE=spec.l_sel * paged, PER_PART=tiles.PER_PART, WIN_PART=tiles.WIN_PART)
    each |= dict(NB=padded(num_blocks), STAGES=tiles.tok_stages)
    ahead = dict(WHOLE=whole, AHEAD=True, UPCAST=False)
    yield (
        attend.attend_tokens,
        dims | blocks | choice | each | ahead | last | dict(BN=tiles.TOKENS),
        dict(num_warps=tiles.tok_warps, num_stages=tiles.tok_stages),
    )
    yield (
        merge.merge_parts,
        dict(DV=d_v, DV_PAD=padded(d_v))
        | blocks
        | dict(N_SEL=16, FORCED=0 if whole else 3)
        | dict(PER_PART=tiles.PER_PART, PARTS=power_of_2(num_more))
        | dict(CMP_PADDED=power_of_2(num_parts))
        | dict(CMP_PART=tiles.CMP_PART, WIN_PART=tiles.WIN_PART, EARLY=early, ADVANCE=True),
        dict(num_warps=tiles.merge_warps),
    )
    if tiles.programs and early:
        own = dict(TOKENS=tiles.TOKENS)
        own |= dict(CMP_PADDED=power_of_2(num_parts), PARTS=power_of_2(num_more))
        own |= dict(NUM=tiles.programs, FIRST_AHEAD=0, FIRST_FREE=16, ADVANCE=True, PHASE=0)
        own |= dict(PAGED=paged, MADE=False, CMP_PART=tiles.CMP_PART)
        each.pop("PER_PAGE")
        yield (
            resident.step_resident,
            dims | blocks | choice | each | own | last | dict(UPCAST=False),
            dict(num_warps=tiles.cmp_warps, num_stages=tiles.cmp_stages),
        )


ORDER = ("wait", "launch_dependents")


@pytest.mark.parametrize(("d_k", "d_v", "per_group", "segments", "capability"), CASES)
def test_decode_kernels_compile_and_fit(d_k, d_v, per_group, segments, capability):
    early, paged = capability == 90, segments > 4
    for kernel, constants, options in constants_of(d_k, d_v, per_group, segments, early, paged):
        compiled = compile_kernel(kernel, capability, constants, pointers=POINTERS, **options)
        assert compiled.metadata.shared <= MAX_SHARED_BYTES[capability], kernel.__name__
        if capability == 90:
            assert stack_bytes(compiled) <= MAX_STACK_BYTES, kernel.__name__
            assert not shared_addresses(compiled), kernel.__name__
            ptx = compiled.asm["ptx"]
            waits, lets_come = (ptx.index(f"griddepcontrol.{word}") for word in ORDER)
            # The next kernel reads ahead beside the one before this, or beside this one.
            ahead = kernel is score.score_blocks and constants["BESIDE"]
            assert (lets_come < waits) == ahead, kernel.__name__
            # What is read before the wait must not come from the L1 cache.
            loads = re.findall(r"ld\.global[.\w:]*", ptx[:waits])
            assert all(".cg" in load for load in loads), kernel.__name__
        if kernel is attend.attend_tokens:
            assert "cp.async.cg" in compiled.asm["ptx"] and "cp.async.ca" not in compiled.asm["ptx"]


def test_where_every_block_is_read_the_kernel_waits_after_reading():
    for segments in (4, 128):
        kernels = constants_of(128, 128, 16, segments, True, segments > 4, whole=True)
        constants, options = next(rest for k, *rest in kernels if k is attend.attend_tokens)
        compiled = compile_kernel(attend.attend_tokens, 90, constants, pointers=POINTERS, **options)
        assert stack_bytes(compiled) <= MAX_STACK_BYTES
        ptx = compiled.asm["ptx"]
        last_wait, lets_come = (ptx.rindex(f"griddepcontrol.{word}") for word in ORDER)
        assert ptx.rindex("cp.async.cg") < last_wait < lets_come and "cp.async.ca" not in ptx
        assert all(".cg" in load for load in re.findall(r"ld\.global[.\w:]*", ptx))


@pytest.mark.parametrize(("width", "rows"), [(768, MAX_ROWS), (3072, 1)])
def test_products_of_few_rows_read_the_matrix_before_they_wait(width, rows):
    names = ("x", "norm", "w", "bias", "gate", "more", "out", "w2", "bias2", "out2")
    constants = dict(WIDTH=width, ROWS=rows, SILU=False, EARLY=True, BK=padded(width))
    constants |= dict(BN=linear.TILE // padded(width))
    pointers = {f"p_{name}": "*bf16" for name in names}
    options = dict(num_warps=linear.WARPS)
    compiled = compile_kernel(linear.few_rows, 90, constants, pointers=pointers, **options)
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait", 1)
    # 16 bytes at a time and past L1: of both matrices and the norm; nothing that kernels write.
    assert set(re.findall(r"ld\.global[.\w:]*", before)) == {"ld.global.cg.v4.b32"}
    assert "griddepcontrol.launch_dependents" in after and stack_bytes(compiled) == 0


AHEAD = {  # Dk, Dv, dtype, l_sel, paged: whether all copies have 16 bytes
    (8, 8, "bf16", 64, False): True,  # Hkv * max_len * D need not be a multiple of 16
    (20, 12, "fp32", 64, False): True,
    (64, 64, "bf16", 64, False): True,
    (16, 16, "bf16", 32, False): False,  # too small a tile: 8 bytes for each thread
    (80, 80, "bf16", 32, True): False,  # of the second part of the keys
    (20, 12, "bf16", 64, False): False,  # rows of 40 and of 24 bytes
}


def test_decode_reads_ahead_exactly_where_the_compiler_reads_past_l1():
    """With strides of which nothing is known, as those of a cache of odd length."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for (d_k, d_v, name, l_sel, paged), ahead in AHEAD.items():
        heads, spec = (d_k, d_v, 6, 4), BlockSpec(l_sel=l_sel)
        tiles = tiles_of(*heads, dtypes[name], spec)
        case = f"{d_k}, {d_v}, {name}, {l_sel}, paged {paged}"
        assert reads_pass_l1(d_k, d_v, dtypes[name], tiles) == ahead, case
        kernels = constants_of(*heads, True, paged, dtypes[name], spec)
        constants, options = next(rest for k, *rest in kernels if k is attend.attend_tokens)
        pointers = {key: kind.replace("bf16", name) for key, kind in POINTERS.items()}
        with compiling_until("ptx"):
            compiled = compile_kernel(
                *(attend.attend_tokens, 90, constants, name), pointers=pointers,
                strides_aligned=False, **options,
            )  # fmt: skip
        ptx = compiled.asm["ptx"]
        through_l1 = "cp.async.ca" in ptx or re.search(r"ld\.global[.\w:]*evict_first", ptx)
        assert bool(through_l1) != ahead, case


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("softmax", [True, False])
def test_rotation_and_gates_compile(softmax, capability):
    constants = dict(D=64, HALF_PAD=32, SOFTMAX=softmax, EARLY=capability >= 90)
    pointers = POINTERS | {"p_logits": "*bf16"}
    compiled = compile_kernel(
        rope_and_gate.rotate_and_gate_kernel, capability, constants, pointers=pointers, num_warps=1
    )
    assert compiled.asm["cubin"]
