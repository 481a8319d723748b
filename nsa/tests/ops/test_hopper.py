"""Window and compressed branch on Hopper: which calls take the kernels, that they compile, and the
oracle.

Without a GPU the kernels are compiled here, and test_gluon_on_cpu.py runs them as Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from torch import Tensor

from nsa import BlockSpec
from nsa.ops import machine
from nsa.ops.checks import Layout
from nsa.ops.triton import problem
from nsa.ops.triton.hopper import division
from nsa.ops.triton.operators import nsa_attention
from nsa.ops.triton.problem import Hopper, Problem
from nsa.tests.support import gpu
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    compiling_until,
    ptxas_report,
    reused_barriers,
    shared_addresses,
    spilled_bytes,
    starting_on,
)
from nsa.tests.support.gpu import device_dout, device_inputs, forward_backward, needs_gpu
from nsa.tests.support.helpers import Case

KERNELS = {"gluon_forward", "gluon_dkv", "gluon_dq"}
BANDS = {"band_forward", "band_dkv", "band_dq"}
NEVER = problem.MAX_TOKENS + 1
ALL, NONE = Hopper(*(True,) * 6), Hopper()
"""ALL: of the window and the compressed branch, beside a selected branch that reads its blocks."""
HOPPER, AMPERE, BLACKWELL = ((major, 0) for major in (9, 8, 10))


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    """A problem keeps which kernels it runs, and tests change that."""
    problem.forget()
    yield
    problem.forget()


def take_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Short calls take the kernels, too, and at both head dims; never in one pass."""
    patch.setattr(problem, "FULL_ENOUGH", 0.0)
    patch.setattr(problem, "COMPRESSED_FROM", 0)
    patch.setattr(problem, "COMPRESSED_DIMS", (64, 128))
    patch.setattr(problem, "MASKED_DIMS", (64, 128))
    patch.setattr(problem, "MASKED_TILES", 0)
    patch.setattr(problem, "ONE_PASS_FROM", NEVER)


# --- which calls take the kernels ---


def problem_of(
    dims: int | tuple[int, int] = 128,
    group: int = 4,
    heads: int = 8,
    seq_len: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    **more: Any,
) -> Problem:
    d_k, d_v = (dims, dims) if isinstance(dims, int) else dims
    q = torch.empty(batch, seq_len, heads * group, d_k, dtype=dtype, device="meta")
    v = torch.empty(batch, seq_len, heads, d_v, dtype=dtype, device="meta")
    lens = more.pop("lens", [seq_len])
    return Problem(q, v, more.pop("spec", BlockSpec()), 0.1, lens, **more)


def route(*args: Any, **more: Any) -> Hopper:
    return problem_of(*args, **more).hopper


def pretend(monkeypatch: pytest.MonkeyPatch, *facts: Any, **more: Any) -> None:
    one = machine.Machine("cuda", *facts, **more)
    monkeypatch.setattr(machine, "_machine_of", lambda device: one)


def test_heads_of_64_and_128_in_16_bits_take_the_kernels(monkeypatch):
    pretend(monkeypatch, HOPPER)
    assert route() == route(dtype=torch.float16) == route(group=16, heads=4) == ALL
    assert route(64, 6, 2) == ALL._replace(queries=False, cmp_forward=False)
    for other in (
        *(route(dims) for dims in (32, 96, 192, 256, (128, 64), (64, 128))),
        route(dtype=torch.float32),
        route(lens=[8000, 192]),
        route(query_lens=[8192], offsets=[0]),
    ):
        assert other == NONE


def test_a_selected_branch_that_masks_the_past_takes_the_kernels(monkeypatch):
    pretend(monkeypatch, HOPPER)
    taken = Hopper(True, True, False, True, True, True, True, True, True)
    assert route(64, 6, 2, seq_len=2048, batch=16) == taken
    # One row has too little to do, from 4096 tokens on blocks are read, and D 128 was not timed.
    assert not any(any(route(64, 6, 2, seq_len=n)[6:]) for n in (2048, 4096))
    assert not any(route(128, 6, 2, seq_len=2048, batch=16)[6:])
    # Blocks that a tile of keys does not lie in, bits in two words, documents.
    for n, more in (
        (2048, {"spec": BlockSpec(l_sel=32, n_sel=32)}),
        (4096, {"spec": BlockSpec(n_sel=32)}),
        (2048, {"lens": [2000, 48]}),
    ):
        assert not any(route(64, 6, 2, seq_len=n, batch=16, **more)[6:])
    assert route(64, 6, 2, seq_len=4096, batch=16, spec=BlockSpec(l_sel=128)).sel_forward


def test_odd_groups_take_the_kernel_of_keys_alone(monkeypatch):
    pretend(monkeypatch, HOPPER)
    keys = Hopper(keys=True, cmp_keys=True)
    assert route(group=1) == route(group=5) == route(64, 7) == keys
    assert route(64, 3) == keys._replace(forward=True)  # three heads at a time


def test_without_compressed_keys_their_kernels_are_not_taken(monkeypatch):
    pretend(monkeypatch, HOPPER)
    spec = BlockSpec(l=8192, d=8192, l_sel=8192)
    assert route(seq_len=8191, spec=spec)[:6] == (True, True, True, False, False, False)


def test_short_sequences_that_leave_processors_idle_take_the_band_kernels(monkeypatch):
    pretend(monkeypatch, HOPPER)
    # 128 programs of 128 keys; 4096 tokens of two groups are 64, and 3 rounds of 132 need 300.
    assert [route(heads=2, seq_len=n).keys for n in (4096, 8192, 9600, 19200)] == [
        *(False, True, False, True)
    ]
    assert route(heads=2, seq_len=4096, batch=2).keys
    assert route(64, 6, 2, seq_len=1024) == NONE
    taken = Hopper(forward=True, cmp_keys=True, both_queries=True)
    assert route(64, 6, 2, seq_len=4096) == taken
    assert route(seq_len=2047) == Hopper(True, True, True)  # the compressed branch is slower
    assert not route(64, 1, 2, seq_len=8192).cmp_keys
    assert route(seq_len=1) == NONE


def test_other_gpus_other_versions_and_a_switch_take_the_band_kernels(monkeypatch):
    for capability in (AMPERE, BLACKWELL, (12, 0)):
        pretend(monkeypatch, capability)
        assert route() == NONE
    pretend(monkeypatch, HOPPER, triton=(3, 9))
    assert route() == NONE
    pretend(monkeypatch, HOPPER)
    monkeypatch.setattr(problem, "HOPPER", False)
    assert route() == NONE


def test_cudnn_takes_the_gradients_of_the_longest_rows_alone(monkeypatch):
    pretend(monkeypatch, HOPPER)
    monkeypatch.setattr(problem, "cudnn_runs", lambda *_: True)

    def runs(seq_len: int, group: int) -> tuple[bool, bool]:
        q, v = (
            torch.empty(1, seq_len, heads, 128, dtype=torch.bfloat16, device="meta")
            for heads in (4 * group, 4)
        )
        one = Problem(q, v, BlockSpec(), 0.1, [seq_len])
        return one.long, one.long_gradients

    for group in (4, 16):
        assert runs(32768, group) == (False, False)
        assert runs(65536, group) == (True, False)
        assert runs(131072, group) == (True, True)
    assert runs(65536, 3) == (True, True)  # no kernel for dq of odd groups
    monkeypatch.setattr(problem, "HOPPER", False)
    assert runs(65536, 4) == (True, True)


def test_one_pass_takes_long_rows_of_narrow_heads(monkeypatch):
    pretend(monkeypatch, HOPPER)
    for length in (8192, 65536):
        assert problem_of(64, 6, 2, seq_len=length).one_pass
    for one in (problem_of(64, 6, 2, seq_len=8191), problem_of(128), problem_of((64, 32), 6, 2)):
        assert not one.one_pass
    # Too few programs for the gradients of compressed keys: not for the window alone, either.
    masked = problem_of(64, 6, 2, batch=2, spec=BlockSpec(l_sel=256))
    assert masked.hopper.sel_keys and masked.hopper.cmp_keys and not masked.one_pass
    few = problem_of(64, 1, 2)
    assert few.hopper.keys and not few.hopper.cmp_keys and not few.one_pass
    monkeypatch.setattr(problem, "HOPPER", False)
    assert not problem_of(64, 6, 2).one_pass


def test_keys_are_divided_until_all_processors_are_busy():
    # Heads, groups, D and tokens; two tiles of compressed keys see 64 and 32 tiles of queries each.
    assert division.lengths(255, 4096, 31, 16, 1) == [64, 32]
    assert division.lengths(255, 4096, 31, 16, 2) == [32, 32, 0, 32]
    assert division.earliest(255, 4096, 4, 16, 128, 31, 16, 132) == (16, 1)
    assert division.earliest(255, 4096, 2, 6, 64, 31, 16, 132)[1] > 1
    assert division.earliest(65535, 1 << 20, 8, 4, 64, 31, 16, 132) == (1, 1)


SPARSE = BlockSpec(l=320, l_sel=16, n_sel=3)
"""Up to 319 tokens have no compressed one, and the selected branch reads its blocks: the window is
all that is left to walk for the gradient of q."""


def attend(seq_len: int, spec: BlockSpec = SPARSE, dim: int = 128) -> None:
    """Forward and backward of one KV head with two query heads, on tensors that nobody reads."""
    q, gates = (torch.zeros(1, seq_len, 2, n, dtype=torch.bfloat16) for n in (dim, 3))
    k, v = (torch.zeros(1, seq_len, 1, dim, dtype=torch.bfloat16) for _ in range(2))
    cmp = torch.zeros(1, spec.num_cmp(seq_len), 1, dim, dtype=torch.bfloat16)
    tensors = [x.requires_grad_() for x in (q, cmp, cmp.clone(), k, v, k.clone(), v.clone(), gates)]
    layout = Layout([seq_len], [seq_len], 0)
    given: list[Any] = [*tensors, spec]
    out, _ = nsa_attention(*given, scale=0.1, layout=layout, selection=None)
    out.backward(torch.zeros_like(out))


BOTH = BlockSpec(l=16, d=4, l_sel=16, n_sel=3)
"""The same with compressed tokens."""


def test_every_branch_is_computed_once(monkeypatch):
    take_everywhere(monkeypatch)
    with starting_on(90, ()) as started:
        attend(300)
    names = [one.name for one in started if one.name in KERNELS | BANDS]
    assert sorted(names) == sorted(KERNELS)
    # Compressed and window forward, and their keys; one kernel walks both for the gradient of q.
    with starting_on(90, ()) as started:
        attend(300, BOTH)
    names = [one.name for one in started if one.name in KERNELS | BANDS]
    assert sorted(names) == sorted([*KERNELS, "gluon_forward", "gluon_dkv"])
    # The past of a selection that is masked is walked by the same kernels.
    with starting_on(90, ()) as started:
        attend(300, BlockSpec(), 64)
    names = [one.name for one in started if one.name in KERNELS | BANDS]
    assert sorted(names) == sorted([*2 * ["gluon_forward", "gluon_dkv"], *KERNELS])
    # Gradients in one pass: no kernel for those of queries. Not where the past is masked.
    monkeypatch.setattr(problem, "ONE_PASS_FROM", 0)
    for spec, counts in ((BOTH, (2, 0, 1)), (BlockSpec(), (3, 1, 0))):
        with starting_on(90, ()) as started:
            attend(300, spec, 64)
        names = [one.name for one in started]
        assert tuple(map(names.count, ("gluon_dkv", "gluon_dq", "sum_places"))) == counts
        assert "band_dq" not in names
    # Its sums have no order, so deterministic mode takes two.
    torch.use_deterministic_algorithms(True)
    try:
        with starting_on(90, ()) as started:
            attend(300, BOTH, 64)
    finally:
        torch.use_deterministic_algorithms(False)
    names = [one.name for one in started]
    assert tuple(map(names.count, ("gluon_dkv", "gluon_dq"))) == (2, 1)
    monkeypatch.setattr(problem, "HOPPER", False)
    with starting_on(90, ()) as started:
        attend(300, BOTH)
    assert not KERNELS.intersection(one.name for one in started)


# --- compiled for sm_90 ---


SYNC = r"mbarrier\.try_wait|mbarrier\.arrive\.shared|bar\.sync|bulk\.wait_group"
STORE = r"stmatrix|st\.shared|fence\.proxy\.async|bulk\.tensor\.4d\.global"


def pairs(pattern: str, ptx: str) -> set[tuple[str, str]]:
    """Which of these instructions follow each other, in the order of the text."""
    found = re.findall(pattern, ptx)
    return set(pairwise(found))


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, Any]]:
    """The kernels for D 128, which need the most registers and shared memory, and gradients at D 64
    that mask the past, too, in two passes and in one."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        take_everywhere(patch)
        for spec, dim, names, since in (
            (SPARSE, 128, {"gluon_dq"}, NEVER),
            (BOTH, 128, KERNELS, NEVER),
            (BlockSpec(), 64, {"gluon_dq", "gluon_dkv"}, NEVER),
            (BOTH, 64, {"gluon_dkv"}, 0),
        ):
            patch.setattr(problem, "ONE_PASS_FROM", since)
            with compiling_until("ptx"), starting_on(90, names) as started:
                attend(300, spec, dim)
            found += [(one.name, one.compiled) for one in started if one.compiled is not None]
    return found


@pytest.mark.timeout(300)
def test_the_kernels_fit_and_stay_asynchronous(compiled):
    assert {name for name, _ in compiled} == KERNELS
    for name, one in compiled:
        assert one.metadata.shared <= MAX_SHARED_BYTES[90], name
        assert "wgmma.mma_async" in one.asm["ptx"] and "cp.async.bulk.tensor" in one.asm["ptx"]
        report = ptxas_report(one.asm["ptx"])
        assert "serializ" not in report, (name, report)
        assert spilled_bytes(report) <= 160, (name, report)  # measured, not a wish
        assert not reused_barriers(one.asm["ptx"]), name
        assert not shared_addresses(one), name


def test_warps_meet_before_one_of_them_arrives_for_all(compiled):
    """One thread arrives for four warps: the others must have passed their waits by then. A buffer
    is stored to after its copy has left it, and copied after all warps have stored."""
    for name, one in compiled:
        synced, stored = pairs(SYNC, one.asm["ptx"]), pairs(STORE, one.asm["ptx"])
        before = {first for first, second in synced if second.startswith("mbarrier.arrive")}
        assert before == {"bar.sync"}, (name, before)
        after = {second for first, second in synced if first.startswith("bulk")}
        assert after <= {"bar.sync"}, (name, after)
        before = {first for first, second in stored if second.startswith("bulk")}
        assert before <= {"fence.proxy.async", "bulk.tensor.4d.global"}, (name, before)


# --- on a GPU, against float64 ---

SHORT = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
CASES = [
    (Case(SHORT, S=1, Hkv=1, G=2, Dk=64, Dv=64), "bf16"),
    (Case(SHORT, S=64, B=3, Hkv=2, G=4, Dk=128, Dv=128), "bf16"),
    (Case(BlockSpec(w=1), S=130, Hkv=1, G=6, Dk=64, Dv=64), "fp16"),
    (Case(BlockSpec(w=63), S=257, B=2, Hkv=1, G=2, Dk=128, Dv=128), "bf16"),
    (Case(BlockSpec(w=65), S=777, Hkv=2, G=6, Dk=64, Dv=64), "bf16"),
    (Case(BlockSpec(w=200), S=641, B=2, Hkv=1, G=16, Dk=128, Dv=128), "fp16"),
    (Case(BlockSpec(), S=1151, Hkv=2, G=4, Dk=128, Dv=128), "bf16"),
    (Case(BlockSpec(w=4000), S=1000, Hkv=1, G=3, Dk=64, Dv=64), "bf16"),
    (Case(BlockSpec(), S=900, B=2, Hkv=1, G=1, Dk=128, Dv=128), "bf16"),
    (Case(BlockSpec(l=320, l_sel=16, n_sel=3, w=100), S=319, B=2, G=6, Dk=128, Dv=128), "bf16"),
    (Case(BlockSpec(l=320, l_sel=16, n_sel=3), S=200, G=2, Dk=128, Dv=128), "fp16"),
    (Case(BlockSpec(), S=5000, Hkv=1, G=16, Dk=128, Dv=128), "bf16"),  # by queries
    (Case(BlockSpec(), S=4500, Hkv=2, G=6, Dk=64, Dv=64), "fp16"),  # by blocks
    (Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=50), S=1537, G=2, Dk=64, Dv=64), "bf16"),
    (Case(BlockSpec(l=320, d=64, l_sel=64, n_sel=3), S=900, B=2, G=4, Dk=128, Dv=128), "bf16"),
    (Case(BlockSpec(l_sel=128, n_sel=5), S=1270, G=6, Dk=64, Dv=64), "bf16"),
    (Case(BlockSpec(l=64, n_sel=8), S=63, B=2, G=2, Dk=64, Dv=64), "fp16"),  # no compressed token
]
ONE_PASS = [
    (Case(BlockSpec(), S=2500, B=2, Hkv=2, G=6, Dk=64, Dv=64), "bf16"),
    (Case(BlockSpec(n_sel=5), S=1983, B=2, Hkv=1, G=4, Dk=64, Dv=64), "fp16"),
    (Case(BlockSpec(l=8, d=4, n_sel=4, w=50), S=1537, G=3, Dk=64, Dv=64), "bf16"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls take the kernels, too."""
    if gpu.DEVICE == "cuda" and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0")
    take_everywhere(monkeypatch)


def launched() -> set[str]:
    """The places in the code that launched kernels, in calls of one form."""
    known = [one for one in problem._kept.values() if isinstance(one, Problem)]
    places = [place for one in known for place, _ in one.memo]
    return {place if isinstance(place, str) else str(place[0]) for place in places}


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize(("case", "dtype"), CASES, ids=[f"{d}-{c}" for c, d in CASES])
    def test_outputs_and_gradients_equal_float64(self, case, dtype, on_hopper):
        gpu.compare(case, DTYPES[dtype])
        names, spec = launched(), case.spec
        has_cmp = spec.num_cmp(case.S) > 0
        assert "window dkv" in names and ("compressed dkv" in names) == has_cmp
        # The forward of an odd group may be the band kernel's.
        taken = case.G % 2 == 0 or case.G * case.Dk == 3 * 64
        assert ("window forward" in names) == taken
        assert ("compressed forward" in names) == (taken and has_cmp)
        masks = 2 * spec.n_sel * spec.l_sel >= case.S
        in_tiles = masks and spec.l_sel % 64 == 0
        assert ("selected dkv" in names) == in_tiles
        assert ("selected forward" in names) == (taken and in_tiles)
        even = case.G % 2 == 0
        assert ("all dq" in names) == (even and in_tiles and has_cmp)
        assert ("selected dq" in names) == (even and in_tiles and not has_cmp)
        assert ("both dq" in names) == (even and not masks and has_cmp)
        assert ("window dq" in names) == (even and not masks and not has_cmp and case.Dk == 128)

    @pytest.mark.parametrize(("case", "dtype"), ONE_PASS, ids=[f"{d}-{c}" for c, d in ONE_PASS])
    def test_one_pass_gives_all_gradients(self, case, dtype, on_hopper, monkeypatch):
        monkeypatch.setattr(problem, "ONE_PASS_FROM", 0)
        gpu.compare(case, DTYPES[dtype])
        names = launched()
        assert {"compressed dkv and dq", "window dkv and dq"} <= names
        assert not {"dq", "window dq", "both dq"}.intersection(names)

    def test_gradients_of_queries_add_those_of_cudnn(self, on_hopper, monkeypatch):
        """As for long sequences, and those of the selected blocks."""
        monkeypatch.setattr(problem, "LONG_FROM", 1024)
        monkeypatch.setattr(problem, "LONG_GRADIENTS", 1024)
        gpu.compare(Case(BlockSpec(), S=2500, Hkv=1, G=4, Dk=128, Dv=128), torch.bfloat16)
        assert "window dq" in launched()

    def test_strided_inputs_are_read_where_they_lie(self, on_hopper):
        case, dtype = Case(BlockSpec(w=100), S=333, B=2, Hkv=2, G=2, Dk=64, Dv=64), torch.bfloat16
        inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
        expected, grads = forward_backward(case, inputs, dout)
        apart = {name: _apart(x) for name, x in inputs.items()}
        out, apart_grads = forward_backward(case, apart, _apart(dout))
        assert torch.equal(out, expected)
        for name, grad in grads.items():
            assert torch.equal(apart_grads[name], grad), name

    def test_results_repeat_bit_for_bit_in_both_modes(self, on_hopper):
        case, dtype = Case(BlockSpec(), S=1500, Hkv=2, G=4, Dk=128, Dv=128), torch.bfloat16
        inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
        expected, grads = forward_backward(case, inputs, dout)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                out, again = forward_backward(case, inputs, dout)
            finally:
                torch.use_deterministic_algorithms(False)
            assert torch.equal(out, expected)
            for name in ("q", "k_cmp", "v_cmp", "k_win", "v_win"):
                assert torch.equal(again[name], grads[name]), name


def _apart(x: Tensor) -> Tensor:
    """The same numbers with gaps between rows and heads, as slices of a wider tensor have."""
    *outer, tokens, heads, width = x.shape
    wide = torch.full((*outer, tokens + 1, heads + 2, width + 8), 7.0, dtype=x.dtype)
    wide = wide.to(x.device)
    wide[..., 1:, 1:-1, :width] = x
    return wide[..., 1:, 1:-1, :width]
