"""Changing tokens after t leaves everything up to t bit-equal, on every path, with S > w."""

import pytest
import torch

from nsa import BlockSpec, compress, select_blocks
from nsa.tests.support.helpers import (
    BACKENDS,
    PATHS,
    Case,
    make_inputs,
    make_module,
    run,
    torch_path,
)

CASE = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=120, B=2)
CUTS = (0, 6, 7, 10, 11, 39, 40, 77, 118)


def _change_after(inputs: dict[str, torch.Tensor], t: int) -> dict[str, torch.Tensor]:
    """Other values for everything that happens after token t, compressed blocks included."""
    other = make_inputs(CASE, seed=1)
    keep_cmp = CASE.spec.num_cmp(t + 1)
    return {
        name: torch.cat([x[:, :keep], other[name][:, keep:]], dim=1)
        for name, x in inputs.items()
        for keep in [keep_cmp if name in ("k_cmp", "v_cmp") else t + 1]
    }


@pytest.mark.parametrize("t", CUTS)
@pytest.mark.parametrize(
    ("backend", "order", "chunk"),
    [
        ("reference", "auto", None),
        *[("torch", o, c) for o in ("prefix", "gather") for c in (16, 512)],
    ],
)
def test_operator_output_does_not_depend_on_the_future(backend, order, chunk, t, monkeypatch):
    inputs = make_inputs(CASE)
    with torch_path(monkeypatch, order=order, chunk=chunk):
        before = run(CASE, inputs, backend)
        after = run(CASE, _change_after(inputs, t), backend)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", CUTS)
def test_selection_does_not_depend_on_the_future(backend, t):
    inputs = make_inputs(CASE)
    changed = _change_after(inputs, t)
    before = select_blocks(inputs["q"], inputs["k_cmp"], CASE.spec, backend=backend)
    after = select_blocks(changed["q"], changed["k_cmp"], CASE.spec, backend=backend)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compressed_tokens_do_not_depend_on_the_future(backend):
    x = torch.randn(1, 60, 2, 4)
    for t in (7, 8, 31):
        changed = torch.cat([x[:, : t + 1], torch.randn(1, 59 - t, 2, 4)], dim=1)
        visible = CASE.spec.num_cmp(t + 1)
        before = compress(x, CASE.spec, backend=backend)[:, :visible]
        assert torch.equal(before, compress(changed, CASE.spec, backend=backend)[:, :visible])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_module_output_does_not_depend_on_the_future(path, phi, dtype):
    module = make_module(phi=phi).to(dtype)
    x = torch.randn(2, 50, 24, dtype=dtype)
    before = PATHS[path](module, x)
    for t in (5, 8, 20, 33):
        changed = torch.cat([x[:, : t + 1], torch.randn(2, 49 - t, 24, dtype=dtype)], dim=1)
        after = PATHS[path](module, changed)
        assert torch.equal(before[:, : t + 1], after[:, : t + 1])
        assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])
