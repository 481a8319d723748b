"""Two real ranks that share a model out: they learn as one would, and resume any checkpoint.

torchrun and the script of the runbooks start those of the fixture; the nursery starts all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.config import ConfigError
from nsa.records import VAL, ValRow, read_metrics, read_rows
from nsa.records.results import read_dtypes
from nsa.records.sentinels import read_anomaly
from nsa.tests.conftest import REPOSITORY
from nsa.tests.distributed.test_ranks import (
    PLAIN,
    ROUNDING,
    alone,
    config,
    last_steps,
    losses,
    train,
    weights,
    write,
)
from nsa.tests.support import launch
from nsa.tests.support.nursery import Nursery, free_port
from nsa.train import load_model
from nsa.train.build import build_model
from nsa.train.checkpoint import find
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.distributed.strategy import OFF
from nsa.train.runtime import resolve_runtime

pytestmark = pytest.mark.dist

SCRIPT = REPOSITORY / "scripts" / "train_showcase_fsdp.py"
FSDP = "runtime.strategy=fsdp"
BATCH = ("train.batch_size=2", "train.accumulate_grad_batches=2")
BF16_ROUNDING = 2e-3
"""Relative; weights of norms are rounded, too, where blocks are gathered in bf16."""


def equal(found: Path, expected: Path) -> bool:
    """Whether two runs have learned the same, bit by bit."""
    ours, theirs = weights(found), weights(expected)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.fixture(scope="module")
def shared_out(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Six updates of two ranks x two rows x two micro-batches, and what was printed."""
    folder = tmp_path_factory.mktemp("fsdp") / "a"
    path = write(folder, *BATCH)
    code, printed = launch.launch("--config", path, script=SCRIPT, python=nursery.python)
    assert code == 0, printed
    return folder / "run", printed


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same six updates of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    alone(config(folder, "train.batch_size=4", "train.accumulate_grad_batches=2"))
    return folder


def test_a_shared_model_learns_what_one_process_learns(
    shared_out: tuple[Path, str], one: Path
) -> None:
    folder, printed = shared_out
    assert "[ddp] process group ready | backend=gloo world_size=2 timeout_min=1\n" in printed
    assert printed.count("[fsdp] 2 blocks sharded over 2 ranks") == 1
    assert losses(folder) == pytest.approx(losses(one), rel=ROUNDING)
    found, expected = (read_rows(ValRow, f / VAL) for f in (folder, one))
    assert [r.loss for r in found] == pytest.approx([r.loss for r in expected], rel=ROUNDING)
    assert read_metrics(folder).num_params == read_metrics(one).num_params
    assert [p.shape for p in read_dtypes(folder).parameters] == [
        p.shape for p in read_dtypes(one).parameters
    ]


def test_the_model_file_is_whole_and_checkpoints_are_folders(
    shared_out: tuple[Path, str], one: Path
) -> None:
    folder, _ = shared_out
    model, _ = load_model(folder / "model.pt")
    assert {n: x.shape for n, x in model.state_dict().items()} == {
        n: x.shape for n, x in weights(one).items()
    }
    assert [path.name for path in find.paths_of(folder)] == [
        "checkpoint_step6",
        "checkpoint_step3",
    ]
    assert sorted(checkpoint_folder.verify(folder / "checkpoint_step6").files) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "state.pt",
    ]
    saved, _ = load_model(folder / "checkpoint_step6")
    assert all(torch.equal(x, weights(folder)[n]) for n, x in saved.state_dict().items())
    assert [path.name for path in folder.glob(".*")] == [".lock"], "no half file is left"


def test_the_same_ranks_go_on_bit_for_bit(
    shared_out: tuple[Path, str], nursery: Nursery, tmp_path: Path
) -> None:
    flags = ("--resume", shared_out[0] / "checkpoint_step3")
    codes, printed = train(nursery, tmp_path / "b", *BATCH, FSDP, flags=flags)
    assert codes == [0, 0], printed
    resumed = tmp_path / "b" / "run"
    assert losses(resumed) == {s: x for s, x in losses(shared_out[0]).items() if s > 3}
    assert equal(resumed, shared_out[0])


def test_ddp_goes_on_from_parts_and_fsdp_from_a_file(
    shared_out: tuple[Path, str], nursery: Nursery, tmp_path: Path
) -> None:
    """DDP reads the folder, and writes a file; from it FSDP does the last updates."""
    folder = tmp_path / "c"
    write(folder, *BATCH, "train.save_every=2")
    flags = ("--resume", shared_out[0] / "checkpoint_step3", "--steps", 5)
    codes, printed = train(nursery, folder, flags=flags, **PLAIN)
    assert codes == [0, 0], printed
    assert (folder / "run" / "checkpoint_step4.pt").is_file()
    codes, printed = train(nursery, folder, flags=("--resume", "latest", "--strategy", "fsdp"))
    assert codes == [0, 0], printed
    assert "checkpoint_step4.pt: 4 of 6 steps are done" in printed
    expected = {s: x for s, x in losses(shared_out[0]).items() if s > 3}
    assert losses(folder / "run") == pytest.approx(expected, rel=ROUNDING)
    assert [path.name for path in find.paths_of(folder / "run")] == [
        "checkpoint_step6",
        "checkpoint_step4.pt",
    ]


def test_one_process_two_ranks_one_process(nursery: Nursery, tmp_path: Path, one: Path) -> None:
    """In between with a layer that recomputes, and other micro-batches."""
    parts = tmp_path / "d"
    write(
        parts,
        *("train.batch_size=1", "train.accumulate_grad_batches=4", "train.keep_last=1", FSDP),
        *("runtime.gradient_checkpointing=true", "runtime.gc_layers=0:1"),
    )
    batch = ("train.batch_size=4", "train.accumulate_grad_batches=2")
    alone(config(parts / "run", *batch, "train.save_every=2"), stop_after=2)
    codes, printed = train(nursery, parts, flags=("--steps", 4, "--resume", "latest"))
    assert codes == [0, 0], printed
    assert "[train] gradient_checkpointing=on\n" in printed
    # keep_last=1: the folder of step 3 has replaced the file of step 2.
    assert [path.name for path in find.paths_of(parts / "run")] == ["checkpoint_step3"]
    alone(config(parts / "run", *batch), resume="latest")
    metrics = read_metrics(parts / "run")
    assert (metrics.step, metrics.resumed_at, metrics.world_size) == (6, 3, 1)
    assert losses(parts / "run") == pytest.approx(losses(one), rel=ROUNDING)


def test_half_precision_keeps_fp32_weights(nursery: Nursery, tmp_path: Path) -> None:
    """Muon, too: its matrices are whole where they must be."""
    settings = ("runtime.precision=bf16", "train.eval_every=0", "train.optimizer=muon")
    codes, printed = train(nursery, tmp_path / "e", *settings, FSDP)
    assert codes == [0, 0], printed
    assert "blocks gathered in bf16, gradients summed in fp32" in printed
    alone(config(tmp_path / "f", *settings, "train.batch_size=4"))
    folder = tmp_path / "e" / "run"
    assert losses(folder) == pytest.approx(losses(tmp_path / "f"), rel=BF16_ROUNDING)
    content = find.read(folder / "checkpoint_step3")
    tensors = content["state_dict"].values()
    assert {x.dtype for x in tensors} == {torch.float32}
    moments = content["optimizer"]["adamw"]["state"].values()
    assert {s["exp_avg"].dtype for s in moments} == {torch.float32}


def group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun would set for a single rank, on a port of its own."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)


FAMILY = (
    *("model.mlp=gated", "model.qkv_bias=true", "model.qk_norm=true", "train.optimizer=muon"),
    *("train.index_warmup_steps=3", "train.index_warmup=frozen", "train.index_lr=0.01"),
)


@pytest.mark.parametrize(
    ("settings", "rounding"),
    [
        (("model.tie_embeddings=true", "data.respect_documents=true"), 0.0),
        (("train.optimizer=muon", "nsa.phi=mlp"), 0.0),
        (("model.attention=dense", "runtime.precision=bf16"), BF16_ROUNDING),
        (("nsa.phi=mlp", "nsa.gate=sigmoid", "runtime.precision=bf16"), BF16_ROUNDING),
        (("model.rule=msa,reuse", "nsa.l_sel=16", "nsa.d_index=8"), 0.0),
        (("model.rule=dense,msa", "nsa.l_sel=16", "nsa.d_index=8", *FAMILY), 0.0),
    ],
    ids=["tied", "muon", "dense bf16", "mlp bf16", "msa", "a family, frozen at first"],
)
def test_one_rank_learns_what_one_process_learns(
    settings: tuple[str, ...], rounding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 bit for bit."""
    alone(config(tmp_path / "alone", *settings))
    group_of_one(monkeypatch)
    alone(config(tmp_path / "ranks", *settings, "runtime.strategy=fsdp"))
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), rel=rounding)
    assert rounding or equal(tmp_path / "ranks", tmp_path / "alone")


@pytest.mark.parametrize("key", ["compile", "cuda_graph"])
def test_what_cannot_gather_weights_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_of_one(monkeypatch)
    with pytest.raises(ConfigError, match=f"runtime.{key}=true under FSDP.*strategy=ddp"):
        alone(config(tmp_path, "runtime.strategy=fsdp", f"runtime.{key}=true"))


def test_a_strategy_without_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="runtime.strategy=fsdp in one process.*use torchrun"):
        alone(config(tmp_path, "runtime.strategy=fsdp"))
    group_of_one(monkeypatch)
    with pytest.raises(ConfigError, match="runtime.strategy=ddp in one process .--ddp 0"):
        alone(config(tmp_path, "runtime.strategy=ddp"), ddp=OFF)


def test_nan_on_one_rank_leaves_the_whole_weights(nursery: Nursery, tmp_path: Path) -> None:
    codes, printed = train(nursery, tmp_path / "g", FSDP, trouble="nan")
    folder = tmp_path / "g" / "run"
    assert codes == [10, 10], printed
    assert printed.count("[FATAL] non-finite loss") == 1 and "(the loss of rank 1)" in printed
    assert last_steps(folder)[0] == last_steps(folder)[1]
    assert read_anomaly(folder) == "nan_loss"
    left = next(folder.glob("anomaly_step?.pt"))
    content = torch.load(left, weights_only=True)["state_dict"]
    assert all(x.isfinite().all() for x in content.values())
    assert content["embed.weight"].shape == (256, 16)


def test_a_signal_to_one_rank_saves_together(nursery: Nursery, tmp_path: Path) -> None:
    """In fp16, with a scale at which the first gradient overflows: no rank may do that update."""
    settings = ("runtime.precision=fp16", "train.save_every=1", "train.keep_last=0")
    scale: dict[str, Any] = {"NSA_SCALER_INIT_SCALE": "1048576"}
    codes, printed = train(nursery, tmp_path / "h", *settings, FSDP, trouble="term", **scale)
    folder = tmp_path / "h" / "run"
    assert codes == [0, 0], printed
    fresh = build_model(config(folder), 256, resolve_runtime(config(folder).runtime))
    saved = [find.read(folder / f"checkpoint_step{n}") for n in (1, 3)]
    assert all(torch.equal(x, fresh.state_dict()[n]) for n, x in saved[0]["state_dict"].items())
    assert saved[0]["scaler"]["scale"] == 524288.0
    assert not torch.equal(saved[1]["state_dict"]["embed.weight"], fresh.embed.weight)
    assert printed.count("stopped by SIGTERM after step 3") == 1
    assert last_steps(folder) == [3, 3]
    assert checkpoint_folder.verify(folder / "checkpoint_step3").step == 3
    assert read_metrics(folder).status == "halted"


def test_a_disk_that_is_full_for_one_rank_costs_the_checkpoint_of_all(
    nursery: Nursery, tmp_path: Path
) -> None:
    codes, printed = train(nursery, tmp_path / "i", "train.eval_every=0", FSDP, trouble="full")
    folder = tmp_path / "i" / "run"
    assert codes == [0, 0], printed
    for step in (3, 6):
        problem = f"[checkpoint] checkpoint_step{step} in {folder}: not written: rank 1: "
        assert printed.count(problem) == 1 and "File too large" in printed
    assert not list(folder.glob("*checkpoint*"))
    assert read_metrics(folder).status == "finished" and (folder / "model.pt").is_file()


def test_a_spike_takes_all_ranks_back_to_the_same_parts(nursery: Nursery, tmp_path: Path) -> None:
    overrides = ("train.steps=10", "train.save_every=4", "train.eval_every=0")
    spikes = ("train.spike_rule=rollback", "train.spike_window=8")
    codes, printed = train(nursery, tmp_path / "j", *overrides, *spikes, FSDP, trouble="spike")
    folder = tmp_path / "j" / "run"
    assert codes == [0, 0], printed
    assert printed.count("[spike] back to checkpoint_step8;") == 1
    metrics = read_metrics(folder)
    assert (metrics.status, metrics.step, metrics.spikes) == ("finished", 10, 1)
    assert last_steps(folder) == [10, 10]
