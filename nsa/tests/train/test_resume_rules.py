"""Where a run begins, rule by rule: on checkpoints that were written, without any training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nsa.config import Config, to_container
from nsa.data import open_data
from nsa.records import Metrics, write_config
from nsa.records.metrics import write_metrics
from nsa.train import BadCheckpoint, RunRefused
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint.identity import identity_of, rows_of_rank
from nsa.train.checkpoint.resume import Beginning, RequestedRun, find_start
from nsa.train.errors import NothingLeft

BuildConfig = Callable[..., Config]

RESUMES, ANEW, SAME_FILES, REFUSED, DONE = "resumes", "anew", "same files", "refused", "done"
HOUR = 3600.0
WSD = ("train.lr_schedule=wsd", "train.steps=10")
CONSTANT = ("train.lr_schedule=constant", "train.steps=10")
FOUR_ROWS = ("train.batch_size=2", "train.accumulate_grad_batches=2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder, a command, and what must happen."""

    says: str
    # the folder
    was: tuple[str, ...] = ()
    was_ranks: int = 1
    was_asked: int = 0  # rows of a rank, where they are not those of `was`
    step: int = 4
    saved: bool = True
    damaged: bool = False
    status: str = "halted"
    ended_at: int = 10  # --steps of that run
    train_s: float | None = HOUR
    # the command
    now: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 10
    wanted: str = "auto"
    restarted: bool = False
    # what comes of it
    then: str = RESUMES
    text: str = ""
    accumulate: int = 1


OTHER = ("train.seed=7",)
CASES = [
    Case(says="the same run continues"),
    Case(says="a killed run continues", status="running"),
    Case(says="a run that ended by --steps continues", status="finished", ended_at=4),
    Case(says="killed between its last checkpoint and model.pt", step=10, status="running"),
    Case(says="the same, named", step=10, status="running", wanted="latest"),
    Case(says="the same, restarted", step=10, status="running", restarted=True),
    Case(says="nothing there", saved=False, status="", then=ANEW),
    Case(says="no checkpoint after an hour", saved=False, status="running", then=ANEW),
    Case(says="the same run, finished", status="finished", then=ANEW, text="is finished"),
    # Another run in the folder
    Case(says="another, finished", now=OTHER, status="finished", then=ANEW, text="seed: 1337"),
    Case(says="finished by --steps", now=OTHER, status="finished", ended_at=4, then=ANEW),
    Case(says="another, short", now=OTHER, train_s=599.0, then=ANEW, text="it is another run"),
    Case(
        says="another, long", now=OTHER, then=REFUSED, text="the same command with train.seed=1337"
    ),
    Case(
        says="ten minutes", now=OTHER, train_s=600.0, then=REFUSED, text="after 10:00 of training"
    ),
    Case(says="no record", now=OTHER, train_s=None, then=REFUSED, text="with --resume none"),
    Case(
        says="other data",
        now=("data.dataset=shakespeare",),
        then=REFUSED,
        text="data.dataset=synthetic",
    ),
    Case(
        says="another batch",
        now=("train.batch_size=3",),
        then=REFUSED,
        text="batch_size=2 train.acc",
    ),
    Case(
        says="a batch twice as large",
        now=("train.accumulate_grad_batches=2",),
        then=REFUSED,
        text="accumulate_grad_batches=1",
    ),
    Case(says="told none", now=OTHER, wanted="none", then=ANEW),
    Case(says="none of the same run", wanted="none", then=ANEW),
    Case(
        says="an end before the checkpoint",
        steps=3,
        then=REFUSED,
        text="--steps or train.steps above 4",
    ),
    # Only damaged checkpoints
    Case(says="all damaged", damaged=True, then=REFUSED, text="none of its checkpoints is intact"),
    Case(
        says="all damaged, no record",
        damaged=True,
        train_s=None,
        status="",
        then=REFUSED,
        text="checkpoint verify",
    ),
    Case(says="all damaged, short", damaged=True, train_s=5.0, then=ANEW),
    Case(says="all damaged, finished", damaged=True, status="finished", then=ANEW),
    Case(
        says="all damaged, latest",
        damaged=True,
        wanted="latest",
        then=REFUSED,
        text="--resume PATH",
    ),
    # Another number of ranks
    Case(
        says="two to one", was_ranks=2, accumulate=2, text="global batch stays at 4 rows on 1 rank"
    ),
    Case(says="two to one, latest", was_ranks=2, wanted="latest", accumulate=2),
    Case(
        says="two to one again", was=("train.accumulate_grad_batches=2",), was_asked=2, accumulate=2
    ),
    Case(says="and back to two", was=("train.accumulate_grad_batches=2",), was_asked=2, ranks=2),
    Case(says="one to two", was=FOUR_ROWS, now=FOUR_ROWS, ranks=2, text="on 2 ranks: "),
    Case(says="one to two, as written before", was=FOUR_ROWS, ranks=2),
    Case(
        says="one to two, cannot be shared",
        ranks=2,
        then=REFUSED,
        text="global batch: 2 there, 4 here",
    ),
    Case(says="the same, short", ranks=2, train_s=60.0, then=ANEW),
    Case(
        says="two to one, other seed",
        was_ranks=2,
        now=OTHER,
        then=REFUSED,
        text="with train.seed=1337",
    ),
    # The runbooks' order in one folder: smoke and probe on one GPU, production on two
    Case(
        says="smoke, then probe",
        was=("data.dataset=synthetic",),
        status="finished",
        ended_at=4,
        now=("data.dataset=shakespeare",),
        steps=8,
        then=ANEW,
    ),
    Case(says="probe, then production", ranks=2, status="finished", ended_at=4, then=ANEW),
    # Another schedule
    Case(
        says="constant, longer",
        was=CONSTANT,
        now=(*CONSTANT, "train.steps=20"),
        steps=20,
        text="steps: 10 there, 20 here",
    ),
    Case(
        says="constant, longer, finished",
        was=CONSTANT,
        status="finished",
        step=10,
        now=(*CONSTANT, "train.steps=20"),
        steps=20,
    ),
    Case(says="wsd, longer", was=WSD, step=8, now=(*WSD, "train.steps=20"), steps=20),
    Case(
        says="wsd, after its fall began",
        was=WSD,
        step=9,
        now=(*WSD, "train.steps=20"),
        steps=20,
        then=REFUSED,
        text="train.steps=10",
    ),
    Case(says="wsd, shorter", was=WSD, step=4, now=(*WSD, "train.steps=5"), steps=5),
    Case(
        says="wsd, too short",
        was=WSD,
        step=4,
        now=("train.lr_schedule=wsd", "train.steps=5", "train.decay_steps=2"),
        steps=5,
        then=REFUSED,
        text="decay_steps",
    ),
    Case(
        says="cosine, longer",
        now=("train.steps=20",),
        steps=20,
        then=REFUSED,
        text="with train.steps=10",
    ),
    Case(
        says="cosine, longer, in its warm-up",
        was=("train.warmup_steps=5",),
        now=("train.warmup_steps=5", "train.steps=20"),
        steps=20,
    ),
    Case(
        says="another rate",
        was=CONSTANT,
        now=(*CONSTANT, "train.lr=0.5"),
        then=REFUSED,
        text="train.lr",
    ),
    # Restarts by a launcher
    Case(says="restarted", restarted=True, status="running"),
    Case(says="restarted, told none", restarted=True, wanted="none", status="running"),
    Case(
        says="restarted before the first checkpoint",
        restarted=True,
        saved=False,
        status="running",
        then=SAME_FILES,
    ),
    Case(says="restarted in a new folder", restarted=True, saved=False, status="", then=SAME_FILES),
    Case(
        says="restarted, and files of another run",
        restarted=True,
        saved=False,
        now=OTHER,
        then=REFUSED,
        text="moves no files aside",
    ),
    Case(
        says="restarted, another run",
        restarted=True,
        now=OTHER,
        status="finished",
        then=REFUSED,
        text="by hand",
    ),
    Case(says="restarted, short", restarted=True, now=OTHER, train_s=1.0, then=REFUSED),
    Case(
        says="restarted, all damaged",
        restarted=True,
        damaged=True,
        train_s=1.0,
        then=REFUSED,
        text="is intact",
    ),
    Case(says="restarted at its end", restarted=True, status="finished", then=DONE),
    Case(says="restarted on one rank", restarted=True, was_ranks=2, accumulate=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_where_a_run_begins(case: Case, tiny_config: BuildConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    base = ("data.dataset=synthetic", "train.batch_size=2", "train.steps=10", "train.lr=0.01")
    fill(folder, tiny_config(*base, *case.was), case)
    before = sorted(p.name for p in folder.iterdir())
    said: list[str] = []
    cfg = tiny_config(*base, *case.now)

    found, raised = begin(folder, cfg, case, said)

    text = "\n".join([*said, raised])
    assert case.text in text
    assert sorted(p.name for p in folder.iterdir()) == before, "whoever looks touches nothing"
    if found is None:
        assert case.then in (REFUSED, DONE), text
        if case.then == REFUSED and case.wanted == "auto" and not case.restarted:
            assert "to resume it:" in text and "to start over:" in text
    else:
        outcome = RESUMES if found.start else SAME_FILES if found.keeps else ANEW
        assert outcome == case.then, text
        assert found.keeps == (case.then != ANEW)
        accumulate = cfg.train.accumulate_grad_batches if found.start is None else case.accumulate
        assert found.adapt(cfg).train.accumulate_grad_batches == accumulate


def begin(folder: Path, cfg: Config, case: Case, said: list[str]) -> tuple[Beginning | None, str]:
    """What find_start answers, or what it raises."""
    asked = RequestedRun(
        folder=folder,
        wanted=case.wanted,
        cfg=cfg,
        identity=identity_of(cfg, open_data(cfg.data, 32, cfg.train.seed), case.ranks),
        steps=case.steps,
        world_size=case.ranks,
        restarted=case.restarted,
    )
    try:
        return find_start(asked, said.append), ""
    except (RunRefused, BadCheckpoint) as error:
        assert case.then == REFUSED, error
        assert isinstance(error, RunRefused) == (case.wanted == "auto")
        return None, str(error)
    except NothingLeft as error:
        assert case.then == DONE and error.exit_code == 0
        return None, str(error)


def fill(folder: Path, cfg: Config, case: Case) -> None:
    """Leave behind what a run would have."""
    folder.mkdir()
    if case.status:
        write_config(folder, cfg, "tiny.yaml")
    if case.saved:
        content = content_of(cfg, case)
        for step in (case.step - 1, case.step):
            path = checkpoint_file.write(folder, content | {"step": step})
            if case.damaged:
                path.write_bytes(path.read_bytes()[:-1])
    if case.status and case.train_s is not None:
        metrics = Metrics(
            status=case.status,
            train_s=case.train_s,
            steps=case.ended_at,
            step=case.step,
            config_file="tiny.yaml",
            num_params=1,
            tokens_per_step=1,
            device="cpu",
            dtype="fp32",
            attention="",
            seq_len=32,
            batch_global=2,
            lr=0.01,
        )
        write_metrics(folder, metrics)


def content_of(cfg: Config, case: Case) -> checkpoint_file.Content:
    data = open_data(cfg.data, 32, cfg.train.seed)
    rows = case.was_asked or rows_of_rank(cfg.train)
    return {
        "state_dict": {"w": torch.zeros(2)},
        "cfg": to_container(cfg),
        "identity": identity_of(cfg, data, case.was_ranks),
        "batch": {"world_size": case.was_ranks, "rows_of_rank": rows},
        **{"optimizer": {}, "scaler": {}, "rng": {}, "data": {}, "tokens_seen": 1},
        "metrics": {},
    }


FIRST_KEYS = {
    *("data (train)", "data (val)", "global batch", "runtime.precision"),
    *("model.attention", "model.d_k", "model.d_v", "model.dim", "model.n_heads"),
    *("model.n_kv_groups", "model.n_layers", "model.rope_base", "model.rope_scale"),
    *("model.tie_embeddings", "nsa.d", "nsa.gate", "nsa.l", "nsa.l_sel", "nsa.n_sel", "nsa.phi"),
    *("nsa.w", "train.grad_clip", "train.lr", "train.lr_schedule", "train.seed", "train.seq_len"),
    *("train.steps", "train.warmup_steps", "train.weight_decay"),
}
"""Of the checkpoints that were written first; every later one must be able to continue them."""


def test_a_key_that_was_added_later_does_not_part_a_run_from_its_checkpoint(
    tiny_config: BuildConfig,
) -> None:
    """At its default it is no part of the identity; at any other value it is."""
    cfg = tiny_config()
    data = open_data(cfg.data, 32, cfg.train.seed)
    assert set(identity_of(cfg, data)) == FIRST_KEYS
    for setting in (
        *("model.rule=nsa,nsa", "nsa.num_first=0", "nsa.num_local=1", "nsa.pool=moba"),
        *("nsa.pool_block=64", "nsa.d_index=8", "train.index_loss=2", "train.index_warmup_steps=1"),
        *("model.embed_std=0.1", "train.decay_steps=1", "train.optimizer=muon"),
        *("model.mlp=gated", "model.norm_eps=1e-5", "model.qkv_bias=true", "model.qk_norm=true"),
        *("model.rope_scaling=llama3", "model.rope_original_len=64", "model.rope_low_freq=2"),
        "model.rope_high_freq=8",
    ):
        other = identity_of(tiny_config(setting), data)
        assert set(other) - FIRST_KEYS == {setting.partition("=")[0]}, setting
