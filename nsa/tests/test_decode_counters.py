"""Decode reads what NSA promises: counted from the masks in use, proved with poisoned memory."""

import pytest
import torch

from nsa import BlockSpec
from nsa.model.cache import NSACache
from nsa.ops.eager import rows
from nsa.ops.eager.rows import choose_blocks
from nsa.tests.support.helpers import make_module

VARIANTS = {
    "default": {},
    "wide-window": dict(w=100),
    "many-blocks": dict(n_sel=12, l=16, d=8, l_sel=16),
    "mlp": dict(phi="mlp"),
}


@pytest.mark.parametrize("prefilled", [0, 5, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_counted_reads_equal_the_formula_at_every_length(prefilled, variant):
    module = make_module(**VARIANTS[variant])
    spec, x = module.spec, torch.randn(2, 90, 24, dtype=torch.float64)
    cache = module.new_cache(2, 90)
    if prefilled:
        module.prefill(x[:, :prefilled], cache)
        assert cache.reads.sum() == 0  # counters are of decode steps
    total = torch.zeros(2, 2, 3, dtype=torch.int64)
    for t in range(prefilled, 90):
        module.step(x[:, t : t + 1], cache)
        length = t + 1
        blocks = min(spec.n_sel, t // spec.l_sel + 1)
        selected = (blocks - 1) * spec.l_sel + t % spec.l_sel + 1
        num_cmp = 0 if length < spec.l else (length - spec.l) // spec.d + 1
        expected = torch.tensor([num_cmp, selected, min(spec.w, length)])
        assert torch.equal(cache.last_reads, expected.expand(2, 2, 3)), f"length {length}"
        assert cache.last_reads[0, 0].sum() == spec.num_reads(length)
        total += expected
    assert torch.equal(cache.reads, total)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_reads_nothing_beyond_the_counted_tokens(variant, monkeypatch):
    """Everything a step may not read is NaN before the step; the output does not change."""
    module = make_module(**VARIANTS[variant])
    x = torch.randn(1, 80, 24, dtype=torch.float64)
    cache, poisoned = module.new_cache(1, 100), module.new_cache(1, 100)
    module.prefill(x[:, :60], cache)
    _fill_with_nan(poisoned)
    module.prefill(x[:, :60], poisoned)
    selections = _record_selections(monkeypatch)
    for t in range(60, 80):
        expected = module.step(x[:, t : t + 1], cache)
        _poison_unselected(poisoned, selections[-1], t)
        assert torch.equal(module.step(x[:, t : t + 1], poisoned), expected)
        _restore(poisoned, cache)


def _fill_with_nan(cache: NSACache) -> None:
    for kv in (cache.sel, cache.cmp, cache.win, cache.raw):
        kv.k.fill_(torch.nan)
        kv.v.fill_(torch.nan)


def _record_selections(monkeypatch) -> list[torch.Tensor]:
    selections: list[torch.Tensor] = []

    def recording(*args):
        selections.append(choose_blocks(*args))
        return selections[-1]

    monkeypatch.setattr(rows, "choose_blocks", recording)
    return selections


def _poison_unselected(cache: NSACache, chosen: torch.Tensor, t: int) -> None:
    """NaN in every selected-branch token that position t did not select: [B, Hkv, 1, n_sel]."""
    block = torch.arange(cache.max_len) // cache.spec.l_sel
    for head in range(chosen.shape[1]):
        unread = ~torch.isin(block, chosen[0, head, 0].long())
        cache.sel.k[:, head, unread] = torch.nan
        cache.sel.v[:, head, unread] = torch.nan


def _restore(cache: NSACache, good: NSACache) -> None:
    for mine, theirs in ((cache.sel.k, good.sel.k), (cache.sel.v, good.sel.v)):
        mine[:, :, : good.length] = theirs[:, :, : good.length]


def test_reads_at_64k_are_those_of_the_runbook_demo():
    demo = BlockSpec(l=32, d=16, l_sel=64, n_sel=8, w=4096)
    assert demo.num_reads(65536) == 4095 + 8 * 64 + 4096
