"""Training, evaluation, files, generation and reports work with every rule."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.config import Config, ConfigError
from nsa.generate import generate
from nsa.model import TinyLM
from nsa.records import TRAINING, TrainingRow, read_rows
from nsa.records.heartbeat import PROGRESS, read_heartbeat
from nsa.train import run
from nsa.train.checkpoint.model_file import load_model
from nsa.train.optimizer import build_optimizer, set_lr

BuildConfig = Callable[..., Config]
BLOCKS = ("nsa.l_sel=16", "nsa.n_sel=3", "train.seq_len=96", "train.steps=6", "train.eval_every=6")
RULES = {
    "infllm": ("model.rule=pooled",),
    "moba": ("model.rule=pooled", "nsa.pool=moba", "nsa.pool_block=48"),
    "one K and V": ("model.kv=shared",),
    "msa": ("model.rule=msa,reuse", "nsa.d_index=8", "nsa.num_first=0", "nsa.num_local=1"),
    "mixed": ("model.rule=nsa,pooled",),
    "a family": (
        *("model.rule=dense,msa", "model.mlp=gated", "model.qkv_bias=true", "model.qk_norm=true"),
        *("model.rope_scaling=llama3", "model.rope_scale=4", "train.index_warmup_steps=1"),
        *("train.index_warmup=frozen", "train.optimizer=muon", "train.steps=8"),
    ),
    "msa, documents": ("model.rule=msa", "nsa.d_index=8", "data.respect_documents=true"),
}


@pytest.mark.parametrize("settings", RULES.values(), ids=RULES.keys())
def test_a_run_trains_logs_and_generates(
    settings: tuple[str, ...], tiny_config: BuildConfig
) -> None:
    cfg = tiny_config("model.n_layers=2", "train.lr=0.01", *BLOCKS, *settings)
    out = io.StringIO()
    result = run(cfg, config_path="tiny.yaml", out=out)
    folder = Path(cfg.train.out_dir)
    losses = [row.loss for row in read_rows(TrainingRow, folder / TRAINING)]
    assert losses[-1] < losses[0] - 0.2
    lines = [
        beat for beat in read_heartbeat(folder / "heartbeat_rank0.jsonl") if beat.msg == PROGRESS
    ]
    learns, branched = cfg.model.learns_index, any(cfg.model.branched)
    for line in lines:
        assert (line.extra["index_loss"] is not None) == learns
        assert (line.extra["entropy_mean"] is not None) == branched
        assert line.extra["sel_k_mean"] > 0
    assert f"attention: rule {cfg.model.rule}, K and V " in out.getvalue()
    assert "sparse_attention on torch" in out.getvalue()
    model, _ = load_model(folder / "model.pt")
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert torch.equal(generate(model, ids, 40), generate(result.model, ids, 40))


def test_the_indexer_learns_beside_the_model(tiny_config: BuildConfig, tmp_path: Path) -> None:
    """Its loss falls, and its weight and warm-up are those of the config."""
    rule = ("model.rule=msa", "nsa.d_index=8", *BLOCKS, "train.steps=12", "train.lr=0.01")
    found = {}
    for name, more in {
        "plain": (),
        "heavy": ("train.index_loss=4",),
        "warm": ("train.index_warmup_steps=12",),
    }.items():
        cfg = tiny_config(*rule, *more, f"train.out_dir={tmp_path / name}")
        run(cfg, config_path="tiny.yaml", out=io.StringIO())
        beats = read_heartbeat(Path(cfg.train.out_dir) / "heartbeat_rank0.jsonl")
        found[name] = [b.extra["index_loss"] for b in beats if b.msg == PROGRESS]
    assert found["plain"][-1] < 0.8 * found["plain"][0]
    assert found["heavy"] != found["plain"]
    assert found["warm"][0] != found["plain"][0], "the KL over all tokens"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_frozen_warm_up_moves_only_the_indexer(
    optimizer: str, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    """No gradient, no weight decay and no optimizer state of anything else, then all of it learns;
    a run that resumes inside the warm-up or after it ends with the same bits."""
    frozen = (
        *("model.rule=dense,msa", "model.n_layers=2", "nsa.d_index=8", "train.lr=0.01", *BLOCKS),
        *("train.index_warmup=frozen", "train.index_warmup_steps=4", "train.save_every=1"),
        *("train.weight_decay=0.5", f"train.optimizer={optimizer}", "train.index_lr=0.03"),
    )
    whole = Path(tiny_config(*frozen).train.out_dir)
    run(tiny_config(*frozen), config_path="tiny.yaml", out=io.StringIO())
    saved = {step: read_file(whole / f"checkpoint_step{step}.pt") for step in (2, 4, 5)}
    for name, before in saved[2]["state_dict"].items():
        moved = [not torch.equal(before, saved[s]["state_dict"][name]) for s in (4, 5)]
        assert moved == [".rule." in name, True], name
    parts = [saved[4]["optimizer"]]
    parts = [parts[0][part] for part in ("muon", "adamw")] if optimizer == "muon" else parts
    assert sum(len(part["state"]) for part in parts) == 4, "two matrices and two norms"
    for step in (2, 4):
        cfg = tiny_config(*frozen, f"train.out_dir={tmp_path / str(step)}")
        resume = str(whole / f"checkpoint_step{step}.pt")
        run(cfg, config_path="tiny.yaml", out=io.StringIO(), resume=resume)
        ends = [read_file(f / "model.pt")["state_dict"] for f in (whole, tmp_path / str(step))]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_indexer_has_a_rate_of_its_own(optimizer: str, tiny_config: BuildConfig) -> None:
    cfg = tiny_config(
        *("model.rule=dense,msa", "model.n_layers=2", "nsa.d_index=8", "train.lr=0.01", *BLOCKS),
        *("train.index_lr=0.5", "train.weight_decay=0", f"train.optimizer={optimizer}"),
    )
    sizes: dict[str, list[float]] = {}
    for other in (cfg, replace(cfg, train=replace(cfg.train, index_lr=0.0))):
        torch.manual_seed(1)
        model = TinyLM.from_config(other, vocab=64)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        built = build_optimizer(model, other.train)
        set_lr(built, 0.004)
        built.step()
        for name, parameter in model.named_parameters():
            moved = (parameter.detach() - start[name]).abs().mean().item()
            sizes.setdefault(name, []).append(moved)
    for name, (own, shared) in sizes.items():
        expected = 0.5 / 0.01 if ".rule." in name else 1.0
        assert own == pytest.approx(expected * shared, rel=1e-3), name


def read_file(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.rule=msa", "nsa.l_sel=24"), "nsa.l_sel=24.*a multiple of 16 up to 256"),
        (("model.kv=shared", "nsa.l_sel=16", "runtime.cuda_graph=true"), "runtime.cuda_graph=True"),
        (("nsa.n_sel=3", "nsa.num_first=2"), "nsa.n_sel=3.*>= 4"),
        (("train.index_loss=0",), "train.index_loss=0.*> 0"),
        (("nsa.pool=mean",), "nsa.pool='mean'.*infllm | moba"),
        (
            ("model.rule=pooled", "nsa.pool=moba", "nsa.l_sel=16", "nsa.n_sel=4"),
            "nsa.pool_block=512.*divisor of n_sel . l_sel = 64",
        ),
    ],
)
def test_settings_that_a_rule_cannot_have_are_refused(
    settings: tuple[str, ...], message: str, tiny_config: BuildConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(*settings)
