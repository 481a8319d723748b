"""Heads and gates of one product, and its gradient, by kernels: on a GPU, or interpreted.

test_triton_on_cpu.py runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.model.attention import NSAAttention
from nsa.model.rope import Rope, apply_rope
from nsa.ops.machine import interpreted
from nsa.ops.triton import heads
from nsa.ops.triton.heads import Sizes
from nsa.tests.support.gpu import DEVICE
from nsa.tests.support.helpers import assert_near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="needs a CUDA device"),
]
# The compiler warns about itself, and differently each time.
ignore_dynamo = pytest.mark.filterwarnings("ignore")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Sizes, batch, tokens, and columns that nobody reads.
CASES = [
    (Sizes(12, 2, 64, 64, True), 2, 37, 28),
    (Sizes(4, 1, 128, 128, False), 1, 16, 0),
    (Sizes(3, 3, 24, 16, True), 3, 5, 7),
    (Sizes(1, 1, 2, 1, False), 1, 1, 1),
]


def split_in_torch(product: Tensor, rope: Rope, bias: Tensor, sizes: Sizes) -> list[Tensor]:
    """The equations, with torch's own gradients."""
    hq, hkv, d_k, d_v, softmax = sizes
    columns = [hq * d_k, *3 * [hkv * d_k], *3 * [hkv * d_v], 3 * hq]
    q, *keys, v_cmp, v_sel, v_win, logits = product[..., : sum(columns)].split(columns, dim=-1)
    rotated = [apply_rope(x.unflatten(-1, (-1, d_k)), rope) for x in (q, *keys)]
    values = [x.unflatten(-1, (-1, d_v)) for x in (v_cmp, v_sel, v_win)]
    logits = (logits + bias).unflatten(-1, (-1, 3))
    return [*rotated, *values, logits.softmax(-1) if softmax else logits.sigmoid()]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("sizes", "batch", "seq_len", "more"), CASES)
def test_heads_gates_and_gradients_equal_float64(
    sizes: Sizes, batch: int, seq_len: int, more: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    columns = sizes.first_logit + 3 * sizes.num_heads + more
    product = torch.randn(batch, seq_len, columns, device=DEVICE).to(dtype).requires_grad_()
    bias = torch.randn(3 * sizes.num_heads, device=DEVICE, requires_grad=True)
    angles = 50 * torch.rand(seq_len, sizes.d_k // 2, device=DEVICE)
    rope = Rope(angles.cos(), angles.sin())

    out = heads.split(product, *rope, bias, *sizes)
    douts = [torch.randn_like(x) for x in out]
    grads = torch.autograd.grad(out, (product, bias), douts)

    exact = [x.detach().double().requires_grad_() for x in (product, bias)]
    wide = Rope(*(x.double() for x in rope))
    expected = split_in_torch(exact[0], wide, exact[1], sizes)
    expected_grads = torch.autograd.grad(expected, exact, [x.double() for x in douts])
    for x, y in zip((*out, *grads), (*expected, *expected_grads), strict=True):
        assert x.is_contiguous()
        assert_near(x, y, TOLERANCE[dtype])
    assert all(x.dtype == dtype for x in out[:-1])
    assert out[-1].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    # Zeros, and not what the memory held: a product reads these columns.
    assert (grads[0][..., columns - more :] == 0).all()


def test_the_operators_are_registered_as_torch_wants_them() -> None:
    product = torch.randn(2, 5, 40, device=DEVICE, requires_grad=True)
    cos, sin = (torch.randn(5, 2, device=DEVICE) for _ in range(2))
    bias = torch.randn(6, device=DEVICE, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (product, cos, sin, bias, list(map(int, Sizes(2, 1, 4, 4, True))))
    torch.library.opcheck(torch.ops.nsa.split_product.default, args, test_utils=checks)


SMALL: dict[str, Any] = dict(l=8, d=4, l_sel=8, n_sel=4, w=11, backend="triton")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were started."""
    names: list[str] = []
    start = heads._start

    def noted(kernel: Any, *rest: Any) -> None:
        names.append(kernel.__name__)
        start(kernel, *rest)

    monkeypatch.setattr(heads, "_start", noted)
    return names


def trained(module: torch.nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = run(x)
    dout = torch.cos(torch.arange(out.numel(), device=DEVICE) * 0.7).view_as(out)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], dout)]


@ignore_dynamo
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_a_compiled_layer_takes_them_and_computes_the_same(gate: str, started: list[str]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    module = NSAAttention(16, 2, 1, 8, 8, gate=gate, **SMALL).to(DEVICE)
    torch.nn.init.normal_(module.gate.weight)
    torch.nn.init.normal_(module.gate.bias)
    x = torch.randn(2, 40, 16, device=DEVICE, requires_grad=True)
    expected = trained(module, module, x)
    assert not started
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for one, other in zip(trained(module, compiled, x), expected, strict=True):
        assert_near(one, other, 1e-5)
    assert started == ["split_product", "join_gradients"]


@ignore_dynamo
@pytest.mark.parametrize("more", [{"phi": "mlp"}, {"qkv_bias": True}, {"qk_norm": True}], ids=str)
def test_a_layer_whose_heads_need_more_is_left_to_the_compiler(
    more: dict[str, Any], started: list[str]
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    module = NSAAttention(16, 2, 1, 8, 8, **SMALL, **more).to(DEVICE)
    x = torch.randn(1, 40, 16, device=DEVICE)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert_near(compiled(x), module(x), 1e-5)
    assert not started
