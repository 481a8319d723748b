"""`nsa checkpoint` and `nsa prove-resume`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa.cli import main
from nsa.config import Config
from nsa.telemetry.config_file import read_config
from nsa.tests.effects import TINY
from nsa.train import checkpoint, run
from nsa.train.checkpoint_commands import expected_bytes
from nsa.train.export import read_safetensors, write_safetensors
from nsa.train.prove import compare_runs, read_proof

BuildConfig = Callable[..., Config]


@pytest.fixture
def folder(tiny_config: BuildConfig) -> Path:
    cfg = tiny_config("train.steps=4", "train.save_every=2")
    return run(cfg, config_path="tiny").folder


def test_verify_tells_good_from_bad(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "2 of 2 match" in capsys.readouterr().out
    with (folder / "checkpoint_step2.pt").open("r+b") as file:
        file.seek(1000)
        file.write(b"\x00\x01\x02\x03")
    assert main(["checkpoint", "verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "BAD" in printed and "checkpoint_step2.pt" in printed and "1 of 2 match" in printed
    assert main(["checkpoint", "verify", str(folder / "checkpoint_step4.pt")]) == 0


def test_show_prints_the_step_the_size_and_the_settings(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "checkpoint_step4.pt: step 4" in printed
    assert "train.seed: 1337" in printed and "loss_last" in printed


def test_a_file_is_little_larger_than_its_tensors(folder: Path) -> None:
    path = folder / "checkpoint_step4.pt"
    content = checkpoint.read(path)
    weights = sum(x.numel() for x in content["state_dict"].values())
    assert expected_bytes(content) >= 12 * weights  # weights and two moments, fp32
    assert expected_bytes(content) < path.stat().st_size < 2 * expected_bytes(content) + 100_000


def test_backup_copies_the_newest_and_verifies_it(folder: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "backup", str(folder), "--to", str(tmp_path / "copies")]) == 0
    assert checkpoint.verify(tmp_path / "copies" / "checkpoint_step4.pt").step == 4


@pytest.mark.parametrize("name", ["model.pt", "checkpoint_step4.pt"])
def test_export_writes_the_weights_as_safetensors(name: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(folder / name), "--to", str(target)]) == 0
    weights = torch.load(folder / name, weights_only=True)["state_dict"]
    tensors, metadata = read_safetensors(target)
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[key], weights[key]) for key in weights)
    assert json.loads(metadata["cfg"])["model"]["dim"] > 0


def test_the_safetensors_package_reads_the_export(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="an optional package")
    tensors = {"b": torch.randn(3, 2).bfloat16(), "a": torch.randn(4), "scalar": torch.tensor(2.0)}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"k": "v"})
    read = package.load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[key], value) for key, value in tensors.items())


def test_a_cut_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": torch.randn(100)}, {})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="was cut"):
        read_safetensors(path)


def test_an_empty_folder_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "holds no checkpoint_step" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_resume_is_proved_and_a_broken_one_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    out = tmp_path / "proof"
    command = ["prove-resume", "--config", str(config), "--out-dir", str(out), "--steps", "4"]
    assert main(command) == 0
    proof = read_proof(out)
    assert proof["holds"] and proof["resumed_at"] == 2
    assert proof["losses"]["whole"] == proof["losses"]["parts"]
    assert "equal bit by bit" in capfd.readouterr().out
    assert all(read_config(out / name).runtime.deterministic for name in ("whole", "parts"))
    model = out / "parts" / "model.pt"
    content = torch.load(model, weights_only=True)
    content["state_dict"]["norm.weight"][0] += 1e-6
    torch.save(content, model)
    assert not compare_runs(out / "whole", out / "parts", 4)["holds"]
    assert main(command) == 2  # never over an older proof
    assert "exists" in capfd.readouterr().err
