"""The same call gives the same result: again, recomputed, captured as a CUDA graph, compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from nsa import BlockSpec, TinyLM, select_blocks
from nsa.tests.support.gpu import (
    DEVICE,
    GRAD_TOLERANCE,
    ROUNDING,
    TOLERANCE,
    assert_near_gradients,
    device_dout,
    device_inputs,
    forward_backward,
    needs_gpu,
    on_device,
)
from nsa.tests.support.helpers import NAMES, Case, assert_near, run

pytestmark = needs_gpu

PAPER = BlockSpec()
REPEATED = [
    Case(PAPER, S=6000, Hkv=2, G=6, Dk=64, Dv=64),
    Case(PAPER, S=6000, Hkv=2, G=6, Dk=128, Dv=128),
]
PACKED = Case(PAPER, S=6000, Hkv=1, G=16, Dk=64, Dv=64, docs=(10, 5490, 500))
MODEL: dict[str, Any] = dict(
    vocab=64, dim=64, n_layers=2, n_heads=4, n_kv_groups=2, d_k=16, d_v=16,
    l=16, d=8, l_sel=16, n_sel=16, w=32,
)  # fmt: skip
"""Selects everything up to 256 tokens: there, a compiler's rounding cannot choose another block."""


@pytest.mark.parametrize("case", [*REPEATED, PACKED], ids=str)
def test_selection_and_output_are_the_same_from_run_to_run(case):
    case = on_device(case)
    inputs = device_inputs(case, torch.bfloat16)
    out, selection = run(case, inputs, "triton", return_selection=True)
    for _ in range(3):
        again, chosen = run(case, inputs, "triton", return_selection=True)
        assert torch.equal(chosen, selection) and torch.equal(again, out)
    alone = select_blocks(
        inputs["q"], inputs["k_cmp"], case.spec, cu_seqlens=case.cu_seqlens, backend="triton"
    )
    assert torch.equal(alone, selection)


@pytest.mark.parametrize("case", [*REPEATED, PACKED], ids=str)
def test_recomputation_selects_the_same_and_has_the_same_gradients(case):
    case = on_device(case)
    inputs, dout = device_inputs(case, torch.bfloat16), device_dout(case, torch.bfloat16)
    expected, expected_grads = forward_backward(case, inputs, dout)
    selections, outs = [], []

    def attend(*tensors: Tensor) -> Tensor:
        named = dict(zip(NAMES, tensors, strict=True))
        out, selection = run(case, named, "triton", return_selection=True)
        selections.append(selection)
        outs.append(out.detach())
        return out

    leaves = [inputs[name].detach().requires_grad_() for name in NAMES]
    with set_checkpoint_early_stop(False):  # the recomputation is to return its selection, too
        recomputing = checkpoint(attend, *leaves, use_reentrant=False)
    grads = torch.autograd.grad(recomputing, leaves, dout)
    assert len(selections) == 2 and torch.equal(*selections)
    assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected)
    named_grads = dict(zip(NAMES, grads, strict=True))
    assert_near_gradients(named_grads, expected_grads, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_scores_go_to_the_lower_block_at_4k(dtype):
    """Queries of zero weigh all compressed tokens alike: the forced blocks and the lowest win."""
    case = Case(PAPER, S=4096, Hkv=2, G=6, Dk=64, Dv=64)
    inputs = device_inputs(case, dtype)
    q = torch.zeros_like(inputs["q"])
    selection = select_blocks(q, inputs["k_cmp"], case.spec, backend="triton")
    expected = _lowest_blocks(case).to(DEVICE)
    assert torch.equal(selection, expected.expand_as(selection))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [*REPEATED, PACKED], ids=str)
def test_deterministic_algorithms_repeat_gradients_bit_for_bit(case, dtype):
    case = on_device(case)
    inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
    free_order = forward_backward(case, inputs, dout)
    with _deterministic():
        out, grads = forward_backward(case, inputs, dout)
        for _ in range(2):
            again, grads_again = forward_backward(case, inputs, dout)
            assert torch.equal(again, out)
            for name in NAMES:
                assert torch.equal(grads_again[name], grads[name]), name
    assert_near(out, free_order[0], TOLERANCE[dtype])
    assert_near_gradients(grads, free_order[1], GRAD_TOLERANCE[dtype])


@pytest.mark.parametrize("S", [2048, 8192])
def test_a_replayed_cuda_graph_equals_eager(S):
    """Replayed on other values than it was captured with."""
    case = Case(PAPER, S=S, Hkv=2, G=6, Dk=64, Dv=64)
    static, dout = device_inputs(case, torch.bfloat16), device_dout(case, torch.bfloat16)
    graph, (out, grads) = _capture(lambda: forward_backward(case, static, dout))
    fresh = device_inputs(case, torch.bfloat16, seed=1)
    for name in NAMES:
        static[name].copy_(fresh[name])
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_grads = forward_backward(case, fresh, dout)
    assert torch.equal(out, expected)
    assert_near_gradients(grads, expected_grads, ROUNDING[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself, and differently each time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_equals_eager(dtype):
    model, ids = _model_and_ids(dtype, length=256)
    expected, expected_grads = _logits_and_gradients(model, model, ids)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    logits, grads = _logits_and_gradients(compiled, model, ids)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    assert_near(logits, expected, tolerance, "logits")
    for name, grad in expected_grads.items():
        assert_near(grads[name], grad, tolerance, f"gradient of {name}")


def test_a_checkpointed_model_has_the_same_gradients():
    model, ids = _model_and_ids(torch.float32, length=2000)
    expected, expected_grads = _logits_and_gradients(model, model, ids)
    recomputing, _ = _model_and_ids(torch.float32, length=2000, grad_checkpointing=True)
    logits, grads = _logits_and_gradients(recomputing, recomputing, ids)
    assert torch.equal(logits, expected)
    for name, grad in expected_grads.items():
        assert_near(grads[name], grad, 1e-4, f"gradient of {name}")


def _lowest_blocks(case: Case) -> Tensor:  # [1, S, 1, n_sel] int32
    """First, previous and current block, and the lowest others."""
    selection = torch.full((1, case.S, 1, case.spec.n_sel), -1, dtype=torch.int32)
    for t in range(case.S):
        current = t // case.spec.l_sel
        forced = {0, max(current - 1, 0), current}
        others = [j for j in range(current) if j not in forced]
        ids = sorted([*forced, *others[: case.spec.n_sel - len(forced)]])
        selection[0, t, 0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return selection


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call after two rehearsals on a side stream, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _model_and_ids(
    dtype: torch.dtype, length: int, *, grad_checkpointing: bool = False
) -> tuple[TinyLM, Tensor]:
    """A small model with gates that differ by token, and tokens for it; the same every time."""
    torch.manual_seed(0)
    model = TinyLM(**MODEL, grad_checkpointing=grad_checkpointing)
    for block in model.layers:
        torch.nn.init.normal_(block.attn.gate.weight, std=0.1)
    ids = torch.randint(MODEL["vocab"], (2, length))
    return model.to(DEVICE, dtype).train(), ids.to(DEVICE)


def _logits_and_gradients(
    call: Callable[[Tensor], Tensor], model: TinyLM, ids: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Logits, and the gradients of the next-token loss for every parameter of `model`."""
    model.zero_grad(set_to_none=True)
    logits = call(ids)
    guesses, targets = logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    torch.nn.functional.cross_entropy(guesses, targets).backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters()}
