"""`nsa report`: every criterion fails when it must, and what was not recorded never passes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa.cli.__main__ import main
from nsa.cli.operate import REPORT_POINTS
from nsa.config import Config
from nsa.operate.report import html
from nsa.operate.report.command import POINTS, judge
from nsa.operate.report.evidence import read_evidence
from nsa.operate.report.verdict import (
    FAIL,
    GO,
    NO_GO,
    NOT_MEASURED,
    PASS,
    UNKNOWN,
    Row,
    Verdict,
    read_report,
    write_report,
)
from nsa.records import GpuReading, sentinels, write_config, write_metrics
from nsa.records.alarms import Alarm, append_alarm
from nsa.tail import sampled_lines
from nsa.tests.support.recording import GATES, Recorder
from nsa.train import run

BuildConfig = Callable[..., Config]


def record(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    steps: int = 1000,
    *,
    ranks: int = 2,
    csv: bool = True,
    **logged: Any,
) -> Recorder:
    """A run on two GPUs that is at work, watched, as its files show it."""
    recorder = Recorder(folder, monkeypatch, ranks=ranks, csv=csv)
    write_config(folder, config, "test.yaml")
    for beat in recorder.beats:
        beat.loader_ready(2.5)
    recorder.run(steps, **logged)
    recorder.metrics.loss_first = 5.6
    recorder.metrics.world_size = ranks
    recorder.status("running")
    append_alarm(folder, Alarm(type="zero_grad", action="clear"))
    return recorder


@pytest.fixture
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: BuildConfig) -> Recorder:
    config = tiny_config("train.save_every=5000", "data.dataset=fineweb_edu")
    return record(tmp_path, monkeypatch, config)


def at(recorder: Recorder, point: str, **limits: float) -> Verdict:
    free = {"free_gib": 0.0, "free_checkpoints": 0.0}
    return judge(recorder.folder, point, limits=free | limits, now=recorder.now + 1)


def rows(verdict: Verdict) -> dict[str, Row]:
    return {row.name: row for row in verdict.rows}


# healthy runs


@pytest.mark.parametrize("point", ["launch", "100", "500", "phase1", "phase2"])
def test_a_healthy_run_is_go_at_each_point_of_its_life(healthy: Recorder, point: str) -> None:
    verdict = at(healthy, point)
    assert {row.verdict for row in verdict.rows} == {PASS}, verdict.text()
    assert verdict.go and verdict.exit_code == 0
    assert all(row.evidence and row.limit for row in verdict.rows)


def test_a_real_run_is_go_at_its_end_with_every_file_judged(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    cfg = tiny_config("train.save_every=1", f"train.backup_dir={backup}", "train.lr=0.01")
    run(cfg, config_path="tiny", out=io.StringIO())
    folder = Path(cfg.train.out_dir)
    verdict = judge(folder, "final", limits={"free_gib": 0.0})
    assert verdict.word == GO, verdict.text()
    found = rows(verdict)
    assert found["model"].verdict == found["checkpoint loads"].verdict == PASS
    assert found["resumed"].verdict == found["alarms"].verdict == NOT_MEASURED
    assert rows(judge(folder, "checkpoint"))["backup"].verdict == PASS


def test_without_csv_tensorboard_and_statistics_the_heartbeat_is_enough(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NSA_DISABLE_AUX_STATS", "NSA_TB_DISABLE", "NSA_DISABLE_CSV_LOGS"):
        monkeypatch.setenv(name, "1")
    cfg = tiny_config("train.lr=0.01")
    run(cfg, config_path="tiny", out=io.StringIO())
    folder = Path(cfg.train.out_dir)
    assert not (folder / "training.csv").exists()
    verdict = judge(folder, "phase2", limits={"steps_phase2": 3})
    found = rows(verdict)
    assert found["throughput"].verdict == found["loss falls"].verdict == PASS
    for name in ("gate entropy", "largest gate", "collapsed gates"):
        assert found[name].verdict == NOT_MEASURED and "gate entropy" in verdict.summary()


def test_a_table_alone_still_gives_loss_and_speed(healthy: Recorder) -> None:
    for path in healthy.folder.glob("heartbeat_rank*.jsonl"):
        path.unlink()
    verdict = at(healthy, "500")
    found = rows(verdict)
    assert found["loss finite"].verdict == found["throughput"].verdict == PASS
    assert found["throughput"].evidence.startswith("training.csv")
    assert found["heartbeats"].verdict == NOT_MEASURED
    assert verdict.word == UNKNOWN and verdict.exit_code == 2


# each criterion says NO


def nan_at_the_end(recorder: Recorder) -> None:
    recorder.run(20, loss=float("nan"))


def status(word: str) -> Callable[[Recorder], None]:
    return lambda recorder: recorder.status(word)


def metric(**values: Any) -> Callable[[Recorder], None]:
    def change(recorder: Recorder) -> None:
        for name, value in values.items():
            setattr(recorder.metrics, name, value)
        write_metrics(recorder.folder, recorder.metrics)

    return change


def log_line(text: str) -> Callable[[Recorder], None]:
    def write(recorder: Recorder) -> None:
        (recorder.folder / "production.log").write_text(f"fine\n{text}\n", "utf-8")

    return write


def logged(**values: Any) -> Callable[[Recorder], None]:
    """The run as it is, and then as long again with other numbers."""
    return lambda recorder: recorder.run(1000, **values)


def alarm(recorder: Recorder) -> None:
    append_alarm(recorder.folder, Alarm(type="loss_spike", text="up"))


def no_second_rank(recorder: Recorder) -> None:
    (recorder.folder / "heartbeat_rank1.jsonl").unlink()


def silent(recorder: Recorder) -> None:
    recorder.now += 4000


def paused_early(recorder: Recorder) -> None:
    """A stall long before the end: many more beats follow than the end of the file holds."""
    recorder.now += 4000
    recorder.run(8000)


def slow_source(recorder: Recorder) -> None:
    path = recorder.folder / "heartbeat_rank0.jsonl"
    path.write_text(path.read_text("utf-8").replace('"dt": 2.5', '"dt": 250.0'), "utf-8")


def creep(recorder: Recorder) -> None:
    for i in range(50):
        recorder.run(20, gpu=GpuReading(18_000 + 400 * i, 39_000, 97, 61))


def slower(recorder: Recorder) -> None:
    recorder.run(1000, toks_per_s=900.0)


def uneven(recorder: Recorder) -> None:
    for i in range(50):
        recorder.run(20, step_time_s=9.0 if i % 3 == 0 else 2.0)


def second_run(recorder: Recorder) -> None:
    recorder.beats[0].write(0, "boot", {"phase": "start"})
    path = recorder.folder / "heartbeat_rank0.jsonl"
    lines = path.read_text("utf-8").splitlines()
    last = json.loads(lines[-1]) | {"pid": 1}
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n", "utf-8")
    recorder.run(400)


GATES_DOWN = GATES | {"entropy_mean": 0.4, "max_gate_mean": 0.95, "collapse_fraction": 0.3}
NO = [
    ("phase2", "steps", status("halted")),
    ("final", "finished", status("halted")),
    ("phase2", "one run", second_run),
    ("100", "errors", status("oom")),
    ("100", "errors", lambda r: sentinels.write_anomaly(r.folder, "nan_loss")),
    ("100", "errors", log_line("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp")),
    ("100", "errors", lambda r: r.beats[0].loader_error("gone")),
    ("launch", "heartbeats", no_second_rank),
    ("100", "stalls", silent),
    ("100", "stalls", paused_early),
    ("launch", "data", metric(data_fallback="the hub is down")),
    ("launch", "config", metric(config_file="configs/train_showcase.yaml")),
    ("launch", "precision", metric(dtype="fp32")),
    ("launch", "first batch", slow_source),
    ("launch", "first loss", metric(loss_first=0.4)),
    ("final", "loss finite", nan_at_the_end),
    ("final", "loss falls", logged(loss=9.0)),
    ("final", "throughput", logged(toks_per_s=1.0)),
    ("final", "stable speed", slower),
    ("phase2", "steady steps", uneven),
    ("final", "fetch", logged(dt_fetch_s=7.0)),
    ("phase1", "GPU load", logged(gpu=GpuReading(18_000, 21_000, 30, 61))),
    ("final", "memory", logged(gpu=GpuReading(60_000, 70_000, 97, 61))),
    ("final", "flat memory", creep),
    ("final", "fallbacks", logged(fallbacks={"total_fallbacks": 11})),
    ("final", "gate entropy", logged(attention=GATES_DOWN)),
    ("final", "largest gate", logged(attention=GATES_DOWN)),
    ("final", "collapsed gates", logged(attention=GATES_DOWN)),
    ("500", "alarms", alarm),
    ("phase2", "alarms", logged(attention=GATES | {"max_gate_mean": 0.99})),
    ("checkpoint", "checkpoint", status("finished")),
    ("final", "model", status("finished")),
    ("final", "time", status("halted")),
]


@pytest.mark.parametrize(
    ("point", "name", "breaks"), NO, ids=[f"{i}-{p}-{n}" for i, (p, n, _) in enumerate(NO)]
)
def test_each_criterion_fails_when_it_must(
    healthy: Recorder, point: str, name: str, breaks: Callable[[Recorder], object]
) -> None:
    longer = {"steps_phase1": 4000.0} if name == "GPU load" else {"steps_phase2": 2000.0}
    limits = longer if name in ("steps", "steady steps", "GPU load") else {}
    before = rows(at(healthy, point, **limits)).get(name)
    assert before is None or before.verdict != FAIL
    if name in ("throughput", "GPU load"):  # a median needs most of the lines
        breaks(healthy)
    breaks(healthy)
    verdict = at(healthy, point, **limits)
    row = rows(verdict)[name]
    assert row.verdict == FAIL and row.advice and row.evidence, verdict.text()
    assert verdict.word == NO_GO and not verdict.go and verdict.exit_code == 1
    assert name in verdict.summary()


def test_random_tokens_that_are_predicted_are_a_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    config = tiny_config("data.dataset=synthetic")
    recorder = record(tmp_path, monkeypatch, config, 120, ranks=1, loss=5.545)
    found = rows(at(recorder, "100"))
    assert found["no leak"].verdict == PASS
    assert "loss falls" not in found, "there is nothing to learn"
    recorder.run(100, loss=5.1)
    assert rows(at(recorder, "500"))["no leak"].verdict == FAIL


def test_few_losses_that_do_not_fall_yet_are_not_judged_but_a_clear_rise_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    recorder = record(tmp_path, monkeypatch, tiny_config(), 0, ranks=1)
    for loss in (5.50, 5.54, 5.48, 5.52, 5.51):
        recorder.run(20, loss=loss)
    assert rows(at(recorder, "100"))["loss falls"].verdict == NOT_MEASURED
    for loss in (5.9, 6.4, 6.9, 7.5):
        recorder.run(20, loss=loss)
    assert rows(at(recorder, "500"))["loss falls"].verdict == FAIL


def test_a_loss_that_stays_is_a_plateau(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    recorder = record(tmp_path, monkeypatch, tiny_config(), 2200, ranks=1, loss=3.0)
    assert rows(at(recorder, "final", plateau_lines=40))["plateau"].verdict == FAIL
    assert rows(at(recorder, "final"))["plateau"].verdict == NOT_MEASURED


@pytest.fixture
def trained(tiny_config: BuildConfig, tmp_path: Path) -> Path:
    """The folder of a real run with checkpoints and a copy of them."""
    cfg = tiny_config("train.save_every=1", f"train.backup_dir={tmp_path / 'backup'}")
    run(cfg, config_path="tiny", out=io.StringIO())
    return Path(cfg.train.out_dir)


def test_a_checkpoint_that_changed_and_a_copy_that_is_gone_fail(trained: Path) -> None:
    path = trained / "checkpoint_step3.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (trained.parent / "backup" / path.name).unlink()
    verdict = judge(trained, "checkpoint")
    found = rows(verdict)
    assert verdict.word == NO_GO
    assert (
        found["checkpoint loads"].verdict == FAIL and "sha256" in found["checkpoint loads"].evidence
    )
    assert found["backup"].verdict == FAIL


def test_a_checkpoint_in_parts_is_judged_like_a_file(trained: Path) -> None:
    """FSDP writes folders; a damaged part is found."""
    file = trained / "checkpoint_step3.pt"
    parts = trained / "checkpoint_step3"
    assert main(["checkpoint", "convert", str(file), str(parts)]) == 0
    for path in trained.glob("checkpoint_step*.*"):
        path.unlink()
    assert rows(judge(trained, "checkpoint"))["checkpoint loads"].verdict == PASS
    part = max(parts.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert rows(judge(trained, "checkpoint"))["checkpoint loads"].verdict == FAIL


def test_a_model_file_that_is_none_fails_and_runs_nothing_of_it(trained: Path) -> None:
    evil = b"cos\nsystem\n(S'touch " + str(trained / "owned").encode() + b"'\ntR."
    (trained / "model.pt").write_bytes(evil)
    assert rows(judge(trained, "final"))["model"].verdict == FAIL
    assert not (trained / "owned").exists()


def test_a_resumed_run_shows_it(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.save_every=1")
    run(cfg, config_path="tiny", out=io.StringIO(), stop_after=1)
    run(cfg, config_path="tiny", out=io.StringIO())
    row = rows(judge(Path(cfg.train.out_dir), "checkpoint"))["resumed"]
    assert row.verdict == PASS and row.value == "at step 1, now at 3"


# a run that is at work


def test_a_live_run_that_has_not_come_so_far_cannot_be_judged_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    recorder = record(tmp_path, monkeypatch, tiny_config("train.save_every=5000"), 120)
    assert at(recorder, "100").go
    verdict = at(recorder, "500")
    assert verdict.word == UNKNOWN and rows(verdict)["steps"].verdict == NOT_MEASURED
    assert at(recorder, "checkpoint").word == UNKNOWN
    assert at(recorder, "final").word == UNKNOWN


def test_the_first_hundred_steps_are_judged_by_their_own_lines(healthy: Recorder) -> None:
    healthy.run(1000, toks_per_s=1.0, attention=GATES_DOWN)
    healthy.run(1000, toks_per_s=1.0, loss=float("nan"))
    assert rows(at(healthy, "100"))["loss finite"].verdict == PASS
    assert rows(at(healthy, "100"))["throughput"].verdict == PASS
    assert rows(at(healthy, "500"))["gate entropy"].verdict == PASS
    assert rows(at(healthy, "final"))["throughput"].verdict == FAIL


# folders that are not as they should be


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_mode, _head(path))
        for path in sorted(folder.rglob("*"))
    }


def _head(path: Path) -> bytes:
    return path.read_bytes()[-4096:] if path.is_file() and path.stat().st_size < 1 << 24 else b""


def torn(recorder: Recorder) -> None:
    with (recorder.folder / "heartbeat_rank0.jsonl").open("a") as file:
        file.write('{"schema": 1, "ts": 18000')
    with (recorder.folder / "training.csv").open("a") as file:
        file.write("1020,3.1")


def newer(recorder: Recorder) -> None:
    for path in recorder.folder.glob("heartbeat_rank*.jsonl"):
        path.write_text(path.read_text("utf-8").replace('"schema": 1', '"schema": 7'), "utf-8")
    metrics = recorder.folder / "metrics.json"
    metrics.write_text(metrics.read_text("utf-8").replace('"version": 1', '"version": 7'), "utf-8")
    (recorder.folder / "training.csv").write_text("step,loss,new\n1,2,3\n2,3,4\n", "utf-8")


def half_written(recorder: Recorder) -> None:
    for name in ("metrics.json", "env.json", "config.yaml"):
        path = recorder.folder / name
        path.write_text(path.read_text("utf-8")[: path.stat().st_size // 2], "utf-8")


def garbage(recorder: Recorder) -> None:
    for path in recorder.folder.iterdir():
        path.write_bytes(b"\x00\xff{[\n" * 1000)


def huge(recorder: Recorder) -> None:
    """10 GB, sparse: a start that is a run, then nothing but zeros, then lines again."""
    path = recorder.folder / "heartbeat_rank0.jsonl"
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(10_000_000_000)
        file.write(b"\n" + content)


BAD = {
    "torn": (torn, GO, ""),
    "newer": (newer, UNKNOWN, "schema 7"),
    "half-written": (half_written, None, "metrics.json"),
    "garbage": (garbage, UNKNOWN, "heartbeat_rank0.jsonl"),
    "huge": (huge, GO, ""),
    "mixed": (second_run, NO_GO, ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_described_shown_as_far_as_it_goes_and_not_modified(
    healthy: Recorder, kind: str
) -> None:
    breaks, word, said = BAD[kind]
    breaks(healthy)
    before = state_of(healthy.folder)
    evidence = read_evidence(healthy.folder, now=healthy.now)
    for point in POINTS:
        verdict = at(healthy, point)
        assert verdict.text() and verdict.markdown() and html.page(verdict, evidence)
    verdict = at(healthy, "500")
    assert word in (None, verdict.word), verdict.text()
    assert said in " ".join(verdict.problems)
    assert state_of(healthy.folder) == before


def test_an_empty_folder_cannot_be_judged_and_a_missing_one_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("CANNOT JUDGE at final")
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_read_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(
        ValueError, match="cannot be read .Permission denied.; read it as its owner"
    ):
        judge(tmp_path, "final")


# the command and its files


def test_the_command_writes_three_files_elsewhere_and_says_the_verdict_last(
    healthy: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder, out = healthy, tmp_path / "elsewhere"
    recorder.status("finished")
    code = main(
        ["report", str(tmp_path), "--at", "500", "--out", str(out), "--limit", "free_gib=0"]
    )
    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("GO at 500: ")
    assert sorted(path.name for path in out.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    verdict = read_report(out)
    assert verdict.word == GO and verdict.rows and verdict.facts["status"] == "finished"
    page = (out / "report.html").read_text("utf-8")
    assert page.count("<svg") >= 6 and "<script" not in page
    assert "http" not in page and "src=" not in page, "it needs nothing else"


def test_limits_and_points_that_do_not_exist_are_refused(
    healthy: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(healthy.folder)
    assert main(["report", folder, "--at", "500", "--limit", "memory_gibs=3"]) == 2
    assert "the nearest is 'memory_gib'" in capsys.readouterr().err
    assert main(["report", folder, "--at", "500", "--limit", "memory_gib"]) == 2
    assert main(["report", folder, "--at", "500", "--limit", "fallbacks_max=1.5"]) == 2
    assert "whole number" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at='600' is not a point of a run"):
        judge(healthy.folder, "600")
    assert main(["report", folder, "--at", "500", "--limit", "memory_gib=3"]) == 1
    capsys.readouterr()
    assert main(["report", folder, "--at", "500", "--json", "--limit", "free_gib=0"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == GO


def test_a_report_reads_back_and_a_newer_one_is_refused(healthy: Recorder, tmp_path: Path) -> None:
    verdict = at(healthy, "500")
    path = write_report(tmp_path, verdict)
    assert read_report(tmp_path) == verdict
    content = json.loads(path.read_text("utf-8"))
    for change in ({"schema": 2}, {"verdict": "NO-GO"}, {"rows": 3}, {"at": 5}):
        path.write_text(json.dumps(content | change), "utf-8")
        with pytest.raises(ValueError, match="is not a report"):
            read_report(tmp_path)


def test_what_a_run_holds_cannot_become_markup(healthy: Recorder) -> None:
    evil = "<script>alert(1)</script>\x1b[2J`x`"
    metric(config_file=evil, status="running")(healthy)
    verdict = at(healthy, "launch")
    evidence = read_evidence(healthy.folder, now=healthy.now)
    assert "<script" not in html.page(verdict, evidence) + verdict.markdown()
    assert "\x1b" not in verdict.text()


def test_the_points_of_the_command_are_those_with_criteria() -> None:
    assert tuple(POINTS) == REPORT_POINTS


# the curves, and the sample that they are drawn from


def test_a_curve_that_is_thinned_keeps_its_spikes_and_its_ends() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[5_003] = (5_003.0, 99.0)
    kept = html.thin(points)
    assert len(kept) <= html.MOST_POINTS and (5_003.0, 99.0) in kept
    assert kept == sorted(kept) and kept[-1][0] > 9_900


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [0.0, 0.0], [1e-9, 5e8], [-3.0, 4.0]])
def test_any_curve_can_be_drawn(values: list[float]) -> None:
    drawn = html.chart("a < b", [html.Curve("x", [(float(i), v) for i, v in enumerate(values)])])
    assert drawn.startswith("<svg") and "a &lt; b" in drawn and "nan" not in drawn
    assert html.chart("none", [html.Curve("x", [])]) == ""


def test_a_sample_of_a_large_file_has_whole_lines_in_order_from_start_to_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{i:09d}\n" for i in range(200_000)) + "torn", "utf-8")
    numbers = [int(line.text) for line in sampled_lines(path, 1 << 20)]
    assert numbers == sorted(set(numbers)) and all(len(f"{n}") <= 9 for n in numbers)
    assert (numbers[0], numbers[-1]) == (0, 199_999) and len(numbers) < 120_000
    middle = [n for n in numbers if 60_000 < n < 90_000]
    assert middle and len(middle) < 29_999, "some between, not all"
    assert len([*sampled_lines(path, 1 << 30)]) == 200_000
