"""Block scores in Gluon: where the kernel runs, its code, its results."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import BlockSpec, compress
from nsa.ops import machine
from nsa.ops.machine import interpreted
from nsa.ops.triton import attention, problem, select
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    compiling_until,
    ptxas_report,
    shared_addresses,
    spilled_bytes,
    starting_on,
)
from nsa.tests.support.gpu import DEVICE
from nsa.tests.support.hopper import marked, problem_of

if interpreted():
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

DEFAULT = BlockSpec()
NARROW, WIDE = (64, 64), (128, 128)
problem_on = partial(problem_of, S=8192, G=16, dims=WIDE, spec=DEFAULT)

# --- Where it runs ---

MEASURED: list[dict[str, Any]] = [
    *(dict(), dict(S=65536), dict(G=4), dict(dtype=torch.float16), dict(spec=BlockSpec(l=48))),
]
POSSIBLE: list[dict[str, Any]] = [
    *(dict(G=size) for size in (2, 6, 14)),
    *(dict(S=2000), dict(G=12, dims=NARROW)),
]
IMPOSSIBLE: list[dict[str, Any]] = [
    *(dict(G=size) for size in (1, 3, 18)),
    *(dict(dims=(192, 128)), dict(dtype=torch.float32), dict(docs=(4000, 4192))),
    *(dict(offset=100), dict(spec=BlockSpec(l_sel=32)), dict(spec=BlockSpec(l=64))),
    *(dict(spec=BlockSpec(l=16)), dict(S=20)),
]
"""Groups and blocks that it does not take; the last has no compressed token."""


def test_it_runs_on_one_gpu_where_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(machine, "_machine_of", lambda _: machine.Machine("cuda", (9, 0)))
    for changes in MEASURED:
        assert problem_on(**changes).scores_in_gluon, changes
    for changes in (*POSSIBLE, *IMPOSSIBLE):
        assert not problem_on(**changes).scores_in_gluon, changes
    monkeypatch.setattr(problem, "HOPPER", True)
    for changes in (*MEASURED, *POSSIBLE):
        assert problem_on(**changes).scores_in_gluon, changes
    for changes in IMPOSSIBLE:
        assert not problem_on(**changes).scores_in_gluon, changes
    for capability in (80, 89, 100, 120):
        assert not problem_on(capability).scores_in_gluon
    monkeypatch.setattr(problem, "HOPPER", False)
    assert not problem_on().scores_in_gluon


# --- Its code ---


def choose(one: problem.Problem, q: Tensor, k: Tensor) -> select.Selection:
    lse = one.empty(one.batch, one.num_heads, one.seq_len, dtype=torch.float32)
    return select.choose(one, q, k, lse)


@pytest.mark.parametrize(("group", "dim"), [(4, 128), (6, 64)])
def test_products_stay_asynchronous_and_warps_meet_before_one_arrives(group, dim, monkeypatch):
    monkeypatch.setattr(problem, "HOPPER", True)
    q, k = (torch.zeros(1, n, h, dim, dtype=torch.bfloat16) for n, h in ((300, group), (17, 1)))
    kernels = ("gluon_scores", "choose_blocks")
    with compiling_until("ptx"), starting_on(90, kernels) as started:
        choose(problem.Problem(q, k, DEFAULT, 0.1, [300]), q, k)
    assert tuple(one.name for one in started) == kernels
    one = started[0].compiled
    ptx, report = one.asm["ptx"], ptxas_report(one.asm["ptx"])
    assert one.metadata.shared <= MAX_SHARED_BYTES[90]
    assert not shared_addresses(one)
    assert "serializ" not in report, report
    assert spilled_bytes(report) <= 160, report  # between items, not between heads
    # Each of two consumers waits with the next product in flight, for all heads but the first.
    assert len(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+1;", ptx)) == 2 * (group - 1)
    order = re.findall(r"mbarrier\.try_wait|mbarrier\.arrive\.shared|bar\.sync", ptx)
    before = {first for first, second in pairwise(order) if second.startswith("mbarrier.arrive")}
    assert before == {"bar.sync"}


# --- Its results ---


CASES = {
    "16 heads": (1, 4, 16, 128, 8192, "bf16"),
    "4 heads, odd length, two rows": (2, 2, 4, 128, 5001, "fp16"),
    "6 heads of 64": (2, 2, 6, 64, 1187, "bf16"),
    "2 heads, one tile": (1, 1, 2, 128, 50, "bf16"),
    "several chunks": (1, 2, 2, 64, 20000, "fp16"),
}


@pytest.mark.parametrize("name", marked(*CASES))
def test_the_same_blocks_are_chosen_as_by_group_scores(name, monkeypatch):
    batch, groups, group, dim, seq_len, kind = CASES[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    new = torch.Generator(DEVICE).manual_seed(seq_len)
    q = torch.randn(batch, seq_len, groups * group, dim, generator=new, device=DEVICE, dtype=dtype)
    k = torch.randn(batch, seq_len, groups, dim, generator=new, device=DEVICE, dtype=dtype)
    if name == "several chunks":
        monkeypatch.setattr(select, "SCORE_BYTES", 8 << 20)
    k_cmp = compress(k, DEFAULT)
    lse = torch.empty(batch, groups * group, seq_len, device=DEVICE)
    found = []
    for switch in (False, True, True):
        monkeypatch.setattr(problem, "HOPPER", switch)
        one = problem.Problem(q, k, DEFAULT, dim**-0.5, [seq_len])
        assert one.scores_in_gluon == switch
        if not switch:
            attention._band(one, 0, q, k_cmp, k_cmp, lse, {})
        found.append(select.choose(one, q, k_cmp, lse))
    assert torch.equal(found[1].ids, found[2].ids)
    differ = (found[0].ids != found[1].ids).any(dim=-1).float().mean().item()
    assert differ <= 1e-4  # sums of equal numbers in another order, where two blocks are as good
    assert torch.equal(found[0].num_chosen, found[1].num_chosen)
