"""Loss spikes: each rule rings on a planted one, acts as it says, and lets healthy runs alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import Config, TrainConfig
from nsa.data import Data, open_data
from nsa.data.array_rows import AnyOrder
from nsa.records import TRAINING, Metrics, TrainingRow, read_metrics, read_rows
from nsa.tests.train.test_resume import stopped
from nsa.train import Halted, NonFiniteLoss, TrainError, TrainResult, log, run
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.progress import Progress
from nsa.train.runtime import resolve_runtime
from nsa.train.spikes import Spikes
from nsa.train.step import Updated
from nsa.train.telemetry import Telemetry
from nsa.train.trainer import Trainer

BuildConfig = Callable[..., Config]
ROWS = 4
"""Of an update."""
SETTINGS = (
    *("train.steps=30", "train.lr=1e-2", "train.lr_schedule=constant", "train.eval_every=0"),
    *("train.save_every=8", "train.batch_size=2", "train.accumulate_grad_batches=2"),
    *("train.spike_window=8", "train.log_every=7", "model.n_layers=1"),
)
SPIKE = 22
"""The update that reads noise where there is text otherwise; the checkpoint before is at 16."""


class Planted(AnyOrder):
    """Rows of text in which those of some updates are noise, which a trained model hates."""

    def __init__(self, data: Data, updates: range) -> None:
        self._rows, self.num_rows = data.train, data.train.num_rows
        self._bad = range(ROWS * (updates.start - 1), ROWS * (updates.stop - 1))
        self.read: list[int] = []

    def batch(self, position: int, size: int) -> Tensor:
        self.read.append(position)
        if position in self._bad:
            generator = torch.Generator().manual_seed(position)
            return torch.randint(128, 256, (size, 33), generator=generator)
        return self._rows.batch(position, size)

    def fingerprint(self) -> str:
        return self._rows.fingerprint()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], SimpleNamespace]:
    """Plant noise into the updates of the next run; its rows are in `.rows` then."""

    def planting(updates: range) -> SimpleNamespace:
        seen = SimpleNamespace(rows=None, all=[])

        def opened(*args: Any, **options: Any) -> Data:
            data = open_data(*args, **options)
            seen.rows = Planted(data, updates)
            seen.all.append(seen.rows)
            return data._replace(train=seen.rows)

        monkeypatch.setattr(import_module("nsa.train.batches"), "open_data", opened)
        monkeypatch.setenv("NSA_FWE_PREFETCH", "0")  # rows are then read when they are needed
        return seen

    return planting


def train(cfg: Config, **options: object) -> tuple[TrainResult, list[str]]:
    out = io.StringIO()
    result = run(cfg, config_path="tiny.yaml", out=out, **options)  # type: ignore[arg-type]
    return result, [line for line in out.getvalue().splitlines() if line.startswith("[spike]")]


def weights(result: TrainResult) -> dict[str, Tensor]:
    return result.model.state_dict()


def same(a: TrainResult, b: TrainResult) -> bool:
    return all(torch.equal(x, weights(b)[name]) for name, x in weights(a).items())


Plant = Callable[[range], SimpleNamespace]
NONE, ONE = range(1, 1), range(SPIKE, SPIKE + 1)


def test_a_healthy_run_rings_no_alarm_and_is_the_same_under_every_rule(
    tiny_config: BuildConfig, plant: Plant, tmp_path: Path
) -> None:
    plant(NONE)
    results = []
    for rule in ("off", "log", "skip", "rollback"):
        place = f"train.out_dir={tmp_path / rule}"
        result, said = train(tiny_config(*SETTINGS, f"train.spike_rule={rule}", place))
        assert said == [] and result.metrics.spikes == 0, rule
        results.append(result)
        assert same(result, results[0]), rule


def test_log_says_it_and_changes_nothing(
    tiny_config: BuildConfig, plant: Plant, tmp_path: Path
) -> None:
    plant(ONE)
    off, silence = train(
        tiny_config(*SETTINGS, "train.spike_rule=off", f"train.out_dir={tmp_path}/0")
    )
    cfg = tiny_config(*SETTINGS, "train.spike_rule=log")
    result, said = train(cfg)
    assert silence == [] and off.metrics.spikes == 0
    assert len(said) == 1 and f"at step {SPIKE} is a spike" in said[0]
    assert "training continues" in said[0]
    assert read_metrics(Path(cfg.train.out_dir)).spikes == 1
    assert same(result, off)


@pytest.mark.parametrize("settings", [(), ("runtime.precision=fp16",), ("train.optimizer=muon",)])
def test_skip_leaves_the_update_out_and_no_other(
    settings: tuple[str, ...],
    tiny_config: BuildConfig,
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(ONE)
    moved: dict[int, bool] = {}
    real = Trainer.update

    def update(self: Trainer, step: int, *args: object) -> object:
        weight = self.model.layers[0].mlp.fc1.weight
        before = weight.detach().clone()
        done = real(self, step, *args)  # type: ignore[arg-type]
        moved[step] = not torch.equal(before, weight)
        return done

    monkeypatch.setattr(Trainer, "update", update)
    result, said = train(tiny_config(*SETTINGS, *settings, "train.spike_rule=skip"))
    assert len(said) == 1 and f"at step {SPIKE} " in said[0] and "its update was skipped" in said[0]
    assert result.metrics.spikes == 1
    assert [step for step, did in moved.items() if not did] == [SPIKE]


def test_rollback_returns_to_the_checkpoint_and_jumps_over_the_data(
    tiny_config: BuildConfig, plant: Plant
) -> None:
    seen = plant(ONE)
    cfg = tiny_config(*SETTINGS, "train.spike_rule=rollback")
    result, said = train(cfg)
    folder = Path(cfg.train.out_dir)
    assert "back to checkpoint_step16.pt" in said[1] and "6 updates" in said[1]
    assert (result.metrics.step, result.metrics.status) == (30, "finished")
    assert result.metrics.spikes == 1 and result.metrics.resumed_at == 16
    first, second = (rows.read for rows in seen.all)
    assert first[-2] // ROWS + 1 in (SPIKE, SPIKE + 1), "seen at most one step late"
    assert second == list(range(ROWS * SPIKE, ROWS * (30 + SPIKE - 16), 2))
    steps = [row.step for row in read_rows(TrainingRow, folder / TRAINING)]
    assert steps == sorted(set(steps)) and steps[-1] == 30
    saved = checkpoint_file.read(folder / "checkpoint_step24.pt")
    assert saved["spikes"]["jumped"] == SPIKE - 16


def test_a_run_that_rolled_back_is_resumed_exactly(
    tiny_config: BuildConfig, plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the rollback, and in the spike, which is not saved."""
    plant(ONE)
    settings = (*SETTINGS, "train.spike_rule=rollback")
    whole, _ = train(tiny_config(*settings, f"train.out_dir={tmp_path / 'whole'}"))
    for step, newest in ((27, 27), (SPIKE, 16)):
        parts = tiny_config(*settings, f"train.out_dir={tmp_path / str(step)}")
        stopped(parts, step, monkeypatch)
        assert checkpoint_file.steps_of(tmp_path / str(step))[0] == newest
        resumed, _ = train(parts)
        assert same(resumed, whole), step
        assert resumed.metrics.spikes == 1


def test_skipping_is_resumed_exactly(
    tiny_config: BuildConfig, plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is part of the state: the spike comes right after the resume."""
    plant(ONE)
    settings = (*SETTINGS, "train.spike_rule=skip")
    whole, _ = train(tiny_config(*settings, f"train.out_dir={tmp_path / 'whole'}"))
    parts = tiny_config(*settings, f"train.out_dir={tmp_path / 'parts'}")
    stopped(parts, SPIKE - 1, monkeypatch)
    resumed, said = train(parts)
    assert len(said) == 1 and same(resumed, whole)


def test_without_a_checkpoint_the_run_goes_on(tiny_config: BuildConfig, plant: Plant) -> None:
    plant(ONE)
    cfg = tiny_config(*SETTINGS, "train.spike_rule=rollback", "train.save_every=25")
    result, said = train(cfg)
    assert "no checkpoint before it" in said[1]
    assert result.metrics.status == "finished"


def test_spikes_without_end_end_the_run(tiny_config: BuildConfig, plant: Plant) -> None:
    plant(range(SPIKE, 500))
    cfg = tiny_config(*SETTINGS, "train.spike_rule=rollback", "train.spike_threshold=4")
    with pytest.raises(TrainError, match="rollback number 6 to checkpoint_step16.pt.*lower"):
        train(cfg)


@pytest.mark.parametrize(("save_every", "newest"), [(8, 16), (25, SPIKE)], ids=["goes-back", "no"])
def test_a_halt_in_a_spike_is_obeyed_and_saves_it_only_where_there_is_nothing_else(
    save_every: int,
    newest: int,
    tiny_config: BuildConfig,
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(ONE)
    cfg = tiny_config(*SETTINGS, "train.spike_rule=rollback", f"train.save_every={save_every}")
    folder = Path(cfg.train.out_dir)
    real = Trainer.update

    def update(self: Trainer, step: int, *args: object) -> object:
        if step == SPIKE:
            (folder / ".HALT").touch()
        return real(self, step, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(Halted, match=r"stopped by .HALT"):
        train(cfg)
    assert checkpoint_file.steps_of(folder)[0] == newest
    assert (folder / ".HALT.done").exists()


def limits(losses: list[float], **settings: float) -> list[float]:
    spikes = Spikes(TrainConfig(spike_window=5, **settings), torch.device("cpu"))  # type: ignore
    limits = []
    for loss in losses:
        limits.append(spikes.limit().item())
        spikes.remember(torch.tensor(loss))
    return limits


def test_the_limit_is_the_median_and_so_many_robust_deviations() -> None:
    found = limits([4.0, 3.0, 5.0, 2.0, 9.0, 1.0, 4.0], spike_threshold=2.0)
    assert found[:5] == [float("inf")] * 5
    # of 4 3 5 2 9: median 4, distances 0 1 1 2 5; of 3 5 2 9 1: median 3, distances 0 2 1 6 2
    assert found[5:] == pytest.approx([4 + 2 * 1.4826 * 1, 3 + 2 * 1.4826 * 2])


def test_equal_losses_leave_room_for_one_percent() -> None:
    assert limits([2.0] * 6, spike_threshold=8.0)[-1] == pytest.approx(2 + 8 * 0.02)


def test_losses_that_stay_high_become_the_usual() -> None:
    losses = [2.0, 2.1, 1.9, 2.0, 2.05] + 5 * [4.0]
    found = limits(losses, spike_threshold=4.0)
    rings = [loss > limit for loss, limit in zip(losses, found, strict=True)]
    assert rings[5:] == [True, True, True, False, False]


def test_a_check_returns_at_a_spike_before_it_sees_what_came_later(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback after step 2 must win over the NaN of step 3, which it would not train again."""
    settings = ("train.spike_rule=rollback", "train.log_every=1", "train.save_every=8")
    cfg = tiny_config(*settings, "model.attention=dense")
    folder = Path(cfg.train.out_dir)
    folder.mkdir(parents=True)
    runtime = resolve_runtime(cfg.runtime, attention="dense")
    sizes = dict(num_params=1, tokens_per_step=1, steps=9, seq_len=1, batch_global=1, lr=0.1)
    metrics = Metrics(config_file="x", device="cpu", dtype="fp32", attention="dense", **sizes)  # type: ignore[arg-type]
    out = io.StringIO()
    monkeypatch.setenv("NSA_TB_DISABLE", "1")
    monkeypatch.setattr(log, "LATE", ("cpu",))
    telemetry = Telemetry(folder, runtime, 0, print)
    run_log = log.RunLog(folder, metrics, cfg, Progress(out, steps=9), telemetry)
    for step, loss in enumerate((1.0, 9.0, float("nan")), start=1):
        run_log.add(step, Updated(*torch.tensor([loss, 1.0, 5.0])), 0.1, None)

    spike = run_log.check(settle=True)

    assert spike is not None and spike.step == 2
    assert [row.step for row in run_log.training.rows] == [1], "the spike's line waits"
    with pytest.raises(NonFiniteLoss):
        run_log.check(settle=True)
    assert [row.step for row in run_log.training.rows] == [1, 2]
    telemetry.heartbeat.close()
