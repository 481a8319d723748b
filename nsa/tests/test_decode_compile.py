"""The decode kernels compile for sm_80 and sm_90, and fit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.ops.spec import NUM_FORCED, BlockSpec
from nsa.ops.triton.decode_tiles import decode_tiles
from nsa.ops.triton.kernels import decode, decode_merge, decode_score, token
from nsa.ops.triton.tiles import padded, parts_of
from nsa.tests.compiling import MAX_SHARED_BYTES, compile_kernel, stack_bytes

SPEC = BlockSpec()
HEADS = [(64, 64, 6), (128, 128, 16), (192, 128, 16), (256, 256, 4)]
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
    **dict.fromkeys(("p_reads", "p_last_reads"), "*i64"),
}
"""Those whose types are not those of the other kernels."""


def constants_of(d_k: int, d_v: int, per_group: int, segments: int, early: bool, paged: bool):
    """By kernel: its constants and options."""
    num_cmp, num_blocks = SPEC.num_cmp(65536), SPEC.num_blocks(65536)
    tiles = decode_tiles(
        *(d_k, d_v, per_group, torch.bfloat16),
        segments=segments,
        num_cmp=num_cmp,
        window=SPEC.w,
        spec=SPEC,
    )
    main, rest = parts_of(d_k)
    dims = dict(DK=d_k, DV=d_v, DK1=main, DK2=rest, DV_PAD=padded(d_v))
    blocks = dict(L=SPEC.l, STEP=SPEC.d, L_SEL=SPEC.l_sel)
    num_parts = -(-num_cmp // tiles.CMP_PART)
    num_more = -(-SPEC.w // tiles.WIN_PART) + -(-NUM_FORCED // tiles.PER_PART)
    num_more += -(-(SPEC.n_sel - NUM_FORCED) // tiles.PER_PART)
    last = dict(EARLY=early, BM=tiles.BM)
    choice = dict(N_SEL=16, N_SEL_PAD=16, LEVELS=2)
    yield (
        decode.attend_compressed,
        dims
        | blocks
        | dict(PAGED=paged, MADE=False, LEVELS=2, SUMS=tiles.SUMS, CMP_PART=tiles.CMP_PART)
        | last
        | dict(UPCAST=False, BN=tiles.BN),
        dict(num_warps=tiles.cmp_warps, num_stages=tiles.cmp_stages),
    )
    yield (
        decode_score.score_blocks,
        blocks
        | dict(PARTS=padded(num_parts), STRIDES_PAD=4, NB=tiles.BLOCKS, SUMS=tiles.SUMS)
        | dict(CMP_PART=tiles.CMP_PART, LEVELS=2, BESIDE=tiles.BESIDE)
        | last
        | dict(BN=tiles.BN),
        dict(num_warps=4),
    )
    each = dict(PER_PAGE=64 * paged, PER_PART=tiles.PER_PART, WIN_PART=tiles.WIN_PART)
    each |= dict(NB=padded(num_blocks), AHEAD=True, UPCAST=False)
    yield (
        decode.attend_tokens,
        dims | blocks | choice | each | last | dict(BN=tiles.TOKENS),
        dict(num_warps=tiles.tok_warps, num_stages=tiles.tok_stages),
    )
    yield (
        decode_merge.merge_parts,
        dict(DV=d_v, DV_PAD=padded(d_v))
        | blocks
        | dict(N_SEL=16, PER_PART=tiles.PER_PART, PARTS=padded(num_parts + num_more))
        | dict(CMP_PART=tiles.CMP_PART, WIN_PART=tiles.WIN_PART, EARLY=early, ADVANCE=True),
        dict(num_warps=tiles.merge_warps),
    )


ORDER = ("wait", "launch_dependents")


@pytest.mark.parametrize(("capability", "segments"), [(80, 4), (90, 4), (90, 128)])
@pytest.mark.parametrize(("d_k", "d_v", "per_group"), HEADS)
def test_decode_kernels_compile_and_fit(d_k, d_v, per_group, segments, capability):
    early, paged = capability == 90, segments > 4
    for kernel, constants, options in constants_of(d_k, d_v, per_group, segments, early, paged):
        compiled = compile_kernel(kernel, capability, constants, pointers=POINTERS, **options)
        assert compiled.metadata.shared <= MAX_SHARED_BYTES[capability], kernel.__name__
        if capability == 90:
            assert stack_bytes(compiled) <= MAX_STACK_BYTES, kernel.__name__
            ptx = compiled.asm["ptx"]
            waits, lets_come = (ptx.index(f"griddepcontrol.{word}") for word in ORDER)
            # The next kernel reads ahead beside the one before this, or beside this one.
            ahead = kernel is decode_score.score_blocks and constants["BESIDE"]
            assert (lets_come < waits) == ahead, kernel.__name__
        if kernel is decode.attend_tokens:
            # What is read before the wait must not come from the L1 cache.
            assert "cp.async.cg" in compiled.asm["ptx"] and "cp.async.ca" not in compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("softmax", [True, False])
def test_rotation_and_gates_compile(softmax, capability):
    constants = dict(D=64, HALF_PAD=32, SOFTMAX=softmax)
    pointers = POINTERS | {"p_logits": "*bf16"}
    compiled = compile_kernel(
        token.rotate_and_gate, capability, constants, pointers=pointers, num_warps=1
    )
    assert compiled.asm["cubin"]
