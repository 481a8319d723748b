"""Numerical gradients in float64 of everything that is differentiated by hand or by autograd."""

import pytest
import torch

from nsa import BlockSpec, compress
from nsa.model.attention import BlockMLP
from nsa.tests.support.explicit import explicit_attention
from nsa.tests.support.helpers import BACKENDS, Case, make_inputs, make_module, run, torch_path

TINY = BlockSpec(l=4, d=2, l_sel=4, n_sel=3, w=3)


@pytest.mark.parametrize("backend_order", ["reference", "prefix", "gather"])
@pytest.mark.parametrize(
    "case",
    [
        Case(TINY, S=13, Hkv=1, G=2, Dk=3, Dv=2),
        Case(TINY, S=12, Hkv=2, G=1, Dk=2, Dv=3, docs=(5, 7)),
    ],
    ids=str,
)
def test_attention_gradients_are_the_numerical_ones(backend_order, case, monkeypatch):
    inputs = make_inputs(case, grad=True)
    backend = "reference" if backend_order == "reference" else "torch"
    order = "auto" if backend == "reference" else backend_order
    # The selection is piecewise constant: hold it, so that a finite step cannot flip it.
    with torch_path(monkeypatch, order=order, chunk=5):
        _, selection = run(case, inputs, backend, return_selection=True)

        def attention(*tensors: torch.Tensor) -> torch.Tensor:
            named = dict(zip(inputs, tensors, strict=True))
            return run(case, named, backend, selection=selection)

        # All entries for the oracle; random directions for the torch path, which equals it.
        fast = backend != "reference"
        assert torch.autograd.gradcheck(attention, tuple(inputs.values()), fast_mode=fast)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_compress_gradients_are_the_numerical_ones(backend):
    x = torch.randn(1, 11, 2, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 11], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda y: compress(y, TINY, cu_seqlens=cu_seqlens, backend=backend), (x,)
    )


def test_learned_compression_gradients_are_the_numerical_ones():
    phi = BlockMLP(TINY, 3).double()
    x = torch.randn(1, 9, 2, 3, dtype=torch.float64, requires_grad=True)
    parameters = tuple(phi.parameters())

    def apply(y: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return phi(y, [9])

    assert torch.autograd.gradcheck(apply, (x, *parameters))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_module_gradients_equal_the_oracles(phi, backend):
    module = make_module(phi=phi, backend=backend)
    x = torch.randn(2, 50, 24, dtype=torch.float64, requires_grad=True)
    leaves = {"x": x, **dict(module.named_parameters())}
    found, wanted = (
        torch.autograd.grad(out.square().sum(), tuple(leaves.values()))
        for out in (module(x), explicit_attention(module, x))
    )
    for name, grad, expected in zip(leaves, found, wanted, strict=True):
        assert expected.abs().max() > 0, f"{name} gets no gradient"
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)


def test_no_gradient_flows_through_the_scores():
    """With only the selected branch open, the compressed keys matter to no gradient."""
    case = Case(TINY, S=30)
    inputs = make_inputs(case, grad=True)
    gates = torch.tensor([0.0, 1, 0], dtype=torch.float64).expand(1, 30, 4, 3)
    run(case, {**inputs, "gates": gates}, "torch").sum().backward()
    assert inputs["k_cmp"].grad.abs().max() == 0
    assert inputs["v_cmp"].grad.abs().max() == 0
    assert inputs["k_sel"].grad.abs().max() > 0
