"""Switches that route a call: what the plan says, what runs, what is counted, what is marked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec, NSAAttention, compress, nsa_attention
from nsa.ops import fallbacks, plan, plan_attention
from nsa.ops.fallbacks import Fallback
from nsa.ops.triton.bands import flash
from nsa.tests.support.gpu import compare, interpreted, needs_gpu
from nsa.tests.support.helpers import Case, assert_near, make_inputs, run, run_with_gradients

SMALL = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
BF16_ON_GPU = ("cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    fallbacks.reset()
    plan.audit_sdpa.cache_clear()
    yield
    fallbacks.reset()


# --- the plan ---

CHANGES = {
    "NSA_USE_FA2": ("1", "win: flash: torch"),
    "NSA_USE_FA2_WIN": ("1", "win: flash: torch"),
    "NSA_USE_FA2_CMP": ("1", "cmp: flash: torch"),
    "NSA_SDPA_AUDIT": ("1", "SDPA audited"),
    "NSA_SDPA_NO_FLASH": ("1", "SDPA backends: no flash"),
    "NSA_SDPA_FLASH_ONLY": ("1", "SDPA backends: flash only"),
    "NSA_STRICT_ASSERTS": ("1", "selections checked"),
    "NSA_NVTX": ("1", "NVTX ranges"),
    "NSA_SEL_RANGES_V2": ("0", "selection: reference"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_switch_changes_the_printed_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, says = CHANGES[name]
    assert says not in str(plan_attention(*BF16_ON_GPU))

    monkeypatch.setenv(name, value)

    assert says in str(plan_attention(*BF16_ON_GPU))


ROUTES = {  # variables: (cmp goes through flash, win does)
    (): (False, False),
    ("NSA_USE_FA2=1",): (False, True),
    ("NSA_USE_FA2=1", "NSA_USE_FA2_CMP=1"): (True, True),
    ("NSA_USE_FA2=1", "NSA_USE_FA2_WIN=0"): (False, False),
    ("NSA_USE_FA2_CMP=1", "NSA_USE_FA2_WIN=1"): (True, True),
    ("NSA_USE_FA2=0", "NSA_USE_FA2_CMP=1", "NSA_USE_FA2_WIN=1"): (False, False),
    ("NSA_USE_FA2=", "NSA_USE_FA2_CMP=1"): (True, False),
}


@pytest.mark.parametrize("variables", ROUTES, ids=" ".join)
def test_branches_go_where_the_switches_send_them(
    variables: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))

    found = plan_attention(*BF16_ON_GPU)

    assert (found.cmp == plan.FLASH, found.win == plan.FLASH) == ROUTES[variables]
    assert found.fallbacks == ()


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "the tensors are on cpu": dict(device="cpu", dtype=torch.bfloat16),
    "only the triton backend": dict(device="cuda", dtype=torch.bfloat16, backend="torch"),
    "flash kernels have no torch.float32": dict(device="cuda", dtype=torch.float32),
    "differ: 192, 128": dict(device="cuda", dtype=torch.float16, head_dims=(192, 128)),
    "documents are packed": dict(device="cuda", dtype=torch.float16, packed=True),
}


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_an_impossible_route_falls_back_with_its_reason(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")

    found = plan_attention(**IMPOSSIBLE[reason])

    assert found.win == plan.OWN
    assert reason in str(found) and reason in dict(found.fallbacks)["win"]


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_flash_only_refuses_to_fall_back(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")
    monkeypatch.setenv("NSA_SDPA_FLASH_ONLY", "1")

    with pytest.raises(ValueError, match=f"NSA_SDPA_FLASH_ONLY=1 .*win branch.*{reason}.*unset"):
        plan_attention(**IMPOSSIBLE[reason])


def test_no_flash_forbids_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")
    monkeypatch.setenv("NSA_SDPA_NO_FLASH", "1")

    found = plan_attention(*BF16_ON_GPU)

    assert found.win == plan.OWN and "NSA_SDPA_NO_FLASH=1" in dict(found.fallbacks)["win"]


def test_no_flash_and_flash_only_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SDPA_NO_FLASH", "1")
    monkeypatch.setenv("NSA_SDPA_FLASH_ONLY", "1")

    with pytest.raises(ValueError, match="contradict each other.*unset one"):
        plan_attention()


def test_heads_that_are_padded_alike_count_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")

    assert plan_attention(*BF16_ON_GPU, head_dims=(20, 24)).win == plan.FLASH


def test_equal_calls_share_a_plan() -> None:
    assert plan_attention("cuda", torch.bfloat16) is plan_attention("cuda", torch.bfloat16)


# --- what is counted and logged ---


def attend(dtype: torch.dtype = torch.float32) -> Tensor:
    case = Case(SMALL, S=40)
    return run(case, make_inputs(case, dtype), "auto")


def test_a_route_that_is_not_taken_is_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")
    monkeypatch.setenv("NSA_USE_FA2_CMP", "1")

    with caplog.at_level(logging.WARNING, logger="nsa"):
        attend()
        attend()

    reason = "the tensors are on cpu, flash kernels need a CUDA device"
    expected = {Fallback(None, "cmp", reason): 2, Fallback(None, "win", reason): 2}
    assert fallbacks.counts() == expected
    assert [record.getMessage() for record in caplog.records] == [
        f"fallback, branch cmp: {reason}",
        f"fallback, branch win: {reason}",
    ]


def test_nothing_is_counted_where_nothing_was_asked_for() -> None:
    attend()

    assert fallbacks.counts() == {}


def test_the_layer_of_a_fallback_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")
    module = NSAAttention(16, 2, 1, 8, 8, l=8, d=4, l_sel=8, n_sel=4, w=11)
    x = torch.randn(1, 40, 16)

    module(x, layer=3)
    module(x, layer=3)
    module(x)

    assert {(key.layer, key.branch): n for key, n in fallbacks.counts().items()} == {
        (3, "win"): 2,
        (None, "win"): 1,
    }


def test_auto_without_triton_on_a_gpu_is_a_fallback_of_all_branches() -> None:
    found = plan_attention("cuda", torch.float64)

    assert found.backend == "torch"
    assert found.fallbacks == (("all", found.reason),)
    assert plan_attention("cpu", torch.float64).fallbacks == ()
    assert plan_attention("cuda", torch.float64, "torch").fallbacks == ()


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=needs_gpu)])
def test_auto_without_triton_on_a_gpu_is_counted(where: str) -> None:
    case = Case(SMALL, S=40)
    inputs = {name: x.to(where) for name, x in make_inputs(case, torch.float64).items()}

    run(case, inputs, "auto")

    assert [(key.branch, n) for key, n in fallbacks.counts().items()] == [("all", 1)]


def test_counts_are_exact_when_threads_race() -> None:
    def count() -> None:
        for _ in range(500):
            fallbacks.record("win", "a race", layer=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert fallbacks.counts() == {Fallback(1, "win", "a race"): 2000}
    fallbacks.reset()
    assert fallbacks.counts() == {}


def test_audit_logs_the_sdpa_backends_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NSA_SDPA_AUDIT", "1")

    with caplog.at_level(logging.WARNING, logger="nsa"):
        attend()
        attend()

    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("SDPA on cpu, torch.float32, head dims 8 and 8: only math and")


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=needs_gpu)])
def test_audit_gives_a_verdict_on_every_backend_of_a_gpu(where: str) -> None:
    wide = plan._sdpa_backends(where, torch.bfloat16, (64, 64))
    single = plan._sdpa_backends(where, torch.float32, (64, 64))

    assert "flash: yes" in wide and "efficient: " in wide and "cudnn: " in wide
    assert "flash: no (" in single and "flash: no ()" not in single


# --- flash kernels: the arrangement of the compressed branch, and the window ---


def softmax_logits(
    q: Tensor, k: Tensor, scale: float, window: int | None, causal: bool
) -> Tensor:  # [B, Hq, S, K]
    """Causal (ends aligned), within a window; or all of them."""
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    last = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])
    hidden = key > last if window is None else (key > last) | (key <= last - window)
    return (logits * scale).masked_fill(hidden & causal, -torch.inf)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """What flash kernels compute, written out."""
    logits = softmax_logits(q, k, scale, window, causal)
    v = v.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), v), logits.logsumexp(dim=-1)


def softmax_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What their backward computes from the output and log-sum-exp that it is given."""
    per_group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(per_group, dim=2) for x in (k, v))
    logits = softmax_logits(q, k, scale, window, causal)
    probs = (logits - lse.to(q.dtype).unsqueeze(-1)).exp()
    delta = torch.einsum("bqhd,bqhd->bhq", dout, out).unsqueeze(-1)
    dlogits = probs * (torch.einsum("bqhd,bkhd->bhqk", dout, wide_v) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dlogits, wide_k)
    dk = torch.einsum("bhqk,bqhd->bkhd", dlogits, q)
    dv = torch.einsum("bhqk,bqhd->bkhd", probs, dout)
    return dq, *(x.unflatten(2, (-1, per_group)).sum(dim=3) for x in (dk, dv))


PLAIN = flash.Kernel(softmax_attention, softmax_gradients)
FLASH_CASES = [
    Case(SMALL, S=40, B=2, Hkv=2, G=3),
    Case(SMALL, S=41),  # the last group is padded
    Case(SMALL, S=8),  # one compressed token, seen by one query
    Case(SMALL, S=11, G=1),
    Case(BlockSpec(l=4, d=4, l_sel=4, n_sel=3, w=1), S=19),
    Case(BlockSpec(l=1, d=1, l_sel=4, n_sel=3, w=100), S=9, B=2),
]


@pytest.mark.parametrize(
    ("branch", "residue_bytes"),
    [(0, 1), (0, 1 << 30), (2, 0)],
    ids=["cmp-one-by-one", "cmp-all", "win"],
)
@pytest.mark.parametrize("case", FLASH_CASES, ids=str)
def test_the_arrangement_for_flash_kernels_computes_the_branch(
    case: Case, branch: int, residue_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-hot gates make the oracle's output that of a single branch."""
    monkeypatch.setattr(flash, "RESIDUE_BYTES", residue_bytes)
    inputs = make_inputs(case)
    inputs["gates"] = torch.eye(3, dtype=torch.float64)[branch].expand_as(inputs["gates"])
    expected, expected_grads = run_with_gradients(case, inputs, "reference")
    k, v = ("k_cmp", "v_cmp") if branch == 0 else ("k_win", "v_win")
    q, keys, values = inputs["q"], inputs[k], inputs[v]
    lse = torch.empty(case.B, case.Hkv * case.G, case.S, dtype=torch.float64)
    scale = case.Dk**-0.5

    out = flash.forward(branch, q, keys, values, case.spec, scale, lse, PLAIN)
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64) * 0.7).view_as(out)
    rest = (out, lse, weight, case.spec, scale, PLAIN)
    grads = flash.backward(branch, q, keys, values, *rest)

    assert_near(out, expected, 1e-10)
    for name, grad in zip(("q", k, v), grads, strict=True):
        assert_near(grad, expected_grads[name], 1e-10, f"gradient of {name}")
    sees_none = torch.arange(case.S) < (case.spec.l - 1 if branch == 0 else 0)
    assert ((lse == torch.inf) == sees_none).all()


@pytest.mark.parametrize("residue_bytes", [1, 1 << 30], ids=["one-by-one", "all"])
@pytest.mark.parametrize("case", FLASH_CASES, ids=str)
def test_queries_with_an_offset_compute_their_part_of_the_gradients(
    case: Case, residue_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the queries, cut anywhere, with the keys of the whole row."""
    monkeypatch.setattr(flash, "RESIDUE_BYTES", residue_bytes)
    monkeypatch.setattr(flash, "FLAT_BYTES", residue_bytes)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    inputs, scale = make_inputs(case), case.Dk**-0.5
    q, k, v = inputs["q"], inputs["k_cmp"], inputs["v_cmp"]
    sizes = (case.B, case.Hkv * case.G)
    lse = torch.empty(*sizes, case.S, dtype=torch.float64)
    whole = flash.forward(0, q, k, v, case.spec, scale, lse, PLAIN)
    weight = torch.cos(torch.arange(whole.numel(), dtype=torch.float64) * 0.7).view_as(whole)
    known = (whole, lse, weight, case.spec, scale, PLAIN)
    wanted = flash.backward(0, q, k, v, *known)
    for cut in range(1, case.S):
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for rows in (slice(0, cut), slice(cut, case.S)):
            given = (whole[:, rows], lse[:, :, rows], weight[:, rows])
            grads = flash.backward(
                0, q[:, rows], k, v, *given, case.spec, scale, PLAIN, offset=rows.start
            )
            close(grads[0], wanted[0][:, rows])
            dk, dv = dk + grads[1], dv + grads[2]
        close(dk, wanted[1])
        close(dv, wanted[2])


def test_the_log_sum_exp_is_in_base_2() -> None:
    case = Case(SMALL, S=40)
    x = make_inputs(case)
    lse = torch.empty(1, 4, 40, dtype=torch.float64)

    flash.forward(2, x["q"], x["k_win"], x["v_win"], case.spec, 1.0, lse, PLAIN)

    _, natural = softmax_attention(x["q"], x["k_win"], x["v_win"], 1.0, case.spec.w)
    torch.testing.assert_close(torch.exp2(lse), natural.exp())


@interpreted
def test_the_triton_path_with_routed_branches_equals_its_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a plain softmax in the place of the flash kernels."""
    case = Case(SMALL, S=41, Hkv=1, G=2, Dk=16, Dv=16)
    inputs = make_inputs(case, torch.float32)
    own, own_grads = run_with_gradients(case, inputs, "triton")
    windows: list[int | None] = []

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        windows.append(args[-1])
        return PLAIN.forward(*args)

    monkeypatch.setattr(flash, "TORCH", flash.Kernel(forward, PLAIN.backward))
    monkeypatch.setenv("NSA_USE_FA2", "1")
    monkeypatch.setenv("NSA_USE_FA2_CMP", "1")
    monkeypatch.setattr(plan, "_flash_obstacle", lambda *_: "")
    plan._plan.cache_clear()

    out, grads = run_with_gradients(case, inputs, "triton")

    plan._plan.cache_clear()
    # The last group of queries is incomplete: its residues are a call of their own.
    assert windows == [None, None, SMALL.w]
    assert_near(out, own, 1e-5)
    for name in inputs:
        assert_near(grads[name], own_grads[name], 1e-4, name)


@interpreted
def test_the_triton_path_sends_queries_with_an_offset_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a plain softmax in the place of cuDNN, which takes the compressed branch of long rows.

    Scores of queries with an offset are folded into blocks as those of a whole row.
    """
    from nsa.ops.triton import problem

    case, first = Case(SMALL, S=70, Hkv=1, G=2, Dk=16, Dv=16), 37
    inputs: dict[str, Any] = make_inputs(case, torch.float32)
    part = {name: x[:, first:] if name in ("q", "gates") else x for name, x in inputs.items()}
    leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in part.items()}
    found = []
    for route in (False, True):
        if route:
            calls: list[str] = []
            monkeypatch.setattr(flash, "CUDNN", noting(PLAIN, calls))
            monkeypatch.setattr(problem, "LONG_FROM", 0)
            monkeypatch.setattr(problem, "MANY_QUERIES", 0)
            monkeypatch.setattr(problem, "cudnn_runs", lambda *_: True)
        out, chosen = nsa_attention(
            **leaves, spec=case.spec, q_offset=first, backend="triton", return_selection=True
        )
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        found.append((out.detach(), chosen, *grads))
    assert calls == ["backward"] * 3  # before the square, and its two groups of residues
    whole, whole_chosen = nsa_attention(
        **inputs, spec=case.spec, backend="reference", return_selection=True
    )
    assert_near(found[0][0], whole[:, first:], 1e-5)
    assert torch.equal(found[0][1], whole_chosen[:, first:])
    for own, routed in zip(*found, strict=True):
        assert_near(routed, own, 1e-4)


@interpreted
def test_a_rank_computes_its_two_parts_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a rank that shares a row: its windows apart, then the two other branches; with a
    plain softmax in the place of cuDNN."""
    from bench.attention import cases
    from bench.ranks import parts
    from nsa.ops.triton import problem
    from nsa.parallel import Split

    monkeypatch.setattr(flash, "CUDNN", PLAIN)
    monkeypatch.setattr(problem, "LONG_FROM", 0)
    monkeypatch.setattr(problem, "MANY_QUERIES", 0)
    monkeypatch.setattr(problem, "cudnn_runs", lambda *_: True)
    sizes = cases.Case(cases.Shape(2, 1, 16, 16), batch=1, length=80, repeats=1)
    whole = parts.Whole(sizes, SMALL, torch.float32, "cpu")
    wanted = whole.run("torch")
    rank = parts.Rank(whole, Split(80, 2), 0)

    found = parts.compare(rank, rank.run("triton"), wanted)

    assert found["out_error"] < 1e-5 and found["dq_error"] < 1e-5
    assert found["same_blocks"] == 1.0


PAPER = BlockSpec()
GPU_CASES = [
    Case(PAPER, S=1000, B=2, Hkv=2, G=3, Dk=64, Dv=64),
    Case(PAPER, S=2500, Hkv=1, G=4, Dk=128, Dv=128),
    Case(PAPER, S=5000, Hkv=2, G=2, Dk=64, Dv=64),  # the selected branch goes by block
    Case(PAPER, S=5000, Hkv=1, G=16, Dk=64, Dv=64),  # by query
    Case(PAPER, S=700, Hkv=1, G=2, Dk=256, Dv=256),
    Case(PAPER, S=700, Hkv=1, G=2, Dk=20, Dv=20),  # padded heads
    Case(PAPER, S=33, Hkv=1, G=2, Dk=64, Dv=64),  # w > S, two queries see a compressed token
    Case(PAPER, S=20, Hkv=1, G=2, Dk=64, Dv=64),  # no compressed token
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("switch", ["NSA_USE_FA2", "NSA_USE_FA2_WIN", "NSA_USE_FA2_CMP", "both"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_flash_routes_equal_float64_on_a_gpu(
    case: Case, switch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NSA_USE_FA2", "NSA_USE_FA2_CMP") if switch == "both" else (switch,):
        monkeypatch.setenv(name, "1")
    calls: list[str] = []
    monkeypatch.setattr(flash, "TORCH", noting(flash.TORCH, calls))

    compare(case, dtype)

    num_calls = 0 if switch == "NSA_USE_FA2_CMP" else 1  # the window
    if "CMP" in switch or switch == "both":
        groups, rest = divmod(max(case.S - PAPER.l + 1, 0), PAPER.d)
        num_calls += case.B * ((groups > 0) + (rest > 0))
    assert calls == ["forward"] * num_calls + ["backward"] * num_calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residue_bytes", [1, 1 << 30], ids=["one-by-one", "all"])
@pytest.mark.parametrize("per_group", [4, 16])
def test_cudnn_of_long_sequences_equals_float64_on_a_gpu(
    per_group: int, residue_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN takes this branch on Hopper and later")
    from nsa.ops.triton import problem

    calls: list[str] = []
    monkeypatch.setattr(problem, "LONG_FROM", 0)
    monkeypatch.setattr(problem, "_kept", {})
    monkeypatch.setattr(flash, "CUDNN", noting(flash.CUDNN, calls))
    monkeypatch.setattr(flash, "RESIDUE_BYTES", residue_bytes)

    compare(Case(PAPER, S=2500, B=2, Hkv=1, G=per_group, Dk=128, Dv=128), dtype)

    num_calls = 2 * (PAPER.d if residue_bytes == 1 else 2)  # two groups of residues
    assert calls == ["forward"] * num_calls + ["backward"] * num_calls


def noting(kernel: flash.Kernel, calls: list[str]) -> flash.Kernel:
    """The same kernel, which writes down its calls."""

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append("forward")
        return kernel.forward(*args)

    def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append("backward")
        return kernel.backward(*args)

    return flash.Kernel(forward, backward)


# --- NVTX ranges ---


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NVTX was told: names pushed, and "pop"."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    monkeypatch.setattr(plan, "_has_cuda", lambda: True)
    return told


def test_nvtx_ranges_open_and_close_in_order(
    marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 32, 16)
    NSAAttention(16, 2, 1, 8, 8, l=8, d=4, l_sel=8, n_sel=4, w=11)(x)
    assert marks == []

    monkeypatch.setenv("NSA_NVTX", "1")
    NSAAttention(16, 2, 1, 8, 8, l=8, d=4, l_sel=8, n_sel=4, w=11)(x)

    assert marks == [
        *("projections+rope", "pop", "pcmp_all", "pop"),
        *("nsa.sel.ranges_v2", "map_pcmp_to_pslc", "pop", "topk+ranges", "pop", "pop"),
        *("branch_attn+gate", "pop", "branch_attn+gate", "pop"),
    ]


def test_an_nvtx_range_closes_after_an_error(marks: list[str]) -> None:
    with pytest.raises(RuntimeError, match="inside"), plan.nvtx("part", True):
        raise RuntimeError("inside")

    assert marks == ["part", "pop"]


# --- torch.compile ---

ignore_dynamo = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo does itself what torch warns of."""


def compressed_attention(*tensors: Tensor, backend: str) -> Tensor:
    """q, k_cmp and v_cmp before compression, the other keys and values, gate logits."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, logits = tensors
    k_cmp, v_cmp = (compress(x, SMALL, backend=backend) for x in (k_cmp, v_cmp))
    gates = logits.softmax(dim=-1)
    return nsa_attention(
        *(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), SMALL, backend=backend
    )


def assert_compiles(backend: str) -> None:
    """As one graph, forward and backward, with the results of the function as it is."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 40, 2, 16)] + 6 * [(1, 40, 1, 16)] + [(1, 40, 2, 3)]
    leaves = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    compiled = torch.compile(compressed_attention, fullgraph=True, backend="eager")
    expected, out = (f(*leaves, backend=backend) for f in (compressed_attention, compiled))
    dout = torch.cos(torch.arange(out.numel()) * 0.7).view_as(out)
    assert_near(out, expected, 1e-6)
    for grad, grad_expected in zip(
        *(torch.autograd.grad(x, leaves, dout) for x in (out, expected)), strict=True
    ):
        assert_near(grad, grad_expected, 1e-6, "gradient")


@ignore_dynamo
def test_the_torch_path_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NSA_NVTX", "NSA_USE_FA2", "NSA_SDPA_AUDIT"):
        monkeypatch.setenv(name, "1")
    torch.compiler.reset()

    assert_compiles("torch")


@ignore_dynamo
def test_a_module_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    module = NSAAttention(16, 2, 1, 8, 8, l=8, d=4, l_sel=8, n_sel=4, w=11)
    x = torch.randn(1, 40, 16)

    compiled = torch.compile(module, fullgraph=True, backend="eager")

    assert_near(compiled(x, layer=2), module(x, layer=2), 1e-6)


@interpreted
@ignore_dynamo
def test_the_triton_path_compiles_as_one_graph() -> None:
    torch.compiler.reset()

    assert_compiles("triton")


@interpreted
def test_the_triton_operators_are_registered_as_torch_wants_them() -> None:
    case = Case(SMALL, S=24, Hkv=1, G=2, Dk=16, Dv=16)
    tensors = make_inputs(case, torch.float32, grad=True).values()
    blocks = SMALL.to_ints()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    q, *keys, gates = tensors
    for count, places in ((24, ([], [])), (10, ([10], [14]))):
        some = (q[:, -count:].detach().requires_grad_(), *keys, gates[:, -count:])
        args = (*some, None, blocks, 0.25, [24], [False] * 4, *places)
        torch.library.opcheck(torch.ops.nsa.attention.default, args, test_utils=checks)
    x = torch.randn(1, 24, 1, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.nsa.mean.default, (x, blocks, [24]), test_utils=checks)
