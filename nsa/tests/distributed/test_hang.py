"""What counts as a hang, what is said about it, and that nobody else's process is touched."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.config import Config
from nsa.files import start_ticks
from nsa.records import read_heartbeat
from nsa.records.hang_report import (
    GONE,
    PATTERN,
    RUNS,
    SILENT,
    STOPPED,
    BadReport,
    RankState,
    read_report,
    sentence,
    write_report,
)
from nsa.records.spans import PAUSE_S, SIZE, Place, Spans, read_span, span
from nsa.train import run
from nsa.train.distributed.hang import (
    answer,
    end_calls,
    gather,
    kill,
    make_call,
    process_state,
    read_call,
    read_recorder,
)
from nsa.train.trainer import Trainer


def state(rank: int, span: str = "agreement", **others: object) -> RankState:
    known: dict[str, object] = dict(
        pid=40 + rank, host="n", state=RUNS, step=7, waits=span == "agreement", still_s=12.0
    )
    return RankState(rank=rank, span=span, **(known | others))  # type: ignore[arg-type]


def counted(begun: int) -> dict[str, object]:
    return {"begun": begun, "ended": begun - 1, "recent": []}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            [state(0), state(1, "fetch")],
            "Rank 1 (pid 41 on n) has been in fetch of update 7 for 12 s; "
            "rank 0 waits for it in agreement of update 7.",
        ),
        (
            [state(0), state(1, state=STOPPED), state(2)],
            "Rank 1 (pid 41 on n) is stopped by a signal, in agreement of update 7, for 12 s or "
            "more; ranks 0, 2 wait for it in agreement of update 7.",
        ),
        (
            [state(0, "update", state=GONE), state(1)],
            "Rank 0 (pid 40 on n) is gone: its process ended in update 7; "
            "rank 1 waits for it in agreement of update 7.",
        ),
        (
            [state(0, state=SILENT, step=0), state(1, "forward", step=0)],
            "Rank 0 (pid 40 on n) gives no sign of life: silent for 12 s or more, since agreement, "
            "before update 1; rank 1 is in forward, before update 1.",
        ),
        (
            [state(0), state(1, step=6)],
            "Rank 1 (pid 41 on n) has been in agreement of update 6 for 12 s; "
            "rank 0 waits for it in agreement of update 7.",
        ),
        (
            [state(0, recorder=counted(9)), state(1, recorder=counted(8))],
            "Rank 1 (pid 41 on n) has been in agreement of update 7 for 12 s; "
            "rank 0 waits for it in agreement of update 7.",
        ),
        (
            [state(0, recorder=counted(9)), state(1, recorder=counted(9))],
            "All ranks wait for each other, each in exchange 9 (the network, or a device?): "
            "ranks 0, 1 wait in agreement of update 7.",
        ),
        (
            [state(0, "fetch")],
            "Rank 0 (pid 40 on n) has been in fetch of update 7 for 12 s; "
            "no other rank is waited for.",
        ),
    ],
    ids=["busy", "stopped", "gone", "silent", "behind", "fewer-exchanges", "all-wait", "alone"],
)
def test_the_sentence_says_who_is_where_and_who_waits(
    ranks: list[RankState], expected: str
) -> None:
    assert sentence(ranks) == expected


def test_a_report_is_read_back_and_begins_with_its_sentence(tmp_path: Path) -> None:
    ranks = [state(0, stacks=["a", "b"]), state(1, "fetch", recorder=counted(3))]
    path = write_report(tmp_path, ranks, by=1, why="too long")
    assert path != write_report(tmp_path, ranks, by=1, why="again"), "none is replaced"
    report = read_report(path)
    assert path.read_text(encoding="utf-8").splitlines()[0] == report.sentence == sentence(ranks)
    assert (report.ranks, report.by, report.why) == (ranks, 1, "too long")


@pytest.mark.parametrize("text", ["", "x\n", "x\n[]", 'x\n{"ranks": [{}]}', 'x\n{"ranks": 3}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hang_report_1.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadReport, match="hang_report_1.txt: not a hang report"):
        read_report(path)


def test_the_place_of_a_rank_is_in_its_file_at_each_change(tmp_path: Path) -> None:
    spans = Spans()
    spans.open(tmp_path, 3)
    assert _place(tmp_path) == ("start", 0, False)
    spans.begin_update(5)
    spans.enter("fetch", waits=False)
    assert _place(tmp_path) == ("fetch", 5, False)
    spans.enter("agreement", waits=True)
    assert _place(tmp_path) == ("agreement", 5, True)
    spans.leave()
    spans.leave()
    assert _place(tmp_path) == ("update", 5, False)
    spans.close()
    found = read_span(tmp_path, 3)
    assert found is not None and (found.pid, found.started) == (os.getpid(), start_ticks())
    assert found.count == spans.count
    assert (tmp_path / "span_rank3.json").stat().st_size == SIZE


def _place(folder: Path) -> tuple[str, int, bool]:
    place = read_span(folder, 3)
    assert place is not None
    return place.span, place.step, place.waits


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rank": 3}', "[" * 100_000])
def test_a_place_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "span_rank3.json").write_text(text, encoding="utf-8")
    assert read_span(tmp_path, 3) is None and read_span(tmp_path, 4) is None


def test_what_is_allowed_follows_the_measured_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("nsa.records.spans.time.monotonic", lambda: now)
    spans = Spans()
    spans.open(tmp_path, 0, least_s=5.0)
    for step in range(1, 5):
        assert spans.allowed_s() == PAUSE_S, "the first updates compile"
        spans.begin_update(step)
        now += 2.0
    assert spans.allowed_s() == 20.0, "ten times the usual one"
    spans.enter("evaluate", waits=False)
    spans.enter("all-reduce of sums", waits=True)
    assert spans.allowed_s() == PAUSE_S, "also inside of it"
    now += 500.0
    spans.leave()
    spans.leave()
    assert spans.allowed_s() == 20.0, "an evaluation is no update"
    spans.begin_update(5)
    now += 9.0
    spans.begin_update(6)
    assert spans.allowed_s() == 27.0, "three times the longest"
    for step in range(7, 80):
        now += 0.01
        spans.begin_update(step)
    assert spans.allowed_s() == 5.0, "the least"
    spans.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def place_of(pid: int, started: int) -> Place:
    host = os.uname().nodename
    known = dict(rank=1, count=1, step=2, span="fetch", waits=False, allowed_s=1.0, ts=0.0)
    return Place(pid=pid, started=started, host=host, **known)  # type: ignore[arg-type]


def test_a_process_is_known_by_its_start_and_no_other_is_killed(
    sleeper: subprocess.Popen[bytes],
) -> None:
    place = place_of(sleeper.pid, start_ticks(sleeper.pid))
    stranger = replace(place, started=place.started + 1)
    assert process_state(place) == SILENT
    assert process_state(stranger) == GONE, "the pid is somebody else's by now"
    assert process_state(replace(place, host="elsewhere")) == SILENT
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: process_state(place) == STOPPED)
    kill(stranger)
    assert sleeper.poll() is None and process_state(place) == STOPPED
    kill(place)
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    assert process_state(place) == GONE
    kill(place)  # nobody is there


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ranks_meet_in_the_folder_and_the_silent_one_is_found(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    call = make_call(tmp_path, 0)
    assert call is not None and read_call(tmp_path) == call
    assert make_call(tmp_path, 2) is None, "one call at a time"
    answer(tmp_path, call, state(0))
    late = threading.Timer(0.2, lambda: answer(tmp_path, call, state(2, "fetch")))
    late.start()
    spans = Spans()
    spans.open(tmp_path, 1)
    spans.close()
    (tmp_path / ".hang_raw_rank1.txt").write_text("in C\n", encoding="utf-8")
    states = gather(tmp_path, call, {0: 5.0, 1: 6.0, 2: 7.0}, patience_s=0.6)
    late.join()
    assert [s.state for s in states] == [RUNS, SILENT, RUNS]
    assert (states[1].span, states[1].still_s, states[1].stacks) == ("start", 6.0, ["in C"])
    end_calls(tmp_path)
    assert read_call(tmp_path) is None and not list(tmp_path.glob(".hang_answer*"))


def test_an_answer_to_an_earlier_call_does_not_count(tmp_path: Path) -> None:
    call = make_call(tmp_path, 0)
    assert call is not None
    answer(tmp_path, call._replace(id="before"), state(0))
    assert gather(tmp_path, call, {0: 1.0}, patience_s=0.0)[0].state == SILENT


def test_the_recorder_is_empty_without_ranks() -> None:
    assert read_recorder() is None


@pytest.mark.parametrize(("least_s", "num_reports"), [("0.2", 1), ("0", 0)], ids=["on", "off"])
def test_a_wait_beyond_the_least_is_reported_once_and_training_goes_on(
    least_s: str,
    num_reports: int,
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One process; the fifth batch comes when there is a report, or in a second."""
    real = Trainer.fetch

    def fetch(self: Trainer, position: int) -> object:
        if position == self.position(5):
            end = time.monotonic() + (60.0 if num_reports else 1.0)
            with span("fetch"):
                while time.monotonic() < end and not list(self.folder.glob(PATTERN)):
                    time.sleep(0.05)
        return real(self, position)

    monkeypatch.setattr(Trainer, "fetch", fetch)
    monkeypatch.setenv("NSA_HANG_LEAST_S", least_s)
    config = tiny_config("train.steps=6", "train.eval_every=0")
    result = run(config, config_path="tiny.yaml", out=io.StringIO())
    assert result.metrics.status == "finished"
    reports = list(result.folder.glob(PATTERN))
    assert len(reports) == num_reports
    assert capsys.readouterr().err.count("[hang]") == num_reports
    assert not list(result.folder.glob(".hang*"))
    for path in reports:
        assert "has been in fetch of update 5" in read_report(path).sentence
        kinds = [beat.msg for beat in read_heartbeat(result.folder / "heartbeat_rank0.jsonl")]
        assert kinds.count("watchdog_dump") == 1
