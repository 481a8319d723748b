"""run.info and phase.json: what was written is read back, and what is damaged is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nsa.records.env import altered_files
from nsa.records.launch import (
    PhaseVerdict,
    RunInfo,
    read_run_info,
    read_verdict,
    write_run_info,
    write_verdict,
)


def sample() -> RunInfo:
    return RunInfo(
        profile="prime",
        run_dir="artifacts/train_runs/m7c_20260101-000000",
        out_dir="artifacts/m7c_125m",
        config="configs/m7c_125m_80g.yaml",
        gpus="2 (max_mem=81153MB) NVIDIA A100-SXM4-80GB",
        ranks=2,
        dataset="fineweb_edu",
        hostname="gpu-host",
        commit="",
        altered=["M configs/base.yaml", "?? notes: mine.txt"],
        changed=["train.lr: 0.1 -> 0.2"],
        environment=["NCCL_DEBUG=WARN"],
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    info = sample()
    info.note("phase smoke: GO")
    assert read_run_info(write_run_info(tmp_path / "run.info", info)) == info
    info.done("all phases\nare done", 0)
    write_run_info(tmp_path / "run.info", info)
    assert read_run_info(tmp_path) == info  # a folder will do
    text = (tmp_path / "run.info").read_text(encoding="utf-8")
    assert "\ngpus: 2 (max_mem=81153MB) NVIDIA" in text and "\nexit_code: 0\n" in text
    assert text.splitlines()[-1].startswith("[done] 2") and "all phases are done" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 2", "has version 2; this program reads version 1"),
        ("version: 1\n", "", "has version None"),
        ("ranks: 2", "ranks: two", "ranks: 'two' is not a whole number"),
        ("profile: prime\n", "", "has no line 'profile'"),
        ("profile:", "prof:", "is not a line of a run.info"),
        ("profile: prime", "half a li", "is not a line of a run.info"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_run_info(tmp_path / "run.info", sample())
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_run_info(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_verdict_is_read_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    verdict = PhaseVerdict(phase="1", judged="phase1", go=True, time="x", launched={"steps": "8"})
    path = write_verdict(tmp_path, verdict)
    assert read_verdict(tmp_path) == verdict
    for text in ("", "[]", "{}", '{"version": 1}', path.read_text().replace("1", "2", 1)):
        path.write_text(text, encoding="utf-8")
        assert read_verdict(tmp_path) is None
    path.unlink()
    assert read_verdict(tmp_path) is None


def test_altered_files_are_those_that_differ_from_the_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    assert altered_files(tmp_path) == []
    git("init", "-q")
    for name in ("kept.yaml", "changed.yaml"):
        (tmp_path / name).write_text("a: 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    assert altered_files(tmp_path) == []
    (tmp_path / "changed.yaml").write_text("a: 2\n")
    (tmp_path / "new.yaml").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "new.py").write_text("")
    assert altered_files(tmp_path) == ["M changed.yaml", "?? folder/new.py", "?? new.yaml"]
