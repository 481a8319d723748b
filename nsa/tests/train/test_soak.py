"""scripts/soak.py does what it says, with one kill; docs/reliability.md has a run with many."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from nsa.tests.support.nursery import Nursery
from scripts.soak import main, same

pytestmark = pytest.mark.dist


def test_a_soak_of_one_cycle_ends_bit_equal(
    nursery: Nursery,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", str(nursery.python))
    assert main(["--cycles", "1", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("cycle 1: rank ")
    result = json.loads(lines[-1])
    assert result["bit_equal"] and result["updates"] == 6
    assert 0 <= result["most_updates_repeated"] <= 2 * result["save_every"]


def test_one_bit_is_a_difference() -> None:
    ones = {"a": torch.ones(3)}
    other = {"a": torch.ones(3).nextafter(torch.tensor([1.0, 1.0, 2.0]))}
    assert same(ones, {"a": torch.ones(3)})
    assert not same(ones, other) and not same(ones, {"b": torch.ones(3)})
