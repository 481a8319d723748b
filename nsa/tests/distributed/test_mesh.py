"""Ranks that share rows (runtime.cp) and matrices (runtime.tp): they learn as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.records import VAL, ValRow, read_metrics, read_rows
from nsa.tests.distributed.test_ranks import PLAIN, alone, config, losses, train
from nsa.tests.support.nursery import Nursery

pytestmark = pytest.mark.dist

TWENTY = ("train.steps=20", "train.save_every=10", "train.eval_every=10", "train.grad_clip=0.5")
CLOSE = 1e-6
"""Relative, over twenty updates: the order of sums is all that differs."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty updates of four rows in one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    alone(config(folder, *TWENTY, "train.batch_size=4", "model.n_kv_groups=2"))
    return folder


def test_two_ranks_that_share_rows_learn_what_one_process_learns(
    nursery: Nursery, one: Path, tmp_path: Path
) -> None:
    codes, printed = train(
        nursery, tmp_path / "a", *TWENTY, "model.n_kv_groups=2", "train.batch_size=4", "runtime.cp=2", **PLAIN
    )
    assert codes == [0, 0], printed
    folder = tmp_path / "a" / "run"
    assert losses(folder) == pytest.approx(losses(one), rel=CLOSE)


def test_x(nursery: Nursery, one: Path, tmp_path: Path) -> None:
    for name, ranks, settings in (
        ("fsdp-cp", 4, ("train.batch_size=2", "runtime.cp=2", "runtime.strategy=fsdp")),
        ("tp", 2, ("train.batch_size=4", "runtime.tp=2")),
        ("cptp", 4, ("train.batch_size=4", "runtime.tp=2", "runtime.cp=2")),
    ):
        codes, printed = train(nursery, tmp_path / name, *TWENTY, "model.n_kv_groups=2", *settings, ranks=ranks)
        assert codes == [0] * ranks, printed
        folder = tmp_path / name / "run"
        print(name, max(abs(a - b)/b for a, b in zip(losses(folder).values(), losses(one).values())))
        print(printed[-3000:])
