"""Training on a GPU: an update waits for nothing, compiled blocks agree, Muon is orthogonal."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nsa.config import Config
from nsa.data import packed_bounds
from nsa.model import TinyLM
from nsa.records import TRAINING, TrainingRow, read_rows
from nsa.tests.support.gpu import needs_gpu
from nsa.train import run
from nsa.train.build import build_step
from nsa.train.optimizer import orthogonalize
from nsa.train.runtime import resolve_runtime
from nsa.train.step import MicroBatch

pytestmark = needs_gpu

BuildConfig = Callable[..., Config]
ON_GPU = (
    *("runtime.device=cuda", "runtime.precision=bf16", "train.seq_len=256", "model.dim=64"),
    *("model.d_k=16", "model.d_v=16", "nsa.l=16", "nsa.d=8", "nsa.l_sel=16", "nsa.w=32"),
)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_an_update_waits_for_nothing(
    optimizer: str, packed: bool, tiny_config: BuildConfig
) -> None:
    cfg = tiny_config(
        *ON_GPU, f"train.optimizer={optimizer}", "train.spike_rule=skip", "train.spike_window=4"
    )
    runtime = resolve_runtime(cfg.runtime, (16, 16))
    step = build_step(cfg, TinyLM.from_config(cfg, 256).to(runtime.device), runtime)
    rows = [torch.randint(1, 256, (2, 257)) for _ in range(8)]
    for i, row in enumerate(rows):
        row[:, 100 + i % 3 :: 37] = 0  # three ways to cut: more than are remembered, all compiled
    batches = [
        MicroBatch(row.pin_memory(), packed_bounds(row, eos=0) if packed else None) for row in rows
    ]
    for batch in batches[:6]:  # until all is compiled, and the window of losses is full
        step([batch], 1e-3)
    torch.cuda.synchronize()
    with no_waiting():
        for batch in batches[6:]:
            step([batch], 1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself, and differently each time
@pytest.mark.parametrize("rule", ["nsa", "pooled", "msa"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(
    rule: str, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    losses = []
    for compiled in ("false", "true"):
        out_dir = f"train.out_dir={tmp_path / compiled}"
        changes = ("train.steps=6", f"runtime.compile={compiled}", f"model.rule={rule}", out_dir)
        cfg = tiny_config(*ON_GPU, *changes)
        run(cfg, config_path="tiny.yaml", out=io.StringIO())
        losses.append([row.loss for row in read_rows(TrainingRow, tmp_path / compiled / TRAINING)])
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 256)], ids=str)
def test_muon_is_orthogonal_in_bf16(shape: tuple[int, int]) -> None:
    matrices = torch.randn(4, *shape, device="cuda")
    found = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert found.max() < 1.4 and found.median() > 0.6
