"""runtime.compile: the same run, faster; the same files, checkpoints and names."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from nsa.config import Config, ConfigError, load_config
from nsa.records import TRAINING, TrainingRow, read_rows
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.train import TrainResult, build, load_model, run

# torch warns about what its own tracer does; outside of tests that stays unseen.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor",
    "ignore:.*should not be instantiated:DeprecationWarning",
)

BuildConfig = Callable[..., Config]
SETTINGS = ("train.steps=6", "train.save_every=3", "train.eval_every=4", "train.log_every=3")
COMPILED = (*SETTINGS, "runtime.compile=true")


def config(folder: Path, *overrides: str) -> Config:
    out_dir = f"train.out_dir={folder}"
    return load_config(
        REPOSITORY / "configs" / "base.yaml", [*TINY, out_dir, *overrides], environ={}
    )


def train(cfg: Config) -> TrainResult:
    """Train, compiled by whatever traces, guards and derives as inductor does, without its C++."""
    torch.compiler.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BACKEND", "aot_eager")
        result = run(cfg, config_path="tiny.yaml", out=io.StringIO())
    torch.compiler.reset()
    return result


def losses(cfg: Config) -> list[float]:
    return [row.loss for row in read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, TrainResult]:
    """A run that is not compiled."""
    cfg = config(tmp_path_factory.mktemp("plain"), *SETTINGS)
    return cfg, train(cfg)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, TrainResult, int]:
    """A compiled run, and its number of graphs."""
    cfg = config(tmp_path_factory.mktemp("whole"), *COMPILED)
    return cfg, train(cfg), counters["stats"]["unique_graphs"]


def assert_same_run(cfg: Config, result: TrainResult, plain: tuple[Config, TrainResult]) -> None:
    assert losses(cfg) == pytest.approx(losses(plain[0]), rel=1e-5)
    metrics, expected = result.metrics, plain[1].metrics
    assert metrics.val_loss == pytest.approx(expected.val_loss, rel=1e-5)
    assert "blocks compiled" in metrics.attention
    assert metrics.attention_stats.keys() == expected.attention_stats.keys()
    assert len(metrics.attention_stats) > 5


def test_a_compiled_run_has_the_losses_of_a_plain_one(
    plain: tuple[Config, TrainResult], whole: tuple[Config, TrainResult, int]
) -> None:
    cfg, result, num_graphs = whole
    assert num_graphs == 1, "every layer and step shares one graph"
    assert_same_run(cfg, result, plain)


def test_so_has_one_with_rules(tmp_path: Path) -> None:
    """All layers share their graphs; the choice of blocks is in none of them."""
    rules = ("model.rule=msa,reuse", "model.n_layers=6", "nsa.l_sel=16", "nsa.d_index=4")
    expected = config(tmp_path / "plain", *SETTINGS, *rules)
    train(expected)
    cfg = config(tmp_path / "compiled", *COMPILED, *rules)
    train(cfg)
    assert losses(cfg) == pytest.approx(losses(expected), rel=1e-5)
    assert 4 <= counters["stats"]["unique_graphs"] <= 8, "of two kinds of layers, not of six"


def test_so_has_one_that_recomputes(plain: tuple[Config, TrainResult], tmp_path: Path) -> None:
    cfg = config(tmp_path, *COMPILED, "runtime.gradient_checkpointing=true")
    result = train(cfg)
    assert counters["stats"]["unique_graphs"] == 1
    assert_same_run(cfg, result, plain)


def test_names_in_checkpoints_and_models_stay(whole: tuple[Config, TrainResult, int]) -> None:
    cfg, result, _ = whole
    folder = Path(cfg.train.out_dir)
    for path in (folder / "checkpoint_step6.pt", folder / "model.pt"):
        names = torch.load(path, weights_only=True)["state_dict"].keys()
        assert not any("_orig_mod" in name for name in names)
        model, loaded = load_model(path)
        assert loaded == cfg and list(names) == list(result.model.state_dict())
        assert not model.compiled


def test_a_resumed_compiled_run_is_exact_although_its_first_step_is_logged(
    whole: tuple[Config, TrainResult, int], tmp_path: Path
) -> None:
    """A logged step collects statistics; it must not train otherwise for that."""
    for path in Path(whole[0].train.out_dir).glob("checkpoint_step3*"):
        shutil.copy(path, tmp_path)
    resumed = train(config(tmp_path, *COMPILED))
    assert resumed.metrics.resumed_at == 3
    for name, tensor in whole[1].model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_without_a_compiler_the_run_does_not_start(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    cfg = tiny_config(*COMPILED)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler .* runtime.compile=false"):
        run(cfg, config_path="tiny.yaml", out=io.StringIO())
    assert not Path(cfg.train.out_dir).exists()


@pytest.mark.filterwarnings("ignore")  # inductor uses what torch deprecates
def test_inductor_trains_to_the_losses_of_a_plain_run(tmp_path: Path) -> None:
    """Also where l_sel does not divide the length, which inductor's C++ once got wrong."""
    odd = ("train.seq_len=41", "nsa.l_sel=16")
    plain = config(tmp_path / "plain", *SETTINGS, *odd)
    cfg = config(tmp_path / "compiled", *COMPILED, *odd)
    train(plain)
    counters.clear()
    run(cfg, config_path="tiny.yaml", out=io.StringIO())
    torch.compiler.reset()
    assert losses(cfg) == pytest.approx(losses(plain), rel=1e-5)
    assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
