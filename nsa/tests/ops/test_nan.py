"""A NaN is never hidden and never spreads: exactly the rows that depend on it are NaN."""

import pytest
import torch

from nsa import BlockSpec
from nsa.tests.support.helpers import (
    BACKENDS,
    NAMES,
    PATHS,
    Case,
    make_inputs,
    make_module,
    run,
    torch_path,
)

CASE = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=96, B=2, Hkv=2, G=2)
BAD_BATCH, BAD_GROUP, BAD_TOKEN, BAD_BLOCK = 1, 1, 42, 5


def _rows_that_depend(name: str, selection: torch.Tensor) -> torch.Tensor:
    """Rows [S, Hq] of the bad batch element whose output depends on the planted NaN."""
    spec = CASE.spec
    t = torch.arange(CASE.S)
    heads = torch.zeros(CASE.S, 4, dtype=torch.bool)
    group = slice(2 * BAD_GROUP, 2 * BAD_GROUP + 2)
    if name in ("k_cmp", "v_cmp"):
        heads[:, group] = (t >= BAD_BLOCK * spec.d + spec.l - 1)[:, None]
    elif name in ("k_sel", "v_sel"):
        block = BAD_TOKEN // spec.l_sel
        reads = (selection[BAD_BATCH, :, BAD_GROUP] == block).any(dim=-1) & (t >= BAD_TOKEN)
        heads[:, group] = reads[:, None]
    elif name in ("k_win", "v_win"):
        heads[:, group] = ((t >= BAD_TOKEN) & (t < BAD_TOKEN + spec.w))[:, None]
    elif name == "q":
        heads[BAD_TOKEN, group] = True  # the heads of a group rank the blocks together
    else:
        heads[BAD_TOKEN, 2 * BAD_GROUP] = True
    return heads


PLANTED = [(name, torch.nan) for name in NAMES]
# An infinite logit or gate has an ordinary meaning; an infinite value must not leak either.
PLANTED += [(name, torch.inf) for name in NAMES if name.startswith("v_")]


@pytest.mark.parametrize(("name", "bad"), PLANTED)
@pytest.mark.parametrize(
    ("backend", "order"), [("reference", "auto"), ("torch", "prefix"), ("torch", "gather")]
)
def test_exactly_the_rows_that_depend_on_it_are_nan(backend, order, name, bad, monkeypatch):
    inputs = make_inputs(CASE)
    with torch_path(monkeypatch, order=order, chunk=32):
        clean, selection = run(CASE, inputs, backend, return_selection=True)
        at = BAD_BLOCK if name in ("k_cmp", "v_cmp") else BAD_TOKEN
        head = 2 * BAD_GROUP if name in ("q", "gates") else BAD_GROUP
        inputs[name][BAD_BATCH, at, head, 0] = bad
        poisoned = run(CASE, inputs, backend)
    expected = torch.zeros(2, CASE.S, 4, dtype=torch.bool)
    expected[BAD_BATCH] = _rows_that_depend(name, selection)
    assert expected.any()
    assert torch.equal(poisoned.isnan().all(dim=-1), expected)
    assert torch.equal(poisoned[~expected], clean[~expected])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_selection_stays_legal_when_scores_are_nan(backend, monkeypatch):
    monkeypatch.setenv("NSA_STRICT_ASSERTS", "1")
    inputs = make_inputs(CASE)
    inputs["k_cmp"][:] = torch.nan
    _, selection = run(CASE, inputs, backend, return_selection=True)
    current = (torch.arange(CASE.S) // CASE.spec.l_sel)[None, :, None, None]
    assert ((selection >= -1) & (selection <= current)).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_a_nan_token_reaches_the_future_of_its_own_sequence_only(path, phi):
    module = make_module(phi=phi)
    x = torch.randn(3, 40, 24, dtype=torch.float64)
    clean = PATHS[path](module, x)
    x[1, 17, 3] = torch.nan
    poisoned = PATHS[path](module, x)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert torch.equal(poisoned[1, :17], clean[1, :17])
    assert poisoned[1, 17:28].isnan().all()  # within the window of 11 every row reads it


@pytest.mark.parametrize("order", ["prefix", "gather"])
def test_rows_without_a_compressed_token_have_zero_output_and_no_gradient(order, monkeypatch):
    inputs = make_inputs(CASE, grad=True)
    gates = torch.tensor([1.0, 0, 0], dtype=torch.float64).expand(2, CASE.S, 4, 3)
    with torch_path(monkeypatch, order=order):
        out = run(CASE, {**inputs, "gates": gates}, "torch")
    assert out[:, : CASE.spec.l - 1].abs().max() == 0
    out[:, : CASE.spec.l - 1].sum().backward()
    for name in NAMES[:-1]:
        assert inputs[name].grad.abs().max() == 0, name
