"""The dashboard's texts: the end of the log, generated samples, how to resume a run that died."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nsa.operate.report.command import judge
from nsa.operate.run_folder import read_run
from nsa.records.folder import LAUNCH, take_lock
from nsa.records.results import PROMPT, Sample, append_sample, write_sample
from nsa.tests.support.recording import Recorder, dead_pid
from nsa.tests.web.test_dashboard import SECRET, settled
from nsa.web.header import (
    LOG_BYTES,
    LOG_LINES,
    MOST_LOG_TEXT,
    MOST_SAMPLE_TEXT,
    MOST_SAMPLES,
    resume_command,
)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(tmp_path / "artifacts" / "run", monkeypatch, log_every=10)
    recorder.run(40)
    recorder.status("running")
    return recorder


def log_of(folder: Path) -> dict[str, Any]:
    return settled(folder).get(0).log()


def samples_of(folder: Path) -> dict[str, Any]:
    return settled(folder).get(0).samples()


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


# the log


def test_of_a_long_log_the_last_lines_are_sent(tmp_path: Path) -> None:
    text = "".join(f"step {i:06d} | loss 1.5\n" for i in range(100_000))
    (tmp_path / "train.log").write_text(text + "half a li")
    log = log_of(tmp_path)
    assert (log["file"], log["problem"]) == ("train.log", "")
    assert len(log["lines"]) == LOG_LINES
    assert [line[1][:11] for line in (log["lines"][0], log["lines"][-1])] == [
        "step 099800",
        "step 099999",
    ]
    for byte, line in log["lines"]:
        assert text[byte:].startswith(line), "its place in the file"


def test_long_lines_are_cut_and_an_endless_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("a" * 100_000 + "\n" + "b\n")
    assert [len(text) for _, text in log_of(tmp_path)["lines"]] == [MOST_LOG_TEXT, 1]
    path.write_text("a" * (2 * LOG_BYTES))
    log = log_of(tmp_path)
    assert log["lines"] == [] and "no whole line" in log["problem"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[1;31mred\x1b[0m and \x1b]0;a title\x07plain", "red and plain"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b" 10%|#   \r 20%|##  \r 30%|### ", " 30%|### "),
        (b"windows\r", "windows"),
        (b"a\tb", "a   b"),
        (b"nul\x00 bell\x07 csi\xc2\x9b31m", "nul  bell  csi 31m"),
        (b"bytes \xff\xfe", "bytes \ufffd\ufffd"),
        ("turned \u202e around".encode(), "turned   around"),
        (b"<script>alert(1)</script>", "<script>alert(1)</script>"),
        (b"HF_TOKEN=hf_abcdefghijklmnop1234", "HF_TOKEN=***"),
    ],
)
def test_control_characters_and_secrets_are_removed(
    tmp_path: Path, written: bytes, shown: str
) -> None:
    (tmp_path / "train.log").write_bytes(written + b"\n")
    ((_, text),) = log_of(tmp_path)["lines"]
    assert text == shown and is_plain(text)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["train.log", "samples.jsonl", "sample.txt"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "outside").write_text(f"{SECRET}\n")
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "link":
        (folder / name).symlink_to(tmp_path / "outside")
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    answers = [log_of(folder), samples_of(folder)]
    assert SECRET not in json.dumps(answers)
    assert name in json.dumps(answers), "it is said"
    assert answers[0]["lines"] == [] and answers[1]["samples"] == []


def test_the_log_that_was_written_last_is_shown_and_never_a_link(tmp_path: Path) -> None:
    for age_s, name in ((50, "production.log"), (900, "old.log"), (0, "tracker.log")):
        (tmp_path / name).write_text(f"{name}\n")
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "z.log").symlink_to(tmp_path / "old.log")
    assert log_of(tmp_path)["lines"][0][1] == "production.log"


def test_without_a_log_the_page_says_what_writes_one(recorder: Recorder) -> None:
    log = log_of(recorder.folder)
    assert log["file"] is None and log["lines"] == []
    assert "nsa launch" in log["problem"] and f"tee -a {recorder.folder}" in log["problem"]


def test_the_log_of_the_launch_is_found_beside_the_run(recorder: Recorder) -> None:
    records = recorder.folder.parent / "train_runs" / "m7c_20270101-000000"
    records.mkdir(parents=True)
    (records / "run.info").write_text(f"out_dir: {recorder.folder}\n")
    (records / "train.log").write_text("step 0001 | loss 5.5\n")
    log = log_of(recorder.folder)
    assert log["lines"] == [[0, "step 0001 | loss 5.5"]] and log["file"] == str(
        records / "train.log"
    )
    (records / "run.info").write_text("out_dir: artifacts/another\n")
    assert log_of(recorder.folder)["file"] is None


# samples


def sample(step: int, text: str) -> Sample:
    return Sample(ts=1.8e9, step=step, prompt=PROMPT, text=text)


def test_samples_are_shown_with_step_and_prompt_oldest_first(recorder: Recorder) -> None:
    stamps = [settled(recorder.folder).runs()["runs"][0]["samples"]]
    for step in range(10, 10 * MOST_SAMPLES + 30, 10):
        append_sample(recorder.folder, sample(step, f"<b>{step}</b>\n\x1b[31mred\x00\r\nend"))
        stamps.append(settled(recorder.folder).runs()["runs"][0]["samples"])
    assert stamps[0] == "" and len({*stamps}) == len(stamps), "the page sees that one came"
    found = samples_of(recorder.folder)
    assert found["problems"] == []
    assert [s["step"] for s in found["samples"]] == [*range(30, 10 * MOST_SAMPLES + 30, 10)]
    assert found["samples"][0]["prompt"] == PROMPT
    assert found["samples"][0]["text"] == "<b>30</b>\nred \nend"


def test_a_sample_is_bounded(tmp_path: Path) -> None:
    append_sample(tmp_path, sample(1, "x" * (MOST_SAMPLE_TEXT + 5)))
    assert len(samples_of(tmp_path)["samples"][0]["text"]) == MOST_SAMPLE_TEXT


def test_an_older_run_has_the_text_alone_and_a_new_one_may_have_none(tmp_path: Path) -> None:
    assert samples_of(tmp_path) == {"samples": [], "problems": []}
    write_sample(tmp_path, "KING.\nWho's there?")
    (only,) = samples_of(tmp_path)["samples"]
    assert only == {"step": None, "ts": None, "prompt": "", "text": "KING.\nWho's there?"}


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"schema": 2}', '{"schema": 1, "ts": 1, "step": "x", "prompt": 1}']
)
def test_a_foreign_line_of_samples_is_said(tmp_path: Path, line: str) -> None:
    (tmp_path / "samples.jsonl").write_text(line + "\n")
    found = samples_of(tmp_path)
    assert found["samples"] == [] and "samples.jsonl" in found["problems"][0]


# one loss, and a run that died


def test_the_loss_is_one_number_everywhere(recorder: Recorder) -> None:
    source = settled(recorder.folder).get(0)
    last = source.header()["loss"]
    assert last == source.series(0, 1e9, 3)["progress"]["columns"]["loss"]["last"]
    assert last == pytest.approx(read_run(recorder.folder).losses[-1][1], abs=1e-6)
    rows = {row.name: row for row in judge(recorder.folder, "final").rows}
    assert rows["loss finite"].value == f"{last:.4f} at step 40"


def test_a_run_that_died_says_where_it_resumes_and_by_which_command(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled(recorder.folder).runs()["runs"][0]["next"] is None, "it may be alive"
    env = json.loads((recorder.folder / "env.json").read_text())
    env["argv"] = ["/x/bin/nsa", "train", "--config", "a b.yaml", "--resume", "none"]
    (recorder.folder / "env.json").write_text(json.dumps(env))
    beats = recorder.beats[0].path
    beats.write_text(beats.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    (run,) = settled(recorder.folder).runs()["runs"]
    assert (run["verdict"], run["level"]) == ("died at step 40", "bad")
    assert run["next"] == {
        "why": "its process is gone",
        "command": "nsa train --config 'a b.yaml'",
        "checkpoint": None,
        "again": 40,
    }
    (recorder.folder / "checkpoint_step30.pt").write_bytes(b"x")
    monkeypatch.setattr("sys.argv", ["/x/bin/nsa", "launch", "--profile", "production"])
    take_lock(recorder.folder, LAUNCH, say=print).release()
    found = settled(recorder.folder).runs()["runs"][0]["next"]
    assert (found["checkpoint"], found["again"]) == (30, 10)
    assert found["command"] == "nsa launch --profile production"


@pytest.mark.parametrize(
    ("argv", "ranks", "command"),
    [
        ("/v/bin/nsa train --resume=none train.lr=1", 1, "nsa train train.lr=1"),
        ("nsa train --resume latest", 1, "nsa train --resume latest"),
        ("/s/nsa/cli/__main__.py train", 1, "python -m nsa.cli train"),
        ("scripts/train_showcase.py --ddp 0", 1, "python scripts/train_showcase.py --ddp 0"),
        ("nsa train", 2, "torchrun --nproc-per-node=2 -m nsa.cli train"),
        ("s.py --ddp 1", 2, "torchrun --nproc-per-node=2 s.py --ddp 1"),
        ("", 1, ""),
        ("nsa 'cut off", 1, ""),
    ],
)
def test_the_command_that_resumes(argv: str, ranks: int, command: str) -> None:
    assert resume_command(argv, ranks) == command
