"""The watchdog: every alarm rings when it must, and none for a run that is only slow or over."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.cli.__main__ import main
from nsa.config import Config
from nsa.operate.limits import (
    CPU,
    GPU,
    HALTING,
    Limits,
    limit_table,
    limits_for,
    read_limits,
    refresh,
)
from nsa.operate.monitor import Report
from nsa.operate.run_folder import read_run
from nsa.operate.watch.rules import RULES, judge
from nsa.operate.watch.watchdog import Watch
from nsa.records import Heartbeat, sentinels
from nsa.records.alarms import TYPES, Alarm, append_alarm, last_alarms, read_gate_details
from nsa.records.env import GpuReading
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.recording import GATES, Recorder, dead_pid
from nsa.train import Halted, RunRefused, locked_folder, run, runner
from nsa.train.build import build_model

BuildConfig = Callable[..., Config]


def roomy(limits: Limits) -> Limits:
    """Whatever room the disk of the tests has is enough."""
    return dataclasses.replace(limits, free_gib=0.0, free_checkpoints=0.0)


ROOMY = roomy(GPU)


def rung(recorder: Recorder, limits: Limits = ROOMY, *, later_s: float = 0.0) -> list[Alarm]:
    return judge(read_run(recorder.folder, now=recorder.now + later_s), limits)


def types(alarms: list[Alarm]) -> set[str]:
    return {alarm.type for alarm in alarms}


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(tmp_path, monkeypatch)


# healthy runs


@pytest.mark.parametrize(
    ("log_every", "step_s", "ranks", "csv", "each_s"),
    [
        (20, 2.0, 1, True, 60),
        (2, 2.0, 2, False, 600),
        (20, 100.0, 2, True, 100),
        (20, 0.5, 1, True, 600),
    ],
    ids=["usual", "many-lines-two-ranks-no-csv", "slow-steps-two-ranks", "quick-steps"],
)
def test_an_hour_of_a_healthy_run_rings_nothing(
    log_every: int,
    step_s: float,
    ranks: int,
    csv: bool,
    each_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(
        tmp_path, monkeypatch, log_every=log_every, step_s=step_s, ranks=ranks, csv=csv
    )
    said: list[str] = []
    watch = Watch(tmp_path, say=said.append, adapt=roomy)
    begin, next_pause = recorder.now, 600.0
    while recorder.now < begin + 3600:
        recorder.run(round(each_s / step_s))
        if recorder.now - begin > next_pause:  # an evaluation, and then a checkpoint
            next_pause += 600
            assert not watch.look(now=recorder.now + 90).alarms
            recorder.now += 100
        assert not watch.look(now=recorder.now + 0.9 * step_s).alarms
    assert last_alarms(tmp_path, 9) == []
    assert len(said) == 1 and "alarms: 0" in said[0]


@pytest.mark.parametrize("status", ["finished", "halted", "non_finite", "oom"])
def test_silence_after_the_end_is_no_stall(recorder: Recorder, status: str) -> None:
    recorder.run(40)
    recorder.status(status)
    assert rung(recorder, later_s=1e6) == []


def test_steps_of_minutes_are_no_stall_but_silence_of_ten_of_them_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, step_s=400.0)
    recorder.run(30)
    assert rung(recorder, later_s=9.5 * 360) == []
    (alarm,) = rung(recorder, later_s=11 * 440)
    assert alarm.type == "heartbeat_stall"
    assert alarm.limits["age_s"] > 3600 and "10 x the median" in alarm.text


def test_beats_that_are_switched_off_leave_the_times_of_the_logged_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, step_s=30.0)
    monkeypatch.setattr(Heartbeat, "beat", lambda self, step: None)
    recorder.run(100)
    recorder.beats[0].write(100, "beat", {"phase": "save"})
    recorder.now += 5
    recorder.run(20)
    assert min(read_run(tmp_path).ranks[0].gaps) > 500
    assert rung(recorder, later_s=5000) == []
    assert types(rung(recorder, later_s=7000)) == {"heartbeat_stall"}


def test_the_first_update_and_the_last_may_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, steps=20)
    assert rung(recorder, later_s=850) == []
    assert types(rung(recorder, later_s=950)) == {"heartbeat_stall"}
    recorder.run(20)
    assert rung(recorder, later_s=850) == []
    assert types(rung(recorder, later_s=950)) == {"heartbeat_stall"}


def test_an_evaluation_may_take_long_and_does_not_excuse_the_steps_after_it(
    recorder: Recorder,
) -> None:
    recorder.run(40)
    recorder.beats[0].write(40, "beat", {"phase": "evaluate"})
    assert rung(recorder, later_s=1700) == []
    assert "in the phase evaluate" in rung(recorder, later_s=1900)[0].text
    recorder.now += 1000
    recorder.run(5)
    assert types(rung(recorder, later_s=200)) == {"heartbeat_stall"}


def test_lines_of_the_process_before_do_not_count_after_a_resume(recorder: Recorder) -> None:
    recorder.run(100, attention=GATES | {"entropy_mean": 0.05}, grad_norm=0.0)
    assert types(rung(recorder)) >= {"gate_collapse", "zero_grad"}
    recorder.boot()
    assert rung(recorder) == []


# each alarm


def test_a_silent_rank_rings_and_the_other_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, ranks=2)
    recorder.run(100)
    recorder.beats.pop()
    recorder.run(200)
    (alarm,) = rung(recorder)
    assert (alarm.type, alarm.rank, alarm.step) == ("heartbeat_stall", 1, 100)
    assert alarm.file == "heartbeat_rank1.jsonl"
    assert 300 < alarm.values["age_s"] < 500 and alarm.limits["age_s"] == 180.0


def test_the_dump_of_a_watchdog_is_no_sign_of_life(recorder: Recorder) -> None:
    recorder.run(100)
    recorder.now += 300
    recorder.beats[0].watchdog_dump("x")
    assert types(rung(recorder)) == {"heartbeat_stall"}


def test_a_crawling_run_is_a_flatline_and_a_hiccup_is_not(recorder: Recorder) -> None:
    recorder.run(400)
    recorder.run(60, toks_per_s=100.0)
    assert rung(recorder) == []
    recorder.run(20, toks_per_s=100.0)
    (alarm,) = rung(recorder)
    assert alarm.type == "throughput_flatline" and alarm.step == 480
    assert alarm.values["toks_per_s"] == [100.0] * 4
    assert alarm.limits["toks_per_s"] == pytest.approx(512, rel=0.05)


def test_quick_lines_must_be_slow_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=1, step_s=0.1)
    recorder.run(100)
    recorder.run(20, toks_per_s=1.0)
    assert rung(recorder) == []
    recorder.now += 60
    recorder.run(4, toks_per_s=1.0)
    recorder.step_s = 20
    recorder.run(4, toks_per_s=1.0)
    assert types(rung(recorder)) == {"throughput_flatline"}


@pytest.mark.parametrize(
    "gates", [{"entropy_mean": 0.1}, {"max_gate_mean": 0.97}], ids=["entropy", "largest"]
)
def test_collapsed_gates_ring_after_three_lines(recorder: Recorder, gates: dict[str, Any]) -> None:
    recorder.run(100)
    recorder.run(40, attention=GATES | gates)
    assert rung(recorder) == []
    recorder.run(20, attention=GATES | gates)
    (alarm,) = rung(recorder)
    assert alarm.type == "gate_collapse" and "3 lines" in alarm.text
    assert alarm.values.items() >= gates.items()


def test_a_zero_gradient_rings_and_a_small_one_does_not(recorder: Recorder) -> None:
    recorder.run(60, grad_norm=1e-7)
    assert rung(recorder) == []
    recorder.run(40, grad_norm=0.0)
    assert types(rung(recorder)) == {"zero_grad"}


def test_a_loss_that_is_not_finite_rings_at_once_a_gradient_after_three_lines(
    recorder: Recorder,
) -> None:
    recorder.run(60)
    recorder.run(40, grad_norm=float("inf"))
    assert rung(recorder) == [], "loss scaling overflows now and then"
    recorder.run(20, grad_norm=float("inf"))
    (alarm,) = rung(recorder)
    assert alarm.type == "nan_loss" and alarm.values == {"grad_norm": "inf"}
    recorder.run(20, loss=float("nan"))
    assert rung(recorder)[0].values == {"loss": "nan"}


@pytest.mark.parametrize("csv", [True, False], ids=["csv", "heartbeat-only"])
def test_a_loss_that_jumps_and_stays_rings_and_a_single_line_does_not(
    csv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, csv=csv)
    recorder.run(1000)
    recorder.run(20, loss=7.0)
    assert rung(recorder) == []
    recorder.run(20, loss=7.0)
    (alarm,) = rung(recorder)
    assert alarm.type == "loss_spike" and alarm.values["loss"] == [7.0, 7.0]
    assert alarm.file == ("training.csv" if csv else "heartbeat_rank0.jsonl")


@pytest.mark.parametrize("csv", [True, False], ids=["csv", "heartbeat-only"])
def test_a_loss_that_does_not_fall_any_more_rings(
    csv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, csv=csv, log_every=5)
    recorder.run(500)
    recorder.run(600, loss=3.4)
    assert rung(recorder) == [], "for a thousand steps it may"
    recorder.run(600, loss=3.4)
    (alarm,) = rung(recorder)
    assert alarm.type == "loss_plateau" and alarm.limits["steps"] == 1000


@pytest.mark.parametrize("name", ["gpu_mem_alloc", "rss_mib"])
def test_memory_that_creeps_rings_and_memory_that_wavers_does_not(
    name: str, recorder: Recorder
) -> None:
    def log(mib: float) -> None:
        reading = GpuReading(int(mib)) if name == "gpu_mem_alloc" else GpuReading()
        recorder.run(20, gpu=reading, rss_mib=mib)

    for i in range(60):
        log(10_000 + 700 * (i % 2))
    assert rung(recorder) == []
    for i in range(60):
        log(10_000 + 30 * i)
    (alarm,) = rung(recorder)
    assert alarm.type == "memory_creep"
    first, middle, last = alarm.values[name]
    assert first < middle < last and last - first > alarm.limits["rise_mib"] >= 512


def test_fallbacks_that_rise_with_every_line_ring(recorder: Recorder) -> None:
    def counts(total: int) -> dict[str, int]:
        return {"sliding_fa2_fails": total, "total_fallbacks": total}

    recorder.run(400, fallbacks=counts(50))
    assert rung(recorder) == [], "some at the start are counted, and stay"
    for total in (62, 74, 86, 98):
        recorder.run(20, fallbacks=counts(total))
    assert rung(recorder) == []
    recorder.run(20, fallbacks=counts(110))
    (alarm,) = rung(recorder)
    assert alarm.type == "fallbacks_rising" and alarm.values["rise"] == 60
    assert alarm.values["fb_sliding_fa2_fails"] == 110


def test_little_room_on_the_disk_rings(recorder: Recorder) -> None:
    recorder.run(20)
    free_gib = os.statvfs(recorder.folder).f_bavail * os.statvfs(recorder.folder).f_frsize / 2**30
    tight = dataclasses.replace(GPU, free_gib=free_gib + 1000)
    (alarm,) = rung(recorder, tight)
    assert alarm.type == "disk_full" and alarm.limits["free_gib"] > alarm.values["free_gib"]
    (recorder.folder / "checkpoint_step20.pt").touch()
    os.truncate(recorder.folder / "checkpoint_step20.pt", int(free_gib * 2**30))
    assert types(rung(recorder, dataclasses.replace(GPU, free_gib=0.0))) == {"disk_full"}
    assert types(rung(recorder)) == set()


# on real runs


def look_at_each_step(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge a run of this process while it is running, after each step that it logs."""
    real = Heartbeat.step_end

    def step_end(self: Heartbeat, step: int) -> None:
        real(self, step)
        watch.look()

    monkeypatch.setattr(Heartbeat, "step_end", step_end)


@torch.no_grad()
def collapse_gates(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.copy_(50.0 * (torch.arange(parameter.numel()) % 3 == 0).view_as(parameter))


@torch.no_grad()
def zero_weights(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


@pytest.mark.parametrize(
    ("spoil", "kind", "at"),
    [(collapse_gates, "gate_collapse", 3), (zero_weights, "zero_grad", 2)],
    ids=["gate_collapse", "zero_grad"],
)
def test_a_real_run_that_goes_wrong_is_halted_and_a_restart_is_refused(
    spoil: Callable[[torch.nn.Module], None],
    kind: str,
    at: int,
    tiny_config: BuildConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = tiny_config("train.steps=8")
    folder = Path(cfg.train.out_dir)

    def build(*args: Any) -> Any:
        model = build_model(*args)
        spoil(model)
        return model

    monkeypatch.setattr(runner, "build_model", build)
    look_at_each_step(Watch(folder, say=lambda text: None, adapt=roomy), monkeypatch)
    with pytest.raises(Halted, match=f"after step {at}"):
        run(cfg, config_path="tiny", out=io.StringIO())
    assert sentinels.read_anomaly(folder) == kind
    halt = sentinels.read_halt(folder)
    assert halt is not None and halt.reason == kind
    assert [(a.type, a.action, a.step) for a in last_alarms(folder, 9)] == [
        (kind, "note", at),
        (kind, "halt", at),
    ]
    with pytest.raises(RunRefused, match=kind):
        run(cfg, config_path="tiny", out=io.StringIO())
    if kind == "gate_collapse":
        assert len(read_gate_details(folder)["layers"]) == cfg.model.n_layers


def test_a_real_healthy_run_rings_nothing_and_shows_that_it_was_watched(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config("train.steps=12")
    said: list[str] = []
    look_at_each_step(Watch(Path(cfg.train.out_dir), say=said.append, adapt=roomy), monkeypatch)
    assert run(cfg, config_path="tiny", out=io.StringIO()).metrics.status == "finished"
    assert (Path(cfg.train.out_dir) / "alarms.jsonl").read_bytes() == b""
    assert len(said) == 1 and "running" in said[0]


# folders that are not what they should be


def test_an_empty_folder_has_nothing_to_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), "--once"]) == 3
    assert "no files of a run" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["watch", str(tmp_path / "none"), "--once"]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_torn_last_line_and_a_foreign_one_are_passed_over(recorder: Recorder) -> None:
    recorder.run(40)
    path = recorder.beats[0].path
    with path.open("a") as file:
        file.write('not ours\n{"schema": 1, "ts": 18')
    run = read_run(recorder.folder, now=recorder.now)
    assert judge(run, ROOMY) == []
    assert run.ranks[0].last is not None and run.ranks[0].last.step == 40
    (problem,) = run.problems
    assert "1 lines cannot be read" in problem and "'not ours'" in problem


def test_files_of_a_newer_version_are_named_and_not_judged(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.run(40)
    for name in ("heartbeat_rank0.jsonl", "metrics.json"):
        path = recorder.folder / name
        text = path.read_text().replace('"schema": 1', '"schema": 2')
        path.write_text(text.replace('"version": 1', '"version": 2'))
    assert main(["watch", str(recorder.folder), "--once"]) == 3
    said = capsys.readouterr().out
    assert "schema 2; this program reads up to 1" in said and "has version 2" in said
    assert not (recorder.folder / ".HALT").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', "nonsense"])
def test_metrics_of_something_else_do_not_hide_the_heartbeat(recorder: Recorder, text: str) -> None:
    recorder.run(40)
    (recorder.folder / "metrics.json").write_text(text)
    assert types(rung(recorder, later_s=300)) == {"heartbeat_stall"}
    assert len(read_run(recorder.folder).problems) == 1


def test_two_processes_that_write_one_heartbeat_are_named(recorder: Recorder) -> None:
    recorder.run(40)
    path = recorder.beats[0].path
    other = path.read_text().splitlines()[-1].replace(str(os.getpid()), "4321")
    with path.open("a") as file:
        file.write(f"{other}\n")
    (problem,) = read_run(recorder.folder).problems
    assert "4321" in problem and "at the same time" in problem


def test_a_folder_that_takes_no_file_is_judged_all_the_same(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.run(40)
    (recorder.folder / "alarms.jsonl").mkdir()  # a root user may write into any folder
    (recorder.folder / ".HALT").mkdir()
    said: list[str] = []
    watch = Watch(recorder.folder, say=said.append, adapt=lambda limits: ROOMY)
    assert types(watch.look(now=recorder.now + 300).alarms) == {"heartbeat_stall"}
    assert any("NOTE heartbeat_stall" in line for line in said)
    assert "alarms.jsonl: lines are being dropped" in capsys.readouterr().err


def test_of_a_huge_heartbeat_only_the_end_is_read(recorder: Recorder) -> None:
    recorder.run(20)
    path = recorder.beats[0].path
    lines = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(20 << 30)  # zeros that take no room; reading them would take minutes
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + lines)
    run = read_run(recorder.folder, now=recorder.now)
    assert run.ranks[0].last is not None and run.ranks[0].last.step == 20
    assert judge(run, ROOMY) == []


# the command, the limits and the file


def test_the_exit_code_says_whether_an_alarm_rings(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.operate.watch.rules.GIB", 1)
    recorder.run(40)
    folder = str(recorder.folder)
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: recorder.now + 10)
    assert main(["watch", folder, "--once"]) == 0
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: recorder.now + 300)
    assert main(["watch", folder, "--once", "--halt", "0"]) == 1
    assert "NOTE heartbeat_stall at step 40" in capsys.readouterr().out
    assert sentinels.read_halt(folder) is None
    assert main(["watch", folder, "--once"]) == 1
    assert (recorder.folder / ".HALT").read_text() == "halt: heartbeat_stall\n"
    assert sentinels.read_anomaly(folder) == "heartbeat_stall"
    recorder.status("halted")
    assert main(["watch", folder, "--until-ended"]) == 0


def test_an_alarm_that_rang_before_the_end_is_in_the_exit_code(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends well between two looks."""
    monkeypatch.setattr("nsa.operate.watch.rules.GIB", 1)
    recorder.run(40)
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: recorder.now + 300)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        recorder.status("finished")

    monkeypatch.setattr("nsa.operate.watch.watchdog.time.sleep", sleep)
    assert main(["watch", str(recorder.folder), "--until-ended", "--halt", "0"]) == 1
    assert len(looks) == 1


def test_a_run_that_died_ends_the_watch_with_an_alarm(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone, and metrics.json says running for ever."""
    monkeypatch.setattr("nsa.operate.watch.rules.GIB", 1)
    recorder.run(40)
    path = recorder.beats[0].path
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    looks: list[float] = []
    monkeypatch.setattr("nsa.operate.watch.watchdog.time.sleep", looks.append)
    monkeypatch.setattr(
        "nsa.operate.run_folder.time.time", lambda: recorder.now + 6 + 5 * len(looks)
    )
    assert main(["watch", str(recorder.folder), "--until-ended"]) == 1
    assert len(looks) == 1, "a launcher has a moment to start it again"
    assert "died at step 40: its process is gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--interval", "0"], "--interval 0"),
        (["--webhook", "file:///etc/passwd"], "--webhook"),
        (["--kill", "--halt", "0"], "--kill needs .HALT first"),
    ],
    ids=["interval", "webhook", "kill"],
)
def test_bad_flags_are_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), "--once", *flags]) == 2
    assert said in capsys.readouterr().err


def test_every_rule_has_its_word_and_the_halting_ones_are_anomalies() -> None:
    by_the_run = (locked_folder.ALARM,)  # a watcher cannot know it
    assert (*(rule.__name__ for rule in RULES), *by_the_run) == TYPES
    assert {*HALTING} <= {*TYPES} and {*HALTING} <= {*sentinels.ANOMALIES}


def test_limits_depend_on_the_device_and_are_quoted_in_the_documentation() -> None:
    assert limits_for("cpu") is CPU and limits_for("cuda:1") is GPU and limits_for(None) is GPU
    assert CPU != GPU
    page = (REPOSITORY / "docs" / "operate.md").read_text(encoding="utf-8")
    assert refresh(page) == page, "python -m nsa.operate.limits docs/operate.md"
    tables = "".join(limit_table(group) for group in read_limits())
    assert all(f"`{item.name}`" in tables for item in dataclasses.fields(Limits))
    assert limits_for("cuda:0", "NVIDIA H200").toks_per_s_min > GPU.toks_per_s_min
    assert limits_for("cuda:0", "Some GPU") is GPU and limits_for("cpu", "NVIDIA H200") is CPU


def test_alarms_read_back_what_was_written_and_refuse_a_newer_schema(tmp_path: Path) -> None:
    assert last_alarms(tmp_path, 3) == []
    alarm = Alarm(type="zero_grad", rank=1, step=4, values={"x": [1.5]}, limits={"x": 2})
    written = [append_alarm(tmp_path, alarm, now=10.0 + i) for i in range(3)]
    assert last_alarms(tmp_path, 2) == written[1:]
    with (tmp_path / "alarms.jsonl").open("a") as file:
        file.write('{"schema": 1, "type": "zero')
    assert last_alarms(tmp_path, 9) == written
    (tmp_path / "alarms.jsonl").write_text(json.dumps({"schema": 2, "type": "new"}) + "\n")
    with pytest.raises(ValueError, match="schema 2.*reads up to 1"):
        last_alarms(tmp_path, 1)


def test_a_run_that_starts_anew_takes_its_alarms_aside(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    folder = Path(cfg.train.out_dir)
    run(cfg, config_path="tiny", out=io.StringIO())
    append_alarm(folder, Alarm(type="zero_grad"))
    run(cfg, config_path="tiny", out=io.StringIO(), resume="none")
    assert not (folder / "alarms.jsonl").exists()
    assert len(list(folder.glob("previous/*/alarms.jsonl"))) == 1


# folders in which anything may stand


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1e308,
    "text",
    "\x1b[2J",
    [],
    [[1]],
    {},
    {"a": None},
    [None] * 3,
)


def spoil(value: Any, chance: random.Random) -> Any:
    """Put something strange in place of a part of a JSON value."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(sorted(value))
        return value | {name: spoil(value[name], chance)}
    return chance.choice(STRANGE)


@pytest.mark.parametrize("seed", range(24))
def test_no_content_of_the_files_makes_the_readers_crash(seed: int, recorder: Recorder) -> None:
    chance = random.Random(seed)
    norm = chance.choice([0.5, 0.0, float("inf")])
    recorder.run(120, attention=GATES | {"entropy_mean": 0.1}, grad_norm=norm)
    append_alarm(recorder.folder, Alarm(type="zero_grad", values={"x": 1}), now=recorder.now)
    for name in ("heartbeat_rank0.jsonl", "metrics.json", "env.json", "alarms.jsonl"):
        path = recorder.folder / name
        lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
        for i in range(len(lines)):
            if chance.random() < 0.5:
                lines[i] = json.dumps(spoil(json.loads(lines[i]), chance))
        path.write_text("\n".join(lines) + "\n")
    (recorder.folder / ".HALT").write_bytes(bytes(chance.randrange(256) for _ in range(20)))
    said: list[str] = []
    watch = Watch(recorder.folder, kill=True, say=said.append, adapt=lambda limits: ROOMY)
    judgement = watch.look(now=recorder.now + 300)
    report = Report(judgement.run)
    assert report.plain() and report.line() and said
    assert "\x1b" not in report.plain()
