"""runtime.compile: the same run, faster; the same files, checkpoints and names."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from nsa.config import Config, ConfigError
from nsa.records import TRAINING, TrainingRow, read_rows
from nsa.tests.test_resume import stopped
from nsa.train import TrainResult, build, load_model, run

# torch warns about what its own tracer does; outside of tests that stays unseen.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor",
    "ignore:.*should not be instantiated:DeprecationWarning",
)

BuildConfig = Callable[..., Config]
COMPILED = ("runtime.compile=true", "train.steps=6", "train.save_every=3", "train.eval_every=4")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces, guards and derives as inductor does, and leaves out its C++ compiler."""
    monkeypatch.setattr(build, "BACKEND", "aot_eager")


def train(cfg: Config, **options: object) -> TrainResult:
    return run(cfg, config_path="tiny.yaml", out=io.StringIO(), **options)  # type: ignore[arg-type]


def losses(cfg: Config) -> list[float]:
    return [row.loss for row in read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("checkpointed", ["false", "true"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(
    checkpointed: str, tiny_config: BuildConfig
) -> None:
    settings = (
        *COMPILED,
        "train.log_every=2",
        "model.n_layers=3",
        f"runtime.gradient_checkpointing={checkpointed}",
    )
    plain = train(tiny_config(*settings, "runtime.compile=false"))
    expected = losses(tiny_config())
    result = train(tiny_config(*settings))

    assert counters["stats"]["unique_graphs"] == 1, "every layer and step shares one graph"
    assert losses(tiny_config()) == pytest.approx(expected, rel=1e-5)
    assert result.metrics.val_loss == pytest.approx(plain.metrics.val_loss, rel=1e-5)
    assert "blocks compiled" in result.metrics.attention
    assert result.metrics.attention_stats.keys() == plain.metrics.attention_stats.keys()
    assert len(result.metrics.attention_stats) > 5


def test_names_in_checkpoints_and_models_stay(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BACKEND", "eager")  # the least that wraps a module
    cfg = tiny_config(*COMPILED)
    result = train(cfg)
    folder = Path(cfg.train.out_dir)
    for path in (folder / "checkpoint_step6.pt", folder / "model.pt"):
        names = torch.load(path, weights_only=True)["state_dict"].keys()
        assert not any("_orig_mod" in name for name in names)
        model, loaded = load_model(path)
        assert loaded == cfg and list(names) == list(result.model.state_dict())
        assert not model.compiled


@pytest.mark.usefixtures("quick")
def test_a_resumed_compiled_run_is_exact_although_its_first_step_is_logged(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logged step collects statistics; it must not train otherwise for that."""
    settings = (*COMPILED, "train.log_every=3")
    whole = tiny_config(*settings, f"train.out_dir={tmp_path / 'whole'}")
    parts = tiny_config(*settings, f"train.out_dir={tmp_path / 'parts'}")
    expected = train(whole)
    stopped(parts, 4, monkeypatch)
    resumed = train(parts)
    assert resumed.metrics.resumed_at == 4
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_without_a_compiler_the_run_does_not_start(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    cfg = tiny_config(*COMPILED)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler .* runtime.compile=false"):
        train(cfg)
    assert not Path(cfg.train.out_dir).exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor uses what torch deprecates
def test_inductor_trains_to_the_losses_of_a_plain_run(tiny_config: BuildConfig) -> None:
    train(tiny_config())
    expected = losses(tiny_config())
    train(tiny_config("runtime.compile=true"))
    assert losses(tiny_config()) == pytest.approx(expected, rel=1e-5)
    assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
