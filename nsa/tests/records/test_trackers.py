"""Trackers get the curves of a run, and can neither end nor delay it.

The package here is a small one on disk with the interface of the real ones; it runs in a process of
its own, as they do.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.config import Config, ConfigError, to_container
from nsa.records import TrainingRow, read_metrics, read_rows, sinks
from nsa.records.sinks import Tracked, Tracker, open_tracker, read_tracked, require_tracker
from nsa.tests.support.fake_tracker import install, read_calls
from nsa.train import run

BuildConfig = Callable[..., Config]
SLEEP = "time.sleep(600)"


def train(cfg: Config) -> str:
    out = io.StringIO()
    run(cfg, config_path="x.yaml", out=out)
    return out.getvalue()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_run_and_its_curves(
    name: str, tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install(name, tmp_path, monkeypatch)
    cfg = tiny_config(f"train.tracker={name}")

    printed = train(cfg)

    folder = Path(cfg.train.out_dir)
    tracked = read_tracked(folder)
    assert tracked is not None and tracked.tracker == name
    assert f"{name} tracks this run as {tracked.id}" in printed
    (first, opened), *points, last = read_calls(calls)
    assert (first, last) == ("init", ("finish", {}))
    assert opened["project"] == "nsa" and opened["config"] == to_container(cfg)
    assert opened["resume"] == "allow"
    if name == "wandb":
        assert (opened["id"], opened["dir"]) == (tracked.id, str(folder))
        assert opened["settings"] == {"console": "off", "silent": True}
    else:
        assert opened["name"] == tracked.id
    rows = read_rows(TrainingRow, folder / "training.csv")
    losses = [
        (p["step"], p["values"]["train/loss"]) for _, p in points if "train/lr" in p["values"]
    ]
    assert losses == [(row.step, pytest.approx(row.loss, abs=1e-6)) for row in rows]
    assert points[-1][1]["values"].keys() == {"val/loss", "val/ppl"}
    assert "layer_entropy_mean/01" in points[0][1]["values"]


def test_a_resumed_run_goes_on_under_its_id_and_a_new_one_does_not(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install("wandb", tmp_path, monkeypatch)
    cfg = tiny_config("train.tracker=wandb")
    folder = Path(cfg.train.out_dir)
    folder.mkdir()

    for resumed in (False, True, False):
        open_tracker(cfg, folder, resumed=resumed, say=print).close()

    first, second, third = (values["id"] for name, values in read_calls(calls) if name == "init")
    assert first == second != third


def test_a_broken_tracker_file_costs_the_id_and_not_the_run(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("wandb", tmp_path, monkeypatch)
    cfg, said = tiny_config("train.tracker=wandb"), list[str]()
    folder = Path(cfg.train.out_dir)
    folder.mkdir()
    for text in ("{", "[]", '{"version": 9}'):
        (folder / sinks.TRACKER).write_text(text)
        open_tracker(cfg, folder, resumed=True, say=said.append).close()

        assert "uses a new run id" in said[-2]
        assert read_tracked(folder) is not None


def test_a_missing_package_is_an_error_before_the_training(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cfg = tiny_config("train.tracker=wandb")

    with pytest.raises(ConfigError, match=r"pip install -c constraints.txt -e '.\[wandb\]'"):
        train(cfg)

    assert not Path(cfg.train.out_dir).exists()
    require_tracker("none")


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_tracker_that_raises_is_dropped_with_one_line(
    where: str, tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("trackio", tmp_path, monkeypatch, **{where: "raise RuntimeError('no such server')"})
    cfg = tiny_config("train.tracker=trackio")

    printed = train(cfg)

    (line,) = (line for line in printed.splitlines() if "stopped receiving this run" in line)
    assert "no such server" in line and "tracker.log" in line
    assert read_metrics(Path(cfg.train.out_dir)).status == "finished"


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_tracker_that_blocks_is_ended_with_one_line(
    where: str, tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("trackio", tmp_path, monkeypatch, **{where: SLEEP})
    said: list[str] = []
    cfg = tiny_config("train.tracker=trackio")
    Path(cfg.train.out_dir).mkdir()
    blocked = open_tracker(cfg, Path(cfg.train.out_dir), resumed=False, say=said.append)
    monkeypatch.setattr(sinks, "MOST_WAITING", 1 << 20)
    point = {f"layer_{i}": 0.123456789 for i in range(1000)}

    start = time.monotonic()
    for step in range(100):
        blocked.add(step, point)
    blocked.close(timeout_s=60)

    assert time.monotonic() - start < 10
    (line,) = said[1:]
    assert "trackio stopped receiving this run: 1 MiB are queued for it" in line


def test_the_end_of_a_run_waits_for_a_tracker_only_so_long(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("trackio", tmp_path, monkeypatch, log=SLEEP)
    said: list[str] = []
    cfg = tiny_config("train.tracker=trackio")
    Path(cfg.train.out_dir).mkdir()
    blocked = open_tracker(cfg, Path(cfg.train.out_dir), resumed=False, say=said.append)
    blocked.add(1, {"train/loss": 1.0})

    blocked.close(timeout_s=0.5)

    assert "it did not finish within 0 s" in said[1] or "within 1 s" in said[1]
    assert len(said) == 2


def test_no_tracker_starts_no_process_and_writes_nothing(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", pytest.fail)
    with open_tracker(tiny_config(), tmp_path, resumed=False, say=pytest.fail) as nobody:
        nobody.add(1, {"train/loss": 1.0})
    Tracker().close()

    assert list(tmp_path.iterdir()) == []


def test_tracker_file_reads_back_and_another_version_is_refused(tmp_path: Path) -> None:
    assert read_tracked(tmp_path) is None
    path = sinks.write_tracked(tmp_path, Tracked("wandb", "run-1"))
    assert read_tracked(tmp_path) == ("wandb", "run-1")
    path.write_text('{"version": 2}')
    with pytest.raises(ValueError, match="has version 2; this program reads version 1"):
        read_tracked(tmp_path)
