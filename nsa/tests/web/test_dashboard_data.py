"""What the dashboard keeps of a run: bounded, without losing extremes, from files of any kind."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nsa.operate import followed_run
from nsa.records import Beat, read_config
from nsa.records.tables import read_selection
from nsa.tail import Follower
from nsa.tests.support.recording import Recorder
from nsa.web.header import Settings
from nsa.web.source import History, Source, Sources
from nsa.web.table import FIELDS, LayerTable, Table
from nsa.web.timeline import Timeline
from scripts.demo_run import main

# tables


@pytest.mark.parametrize("most_rows", [64, 1 << 14])
@pytest.mark.parametrize("points", [1, 7, 100])
def test_thinning_keeps_every_extreme(most_rows: int, points: int) -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(5000)]
    values[1234], values[4321] = 99.0, -99.0
    table = Table(["x", "y"], most_rows)
    for step, value in enumerate(values):
        table.add(step, 2.0 * step, {"x": value, "y": None})
    assert len(table) <= most_rows
    found = table.window(0, 1e9, points)
    assert found["columns"].keys() == {"x"} and len(found["step"]) <= points
    column = found["columns"]["x"]
    assert max(column["high"]) == 99.0 and min(column["low"]) == -99.0
    if points > 1:
        gaps = [b - a for a, b in pairwise(found["step"])]
        assert max(gaps) - min(gaps) <= 2 * 5000 / min(most_rows, 5000) + 2, "evenly in steps"
        i, j = column["high"].index(99.0), column["low"].index(-99.0)
        assert found["step"][i] <= 1234 and (i + 1 == points or found["step"][i + 1] > 1234)
        assert found["step"][j] <= 4321
    mean = sum(m * (b - a) for m, a, b in spans(found, 5000)) / 5000
    assert mean == pytest.approx(sum(values) / 5000, abs=0.02)


def spans(found: dict, last: int) -> list[tuple[float, int, int]]:  # type: ignore[type-arg]
    ends = [*found["step"][1:], last]
    return list(zip(found["columns"]["x"]["mean"], found["step"], ends, strict=True))


def test_gaps_stay_gaps_and_a_step_that_is_done_again_replaces() -> None:
    table = Table(["x"])
    for step in range(1, 11):
        table.add(step, 0.0, {"x": None if step in (4, 5) else float(step)})
    assert table.window(3, 6, 100)["columns"]["x"]["mean"] == [3, None, None, 6]
    table.add(8, 1.0, {"x": 80.0})
    found = table.window(0, 100, 100)
    assert found["step"] == [1, 2, 3, 4, 5, 6, 7, 8] and found["columns"]["x"]["mean"][-1] == 80


def test_layers_are_bounded_and_a_line_of_another_shape_is_passed_over() -> None:
    fields: dict[str, Any] = {name: [0.5, 1.0] for name in FIELDS}
    fields["gate_branch_shares"] = [[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]
    table = LayerTable(most_rows=16)
    for step in range(1000):
        table.add(Beat(ts=0.0, step=step, extra={"layers": fields}))
    bad_ones: list[Any] = [None, {}, [], {"entropy_mean": "x"}, fields | {"sel_k_mean": [1]}]
    for bad in bad_ones:
        table.add(Beat(ts=0.0, step=1000, extra={"layers": bad}))
    found = table.window(0, 1e9, 5)
    assert table.num_layers == 2 and len(found["step"]) == 5
    assert found["fields"]["share_win"] == [[0.5] * 5, [0.8] * 5]


# files that grow


def test_a_follower_gives_each_line_once_and_begins_again_with_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    follower = Follower(path, 1 << 20)
    assert follower.read(100) == ([], False, False)
    path.write_text("one\ntwo\nthr")
    lines, anew, more = follower.read(5)
    assert ([line.text for line in lines], anew, more) == (["one"], True, True)
    assert [line.text for line in follower.read(100).lines] == ["two"]
    with path.open("a") as file:
        file.write("ee\n")
    (line,) = follower.read(100).lines
    assert line == ("three", "the line at byte 8", 8)
    path.write_text("new\n")
    lines, anew, _ = follower.read(100)
    assert anew and [line.text for line in lines] == ["new"]


def test_a_follower_begins_near_the_end_and_holds_no_endless_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    follower = Follower(path, 25)
    assert [line.text for line in follower.read(1 << 20).lines] == ["line 998", "line 999"]
    assert follower.begun_at == path.stat().st_size - 25
    monkeypatch.setattr("nsa.tail.MOST_LINE", 50)
    with path.open("a") as file:
        file.write("x" * 200)
    assert follower.read(100).lines == []
    assert len(follower._held) <= 50
    with path.open("a") as file:
        file.write("xx\nafter\n")
    texts = [line.text for _ in range(3) for line in follower.read(100).lines]
    assert texts == ["after"]


def test_the_header_has_the_last_loss_of_the_curves_however_thin_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=1)
    recorder.run(900)
    source = Source(tmp_path)
    while source.refresh():
        pass
    recorder.run(1)  # the verdict is not made anew yet
    while source.refresh():
        pass
    loss = source.series(0, 1e9, 50)["progress"]["columns"]["loss"]
    assert len(loss["mean"]) <= 50 and loss["mean"][-1] != loss["last"]
    assert source.header()["loss"] == loss["last"] == round(recorder.metrics.loss_last or 0.0, 5)
    assert "last" not in source.series(0, 500, 50)["progress"]["columns"]["loss"]


def test_of_a_huge_heartbeat_the_end_is_read_and_the_rest_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=5, csv=False)
    recorder.run(2000)
    size = recorder.beats[0].path.stat().st_size
    monkeypatch.setattr(followed_run, "HISTORY_BYTES", size // 10)
    monkeypatch.setattr(followed_run, "PLACES", 8)
    monkeypatch.setattr("nsa.tail.SAMPLE_BYTES", 8192)
    whole = History(tmp_path)
    while whole.read():
        pass
    steps = whole.progress.window(0, 1e9, 2000)["step"]
    early = [step for step in steps if step < 1700]
    assert steps[0] < 100 and steps[-1] == 2000 and 4 <= len(early) <= 10
    assert len(steps) < 100, "most of it was not read"
    assert any("sampled at 8 places" in text for text in whole.problems())


# folders that are not as they should be


def shown(folder: Path) -> dict:  # type: ignore[type-arg]
    """The run as the page gets it, with what every question is answered."""
    sources = Sources([folder])
    source = sources.get(0)
    for _ in range(3):
        source.refresh()
    found: dict = sources.runs()["runs"][0]  # type: ignore[type-arg]
    found |= {"series": source.series(0, 1e9, 500), "timeline": source.timeline(1e9, 50)}
    found |= {"layers": source.layers(0, 1e9, 50), "selection": source.selection(5)}
    json.dumps([found, sources.settings()], allow_nan=False)
    return found


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    run = shown(tmp_path)
    assert run["level"] == "idle" and "no files of a run" in run["verdict"]


def test_a_folder_that_goes_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(tmp_path / "run", monkeypatch).run(40)
    sources = Sources([tmp_path / "run"])
    sources.get(0).refresh()
    (tmp_path / "run").rename(tmp_path / "gone")
    sources.get(0)._due = 0.0
    sources.get(0).refresh()
    assert "is not a folder" in " ".join(sources.runs()["runs"][0]["problems"])


def test_what_is_put_right_is_no_longer_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=10)
    recorder.run(20)
    path = recorder.beats[0].path
    good = path.read_text()
    path.write_text(f"{good}not json\n")
    history = History(tmp_path)
    history.read()
    assert "not json" in "".join(history.problems())
    path.unlink()
    path.symlink_to("/dev/null")
    history.read()
    assert "links are not followed" in "".join(history.problems())
    path.unlink()
    path.write_text(good)
    history.read()
    assert history.problems() == [] and history.progress.last_step == 20


def test_half_written_and_foreign_files_are_named_and_the_rest_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=10)
    recorder.run(100)
    with recorder.beats[0].path.open("a") as file:
        file.write("not json\n\x00\x01\n" + '{"ts": 1e999, "step": 1}\n' + '{"schema"')
    recorder.run(50)
    (tmp_path / "metrics.json").write_text('{"version": 1, "sta')
    (tmp_path / "env.json").write_text('{"version": 77}')
    (tmp_path / "config.yaml").write_text("a: [1, 2\nb: }")
    (tmp_path / "val.csv").write_text("step,loss,ppl\n10,x,1\n20,2.0,7.4\n30,2.")
    (tmp_path / "selection.jsonl").write_text('{"schema": 5, "step": 3}\n[]\n')
    (tmp_path / "alarms.jsonl").write_text("?\n")
    run = shown(tmp_path)
    said = "\n".join(run["problems"])
    for name in ("metrics.json", "env.json", "config.yaml", "val.csv", "selection.jsonl"):
        assert name in said, said
    assert "alarms.jsonl" in said and "lines were skipped" in said
    assert run["series"]["progress"]["step"] == list(range(10, 151, 10))
    assert run["series"]["val"]["columns"]["loss"]["mean"] == [2.0]


def test_lines_of_a_newer_version_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=10, csv=False)
    recorder.run(50)
    path = recorder.beats[0].path
    lines = [json.loads(line) | {"schema": 9} for line in path.read_text().splitlines()]
    with path.open("a") as file:
        file.writelines(json.dumps(line | {"step": line["step"] + 50}) + "\n" for line in lines)
    run = shown(tmp_path)
    assert run["series"]["progress"]["step"] == [10, 20, 30, 40, 50]
    said = "\n".join(run["problems"])
    assert "schema 9; this program reads up to 1; use the program that wrote it" in said


def test_two_runs_in_one_folder_are_not_mixed_in_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=1)
    recorder.run(30)
    path = recorder.beats[0].path
    mine = path.read_text().splitlines()
    other = [json.dumps(json.loads(line) | {"pid": 999_999}) for line in mine]
    mixed = [*mine, other[0]]
    for a, b in zip(mine[1:], other[1:], strict=True):
        mixed += [a, b]
    path.write_text("\n".join(mixed) + "\n")
    run = shown(tmp_path)
    assert run["series"]["progress"]["step"] == list(range(1, 31))
    assert "at the same time" in "\n".join(run["problems"])
    assert "another process" in "\n".join(run["problems"])


def test_a_resumed_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=1, csv=False)
    recorder.run(30)
    recorder.step = 20
    recorder.boot()
    recorder.run(5, loss=7.0)
    column = shown(tmp_path)["series"]["progress"]
    assert column["step"] == list(range(1, 26))
    assert column["columns"]["loss"]["mean"][20:] == [7.0] * 5


def test_what_was_not_recorded_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=10, csv=False)
    recorder.run(50, attention=None, layers=None, mfu=None)
    run = shown(tmp_path)
    columns = run["series"]["progress"]["columns"]
    assert "loss" in columns and "mfu" not in columns and "entropy_mean" not in columns
    assert run["mfu"] is None and run["layers"] == {"step": [], "fields": {}}
    assert run["selection"] == {"steps": []}


def test_without_a_heartbeat_the_table_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=10)
    recorder.run(50)
    recorder.beats[0].path.unlink()
    series = shown(tmp_path)["series"]
    assert series["training"]["step"] == [10, 20, 30, 40, 50]


def test_settings_that_unfold_without_end_are_cut(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for i in range(1, 40):
        lines.append(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}")
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert len(Settings(tmp_path).config()) <= 2000


# the strip of a rank


def beat(ts: float, msg: str = "beat", **extra: object) -> Beat:
    return Beat(ts=ts, msg=msg, extra={"phase": "step_start"} | extra)


def test_a_strip_tells_steps_pauses_restarts_and_silence() -> None:
    line = Timeline()
    line.add(beat(0.0, "boot", phase="start"))
    for second in range(10, 110):
        line.add(beat(second))
    line.add(beat(110.0, phase="save"))
    for second in range(150, 200):
        line.add(beat(second))
    line.add(beat(300.0, "boot", phase="start"))
    for second in range(310, 400):
        line.add(beat(second))
    line.add(Beat(ts=650.0, msg="watchdog_dump"))
    strip = line.strip(0.0, 700.0, 70, now=700.0, allowed_s=100.0)
    states = [segment.state for segment in strip]
    assert states == ["start", "step", "save", "step", "down", "start", "step", "silent"]
    assert strip[4].begin == pytest.approx(190, abs=11) and strip[4].end == pytest.approx(300)
    assert strip[4].longest_s == pytest.approx(101)
    ended = line.strip(0.0, 399.0, 40, now=None, allowed_s=100.0)
    assert ended[-1].state == "step"
    waiting = line.strip(0.0, 450.0, 45, now=450.0, allowed_s=100.0)
    assert waiting[-1].state == "waiting"


def test_a_strip_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.web.timeline.MOST_BEATS", 100)
    line = Timeline()
    for second in range(1000):
        line.add(beat(float(second)))
    assert line.span is not None and line.span[1] == 999 and line.span[0] >= 900


# the made-up run of the documentation


def test_a_made_up_run_is_one_that_every_reader_takes(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert main([str(folder), "--steps", "40", "--log-every", "10", "--spike", "20"]) == 0
    run = shown(folder)
    assert run["problems"] == [] and run["verdict"] == "finished"
    assert run["series"]["progress"]["step"] == [1, 10, 20, 30, 40]
    assert len(run["selection"]["reads_pct"]) == 12 and run["alarm_log"][0]["type"] == "loss_spike"
    assert read_selection(folder)[-1].step == 40 and read_config(folder).train.steps == 40
