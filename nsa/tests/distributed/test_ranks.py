"""Two real ranks: they train as one would, and leave together, whatever happens to one of them.

torchrun starts the ranks of the fixture `two`; all others come from the nursery.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.config import Config, load_config
from nsa.model import TinyLM
from nsa.records import (
    TRAINING,
    VAL,
    Beat,
    TrainingRow,
    ValRow,
    read_heartbeat,
    read_metrics,
    read_rows,
    write_config,
)
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.tests.support import launch
from nsa.tests.support.nursery import Nursery
from nsa.train import run

pytestmark = pytest.mark.dist

SIX = ("train.steps=6", "train.save_every=3", "train.eval_every=3", "train.lr=0.01")
PLAIN: dict[str, Any] = {"NSA_DDP_COMPRESS": "off"}
"""fp32 on the wire: what is left is the order of sums."""
ROUNDING = 2e-5
"""Relative; six updates at this rate."""


def config(folder: Path, *overrides: str) -> Config:
    base = REPOSITORY / "configs" / "base.yaml"
    return load_config(base, [*TINY, *SIX, f"train.out_dir={folder}", *overrides], environ={})


def write(folder: Path, *overrides: str) -> Path:
    """Write a config for ranks into a new folder beside that of the run."""
    folder.mkdir(parents=True)
    return write_config(folder, config(folder / "run", *overrides), "test")


def alone(cfg: Config, **options: object) -> None:
    run(cfg, config_path="tiny.yaml", out=io.StringIO(), **options)  # type: ignore[arg-type]


def losses(folder: Path) -> dict[int, float]:
    return {row.step: row.loss for row in read_rows(TrainingRow, folder / TRAINING)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)[
        "state_dict"
    ]
    return loaded


def begun(beats: list[Beat]) -> list[int]:
    """The updates that began, in the order of the file."""
    return [beat.step for beat in beats if beat.extra.get("phase") == "step_start"]


def last_steps(folder: Path) -> list[int]:
    """The last update that each rank began."""
    return [begun(read_heartbeat(folder / f"heartbeat_rank{r}.jsonl"))[-1] for r in range(2)]


def train(
    nursery: Nursery, folder: Path, *overrides: str, flags: tuple[object, ...] = (), **options: Any
) -> tuple[list[int], str]:
    """Train on two ranks in a new folder: the exit codes, and what was printed."""
    config = folder / "config.yaml" if folder.exists() else write(folder, *overrides)
    return nursery.start(folder / "log.txt", "--config", config, *flags, **options).finish()


@pytest.fixture(scope="module")
def two(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Six updates of two ranks x two rows x two micro-batches: the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("two") / "a"
    path = write(folder, "train.batch_size=2", "train.accumulate_grad_batches=2")
    code, printed = launch.launch("--config", path, "--ddp", 1, python=nursery.python, **PLAIN)
    assert code == 0, printed
    return folder / "run", printed


def test_two_ranks_equal_one_process_with_twice_the_batch(
    two: tuple[Path, str], tmp_path: Path
) -> None:
    alone(config(tmp_path / "one", "train.batch_size=4", "train.accumulate_grad_batches=2"))

    assert losses(two[0]) == pytest.approx(losses(tmp_path / "one"), rel=ROUNDING)
    evaluations = [read_rows(ValRow, folder / VAL) for folder in (two[0], tmp_path / "one")]
    assert [row.step for row in evaluations[0]] == [3, 6]
    assert [r.loss for r in evaluations[0]] == pytest.approx(
        [r.loss for r in evaluations[1]], rel=ROUNDING
    )
    metrics, single = read_metrics(two[0]), read_metrics(tmp_path / "one")
    assert (metrics.world_size, metrics.batch_global) == (2, 8)
    assert (single.world_size, single.batch_global) == (1, 8)
    assert metrics.tokens_per_step == single.tokens_per_step


def test_two_ranks_train_an_indexer_as_one_process_does(nursery: Nursery, tmp_path: Path) -> None:
    """Its loss too, which is a mean over the ranks; alone at first, then with all other weights."""
    rule = (
        *("model.rule=msa,reuse", "nsa.l_sel=16", "nsa.d_index=8", "train.index_warmup_steps=3"),
        *("train.index_warmup=frozen", "model.qkv_bias=true", "model.mlp=gated"),
    )
    codes, printed = train(nursery, tmp_path / "two", "train.batch_size=2", *rule, **PLAIN)
    assert codes == [0, 0], printed
    alone(config(tmp_path / "one", "train.batch_size=4", *rule))
    folders = tmp_path / "two" / "run", tmp_path / "one"
    assert losses(folders[0]) == pytest.approx(losses(folders[1]), rel=ROUNDING)
    found = [
        [beat.extra["index_loss"] for beat in read_heartbeat(folder / "heartbeat_rank0.jsonl")
         if beat.msg == "progress"]
        for folder in folders
    ]  # fmt: skip
    assert len(found[0]) == 6 and found[0] == pytest.approx(found[1], rel=10 * ROUNDING)
    frozen, free = (
        torch.load(folders[0] / f"checkpoint_step{step}.pt", weights_only=True)["state_dict"]
        for step in (3, 6)
    )
    torch.manual_seed(config(tmp_path).train.seed)
    initial = TinyLM.from_config(config(tmp_path, *rule), 256).state_dict()
    for name, start in initial.items():
        moved = [not torch.equal(start, weights[name]) for weights in (frozen, free)]
        assert moved == [".rule." in name, True], name


def test_the_first_rank_speaks_and_writes_and_each_has_a_heartbeat(two: tuple[Path, str]) -> None:
    folder, printed = two
    ready = "[ddp] process group ready | backend=gloo world_size=2 timeout_min=1\n"
    assert printed.count(ready) == 1
    for rank in range(2):
        line = f"[debug] step 1: input shape torch.Size([2, 32]) | rank {rank} of 2\n"
        assert printed.count(line) == 1
        beats = read_heartbeat(folder / f"heartbeat_rank{rank}.jsonl")
        assert {beat.rank for beat in beats} == {rank}
        assert begun(beats) == [1, 2, 3, 4, 5, 6]
    assert len(re.findall(r"^step 0006 \| loss", printed, re.MULTILINE)) == 1
    assert printed.count("[boot] loading config") == printed.count("[done] wrote:") == 1
    assert len(read_rows(TrainingRow, folder / TRAINING)) == 6
    assert sorted(p.name for p in folder.glob("*.pt")) == [
        "checkpoint_step3.pt",
        "checkpoint_step6.pt",
        "model.pt",
    ]


def test_two_ranks_resume_bit_for_bit(
    two: tuple[Path, str], nursery: Nursery, tmp_path: Path
) -> None:
    batch = ("train.batch_size=2", "train.accumulate_grad_batches=2")
    flags = ("--resume", two[0] / "checkpoint_step3.pt")
    codes, printed = train(nursery, tmp_path / "b", *batch, flags=flags, **PLAIN)
    assert codes == [0, 0], printed
    assert printed.count("3 of 6 steps are done") == 1
    resumed = tmp_path / "b" / "run"
    expected = {step: loss for step, loss in losses(two[0]).items() if step > 3}
    assert losses(resumed) == expected
    uninterrupted = weights(two[0])
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, uninterrupted[name]), name


def test_three_ranks_resume_bit_for_bit(nursery: Nursery, tmp_path: Path) -> None:
    """A sum of three depends on its order, which DDP changes after its first backward pass."""
    whole, rest = tmp_path / "k", tmp_path / "l"
    codes, printed = train(nursery, whole, ranks=3)
    assert codes == [0, 0, 0], printed
    flags = ("--resume", whole / "run" / "checkpoint_step3.pt")
    codes, printed = train(nursery, rest, ranks=3, flags=flags)
    assert codes == [0, 0, 0], printed
    uninterrupted = weights(whole / "run")
    for name, tensor in weights(rest / "run").items():
        assert torch.equal(tensor, uninterrupted[name]), name


def test_one_rank_two_ranks_one_rank_read_the_same_data(nursery: Nursery, tmp_path: Path) -> None:
    """In between also with accumulation, gradient checkpointing and a static graph."""
    whole, parts = tmp_path / "whole", tmp_path / "c"
    alone(config(whole, "train.batch_size=4"))
    write(
        parts,
        *("train.batch_size=1", "train.accumulate_grad_batches=2"),
        "runtime.gradient_checkpointing=true",
    )
    alone(config(parts / "run", "train.batch_size=4", "train.save_every=2"), stop_after=2)

    static = {**PLAIN, "NSA_DDP_STATIC_GRAPH": "1", "NSA_DDP_DISABLE_GC": "0"}
    flags = ("--steps", 4, "--resume", "latest")
    codes, printed = train(nursery, parts, flags=flags, **static)
    assert codes == [0, 0], printed
    assert "2 of 4 steps are done" in printed
    assert "[train] gradient_checkpointing=on\n" in printed
    # The run to step 4 has ended without a checkpoint there; the one of step 3 is the newest.
    alone(config(parts / "run", "train.batch_size=4"), resume="latest")

    metrics = read_metrics(parts / "run")
    assert (metrics.step, metrics.resumed_at, metrics.world_size) == (6, 3, 1)
    assert losses(parts / "run") == pytest.approx(losses(whole), rel=ROUNDING)


def test_a_global_batch_that_the_ranks_cannot_share_out_is_refused(
    two: tuple[Path, str], tmp_path: Path
) -> None:
    from nsa.train import BadCheckpoint

    with pytest.raises(BadCheckpoint, match="global batch: 8 there, 3 here"):
        alone(
            config(tmp_path / "d", "train.batch_size=3"),
            resume=str(two[0] / "checkpoint_step3.pt"),
        )


def test_a_spike_on_one_rank_takes_all_back_to_the_same_checkpoint(
    nursery: Nursery, tmp_path: Path
) -> None:
    overrides = ("train.steps=10", "train.save_every=4", "train.eval_every=0")
    spikes = ("train.spike_rule=rollback", "train.spike_window=8")
    codes, printed = train(nursery, tmp_path / "j", *overrides, *spikes, trouble="spike")
    folder = tmp_path / "j" / "run"
    assert codes == [0, 0], printed
    assert printed.count("[spike] back to checkpoint_step8.pt") == 1
    metrics = read_metrics(folder)
    assert (metrics.status, metrics.step, metrics.spikes) == ("finished", 10, 1)
    for rank in range(2):
        beats = read_heartbeat(folder / f"heartbeat_rank{rank}.jsonl")
        steps = begun(beats)
        assert steps[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9] and steps[-2:] == [9, 10]
