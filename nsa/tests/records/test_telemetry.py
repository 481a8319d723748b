"""Every file of a run is read back by the reader beside its writer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread

from nsa.config import Config, ConfigError
from nsa.files import replacing, write_text
from nsa.records import (
    TRAINING,
    CsvLog,
    Metrics,
    PlotUnavailable,
    TrainingRow,
    ValRow,
    draw_loss_curve,
    open_folder,
    read_config,
    read_metrics,
    read_rows,
    read_sample,
    write_config,
    write_metrics,
    write_sample,
)

ROWS = [
    TrainingRow(step, 5.5 * 0.98**step + (step % 7) * 0.02, 1e-3 / step, 1000.0)
    for step in range(1, 61)
]
VALUES = [ValRow(20, 4.2, 66.686331), ValRow(60, 2.1, 8.166170)]


def metrics(**changes: object) -> Metrics:
    fields = {
        "config_file": "configs/x.yaml",
        "num_params": 10,
        "tokens_per_step": 64,
        "device": "cpu",
        "dtype": "fp32",
        "attention": "torch",
        "steps": 3,
        "seq_len": 32,
        "batch_global": 2,
        "lr": 0.1,
    }
    return Metrics(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed values


def test_interrupted_write_keeps_the_old_file_and_leaves_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="cut off"), replacing(path) as temporary:
        temporary.write_text("half of the ne")
        raise RuntimeError("cut off")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_write_shows_nothing_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"


def test_csv_log_reads_back_what_was_written(tmp_path: Path) -> None:
    training, val = CsvLog(TrainingRow, tmp_path / "t.csv"), CsvLog(ValRow, tmp_path / "v.csv")
    training.append(TrainingRow(1, 5.5, 1e-3, 1234.0))
    training.append(TrainingRow(20, 4.123456, 2.5e-4, 1300.0))
    val.append(ValRow(20, 4.25, 70.105412))
    assert read_rows(TrainingRow, tmp_path / "t.csv") == training.rows
    assert read_rows(ValRow, tmp_path / "v.csv") == val.rows
    assert (tmp_path / "t.csv").read_text().splitlines()[:2] == [
        "step,loss,lr,toks_per_s",
        "1,5.500000,1.000000e-03,1234",
    ]
    assert (tmp_path / "v.csv").read_text().splitlines()[0] == "step,loss,ppl"


def test_csv_lines_are_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    log = CsvLog(ValRow, tmp_path / "v.csv")
    for number in range(3):
        assert len(read_rows(ValRow, tmp_path / "v.csv")) == number
        log.append(ValRow(number, 1.0, 2.718282))


@pytest.mark.parametrize("cut", range(1, 30))
def test_csv_reader_leaves_out_a_torn_last_line(tmp_path: Path, cut: int) -> None:
    log = CsvLog(TrainingRow, tmp_path / TRAINING)
    for row in ROWS[:3]:
        log.append(row)
    whole = (tmp_path / TRAINING).read_bytes()
    last_line = len(whole.splitlines()[-1]) + 1
    (tmp_path / TRAINING).write_bytes(whole[:-cut])
    complete = read_rows(TrainingRow, tmp_path / TRAINING)
    assert [row.step for row in complete] == ([1, 2] if cut <= last_line else [1])


def test_csv_reader_refuses_a_file_of_another_kind(tmp_path: Path) -> None:
    CsvLog(ValRow, tmp_path / "v.csv")
    with pytest.raises(ValueError, match="the header is 'step,loss,ppl'"):
        read_rows(TrainingRow, tmp_path / "v.csv")


def test_csv_log_without_a_path_writes_no_file(tmp_path: Path) -> None:
    log = CsvLog(ValRow, None)
    log.append(VALUES[0])
    assert log.rows == VALUES[:1]
    assert list(tmp_path.iterdir()) == []


def test_metrics_read_back_what_was_written(tmp_path: Path) -> None:
    written = metrics(loss_last=1.5, attention_stats={"entropy_mean": 1.0, "shares": [0.5, 0.5]})
    write_metrics(tmp_path, written)
    assert read_metrics(tmp_path) == written


def test_metrics_stay_json_when_a_loss_is_not_finite(tmp_path: Path) -> None:
    write_metrics(tmp_path, metrics(loss_last=float("nan"), attention_stats={"x": float("inf")}))
    content = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert content["loss_last"] is None
    assert content["attention_stats"] == {"x": None}


def test_metrics_of_another_version_are_refused(tmp_path: Path) -> None:
    write_metrics(tmp_path, metrics(version=99))
    with pytest.raises(ValueError, match="version 99; this program reads version 1"):
        read_metrics(tmp_path)


def test_config_file_gives_the_same_config_again(
    tmp_path: Path, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("train.lr=0.0123", "runtime.gradient_checkpointing=true")
    write_config(tmp_path, config, "configs/x.yaml")
    monkeypatch.setenv("NSA_LR", "0.5")  # took part before, must not do so again
    assert read_config(tmp_path) == config
    assert "configs/x.yaml" in (tmp_path / "config.yaml").read_text().splitlines()[0]


@pytest.mark.parametrize("text", ["", "KING.\nWho's there?\n", "a\r\nb\rc", "\x01 é\ufffd"])
def test_sample_reads_back_as_it_was(tmp_path: Path, text: str) -> None:
    write_sample(tmp_path, text)
    assert read_sample(tmp_path) == text


def test_loss_curve_is_a_picture_with_both_lines(tmp_path: Path) -> None:
    path = draw_loss_curve(tmp_path, ROWS, VALUES, "a run")
    picture = imread(path)
    height, width, _ = picture.shape
    assert width >= 1000 and height >= 500
    for color in ((0x1F, 0x4E, 0x8C), (0xC8, 0x50, 0x1E)):  # training, held-out
        near = abs(picture[..., :3] * 255 - color).max(axis=-1) < 4
        assert near.sum() > 100
    assert list(tmp_path.iterdir()) == [path]


def test_loss_curve_of_one_step_without_evaluation_is_drawn(tmp_path: Path) -> None:
    assert draw_loss_curve(tmp_path, ROWS[:1], [], "a run").stat().st_size > 1000


def test_loss_curve_without_matplotlib_names_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match=r"pip install -c constraints.txt -e '.\[plot\]'"):
        draw_loss_curve(tmp_path, ROWS, VALUES, "a run")


def test_new_folder_is_created_and_has_no_past(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a" / "run")
    assert folder.path.is_dir() and folder.previous is None


def test_files_of_an_earlier_run_move_aside_and_others_stay(tmp_path: Path) -> None:
    ours = ["training.csv", "val.csv", "metrics.json", "config.yaml", "sample.txt", "model.pt"]
    ours += ["loss_curve.png", "checkpoint_step5.pt", "checkpoint_step10.pt"]
    for name in [*ours, "notes.md"]:
        (tmp_path / name).write_text(f"{name} of the first run")
    first = open_folder(tmp_path).previous
    assert first is not None and first.parent == tmp_path / "previous"
    assert sorted(p.name for p in first.iterdir()) == sorted(ours)
    assert (first / "model.pt").read_text() == "model.pt of the first run"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.md", "previous"]

    (tmp_path / "model.pt").write_text("second run")
    second = open_folder(tmp_path).previous
    assert second is not None and second != first
    assert (second / "model.pt").read_text() == "second run"
    assert open_folder(tmp_path).previous is None


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"train.out_dir=.*/file/run: the folder cannot be created"
    ):
        open_folder(tmp_path / "file" / "run")
