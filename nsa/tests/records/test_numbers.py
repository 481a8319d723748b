"""A number of a logged step is spelled once: writers, readers, pages and documents follow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nsa.model.stats import GATE_FIELDS, SELECTION_FIELDS, AttentionStats
from nsa.operate.monitor import Report
from nsa.operate.report import html
from nsa.operate.report.evidence import read_evidence
from nsa.operate.run_folder import read_run
from nsa.records import FallbackRow, GpuReading, Heartbeat, TrainingRow, ValRow, read_heartbeat
from nsa.records.numbers import (
    ATTENTION,
    CHARTS,
    EVALUATED,
    FALLBACK_PREFIX,
    FALLBACKS,
    MEASURED,
    NUMBERS,
    SCALARS,
    Curve,
    Monitored,
    Number,
    curves_of,
    refresh,
    scalars_of,
)
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.recording import Recorder
from nsa.train.progress import FetchTimes
from nsa.web.header import describe_charts
from nsa.web.source import History


def test_every_number_goes_from_the_writer_to_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch, log_every=1)
    recorder.run(3, rss_mib=700.0)
    (*_, beat) = (b for b in read_heartbeat(recorder.beats[0].path) if b.msg == "progress")
    history = History(tmp_path)
    while history.read():
        pass

    values = dict(scalars_of(beat.extra))
    curves = history.series(0, 10, 10)["progress"]["columns"]

    assert [*beat.extra] == [*(number.name for number in NUMBERS), "layers"]
    assert values.keys() == {number.name for number in SCALARS}
    assert None not in values.values()
    assert curves.keys() == {number.name for number in SCALARS if number.curve}
    for name, column in curves.items():
        assert column["last"] == pytest.approx(values[name], rel=1e-5), name


def test_a_new_number_is_one_line_and_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Number(
        "fan_rpm", "1/min", "x", curve=Curve("temp", "fan"), monitor=Monitored("memory", "fan {:g}")
    )
    for module in ("records.numbers", "records.heartbeat"):
        monkeypatch.setattr(f"nsa.{module}.NUMBERS", (*NUMBERS, new))
    for module in ("records.numbers", "operate.monitor", "operate.report.html", "web.header"):
        monkeypatch.setattr(f"nsa.{module}.SCALARS", (*SCALARS, new))
    monkeypatch.setattr("nsa.operate.report.evidence.SCALARS", (*SCALARS, new))
    monkeypatch.setattr("nsa.web.source.COLUMNS", ("fan_rpm",))
    recorder = Recorder(tmp_path, monkeypatch, log_every=1)
    recorder.run(3, fan_rpm=1234)
    history = History(tmp_path)
    while history.read():
        pass

    assert history.series(0, 10, 10)["progress"]["columns"]["fan_rpm"]["last"] == 1234
    assert "fan 1234" in Report(read_run(tmp_path)).plain()
    assert any(">fan<" in drawn for drawn in html.curves(read_evidence(tmp_path)))
    (chart,) = (chart for chart in describe_charts()["charts"] if chart["id"] == "temp")
    assert [curve["label"] for curve in chart["series"]] == ["GPU", "fan"]
    assert "| `fan_rpm` | 1/min | x |" in refresh("")


def test_a_value_that_no_table_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fetch_p99_ms is not a number of a logged step"):
        Heartbeat(tmp_path).progress(1, loss=1.0, fetch_p99_ms=3.0)


def test_what_is_measured_has_the_names_of_the_table() -> None:
    names = {number.name for number in MEASURED}

    assert {*GpuReading._fields, *FetchTimes._fields, *TrainingRow._fields[1:]} <= names
    assert (
        "step",
        *(n.name for n in sorted(MEASURED, key=_column) if n.csv),
    ) == TrainingRow._fields
    assert tuple(number.name for number in EVALUATED) == ValRow._fields[1:]
    counters = {number.name.removeprefix(FALLBACK_PREFIX) for number in FALLBACKS}
    assert counters == {*FallbackRow._fields[1:]}


def _column(number: Number) -> int:
    return TrainingRow._fields.index(number.name) if number.csv else 0


def test_attention_statistics_have_the_keys_of_the_table() -> None:
    stats = AttentionStats()
    gates = torch.full((1, 4, 2, 3), 1 / 3)
    stats.record(0, gates, torch.zeros(1, 4, 1, 2, dtype=torch.int32), block_tokens=4)

    assert {number.stat for number in ATTENTION} == stats.summary().keys() - {"total_gates"}
    parts = {part.name for number in ATTENTION for part in number.parts}
    by_layer = {number.stat for number in ATTENTION if number.by_layer}
    assert by_layer | parts == {*GATE_FIELDS, *SELECTION_FIELDS}


def test_every_curve_has_its_chart_and_every_chart_a_curve() -> None:
    drawn = {number.curve.chart for number in (*SCALARS, *EVALUATED) if number.curve}

    assert drawn == {chart.id for chart in CHARTS}
    assert all(curves_of(chart, (*SCALARS, *EVALUATED)) for chart in CHARTS)
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)
    json.dumps([asdict(chart) for chart in CHARTS], allow_nan=False)


def test_the_page_spells_no_number_that_the_table_can_give() -> None:
    script = (REPOSITORY / "nsa/web/static/charts.js").read_text(encoding="utf-8")

    assert [n.name for n in SCALARS if n.name != "loss" and f'"{n.name}"' in script] == []


def test_the_table_in_the_documentation_is_the_one_of_the_code() -> None:
    page = (REPOSITORY / "docs/schemas/heartbeat.md").read_text(encoding="utf-8")

    assert page == refresh(page), "run `python -m nsa.records.numbers docs/schemas/heartbeat.md`"
