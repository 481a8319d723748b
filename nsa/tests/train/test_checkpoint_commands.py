"""`nsa checkpoint` and `nsa prove-resume`."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nsa.cli.__main__ import main
from nsa.config import load_config
from nsa.records.metrics import read_config
from nsa.tests.conftest import REPOSITORY
from nsa.tests.conftest import TINY as SETTINGS
from nsa.tests.support.effects import TINY
from nsa.tests.support.nursery import Nursery
from nsa.train import prove_resume, run
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint.model_file import export_safetensors
from nsa.train.checkpoint.writer import num_tensor_bytes
from nsa.train.prove_resume import compare_runs, read_proof

TRAP = "ran_a_program"


class Trap:
    """Unpickled without care, it makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (TRAP,)


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    place = tmp_path_factory.mktemp("trained") / "run"
    overrides = (*SETTINGS, "train.steps=4", "train.save_every=2", f"train.out_dir={place}")
    cfg = load_config(REPOSITORY / "configs" / "base.yaml", overrides, environ={})
    return run(cfg, config_path="tiny", out=io.StringIO()).folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


def _torchscript(content: checkpoint_file.Content, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its deprecation
        torch.jit.save(torch.jit.script(Scripted()), path)


def _half(content: checkpoint_file.Content, path: Path) -> None:
    torch.save(content, path)
    os.truncate(path, 5000)


BAD: dict[str, Callable[[checkpoint_file.Content, Path], object]] = {
    "a program": lambda content, path: torch.save(content | {"metrics": Trap()}, path),
    "a program, old format": lambda content, path: torch.save(
        content | {"metrics": Trap()}, path, _use_new_zipfile_serialization=False
    ),
    "a bare pickle": lambda content, path: path.write_bytes(pickle.dumps(Trap())),
    "TorchScript": _torchscript,
    "text": lambda content, path: path.write_text("not a checkpoint\n" * 10),
    "no bytes": lambda content, path: path.write_bytes(b""),
    "half of it": _half,
    "a list": lambda content, path: torch.save([1, 2], path),
    "weights that are text": lambda content, path: torch.save(
        content | {"state_dict": {"embed.weight": "x"}}, path
    ),
    "no step": lambda content, path: torch.save(content | {"step": "four"}, path),
    "settings that are text": lambda content, path: torch.save(content | {"identity": "x"}, path),
}
"""Files with the name, and the manifest, of a checkpoint."""


def write_manifest(path: Path) -> None:
    size, digest = path.stat().st_size, checkpoint_file.file_sha256(path)
    manifest = checkpoint_file.Manifest(path.name, 4, size, digest)
    content = {"version": checkpoint_file.VERSION, **manifest._asdict()}
    checkpoint_file.manifest_path(path).write_text(json.dumps(content))


def test_bad_files_end_in_a_sentence_and_run_nothing(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path, run_config = folder / "checkpoint_step4.pt", tmp_path / "tiny.yaml"
    shutil.copy(folder / "config.yaml", run_config)
    content = checkpoint_file.read(path)
    to = ["--to", str(tmp_path / "out.safetensors")]
    steps = ["train.steps=6", f"train.out_dir={tmp_path / 'other'}"]
    for kind, write in BAD.items():
        write(content, path)
        write_manifest(path)
        commands = [["checkpoint", "show", str(path)], ["checkpoint", "export", str(path), *to]]
        if kind in ("a program", "text", "no step"):  # all read by the same function
            commands += [
                ["checkpoint", "convert", str(path), str(tmp_path / path.stem)],
                ["train", "--config", str(run_config), *steps, "--resume", str(path)],
                ["generate", "A", "--model", str(path)],
            ]
        for command in commands:
            code = main(command)
            told = capsys.readouterr().err
            assert code == 2, f"{kind}: {command}"
            assert told.count("\n") == 1 and str(path) in told, f"{kind}: {command}: {told}"
            assert "weights_only" not in told and "Weights only" not in told, told
    torch.save({"state_dict": {}, "cfg": Trap()}, tmp_path / "model.pt")
    assert main(["checkpoint", "export", str(tmp_path / "model.pt"), *to]) == 2
    assert "contains posix.mkdir" in capsys.readouterr().err
    assert not (tmp_path / TRAP).exists() and not (tmp_path / "out.safetensors").exists()


def test_a_checkpoint_whose_tensors_do_not_fit_its_settings_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "checkpoint_step2.pt"
    content = checkpoint_file.read(path)
    shutil.copy(folder / "config.yaml", tmp_path / "tiny.yaml")
    for key, value in (
        ("state_dict", {"embed.weight": torch.zeros(3)}),
        ("optimizer", {"state": {0: "x"}}),
        ("rng", {"cpu": torch.zeros(3)}),
        ("data", {}),
    ):
        torch.save(content | {key: value}, path)
        write_manifest(path)
        manifest = checkpoint_file.manifest_path(path)
        manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 2'))
        words = ["train", "--config", str(tmp_path / "tiny.yaml")]
        words += [f"train.out_dir={tmp_path / key}", "--resume", str(path)]
        assert main(words) == 2, key
        assert "does not fit the run that it names" in capsys.readouterr().err


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
    content = checkpoint_file.read(path)
    weights = sum(x.numel() for x in content["state_dict"].values())
    assert num_tensor_bytes(content) >= 12 * weights  # weights and two moments, fp32
    assert num_tensor_bytes(content) < path.stat().st_size < 2 * num_tensor_bytes(content) + 100_000


def test_backup_copies_the_newest_and_verifies_it(folder: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "backup", str(folder), "--to", str(tmp_path / "copies")]) == 0
    assert checkpoint_file.verify(tmp_path / "copies" / "checkpoint_step4.pt").step == 4


@pytest.mark.parametrize("name", ["model.pt", "checkpoint_step4.pt"])
def test_export_writes_the_weights_as_safetensors(name: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(folder / name), "--to", str(target)]) == 0
    weights = torch.load(folder / name, weights_only=True)["state_dict"]
    tensors = load_file(target)
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[key], weights[key]) for key in weights)
    with safe_open(target, "pt") as file:
        assert json.loads(file.metadata()["cfg"])["model"]["dim"] > 0


def test_tied_and_small_tensors_are_exported(tmp_path: Path) -> None:
    shared = torch.randn(3, 2).bfloat16()
    tensors = {"b": shared, "a": shared.T, "tied": shared, "scalar": torch.tensor(2.0)}
    read = load_file(export_safetensors(tmp_path / "x.safetensors", tensors, {"k": "v"}))
    assert all(torch.equal(read[key], value) for key, value in tensors.items())


def test_an_empty_folder_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "has no checkpoint_step" in capsys.readouterr().err


def test_resume_is_proved_and_a_broken_one_is_not(nursery: Nursery, tmp_path: Path) -> None:
    def call() -> subprocess.CompletedProcess[str]:
        words = [str(nursery.python), "-m", "nsa.cli", *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    out = tmp_path / "proof"
    command = ["prove-resume", "--config", str(config), "--out-dir", str(out), "--steps", "4"]
    done = call()
    assert done.returncode == 0, done.stderr
    proof = read_proof(out)
    assert proof["holds"] and proof["resumed_at"] == 2
    assert proof["losses"]["whole"] == proof["losses"]["parts"]
    assert "bitwise equal" in done.stdout
    assert all(read_config(out / name).runtime.deterministic for name in ("whole", "parts"))
    model = out / "parts" / "model.pt"
    content = torch.load(model, weights_only=True)
    content["state_dict"]["norm.weight"][0] += 1e-6
    torch.save(content, model)
    assert not compare_runs(out / "whole", out / "parts", 4)["holds"]
    again = call()
    assert again.returncode == 2 and "exists" in again.stderr, "never over an older proof"


def test_each_part_of_a_proof_is_a_new_interpreter_and_its_failure_is_one(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nursery forks in the proof above: here is what a spawned process would be given."""
    cfg, codes = read_config(trained), iter([0, 3])

    class Spawned:
        def __init__(self, target: Any, args: Any) -> None:
            assert pickle.loads(pickle.dumps((target, args))) == (
                prove_resume._train,
                (cfg, "tiny", 2),
            )
            self.exitcode = next(codes)

        def start(self) -> None: ...

        def join(self) -> None: ...

    contexts = {"spawn": SimpleNamespace(Process=Spawned)}
    monkeypatch.setattr("nsa.train.prove_resume.multiprocessing.get_context", contexts.__getitem__)
    prove_resume._in_a_process(cfg, "tiny", 2)
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        prove_resume._in_a_process(cfg, "tiny", 2)
