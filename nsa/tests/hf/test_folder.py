"""Model folders: whole or not at all, bit-equal, and only from safetensors of the right model."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsa.model import TinyLM
from nsa.model.folder import CONFIG, INDEX, WEIGHTS, BadFolder, load_folder, save_folder
from nsa.tests.conftest import REPOSITORY
from nsa.tests.hf.conftest import KINDS, SIZES


def settings_of(kind: str) -> dict[str, Any]:
    sizes = SIZES | KINDS[kind]
    return {"vocab" if name == "vocab_size" else name: sizes[name] for name in sizes}


def written(folder: Path, kind: str = "nsa", **options: Any) -> TinyLM:
    torch.manual_seed(0)
    model = TinyLM(**settings_of(kind))
    save_folder(model, settings_of(kind), folder, **options)
    return model


def test_every_kind_of_model_comes_back_bit_equal_in_one_file_and_in_shards(tmp_path: Path) -> None:
    for kind in KINDS:
        for shard_bytes in (1 << 30, 5000):
            folder = tmp_path / f"{kind}-{shard_bytes}"
            model = written(folder, kind, shard_bytes=shard_bytes)
            settings, weights = load_folder(folder)
            assert (folder / INDEX).exists() == (shard_bytes == 5000)
            assert weights.keys() == model.state_dict().keys()
            assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())
            TinyLM(**settings).load_state_dict(weights)
            assert settings_of(kind).items() <= settings.items()


def test_only_nsa_hf_imports_transformers() -> None:
    package = REPOSITORY / "nsa"
    others = [
        p for p in package.rglob("*.py") if p.parts[len(package.parts)] not in ("hf", "tests")
    ]
    found = [p for p in others if re.search(r"^\s*(from|import) transformers", p.read_text(), re.M)]
    assert others and found == []


def test_how_a_run_computed_is_not_written(tmp_path: Path) -> None:
    model = TinyLM(**settings_of("nsa"))
    given = settings_of("nsa") | {"backend": "reference", "grad_checkpointing": True}
    save_folder(model, given, tmp_path / "model", extra={"index_loss": 0.5})
    settings, _ = load_folder(tmp_path / "model")
    assert settings["backend"] == "auto" and settings["grad_checkpointing"] is False
    assert json.loads((tmp_path / "model" / CONFIG).read_text())["index_loss"] == 0.5


def test_only_a_new_or_empty_folder_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for name in ("full", "link", "empty"):
        with pytest.raises(ValueError, match="exists; a model is written to a new or an empty"):
            written(tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_nothing_is_left_where_the_writer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nsa.model.folder.save_file", full)
    with pytest.raises(BadFolder, match="model was not written: disk full: need .*make room"):
        written(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# --- bad folders: what was changed, and what is said ---


def _edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | changes
        kept = {name: value for name, value in config.items() if value is not ...}
        (folder / CONFIG).write_text(json.dumps(kept))

    return change


def _weights(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def _linked(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")


def _pipe(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _index(places: Any) -> Callable[[Path], object]:
    return _write(INDEX, json.dumps({"weight_map": places}))


EMBED = "model.embed.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), "config.json cannot be read.*copy the folder"),
    "a pipe": (_pipe, "config.json cannot be read .*not a regular file.*copy the folder"),
    "torn config": (_write(CONFIG, "{"), "is not JSON.*another copy"),
    "a list": (_write(CONFIG, "[]"), "is not a JSON object; use"),
    "a llama": (_edit(model_type="llama"), "type 'llama', not 'nsa'; give a folder .*convert it"),
    "no size": (_edit(dim=...), "has no dim; a model of type nsa needs it: add it"),
    "a text": (_edit(dim="32"), "dim is '32'; it must be of type int: edit it"),
    "a switch": (_edit(n_heads=True), "n_heads is True; it must be of type int: edit it"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no weights; model.safetensors or .*copy"),
    "pickled": (_pickled, r"pickled weights \(pytorch_model.bin\).*save the model again"),
    "linked": (_linked, "model.safetensors is a link; weights are read from regular files.*copy"),
    "torn": (lambda f: os.truncate(f / WEIGHTS, 999), "not a whole safetensors file.*again"),
    "layers": (_edit(n_layers=10**9), "weights of 2 layers, its config says 1000000000.*another"),
    "missing": (_weights(lambda t: t.pop(EMBED)), f"has no tensor {EMBED}; its config.*use"),
    "foreign": (
        _weights(lambda t: t.update({"lm.x": torch.ones(2)})), "has an unknown tensor lm.x.*use"
    ),
    "shape": (_edit(vocab_size=65), r"embed.weight is \[64, 32\] of F32.*floats \[65, 32\]; use"),
    "ids": (
        _weights(lambda t: t.update({EMBED: t[EMBED].int()})), r"embed.weight is .* of I32.*use"
    ),
    "outside": (_index({EMBED: "../x.safetensors"}), "no weight_map of names .*another copy"),
    "no shard": (_index({f"model.blocks.{i}.x": "a.safetensors" for i in (0, 1)}), "has no tensor"),
}  # fmt: skip


def test_bad_folders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    written(tmp_path / "good")
    for name, (spoil, said) in BAD.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        spoil(folder)
        with pytest.raises(BadFolder, match=said):
            load_folder(folder)
    with pytest.raises(BadFolder, match="nowhere is not a folder; give one with config.json"):
        load_folder(tmp_path / "nowhere")
