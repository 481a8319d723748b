"""`nsa preflight`: every check says NO-GO when it must, and a healthy plan is GO within seconds."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nsa.cli.__main__ import main
from nsa.config import Config
from nsa.model import TinyLM
from nsa.operate.limits import CPU, refresh, with_values
from nsa.operate.preflight import config_checks, kernel_checks, machine_checks, run_checks
from nsa.operate.preflight.command import CHEAP, LARGE, REHEARSED, examine
from nsa.operate.preflight.config_checks import Check, PlannedRun
from nsa.operate.report.verdict import FAIL, GO, NO_GO, NOT_MEASURED, PASS, UNKNOWN, Row
from nsa.ops import nsa_attention, sparse_attention
from nsa.records import sentinels
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.train import run
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.runtime import Runtime, resolve_runtime

BuildConfig = Callable[..., Config]
BuildPlan = Callable[..., PlannedRun]
SMALL = {"free_gib": 0.0}
"""Whatever room the disk of the tests has is enough."""
ARISING = LARGE.keys() - {"shards"}
"""What is tried where the data does not come from shards; test_shards.py has the other."""


@pytest.fixture
def planned(tiny_config: BuildConfig, tmp_path: Path) -> BuildPlan:
    """Return a function that builds a plan on the CPU, with overrides, limits and other fields."""

    def build(*overrides: str, limits: dict[str, float] | None = None, **fields: Any) -> PlannedRun:
        config = tiny_config(*overrides)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        plan = PlannedRun(
            config=config,
            config_path="tiny.yaml",
            config_named=True,
            ranks=1,
            runtime=resolve_runtime(config.runtime, (8, 8)),
            limits=with_values(CPU, SMALL | (limits or {})),
            scratch=scratch,
        )
        return dataclasses.replace(plan, **fields)

    return build


ON_GPU = Runtime(device=torch.device("cuda"), precision="bf16", use_flash=True, plan="")


def said(row: Row | None, verdict: str) -> Row:
    assert row is not None and row.verdict == verdict, row
    assert row.limit and row.evidence and bool(row.advice) == (verdict != PASS)
    return row


# a plan that is fine


def test_a_healthy_plan_is_go_within_seconds_and_leaves_nothing_behind(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    config = tiny_config("train.steps=6000", "train.save_every=500")
    begin = time.perf_counter()
    verdict = examine(config, "tiny.yaml", ranks=1, limits=SMALL | {"write_mib_per_s": 0})
    assert time.perf_counter() - begin < 60
    assert verdict.word == GO, verdict.text()
    assert {row.name for row in verdict.rows} == {*CHEAP, *ARISING, *REHEARSED} - {"mesh"}
    assert {row.verdict for row in verdict.rows} == {PASS}
    assert list(tmp_path.iterdir()) == [], "neither the run's folder nor ours"


def test_the_command_ends_with_go_and_its_json_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["preflight", "--config", str(REPOSITORY / "configs" / "base.yaml"), "--ranks", "1"]
    flags += ["--limit", "free_gib=0", "--limit", "write_mib_per_s=0"]
    config = [*TINY, f"train.out_dir={tmp_path / 'run'}"]
    assert main([*flags, *config]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("GO at preflight: ")
    monkeypatch.setenv("NSA_SEL_RANGES_V2", "0")
    out = tmp_path / "preflight.json"
    assert main([*flags, "--json", "--out", str(out), *config]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == NO_GO and content == json.loads(out.read_text("utf-8"))
    assert [row["name"] for row in content["rows"] if row["verdict"] == FAIL] == ["environment"]


def test_an_existing_run_folder_is_only_looked_at(tiny_config: BuildConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "training.csv").write_text("old\n", "utf-8")
    before = folder.stat().st_mtime_ns
    examine(tiny_config(), "tiny.yaml", ranks=1, limits=SMALL)
    assert [path.name for path in folder.iterdir()] == ["training.csv"]
    assert folder.stat().st_mtime_ns == before


# what was asked for


def test_a_config_that_nobody_named_is_no_go(planned: BuildPlan) -> None:
    said(config_checks.config_named(planned()), PASS)
    said(config_checks.config_named(planned(config_named=False)), FAIL)


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.seq_len=4",),
        ("train.lr=3.0",),
        ("train.warmup_steps=3",),
        ("train.steps=6000", "train.log_every=3000"),
        ("train.steps=6000", "data.dataset=synthetic"),
    ],
    ids=lambda overrides: overrides[-1],
)
def test_settings_that_make_a_run_pointless_are_no_go(
    planned: BuildPlan, overrides: tuple[str, ...]
) -> None:
    said(config_checks.config_sane(planned()), PASS)
    row = said(config_checks.config_sane(planned(*overrides)), FAIL)
    assert overrides[-1].partition("=")[0] in row.value


def test_a_gpu_that_would_not_compute_in_bf16_is_no_go(planned: BuildPlan) -> None:
    said(config_checks.precision(planned()), PASS)
    row = said(config_checks.precision(planned("runtime.precision=fp16", runtime=ON_GPU)), FAIL)
    assert row.value == "fp16 on cuda"


def test_a_gpu_without_bf16_is_no_go(planned: BuildPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("runtime.precision=bf16", runtime=ON_GPU)
    for has_it, verdict in ((True, PASS), (False, FAIL)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_it=has_it, **_: has_it)
        said(config_checks.precision(plan), verdict)


def test_a_long_run_without_checkpoints_is_no_go(planned: BuildPlan) -> None:
    said(config_checks.checkpoints(planned("train.steps=4999")), PASS)
    said(config_checks.checkpoints(planned("train.steps=5000")), FAIL)
    said(config_checks.checkpoints(planned("train.steps=5000", "train.save_every=500")), PASS)
    said(config_checks.checkpoints(planned("train.steps=5000", "train.save_every=9000")), FAIL)


def test_a_switch_of_a_triage_that_is_still_set_is_no_go(
    planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(config_checks.switches(planned()), PASS)
    monkeypatch.setenv("NSA_DISABLE_AUX_STATS", "1")
    said(config_checks.switches(planned()), PASS)
    monkeypatch.setenv("NSA_FORCE_BRANCH", "win")
    assert "NSA_FORCE_BRANCH=win" in said(config_checks.switches(planned()), FAIL).value


# the machine


def test_a_disk_without_room_for_the_checkpoints_is_no_go(planned: BuildPlan) -> None:
    said(machine_checks.disk_space(planned()), PASS)
    said(machine_checks.disk_space(planned(limits={"free_gib": 1e9})), FAIL)
    config = ("train.steps=100000000", "train.save_every=1", "train.keep_last=0")
    row = said(machine_checks.disk_space(planned(*config)), FAIL)
    assert "100000001 checkpoints" in row.limit


def test_a_slow_disk_is_no_go(planned: BuildPlan) -> None:
    said(machine_checks.disk_speed(planned(limits={"write_mib_per_s": 0.0})), PASS)
    plan = planned(limits={"write_mib_per_s": 1e9})
    said(machine_checks.disk_speed(plan), FAIL)
    assert list(plan.scratch.iterdir()) == []


def test_a_step_that_does_not_fit_is_no_go_and_nothing_large_is_tried(
    planned: BuildPlan,
    tiny_config: BuildConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said(machine_checks.memory(planned()), PASS)
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 99 kB\nMemAvailable:   64 kB\n", "ascii")
    monkeypatch.setattr(machine_checks, "MEMINFO", info)
    assert "64" not in said(machine_checks.memory(planned()), FAIL).limit
    verdict = examine(tiny_config(), "tiny.yaml", ranks=1, limits=SMALL)
    tried = {row.name: row.verdict for row in verdict.rows}
    assert verdict.word == NO_GO and tried["memory"] == FAIL
    assert {tried[name] for name in (*ARISING, *REHEARSED)} == {NOT_MEASURED}
    info.unlink()
    said(machine_checks.memory(planned()), NOT_MEASURED)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A real run at work, and its folder."""
    folder = tmp_path / "busy"
    config = [*TINY, "train.steps=4000", "train.eval_every=0", f"train.out_dir={folder}"]
    command = [sys.executable, "-m", "nsa.cli", "train"]
    command += ["--config", "configs/base.yaml", *config]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 90
        while not (folder / "training.csv").exists() and process.poll() is None:
            assert time.monotonic() < until, "the run does not start"
            time.sleep(0.1)
        yield process, folder
    finally:
        process.kill()
        process.wait()


def test_a_run_that_is_still_at_work_is_no_go(
    planned: BuildPlan, training: tuple[subprocess.Popen[bytes], Path]
) -> None:
    process, folder = training
    row = said(machine_checks.processes(planned(f"train.out_dir={folder}")), FAIL)
    assert f"pid {process.pid} writes to" in row.evidence
    said(machine_checks.processes(planned()), PASS)
    row = said(machine_checks.processes(planned(runtime=ON_GPU)), FAIL)
    assert process.pid in [pid for pid, _ in machine_checks.trainers()]
    process.kill()
    process.wait()
    said(machine_checks.processes(planned(f"train.out_dir={folder}")), PASS)


@pytest.mark.parametrize(
    ("command", "trains"),
    [
        ("python -u scripts/train_showcase.py --steps 3", True),
        ("/usr/bin/python3.11 /x/bin/torchrun --nproc_per_node=2 scripts/train_showcase.py", True),
        ("python -m nsa.cli train --config x", True),
        ("python -m nsa.cli train", True),
        ("python /x/.venv/bin/nsa train", True),
        ("python -m nsa.cli preflight --config train", False),
        ("vim scripts/train_showcase.py", False),
        ("tail -f train_showcase.py", False),
        ("", False),
    ],
)
def test_what_counts_as_a_trainer(command: str, trains: bool) -> None:
    assert machine_checks.is_trainer(command.split()) is trains


def test_an_order_to_stop_that_was_left_is_no_go(planned: BuildPlan) -> None:
    plan = planned()
    said(machine_checks.halt_file(plan), PASS)
    plan.folder.mkdir()
    sentinels.write_halt(plan.folder, "operator")
    assert "operator" in said(machine_checks.halt_file(plan), FAIL).value


def test_versions_that_do_not_belong_together_are_no_go(planned: BuildPlan) -> None:
    problems = machine_checks.pairing_problems
    needs = ['triton==3.6.0; platform_system == "Linux"', "numpy"]
    assert problems("13.0", "580.65.06", "3.6.0", needs) == []
    assert "older than 580" in problems("13.0", "550.1", "3.6.0", needs)[0]
    assert "torch asks for 3.6.0" in problems("13.0", "580.65", "3.7.1", needs)[0]
    assert "not installed" in problems("12.8", "580.65", None, needs)[0]
    assert "without CUDA" in problems(None, "580.65", "3.6.0", needs)[0]
    said(machine_checks.versions(planned()), PASS)
    if torch.version.cuda is None:
        said(machine_checks.versions(planned(runtime=ON_GPU)), FAIL)


# the kernels


def test_kernels_that_differ_from_the_oracle_are_no_go(
    planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    said(kernel_checks.parity(plan), PASS)

    def wrong_output(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, chosen = nsa_attention(*args, **options)
        return out * (1.0 if options["backend"] == "reference" else 1.001), chosen

    monkeypatch.setattr(kernel_checks, "nsa_attention", wrong_output)
    said(kernel_checks.parity(plan), FAIL)

    def wrong_selection(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, chosen = nsa_attention(*args, **options)
        is_own = options["backend"] != "reference" and options["selection"] is None
        return out, chosen.roll(1, dims=1) if is_own else chosen

    monkeypatch.setattr(kernel_checks, "nsa_attention", wrong_selection)
    assert "error" in said(kernel_checks.parity(plan), FAIL).value


@pytest.mark.parametrize("rule", ["pooled", "nsa,pooled"])
def test_kernels_of_layers_with_one_k_and_v_are_compared_too(
    rule: str, planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(f"model.rule={rule}", "nsa.l_sel=16")
    said(kernel_checks.parity(plan), PASS)

    def wrong_output(*args: Any, **options: Any) -> Tensor:
        out = sparse_attention(*args, **options)
        return out * (1.0 if options["backend"] == "reference" else 1.001)

    monkeypatch.setattr(kernel_checks, "sparse_attention", wrong_output)
    said(kernel_checks.parity(plan), FAIL)


def test_parity_of_dense_attention_is_no_question(planned: BuildPlan) -> None:
    assert kernel_checks.parity(planned("model.attention=dense")) is None


def test_a_model_that_sees_the_future_is_no_go(
    planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(kernel_checks.causality(planned()), PASS)
    said(kernel_checks.causality(planned("model.attention=dense")), PASS)
    forward = TinyLM.forward

    def leaks(self: TinyLM, ids: Tensor, *rest: Any, **options: Any) -> Tensor:
        logits = forward(self, ids, *rest, **options)
        return logits + 1e-3 * logits.roll(-1, dims=1)

    monkeypatch.setattr(TinyLM, "forward", leaks)
    said(kernel_checks.causality(planned()), FAIL)


# what the run will do


def test_ranks_that_do_not_meet_or_add_up_wrong_are_no_go(
    planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(run_checks.all_reduce(planned()), PASS)
    (planned().scratch / "store").unlink(missing_ok=True)

    def wrong(tensor: Tensor) -> None:
        tensor += 1

    monkeypatch.setattr(dist, "all_reduce", wrong)
    assert "the sum is 2, not 1" in said(run_checks.all_reduce(planned()), FAIL).value
    assert not dist.is_initialized()


@pytest.mark.dist
def test_two_ranks_meet_and_one_that_is_late_is_no_go(planned: BuildPlan) -> None:
    said(run_checks.all_reduce(planned(ranks=2)), PASS)
    (planned().scratch / "store").unlink(missing_ok=True)
    late = planned(ranks=2, limits={"all_reduce_s": 0.05})
    assert "did not finish" in said(run_checks.all_reduce(late), FAIL).value


def test_data_that_does_not_come_in_time_is_no_go(planned: BuildPlan, tmp_path: Path) -> None:
    said(run_checks.first_batch(planned()), PASS)
    missing = ("data.dataset=fineweb_edu_local", f"data.local_path={tmp_path / 'none.jsonl'}")
    assert "none.jsonl" in said(run_checks.first_batch(planned(*missing)), FAIL).value
    late = planned(limits={"first_batch_s": 1e-4})
    assert "did not arrive within" in said(run_checks.first_batch(late), FAIL).value
    assert not planned().folder.exists()


def test_a_checkpoint_that_does_not_hold_is_no_go(
    planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_file.write

    def broken(folder: Path, content: checkpoint_file.Content) -> Path:
        path = write(folder, content)
        path.write_bytes(path.read_bytes()[:-1])
        return path

    monkeypatch.setattr(checkpoint_file, "write", broken)
    plan = planned()
    rehearsal = run_checks.rehearse(plan)
    assert "it was truncated" in said(run_checks.saves_and_resumes(plan, rehearsal), FAIL).value
    said(run_checks.eta_and_cost(plan, rehearsal), NOT_MEASURED)


def test_the_time_is_measured_where_a_run_writes_no_tables(
    planned: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_DISABLE_CSV_LOGS", "1")
    plan = planned()
    rehearsal = run_checks.rehearse(plan)
    assert rehearsal.problem == "" and 0 < rehearsal.step_s < 60
    said(run_checks.saves_and_resumes(plan, rehearsal), PASS)


def test_a_rehearsal_that_was_not_resumed_is_no_go(planned: BuildPlan) -> None:
    rehearsal = run_checks.Rehearsal(step_s=1.0, checkpoint_bytes=1, resumed_at=None)
    said(run_checks.saves_and_resumes(planned(), rehearsal), FAIL)


def test_a_run_that_takes_too_long_or_costs_too_much_is_no_go(planned: BuildPlan) -> None:
    done = run_checks.Rehearsal(step_s=72.0, checkpoint_bytes=1, resumed_at=3)
    steps = "train.steps=50"  # an hour
    row = said(run_checks.eta_and_cost(planned(steps, price_per_h=3.0), done), PASS)
    assert row.value == "1 h 0 min for 50 steps, cost 3.00 at 3/h"
    said(run_checks.eta_and_cost(planned(steps, limits={"eta_h": 0.9}), done), FAIL)
    said(run_checks.eta_and_cost(planned(steps, price_per_h=3.0, max_cost=3.1), done), PASS)
    said(run_checks.eta_and_cost(planned(steps, price_per_h=3.0, max_cost=2.9), done), FAIL)
    said(run_checks.eta_and_cost(planned(steps, max_cost=2.9), done), NOT_MEASURED)


# what goes wrong in the checks themselves


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: PlannedRun) -> Row:
        raise OSError(5, "Input/output error")

    checks: dict[str, Check] = {"disk speed": broken}
    monkeypatch.setattr("nsa.operate.preflight.command.CHEAP", CHEAP | checks)
    verdict = examine(tiny_config(), "tiny.yaml", ranks=1, limits=SMALL)
    found = {row.name: row for row in verdict.rows}
    assert "Input/output error" in found["disk speed"].value and verdict.word == NO_GO
    assert found["checkpoint"].verdict == PASS


def test_bad_input_is_refused_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(REPOSITORY / "configs" / "base.yaml")
    config = [*TINY, f"train.out_dir={tmp_path / 'run'}"]
    assert main(["preflight", "--config", base, "--ranks", "0", *config]) == 2
    assert main(["preflight", "--config", base, "--limit", "free=1", *config]) == 2
    assert "'free' is not a limit" in capsys.readouterr().err
    monkeypatch.setattr("tempfile.mkdtemp", _refuse)
    assert main(["preflight", "--config", base, *config]) == 2
    assert "cannot be written to" in capsys.readouterr().err


def _refuse(*args: Any, **options: Any) -> str:
    raise PermissionError(13, "Permission denied")


def test_the_page_quotes_the_limits() -> None:
    for name in ("preflight.md", "report.md"):
        page = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        assert refresh(page) == page, f"python -m nsa.operate.limits docs/{name}"


def test_every_check_is_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "preflight.md").read_text(encoding="utf-8")
    for name in (*CHEAP, *LARGE, *REHEARSED):
        assert f"| {name} |" in page
    assert UNKNOWN in page


def test_a_run_for_ranks_is_rehearsed_in_one_process(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    """runtime.strategy=fsdp is refused without ranks; the rehearsal has one process."""
    asked = tiny_config("runtime.strategy=fsdp")
    rehearsed = run_checks.rehearsal_config(asked, tmp_path)
    assert (asked.runtime.strategy, rehearsed.runtime.strategy) == ("fsdp", "auto")
    result = run(rehearsed, config_path="tiny", out=io.StringIO(), stop_after=1, ddp=0)
    assert result.metrics.status == "finished"


def test_ranks_that_cannot_share_rows_are_no_go(planned: BuildPlan) -> None:
    assert config_checks.mesh(planned(ranks=3)) is None
    shared = planned("runtime.cp=2", ranks=4)
    row = said(config_checks.mesh(shared), PASS)
    assert row.value.startswith("dp 2 x cp 2 x tp 1; a rank receives ")
    assert shared.tokens_per_step == planned(ranks=2).tokens_per_step
    assert said(config_checks.mesh(planned("runtime.cp=2", ranks=3)), FAIL).value == "3 ranks"


@pytest.mark.dist
@pytest.mark.usefixtures("forked_python")
def test_a_mesh_is_rehearsed_on_the_ranks_of_a_row(planned: BuildPlan) -> None:
    plan = planned("runtime.cp=2", ranks=4)
    rehearsal = run_checks.rehearse(plan)
    assert rehearsal == rehearsal._replace(problem="", resumed_at=3)
    assert rehearsal.step_s > 0.0 and rehearsal.checkpoint_bytes > 0
    assert "on the 2 ranks of a row" in run_checks.eta_and_cost(plan, rehearsal).evidence
    broken = run_checks.rehearse(planned("runtime.tp=2", "model.n_kv_groups=2", "model.mlp_dim=33"))
    assert "mlp_dim=33 cannot be divided by 2 ranks" in broken.problem
