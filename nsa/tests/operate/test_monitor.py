"""The monitor: everything of a run at any width, in a terminal and in a pipe, from files alone."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nsa.cli.__main__ import main
from nsa.config import Config
from nsa.config.describe import duration, printable
from nsa.files import size, start_ticks, write_text
from nsa.operate.monitor import Report, monitor, progress_bar, sparkline
from nsa.operate.report.command import judge_evidence
from nsa.operate.report.evidence import read_evidence
from nsa.operate.run_folder import read_run
from nsa.operate.watch.watchdog import describe_run
from nsa.records import sentinels
from nsa.records.alarms import Alarm, append_alarm
from nsa.records.spans import Spans
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.recording import Recorder, dead_pid
from nsa.train import run
from nsa.web.header import describe

BuildConfig = Callable[..., Config]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(tmp_path, monkeypatch, ranks=2)
    recorder.run(400)
    (tmp_path / "checkpoint_step300.pt").write_bytes(b"x" * (3 << 20))
    os.utime(tmp_path / "checkpoint_step300.pt", (recorder.now - 200, recorder.now - 200))
    recorder.status("running")
    return recorder


def drawn(recorder: Recorder, width: int, *, later_s: float = 1.0) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    console.print(Report(read_run(recorder.folder, now=recorder.now + later_s)))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_shown_and_nothing_is_cut(recorder: Recorder, width: int) -> None:
    text = drawn(recorder, width)
    for piece in (
        "running",
        "0.8% | step 400 of 50,000 | eta 1 d 3 h",
        "tokens/s",
        "mfu 31.0%",
        "lr 2.00e-04",
        "GPU 17.6 GiB used, 20.5 GiB held",
        "fetch 2 ms | p50 2 ms | p95 4 ms",
        "entropy 0.90 | largest 0.50 | collapsed 0.0%",
        "cmp 0.30 sel 0.30 win 0.40",
        "step 300 | 3 min 21 s ago | 3.0 MiB",
        "0: step 400, 1 s ago | 1: step 400, 1 s ago",
        "alarms      none",
    ):
        assert piece in text
    lines = text.splitlines()
    assert len(lines) <= 24, "it fits a small terminal"
    assert all(len(line) == width for line in lines)


def test_alarms_halts_and_late_ranks_are_shown(recorder: Recorder) -> None:
    alarm = Alarm(type="zero_grad", text="evil \x1b[2J text")
    append_alarm(recorder.folder, alarm, now=recorder.now)
    sentinels.write_halt(recorder.folder, "operator")
    text = drawn(recorder, 120, later_s=400)
    assert "now heartbeat_stall: rank 1 has been silent for 400 s" in text
    assert "note zero_grad: evil  [2J text" in text and "\x1b" not in text
    assert ".HALT, " in text and "old: operator" in text


def test_what_was_not_recorded_reads_not_measured(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NSA_DISABLE_AUX_STATS", "NSA_TB_DISABLE", "NSA_DISABLE_CSV_LOGS"):
        monkeypatch.setenv(name, "1")
    cfg = tiny_config()
    run(cfg, config_path="tiny", out=io.StringIO())
    report = Report(read_run(Path(cfg.train.out_dir)))
    shown = {row.label: [part.text for part in row.parts] for row in report.rows(100)}
    assert shown["gates"] == ["not measured"]
    assert "mfu not measured" in shown["speed"]
    assert shown["status"][0] == "finished" and "step 3 of 3" in shown["progress"]
    assert float(shown["loss"][0]) > 0, "from the heartbeat"
    assert shown["memory"][0].startswith("process ")


def test_a_pipe_gets_a_report_and_then_a_line_for_what_is_new(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: recorder.now)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert seconds == 9.0
        if looks == 2:
            recorder.run(20)
        if looks == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("nsa.operate.monitor.time.sleep", sleep)
    out = io.StringIO()
    args = argparse.Namespace(once=False, interval=9.0)
    assert monitor(recorder.folder, args, Console(file=out, width=80)) == 0
    before, line = out.getvalue().rsplit("\n", 2)[:2]
    assert line.endswith("tokens/s | alarms: none") and "running | step 420 of 50,000" in line
    assert before.count("step 400 of 50,000") == 1 and "\x1b" not in before


def test_a_terminal_is_drawn_again_and_keeps_the_last_picture(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: recorder.now)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        recorder.run(20)
        if looks == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("nsa.operate.monitor.time.sleep", sleep)
    out = io.StringIO()
    console = Console(file=out, width=80, height=30, force_terminal=True)
    args = argparse.Namespace(once=False, interval=1.0)
    assert monitor(recorder.folder, args, console) == 0
    assert "step 400 of" in out.getvalue()
    assert "step 420 of" in out.getvalue().rsplit("\x1b[?1049l", 1)[1], "after the screen is left"


def test_only_what_was_there_before_is_there_after(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in recorder.folder.iterdir()}
    assert main(["monitor", str(recorder.folder), "--once"]) == 0
    assert "step 400 of 50,000" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in recorder.folder.iterdir()} == before


def test_empty_torn_and_newer_folders_are_shown_as_far_as_they_go(
    recorder: Recorder, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", str(tmp_path_factory.mktemp("empty")), "--once"]) == 0
    assert "no files of a run" in capsys.readouterr().out
    assert main(["monitor", str(recorder.folder / "none"), "--once"]) == 2
    for name in ("metrics.json", "training.csv"):
        path = recorder.folder / name
        path.write_text(path.read_text().replace('"version": 1', '"version": 2') + "\nx,y\n")
    text = Report(read_run(recorder.folder, now=recorder.now)).plain()
    assert "unreadable" in text and "training.csv" in text and "metrics.json" in text
    assert "entropy 0.90" in text and "0: step 400" in text


def test_a_dead_run_is_not_called_running_by_any_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, monkeypatch)
    recorder.run(400)
    recorder.status("running")
    folder, beats = recorder.folder, recorder.beats[0].path

    def look(now: float) -> tuple[str, dict[str, Any]]:
        run = read_run(folder, now=now)
        facts = judge_evidence(read_evidence(folder, now=now), "final").facts
        texts = [Report(run).plain(), Report(run).line(), describe_run(run, 0), json.dumps(facts)]
        return "\n".join(texts), describe(run)

    told, header = look(recorder.now + 5)
    assert "running" in told and "eta" in told and "time left" in told and "died" not in told
    assert header["status"] == "running" and header["eta_s"] is not None and not header["ended"]

    # On a machine that cannot be seen: after an hour of silence, by far longer than usual.
    env = json.loads((folder / "env.json").read_text())
    write_text(folder / "env.json", json.dumps(env | {"hostname": "elsewhere"}))
    assert "died" not in look(recorder.now + 3000)[0]
    told, header = look(recorder.now + 4000)
    assert told.count("died at step 400: no sign of life for 1 h") == 4 and "eta" not in told
    write_text(folder / "env.json", json.dumps(env))

    text = beats.read_text()
    beats.write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    told, header = look(recorder.now + 5)
    assert told.count("died at step 400: its process is gone") == 4
    assert not any(word in told for word in ("status      running", "eta", "time left"))
    assert (header["status"], header["verdict"]) == ("died", "died at step 400")
    assert header["eta_s"] is None and header["ended"] and header["level"] == "bad"
    assert main(["report", str(folder), "--at", "final"]) == 1
    assert "it died at step 400" in capsys.readouterr().out

    # Another process has the number by now.
    beats.write_text(text)
    here = Spans()
    here.open(folder, 0)
    here.close()
    assert "died" not in look(recorder.now + 5)[0]
    place = folder / "span_rank0.json"
    started = start_ticks()
    place.write_text(
        place.read_text().replace(f'"started": {started}', f'"started": {started - 1}')
    )
    assert "died at step 400" in look(recorder.now + 5)[0]

    recorder.status("finished")
    assert "finished" in look(recorder.now + 5)[0]


def test_the_time_left_counts_evaluations_and_checkpoints(recorder: Recorder) -> None:
    recorder.metrics.train_s, recorder.metrics.eval_and_save_s = 1000.0, 250.0
    recorder.status("running")
    left_s = read_run(recorder.folder).eta_s(400)
    assert left_s == pytest.approx(1.25 * 2.0 * (50_000 - 400))


def test_the_script_shows_out_dir_with_the_python_that_is_named(
    recorder: Recorder, tmp_path: Path
) -> None:
    script = REPOSITORY / "scripts" / "monitor_production_50k.sh"
    text = script.read_text()
    assert "set -euo pipefail" in text and "${PYTHON:-python}" in text
    done = subprocess.run(
        ["bash", str(script), "--once"],
        env=os.environ | {"OUT_DIR": str(recorder.folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "step 400 of 50,000" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "7 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min"), (183_600, "2 d 3 h")],
)
def test_time_spans_have_two_units(seconds: int, text: str) -> None:
    assert duration(seconds) == text


def test_small_drawings() -> None:
    assert sparkline([1, 2, 3, float("nan"), 4], 4, "abcd") == "abcd"
    assert sparkline(range(100), 5, "01234") == "01234"
    assert sparkline([2, 2], 9) == "▁▁" and sparkline([], 9) == ""
    assert progress_bar(0.5, 4, "#", ".") == "##.." and progress_bar(7, 2, "#", ".") == "##"
    assert size(5 << 20) == "5.0 MiB" and size(3 << 30) == "3.0 GiB"
    assert printable("a\x1b[1mb\n") == "a [1mb "
