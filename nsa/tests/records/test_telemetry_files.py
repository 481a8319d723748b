"""The files around a run: environment, counters, memory, stacks, events, requests to stop."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.training.compare_report import Comparison, Result
from nsa.config.load import REPOSITORY
from nsa.evaluate.results import NEEDLE, PERPLEXITY, Evaluation
from nsa.model.stats import GATE_FIELDS, SELECTION_FIELDS
from nsa.operate.handoff import contents
from nsa.operate.handoff.contents import Entry, Manifest, Missing
from nsa.operate.report.verdict import FAIL, GO, NO_GO, NOT_MEASURED, PASS, UNKNOWN, Row, Verdict
from nsa.operate.triage import command
from nsa.operate.triage.command import Triage
from nsa.operate.triage.trials import Outcome
from nsa.ops import fallbacks
from nsa.ops.fallbacks import Fallback
from nsa.records import (
    CounterFiles,
    CsvLog,
    FallbackRow,
    Heartbeat,
    KStatsRow,
    MemoryDumps,
    Metrics,
    RunEnvironment,
    TrainingRow,
    ValRow,
    alarms,
    env,
    fallback_counts,
    hang_report,
    last_beat,
    open_folder,
    open_tensorboard,
    read_env,
    read_fallback_counters,
    read_k_stats,
    read_memory,
    read_rows,
    results,
    sentinels,
    sinks,
    spans,
    write_env,
)
from nsa.records import dumps as dump_files
from nsa.records import folder as folders
from nsa.records.alarms import Alarm, as_line
from nsa.records.heartbeat import BASE_FIELDS
from nsa.records.launch import PhaseVerdict, RunInfo
from nsa.records.numbers import EVALUATED, SCALARS
from nsa.records.results import Sample
from nsa.records.sinks import (
    Tracked,
    attention_scalars,
    train_scalars,
    val_scalars,
    write_tracked,
)
from nsa.records.tables import SelectionRecord
from nsa.tests.support.gpu import on_gpu
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import folder as checkpoint_folder
from studies.corpus.pack import Packed
from studies.corpus.record import KindRecord
from studies.long_context.results import Grid, Probe
from studies.long_context.results import Results as NeedleResults
from studies.nsa_vs_dense import results as study_results

PAGES = REPOSITORY / "docs" / "schemas"
SUMMARY: dict[str, Any] = {
    "entropy_mean": 1.0,
    "entropy_min": 0.5,
    "max_gate_mean": 0.5,
    "max_gate_max": 0.75,
    "collapse_fraction": 0.0,
    "branch_shares": [0.5, 0.25, 0.25],
    "total_gates": 64.0,
    "sel_k_mean": 2.5,
    "sel_k_max": 3.0,
    "sel_rows": 64.0,
    "sel_pct_at_max": 0.75,
}
LAYERS = [dict.fromkeys((*GATE_FIELDS, *SELECTION_FIELDS), value) for value in (0.25, 0.75)]


def full_disk(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# env.json


def test_env_file_reads_back_what_was_written(tmp_path: Path) -> None:
    write_env(tmp_path, ["train.py", "--config", "x.yaml"])

    found = read_env(tmp_path)

    assert found.python == sys.version.split()[0] and found.torch.startswith("2.")
    assert found.argv == ["train.py", "--config", "x.yaml"]
    assert found.cuda_available == (found.gpu_name is not None) == (found.cuda_device_count > 0)
    assert json.loads((tmp_path / "env.json").read_text())["time"].endswith("Z")
    assert os.listdir(tmp_path) == ["env.json"]


def test_env_file_records_the_variables_of_a_run_and_no_others() -> None:
    kept = {"NSA_LR": "1", "NCCL_ALGO": "Ring", "TORCH_LOGS": "+sdp", "CUDA_VISIBLE_DEVICES": "0"}
    kept |= {"PYTORCH_CUDA_ALLOC_CONF": "a:b", "RANK": "1", "WORLD_SIZE": "2", "CONFIG": "x.yaml"}

    found = env.collect([], kept | {"HOME": "/", "RANKING": "1", "MY_NSA_LR": "1"})

    assert found.env == kept


def test_env_file_hides_secrets() -> None:
    environ = {
        "NSA_API_KEY": "k1",
        "NCCL_TOKEN": "k2",
        "TORCH_SECRET_X": "k3",
        "CUDA_password": "k4",
    }
    argv = ["train.py", "--hf-token", "k5", "api_key=k6", "--password=k7", "data.tokenizer=byte"]
    argv += ["--token", "--steps", "5"]

    found = env.collect(argv, environ)

    assert not re.search(r"k\d", json.dumps(dataclasses.asdict(found)["env"]) + str(found.argv))
    assert found.env == dict.fromkeys(environ, "***")
    assert found.argv == [
        *("train.py", "--hf-token", "***", "api_key=***", "--password=***", "data.tokenizer=byte"),
        *("--token", "--steps", "5"),
    ]


def test_the_commit_is_known_in_a_repository_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert env.git_commit(tmp_path) is None
    git("init", "-q")
    assert env.git_commit(tmp_path) is None  # nothing is committed
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    commit = git("rev-parse", "HEAD")
    assert env.git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert env.git_commit(tmp_path) == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert env.git_commit(tmp_path) is None


def test_env_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = write_env(tmp_path, [])
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="version 9; this program reads version 1"):
        read_env(tmp_path)


# k_stats.csv and fallback_counters.csv


@pytest.fixture
def no_fallbacks() -> Iterator[None]:
    fallbacks.reset()
    yield
    fallbacks.reset()


@pytest.mark.usefixtures("no_fallbacks")
def test_counter_files_read_back_what_was_written(tmp_path: Path) -> None:
    files = CounterFiles(tmp_path)
    files.append(1, SUMMARY)
    fallbacks.record("win", "no flash here", layer=0)
    files.append(20, None)  # statistics are switched off: only the counters

    assert read_k_stats(tmp_path) == [KStatsRow(1, 2.5, 3, 64, 0.75)]
    assert read_fallback_counters(tmp_path) == [
        FallbackRow(1),
        FallbackRow(20, sliding_fa2_fails=1, total_fallbacks=1),
    ]
    head = (tmp_path / "k_stats.csv").read_text().splitlines()
    assert head == ["step,k_mean,k_max,rows,pct_at_max", "1,2.500000,3,64,0.750000"]
    assert (tmp_path / "fallback_counters.csv").read_text().splitlines()[0] == (
        "step,selection_triton_fails,selection_cuda_fails,selection_pack_fails,"
        "selection_mask_fails,compressed_fa2_fails,sliding_fa2_fails,total_fallbacks"
    )


def test_every_branch_has_its_counter() -> None:
    counts = {
        Fallback(0, "cmp", "a"): 1,
        Fallback(1, "cmp", "b"): 2,
        Fallback(None, "win", "a"): 4,
        Fallback(None, "sel", "a"): 8,
        Fallback(None, "all", "a"): 16,
    }

    found = fallback_counts(counts)

    assert found["compressed_fa2_fails"] == 3 and found["sliding_fa2_fails"] == 4
    assert found["selection_triton_fails"] == 24 and found["total_fallbacks"] == 31


@pytest.mark.usefixtures("no_fallbacks")
def test_a_resumed_run_keeps_the_counters_up_to_its_step(tmp_path: Path) -> None:
    first = CounterFiles(tmp_path)
    for step in (10, 20, 30):
        first.append(step, SUMMARY)

    CounterFiles(tmp_path, resumed_at=20).append(25, SUMMARY)

    assert [row.step for row in read_k_stats(tmp_path)] == [10, 20, 25]
    assert [row.step for row in read_fallback_counters(tmp_path)] == [10, 20, 25]


def test_a_broken_csv_line_is_named(tmp_path: Path) -> None:
    log = CsvLog(ValRow, tmp_path / "val.csv")
    log.append(ValRow(1, 2.0, 7.4))
    with (tmp_path / "val.csv").open("a") as file:
        file.write("2,oops\n")
    with pytest.raises(ValueError, match=r"val.csv, line 3: '2,oops' is not step,loss,ppl"):
        read_rows(ValRow, tmp_path / "val.csv")


def test_a_full_disk_costs_csv_lines_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, row = tmp_path / "t.csv", TrainingRow(1, 2.0, 1e-3, 10.0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", full_disk)
        full.setattr("nsa.records.tables.write_text", full_disk)
        log = CsvLog(TrainingRow, path)
        log.append(row)
        log.append(row)
    log.append(row._replace(step=3))

    assert log.num_dropped == 2 and len(log.rows) == 3
    assert read_rows(TrainingRow, path) == [row._replace(step=3)]  # with its header
    complaints = [x for x in capsys.readouterr().err.splitlines() if "dropped" in x]
    assert len(complaints) == 1 and "No space left on device" in complaints[0]


def test_logs_that_nobody_holds_any_more_keep_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        CsvLog(ValRow, tmp_path / f"{number}.csv").append(ValRow(1, 2.0, 7.4))
        Heartbeat(tmp_path, rank=number).boot()

    assert len(os.listdir("/proc/self/fd")) <= before + 2


# mem_*


@pytest.mark.parametrize(
    ("every", "pre", "post"),
    [
        (0, [], []),
        (1, [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]),
        (2, [1, 3, 5, 7], [2, 4, 6]),
        (3, [1, 4, 7], [3, 6]),
        (100, [1], []),
    ],
)
def test_memory_is_due_around_every_n_steps(every: int, pre: list[int], post: list[int]) -> None:
    due = {step: dump_files.due(step, every) for step in range(1, 8)}

    assert [step for step in due if due[step].pre] == pre
    assert [step for step in due if due[step].post] == post


@pytest.mark.parametrize("every", [0, 2])
def test_memory_dumps_of_a_run_on_a_cpu(every: int, tmp_path: Path) -> None:
    dumps = MemoryDumps(tmp_path, "cpu", every=every)
    dumps.boot()
    for step in (1, 2, 3):
        dumps.before_step(step)
        dumps.after_step(step)

    whens = ["boot", "post_step2", "pre_step1", "pre_step3", "step1"] if every else []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(f"mem_{when}.{end}" for when in whens for end in ("json", "txt"))
    for when in whens:
        content = read_memory(tmp_path / f"mem_{when}.json")
        assert content["when"] == when and 10 < content["rss_mib"] < 1_000_000
        assert (
            "device cpu: torch keeps no memory statistics"
            in (tmp_path / f"mem_{when}.txt").read_text()
        )


def test_memory_dumps_of_two_ranks_do_not_collide(tmp_path: Path) -> None:
    for rank in (0, 1):
        MemoryDumps(tmp_path, "cpu", every=1, rank=rank).boot()

    assert {path.name for path in tmp_path.glob("*.json")} == {
        "mem_boot.json",
        "mem_boot_rank1.json",
    }


@pytest.mark.gpu
@on_gpu
def test_memory_dumps_of_a_gpu_have_torchs_statistics(tmp_path: Path) -> None:
    MemoryDumps(tmp_path, "cuda", every=1).boot()

    assert "allocated_bytes.all.current" in read_memory(tmp_path / "mem_boot.json")
    assert "CUDA memory summary" in (tmp_path / "mem_boot.txt").read_text()


# .HALT and .anomaly_type


def test_halt_is_found_with_its_text_and_age(tmp_path: Path) -> None:
    assert sentinels.read_halt(tmp_path) is None
    (tmp_path / ".HALT").touch()
    touched = sentinels.read_halt(tmp_path)
    assert touched is not None and (touched.text, touched.reason) == ("", "")

    assert sentinels.write_halt(tmp_path, "nan_loss")
    os.utime(tmp_path / ".HALT", (time.time() - 100,) * 2)

    halt = sentinels.read_halt(tmp_path)
    assert halt is not None and (halt.text, halt.reason) == ("halt: nan_loss", "nan_loss")
    assert 99 < halt.age_s < 130
    assert os.listdir(tmp_path) == [".HALT"]


def test_a_halt_that_cannot_be_read_still_asks_but_a_failing_disk_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".HALT").mkdir()
    halt = sentinels.read_halt(tmp_path)
    assert halt is not None and halt.text == "unreadable: is a folder, not a file"

    monkeypatch.setattr(Path, "stat", full_disk)
    assert sentinels.read_halt(tmp_path) is None


def test_a_halt_that_names_an_anomaly_stays(tmp_path: Path) -> None:
    sentinels.write_halt(tmp_path, "gate_collapse")
    assert sentinels.obeyed(tmp_path) is None
    assert sentinels.read_halt(tmp_path) is not None


def test_obeyed_halts_are_kept_under_numbers(tmp_path: Path) -> None:
    assert sentinels.obeyed(tmp_path) is None
    for reason in ("first", "second", "third"):
        sentinels.write_halt(tmp_path, reason)
        assert sentinels.obeyed(tmp_path) is not None
        assert sentinels.read_halt(tmp_path) is None

    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        ".HALT.done": "halt: first\n",
        ".HALT.done.2": "halt: second\n",
        ".HALT.done.3": "halt: third\n",
    }


@pytest.mark.parametrize("kind", sentinels.ANOMALIES)
def test_an_anomaly_reads_back(kind: str, tmp_path: Path) -> None:
    assert sentinels.read_anomaly(tmp_path) is None
    assert sentinels.write_anomaly(tmp_path, kind)
    assert sentinels.read_anomaly(tmp_path) == kind


def test_an_unknown_anomaly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'bad_mood' is unknown; use one of nan_loss, "):
        sentinels.write_anomaly(tmp_path, "bad_mood")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_by_what_asks_for_a_halt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sentinels, "write_text", full_disk)
    monkeypatch.setattr(env, "write_text", full_disk)
    monkeypatch.setattr(dump_files, "write_text", full_disk)

    assert not sentinels.write_halt(tmp_path, "oom")
    assert not sentinels.write_anomaly(tmp_path, "oom")
    write_env(tmp_path, [])
    MemoryDumps(tmp_path, "cpu", every=1).boot()

    said = capsys.readouterr().err
    for name in (".HALT", ".anomaly_type", "env.json", "mem_boot.json"):
        assert (
            f"{tmp_path / name}: not written (No space left on device); the run continues" in said
        )


# stackdump_*.txt

TWO_THREADS = """
import hashlib, sys, threading
from nsa.records import dumps

def wait_in_a_thread():
    sys.stdin.readline()

def work(inside):
    print("ready", flush=True)
    inside()

dumps.install(sys.argv[1], rank=3)
other = threading.Thread(target=wait_in_a_thread, name="the-other")
other.start()
work({"python": other.join,
      "c": lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 6_000_000),
      "holding the lock": lambda: sum(range(100_000_000))}[sys.argv[2]])
other.join()
print("went on", flush=True)
"""


@contextmanager
def running(folder: Path, inside: str) -> Iterator[subprocess.Popen[str]]:
    """Two threads, the main one in an operation; they must end well when asked."""
    with subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS, str(folder), inside],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.2)  # "ready" is said just before it goes inside
            yield process
            out, _ = process.communicate("\n", timeout=60)
            assert out == "went on\n" and process.returncode == 0
        finally:
            process.kill()


def wait_for(folder: Path, pattern: str, number: int = 1, seconds: float = 20) -> list[Path]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = [path for path in folder.glob(pattern) if path.stat().st_size]
        if len(found) >= number:
            return found
        time.sleep(0.02)
    pytest.fail(f"no {number} files {pattern} after {seconds} s")


def test_sigusr1_dumps_every_thread_and_the_process_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, "python") as process:
        process.send_signal(signal.SIGUSR1)
        (first,) = wait_for(tmp_path, "stackdump_*.txt")
        text = first.read_text()
        process.send_signal(signal.SIGUSR1)
        wait_for(tmp_path, "stackdump_*.txt", number=2)

    assert re.fullmatch(r"stackdump_\d+\.txt", first.name)
    head, line = text.splitlines()[:2]
    assert re.fullmatch(rf"Signal {int(signal.SIGUSR1)} at \d{{4}}-\d\d-\d\dT[\d:.]+Z", head)
    assert line == f"pid {process.pid} rank 3 threads 2"
    assert "Thread MainThread (" in text and "in work" in text
    assert "Thread the-other (" in text and "in wait_in_a_thread" in text
    assert first.read_text() == text, "a second dump replaced the first"


def test_the_dump_does_not_wait_for_a_long_operation_in_c(tmp_path: Path) -> None:
    with running(tmp_path, "c") as process:
        process.send_signal(signal.SIGUSR1)
        (dump,) = wait_for(tmp_path, "stackdump_*.txt")

    assert "in work" in dump.read_text(), "the operation was over before the dump"
    assert (tmp_path / ".stackdump_raw_rank3.txt").stat().st_size == 0


def test_the_stack_is_left_even_where_no_python_can_run(tmp_path: Path) -> None:
    with running(tmp_path, "holding the lock") as process:
        process.send_signal(signal.SIGUSR1)
        (raw,) = wait_for(tmp_path, ".stackdump_raw_rank3.txt")
        text = raw.read_text()
        assert list(tmp_path.glob("stackdump_*")) == [], "the lock was not held"

    assert "in work" in text


def test_dumps_of_one_second_get_a_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1700000000.5)

    paths = [dump_files.write_dump(tmp_path, "Signal 10") for _ in range(3)]

    assert [path.name for path in paths if path] == [
        "stackdump_1700000000.txt",
        "stackdump_1700000000_2.txt",
        "stackdump_1700000000_3.txt",
    ]


def test_uninstalling_restores_the_handler_and_leaves_nothing(tmp_path: Path) -> None:
    before, threads = signal.getsignal(signal.SIGUSR1), threading.active_count()
    installed = dump_files.install(tmp_path)
    assert installed is not None
    assert signal.getsignal(signal.SIGUSR1) is not before

    installed.uninstall()
    installed.uninstall()

    assert signal.getsignal(signal.SIGUSR1) is before
    assert threading.active_count() == threads and list(tmp_path.iterdir()) == []


def test_outside_the_main_thread_nothing_is_installed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=dump_files.install, args=(tmp_path,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before and list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_dump_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "write", full_disk)
    assert dump_files.write_dump(tmp_path, "Signal 10") is None
    assert "not written (No space left on device)" in capsys.readouterr().err


# tb/

TAGS = [number.tag for number in (*SCALARS, *EVALUATED) if number.tag]
LAYER_TAGS = [f"layer_{name}" for name in (*GATE_FIELDS, *SELECTION_FIELDS)]


def test_events_read_back_what_was_written(tmp_path: Path) -> None:
    board = open_tensorboard(tmp_path)
    numbers = dict(loss=4.0, toks_per_s=100.0, lr=0.5)
    board.add(1, train_scalars(**numbers, grad_norm=2.0, mfu=0.25, index_loss=0.5))
    board.add(2, train_scalars(**numbers))  # no curve of what nobody knows
    board.add(1, attention_scalars(SUMMARY, LAYERS))
    board.add(2, attention_scalars(None, None))
    board.add(2, val_scalars(loss=2.0, ppl=8.0))
    board.close()

    found = sinks.read_scalars(tmp_path)

    assert found["train/loss"] == [(1, 4.0), (2, 4.0)] and found["train/mfu"] == [(1, 0.25)]
    assert found["train/lr"][0] == (1, 0.5) and found["train/toks_per_s"][0] == (1, 100.0)
    assert found["val/loss"] == [(2, 2.0)] and found["val/ppl"] == [(2, 8.0)]
    assert found["gates/entropy_min"] == [(1, 0.5)] and found["gates/share_win"] == [(1, 0.25)]
    assert found["selection/k_max"] == [(1, SUMMARY["sel_k_max"])]
    assert [found[f"layer_entropy_mean/{i:02d}"] for i in (0, 1)] == [[(1, 0.25)], [(1, 0.75)]]
    by_layer = {f"{tag}/{i:02d}" for tag in LAYER_TAGS for i in (0, 1)}
    assert found.keys() == {*TAGS} | by_layer


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    for resumed_at, steps, loss in ((0, range(1, 8), 4.0), (4, range(5, 10), 2.0)):
        board = open_tensorboard(tmp_path, resumed_at=resumed_at)
        for step in steps:
            board.add(step, train_scalars(loss=loss, toks_per_s=1.0, lr=0.5))
        board.close()

    expected = [(step, 4.0 if step <= 4 else 2.0) for step in range(1, 10)]
    assert sinks.read_scalars(tmp_path)["train/loss"] == expected


@pytest.mark.parametrize("options", [{"disabled": True}, {"rank": 1}])
def test_a_board_that_is_off_writes_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    board = open_tensorboard(tmp_path, **options)
    board.add(1, train_scalars(loss=4.0, toks_per_s=100.0, lr=0.5))
    board.close()

    assert list(tmp_path.iterdir()) == [] and board.num_dropped == 0


def test_without_the_package_it_says_once_which_install_line_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []

    board = open_tensorboard(tmp_path, say=said.append)
    board.add(1, train_scalars(loss=4.0, toks_per_s=100.0, lr=0.5))
    board.add(1, val_scalars(loss=4.0, ppl=2.0))
    board.close()

    assert len(said) == 1 and "pip install -c constraints.txt -e '.[tensorboard]'" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_events_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = open_tensorboard(tmp_path)
    board.add(1, train_scalars(loss=4.0, toks_per_s=100.0, lr=0.5))
    writer = board._writer
    assert writer is not None
    monkeypatch.setattr(writer.file_writer, "add_summary", full_disk)
    board.add(2, train_scalars(loss=4.0, toks_per_s=100.0, lr=0.5))
    board.add(2, val_scalars(loss=4.0, ppl=2.0))
    board.close()

    assert board.num_dropped == 5
    (complaint,) = capsys.readouterr().err.splitlines()
    assert "no more events (No space left on device)" in complaint
    writer.close()


def test_a_folder_that_cannot_be_made_costs_the_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tb").write_text("no folder")
    board = open_tensorboard(tmp_path)
    board.add(1, train_scalars(loss=4.0, toks_per_s=100.0, lr=0.5))
    board.close()
    assert "no events (" in capsys.readouterr().err


# sizes


def test_types_and_sizes_read_back_what_was_written(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    results.write_dtypes(tmp_path, "bf16", [*layer.named_parameters(), ("s", torch.ones(()))])
    report = results.read_dtypes(tmp_path)
    assert report.compute == "bf16"
    assert report.parameters == [
        ("weight", "float32", (2, 3)),
        ("bias", "float32", (2,)),
        ("s", "float32", ()),
    ]
    state = {"state": {0: {"m": torch.zeros(2**18), "step": 1}}, "groups": [{"lr": 0.1}]}
    results.write_opt_state(tmp_path, state)
    assert results.read_opt_state(tmp_path) == 1.0


@pytest.mark.parametrize("text", ["", "version 2\ncompute bf16\n", "version 1\ncompute a\nx y\n"])
def test_a_report_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / results.DTYPES).write_text(text)
    (tmp_path / results.OPT_STATE).write_text(text)
    for read in (results.read_dtypes, results.read_opt_state):
        with pytest.raises(ValueError, match=r"dtypes_report.txt|opt_state_mb.txt"):
            read(tmp_path)


# the folder and the pages


def test_the_files_of_an_earlier_run_move_aside_but_an_order_to_stop_stays(tmp_path: Path) -> None:
    Heartbeat(tmp_path, rank=1).boot()
    write_env(tmp_path, [])
    CounterFiles(tmp_path)
    MemoryDumps(tmp_path, "cpu", every=1).boot()
    dump_files.write_dump(tmp_path, "Signal 10")
    (tmp_path / "tb").mkdir()
    sentinels.write_halt(tmp_path, "x")
    sentinels.obeyed(tmp_path)
    sentinels.write_anomaly(tmp_path, "oom")
    before = {path.name for path in tmp_path.iterdir()}
    sentinels.write_halt(tmp_path, "y")

    previous = open_folder(tmp_path).previous

    assert previous is not None and {path.name for path in previous.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {".HALT", "previous"}


def written_fields(folder: Path) -> dict[str, set[str]]:
    """What every writer writes, by page."""
    heartbeat = Heartbeat(folder)
    heartbeat.boot()
    heartbeat.beat(1)
    nan = float("nan")
    counts = fallback_counts({})
    heartbeat.progress(1, loss=nan, toks_per_s=1.0, lr=0.1, layers=LAYERS, fallbacks=counts)
    heartbeat.step_end(1)
    heartbeat.loader_ready(1.0)
    heartbeat.loader_error("x")
    heartbeat.loader_warmup(1, 1, 1.0)
    heartbeat.watchdog_dump("x")
    lines = [json.loads(line) for line in heartbeat.path.read_text().splitlines()]
    (layers,) = (line["layers"] for line in lines if "layers" in line)
    last = last_beat(heartbeat.path, "progress")
    assert last is not None
    tracked = Tracked("wandb", "x")
    memory = dump_files.write_memory(folder, "boot", "cpu")
    return {
        "heartbeat.md": {*BASE_FIELDS}.union(*lines, layers, (line["msg"] for line in lines)),
        "training_csv.md": {*TrainingRow._fields},
        "val_csv.md": {*ValRow._fields},
        "metrics_json.md": {field.name for field in dataclasses.fields(Metrics)},
        "env_json.md": {field.name for field in dataclasses.fields(RunEnvironment)},
        "k_stats_csv.md": {*KStatsRow._fields},
        "samples_jsonl.md": {field.name for field in dataclasses.fields(Sample)},
        "selection_jsonl.md": {field.name for field in dataclasses.fields(SelectionRecord)},
        "dtypes_report.md": {"version", "compute"},
        "opt_state_mb.md": {"MiB"},
        "checkpoint.md": {
            *(
                "version",
                "step",
                "spikes",
                *checkpoint_file.KEYS,
                *checkpoint_file.Manifest._fields,
            ),
            *(*checkpoint_folder.FolderManifest._fields, *checkpoint_folder.FilePrint._fields),
            *(checkpoint_folder.STATE, checkpoint_folder.METADATA, checkpoint_folder.MANIFEST),
        },
        "fallback_counters_csv.md": {*FallbackRow._fields},
        "sentinels.md": {*sentinels.ANOMALIES, sentinels.HALT, sentinels.DONE, sentinels.ANOMALY},
        "stackdump.md": {"pid", "rank", "threads"},
        "span_rank.md": {field.name for field in dataclasses.fields(spans.Place)},
        "hang_report.md": {
            *(field.name for field in dataclasses.fields(hang_report.RankState)),
            *(field.name for field in dataclasses.fields(hang_report.HangReport)),
            *("begun", "ended", "recent"),
        },
        "mem_dumps.md": {*read_memory(memory)},
        "alarms.md": {*as_line(Alarm(type="x")), *alarms.TYPES, *alarms.ACTIONS},
        "gate_collapse_details.md": {
            *json.loads(alarms.write_gate_details(folder, last).read_text())
        },
        "run_info.md": {*(field.name for field in dataclasses.fields(RunInfo))} - {"notes"},
        "lock.md": {field.name for field in dataclasses.fields(folders.Holder)},
        "phase_json.md": {field.name for field in dataclasses.fields(PhaseVerdict)},
        "tracker_json.md": {*json.loads(write_tracked(folder, tracked).read_text())},
        "profiler_comparison.md": {
            *(field.name for kind in (Comparison, Result) for field in dataclasses.fields(kind)),
        },
        "handoff.md": {
            *(f.name for kind in (Manifest, Entry, Missing) for f in dataclasses.fields(kind)),
            *contents.ITEMS,
        },
        # What is really written is held to these two in test_corpus.py and test_corpus_pack.py.
        "corpus_json.md": {field.name for field in dataclasses.fields(KindRecord)},
        "corpus_pack_json.md": {field.name for field in dataclasses.fields(Packed)},
        "triage.md": {
            *(f.name for kind in (Triage, Outcome) for f in dataclasses.fields(kind)),
            *command.VERDICTS,
        },
        "report.md": {
            *json.loads(Verdict(folder="x", at="500", made="x").json()),
            *(field.name for field in dataclasses.fields(Row)),
            *(PASS, FAIL, NOT_MEASURED, GO, NO_GO, UNKNOWN),
        },
        "recorded_selection.md": {"version", "spec", "selection"},
        "long_context_results.md": {
            "version",
            *(f.name for kind in (NeedleResults, Grid, Probe) for f in dataclasses.fields(kind)),
        },
        "eval_json.md": {
            *("version", *PERPLEXITY, *NEEDLE),
            *(field.name for field in dataclasses.fields(Evaluation)),
        },
        "study_results.md": {*study_results.FIELDS, *study_results.ARM_FIELDS},
        "tensorboard.md": {
            *TAGS,
            *(f"{tag}/{{layer}}" for tag in LAYER_TAGS),
        },
    }


def test_every_field_that_is_written_is_on_its_page(tmp_path: Path) -> None:
    missing = [
        f"docs/schemas/{page}: {field}"
        for page, fields in written_fields(tmp_path).items()
        for field in sorted(fields)
        if f"`{field}`" not in (PAGES / page).read_text(encoding="utf-8")
    ]

    assert missing == []


def test_every_page_is_in_the_list_and_checked(tmp_path: Path) -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in PAGES.glob("*.md")} - {"README.md"}

    assert pages == written_fields(tmp_path).keys()
    assert all(f"({page})" in index for page in pages)
