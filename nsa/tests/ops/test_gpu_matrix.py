"""The kernels over the whole range of shapes, against the torch path in float64."""

import pytest
import torch

from nsa import BlockSpec, select_blocks
from nsa.ops import plan_attention
from nsa.tests.support import matrix
from nsa.tests.support.gpu import DEVICE, compare, device_inputs, needs_gpu, on_device, on_gpu
from nsa.tests.support.helpers import Case

DTYPES = matrix.DTYPES
TABLE = """
dtype     S  B  Hkv   G   Dk   Dv   l   d  l_sel  n_sel     w  docs
bf16      1  2    2   6   64   64  32  16     64     16   512  -
fp16      1  1    2   7   17   33  16   8     16      3     1  -
fp32      1  1    1   4  128  128  32  16     64     16    17  -
bf16      2  1    2   8   64  128  16  16    128      3     1  -
fp16      2  2    1   3   20   12  32   8     32      4     2  -
fp32      2  1    2   2   80   48  16   8     16      8    64  -
fp16     31  2    2   2   64  128  16   8     96      8   512  -
bf16     31  1    1   6  256  256  16  16     16     33    64  -
fp32     31  1    2   7  192  128  32  16     32     64  2048  -
bf16     31  2    1  12  192  128  32   8    128     16    64  -
fp16     31  1    2  16   96   32  64  32     64      4    17  1+13+17
fp32     31  1    1  64   20   12  32  16     64      3     2  -
fp16     64  1    3   3   20   12  64  32     64      8     1  63+1
bf16     64  2    2   5   80   48  32  16     48      4     1  -
fp16     64  1    1   7  128  128  32  32    128     33     2  31+33
fp16     64  1    2  16   16   16  16  16     48     16  2048  20+44
fp16     64  1    1  24  192  128  48  16     16     64    17  -
fp32     64  1    2  32   16   16  16   8     32      4    64  1+31+32
fp32     65  2    3   1   96   32  64  16     48     64  2048  -
bf16     65  1    2   3   16   16  32  32    128     64   512  -
fp32     65  1    2   4   20   12  16  16     96      4  2048  1+64
fp16     65  1    1   6   80   48  48  16     64     16   512  50+15
fp16     65  1    2  12   17   33  32  16     96     33     2  32+33
fp32     65  1    1  16  128  128  32   8     96     64     1  -
bf16     65  1    1  64   64   64  16   8     16     64    64  64+1
bf16   1000  2    3   1   96   32  32   8     96     16    17  -
fp32   1000  1    2   2   80   48  16  16     64     64     2  1+499+500
bf16   1000  1    2   3   17   33  32  32     96      3    17  -
fp16   1000  2    2   4   16   16  48  16     16     33     1  -
fp16   1000  1    1   5  256  256  32   8     48      3  2048  999+1
fp16   1000  1    2   6   16   16  64  16     96      3     2  -
fp16   1000  2    1   8   64   64  16   8     64     16    64  -
bf16   1000  1    2  16  128  128  64  32     32     33   512  -
fp32   1000  1    1  24   64  128  32   8     16      4   512  333+600+67
fp16   1000  1    1  32   20   12  32  16    128     16     2  -
fp16   1000  1    1  64  192  128  64  16     48      8    64  -
fp16   4100  1    2   1   80   48  16  16     32     64  2048  1+3000+1099
bf16   4100  2    2   2   20   12  64  16     32     33    17  -
fp32   4100  1    1   3  128  128  48  16     16      3  2048  -
bf16   4100  1    2   4   16   16  64  16     64     16   512  100+4000
fp32   4100  1    1   5   17   33  32  32     32     16     1  2050+2050
fp32   4100  1    2   6   64   64  32  16    128      8    17  -
bf16   4100  1    2   7   20   12  48  16     48      4     2  4099+1
fp32   4100  1    1   8  192  128  64  32     96      3    64  3500+600
fp32   4100  1    1  12  256  256  16   8     64     33     1  -
bf16   4100  1    2  24   96   32  32   8    128      8  2048  -
bf16   4100  1    1  32   64  128  48  16    128      3   512  31+4069
bf16   4100  1    1   6   64   64  32  16     64      4   512  -
bf16   4100  1    1   4   64   64  32  16     96      3    64  -
bf16   4100  1    2   1   64   64  32  16    128      8    64  -
fp16   4100  1    1   8   32   64  32  16    192      3    64  -
bf16   4100  1    1   6   64   64  32  16    256      3    64  -
fp32   4100  1    1   4   64   64  32  16    256      3    64  -
bf16   4100  1    1   4   64   64  32  16    512      3    64  -
bf16   4100  1    1   4   64   64  32  32   1024      3    64  -
bf16   1000  1    1   4   64   64   2   1      1     16    64  300+700
bf16   4100  1    2  16  128  128  32  16     64      4   512  -
"""
"""Every value of every column meets every dtype; what a query selects goes from a small part of
the past, where kernels go by key blocks, to all of it."""


def read_row(line: str) -> tuple[str, Case]:
    dtype, *sizes, docs = line.split()
    S, B, Hkv, G, Dk, Dv, l, d, l_sel, n_sel, w = map(int, sizes)
    spec = BlockSpec(l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w)
    doc_lens = () if docs == "-" else tuple(map(int, docs.split("+")))
    return dtype, Case(spec, S, B, Hkv, G, Dk, Dv, doc_lens)


CASES = [read_row(line) for line in TABLE.strip().splitlines()[1:]]
GIVEN = [
    ("bf16", Case(BlockSpec(), S=5000, Hkv=2, G=6, Dk=64, Dv=64)),
    ("bf16", Case(BlockSpec(), S=5000, Hkv=1, G=16, Dk=128, Dv=128)),
    ("fp32", Case(BlockSpec(n_sel=4), S=3000, Hkv=2, G=3, Dk=64, Dv=32, docs=(1, 2300, 699))),
]


def test_the_table_pairs_every_value_with_every_dtype():
    axes = {
        "S": {1, 2, 31, 64, 65, 1000, 4100},
        "G": {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64},
        "dims": {(16, 16), (64, 64), (128, 128), (192, 128), (256, 256)}
        | {(64, 128), (80, 48), (96, 32), (20, 12), (17, 33)},
        "l_d": {(16, 8), (16, 16), (32, 8), (32, 16), (32, 32), (48, 16), (64, 16), (64, 32)},
        "l_sel": {16, 32, 48, 64, 96, 128},
        "n_sel": {3, 4, 8, 16, 33, 64},
        "w": {1, 2, 17, 64, 512, 2048},
        "packed": {False, True},
    }
    seen = {(name, value, dtype) for dtype, case in CASES for name, value in values(case).items()}
    pairs = {(name, v, dtype) for name, axis in axes.items() for v in axis for dtype in DTYPES}
    assert pairs <= seen, sorted(map(str, pairs - seen))
    assert all(not case.docs or sum(case.docs) == case.S for _, case in CASES)


def values(case: Case) -> dict[str, object]:
    s = case.spec
    return {
        "S": case.S,
        "G": case.G,
        "dims": (case.Dk, case.Dv),
        "l_d": (s.l, s.d),
        "l_sel": s.l_sel,
        "n_sel": s.n_sel,
        "w": s.w,
        "packed": bool(case.docs),
    }


def over(cases):
    """Parametrize over cases, on a GPU only; ids spell dtype and shape."""
    params = [
        pytest.param(DTYPES[dtype], case, marks=needs_gpu, id=f"{dtype}-{case}")
        for dtype, case in cases
    ]
    return pytest.mark.parametrize(("dtype", "case"), params)


@over(CASES)
def test_outputs_and_gradients_equal_float64(dtype, case):
    plan = plan_attention("cuda", dtype, head_dims=(case.Dk, case.Dv))
    assert (plan.backend, plan.selection) == ("triton", "fast"), str(plan)
    compare(case, dtype)


@over(CASES)
def test_selections_equal_float64_but_for_near_ties(dtype, case):
    case, inputs = on_device(case), device_inputs(case, dtype)
    q, k_cmp, args = inputs["q"], inputs["k_cmp"], dict(cu_seqlens=case.cu_seqlens)
    expected = select_blocks(q.double(), k_cmp.double(), case.spec, backend="torch", **args)
    actual = select_blocks(q, k_cmp, case.spec, backend="triton", **args)
    differs = (actual != expected).any(dim=-1)
    assert differs.sum() <= 1 + 0.002 * differs.numel()


@over(GIVEN)
def test_every_row_may_choose_the_first_block_alone(dtype, case):
    selection = no_blocks(case)
    selection[..., 0] = 0
    compare(case, dtype, selection)


@over(GIVEN)
def test_a_row_may_choose_nothing(dtype, case):
    selection = no_blocks(case)
    selection[:, ::3, :, 0] = 0
    compare(case, dtype, selection)


@over([("bf16", Case(BlockSpec(n_sel=4), S=2000, Hkv=2, G=6, Dk=64, Dv=64))])
def test_gates_may_be_float32_beside_bfloat16(dtype, case):
    compare(case, dtype, gates_dtype=torch.float32)


@over([("bf16", Case(BlockSpec(), S=40, B=1100, Hkv=2, G=32, Dk=16, Dv=16))])
def test_batch_times_heads_may_exceed_what_a_grid_holds(dtype, case):
    """CUDA limits the second dimension of a grid to 65535."""
    compare(case, dtype)


def no_blocks(case: Case) -> torch.Tensor:
    size = (case.B, case.S, case.Hkv, case.spec.n_sel)
    return torch.full(size, -1, dtype=torch.int32, device=DEVICE)


@pytest.mark.gpu
@on_gpu
@pytest.mark.timeout(1200)
def test_shapes_drawn_at_random_equal_float64_each_in_a_process():
    """`python -m nsa.tests.support.matrix --cases 400` draws more."""
    results = matrix.run_all(matrix.draw(seed=1, count=24), workers=8, seconds=900)
    assert not {case: verdict for case, verdict in results.items() if verdict}
