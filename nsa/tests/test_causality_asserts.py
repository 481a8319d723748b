"""NSA_STRICT_ASSERTS=1: an illegal selection raises instead of reading the future."""

import pytest
import torch

from nsa.ops.eager import rows
from nsa.ops.eager.rows import choose_blocks
from nsa.tests.support.helpers import Case, make_inputs, make_module, run

MODULE_SIZES = dict(l=8, d=4, l_sel=8, n_sel=4, w=11)


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("NSA_STRICT_ASSERTS", "1")


def _plant_future_block(monkeypatch, at: int):
    """The choice of blocks gets a bug: the query at position `at` also takes the next block."""

    def buggy(scores, first, spec):
        chosen = choose_blocks(scores, first, spec)
        if first <= at < first + chosen.shape[2]:
            chosen[..., at - first, -1] = at // spec.l_sel + 1
        return chosen

    monkeypatch.setattr(rows, "choose_blocks", buggy)


def test_illegal_block_in_decode_raises(strict, monkeypatch):
    module, x = make_module(**MODULE_SIZES), torch.randn(1, 21, 24, dtype=torch.float64)
    cache = module.new_cache(1, 21)
    module.prefill(x[:, :20], cache)
    _plant_future_block(monkeypatch, at=20)
    with pytest.raises(AssertionError, match="would read the future"):
        module.step(x[:, 20:], cache)


def test_illegal_block_in_batched_prefill_raises(strict, monkeypatch):
    module, x = make_module(**MODULE_SIZES), torch.randn(1, 21, 24, dtype=torch.float64)
    _plant_future_block(monkeypatch, at=13)
    with pytest.raises(AssertionError, match=r"would read the future"):
        module.prefill(x, module.new_cache(1, 21))
    with pytest.raises(AssertionError, match=r"would read the future"):
        module(x)


def test_legal_selections_pass_and_illegal_given_ones_raise(strict):
    module, x = make_module(**MODULE_SIZES), torch.randn(1, 50, 24, dtype=torch.float64)
    assert module(x).isfinite().all()
    case = Case(module.spec, S=50)
    inputs = make_inputs(case)
    for backend in ("reference", "torch"):
        _, selection = run(case, inputs, backend, return_selection=True)
        assert run(case, inputs, backend, selection=selection).isfinite().all()
        future, doubled = selection.clone(), selection.clone()
        future[0, 9, 0, -1] = 2
        doubled[0, 49, 0, 1] = doubled[0, 49, 0, 0]
        with pytest.raises(AssertionError, match="would read the future"):
            run(case, inputs, backend, selection=future)
        with pytest.raises(AssertionError, match="not strictly ascending"):
            run(case, inputs, backend, selection=doubled)


def test_without_the_switch_a_future_block_is_still_not_read():
    case = Case(make_module(**MODULE_SIZES).spec, S=50)
    inputs = make_inputs(case)
    for backend in ("reference", "torch"):
        expected, selection = run(case, inputs, backend, return_selection=True)
        selection[0, 9, 0, 2] = 3  # places 2, 3 of this row are empty
        assert torch.equal(run(case, inputs, backend, selection=selection), expected)
