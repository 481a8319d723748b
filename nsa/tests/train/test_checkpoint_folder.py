"""Checkpoint folders: what they hold, how they are found, and that a bad one is refused unread."""

from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from nsa.cli.__main__ import main
from nsa.config import Config
from nsa.files import temporary_name
from nsa.operate.run_folder import read_run
from nsa.train import BadCheckpoint, load_model, run
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find, sharded_io
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.checkpoint.writer import Saver, new_saver

BuildConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def content() -> checkpoint_file.Content:
    """Small, with every kind of thing that a real one has."""
    first, second = torch.randn(5, 3), torch.rand(5, 3)
    moments = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}
    return {
        "step": 3,
        "state_dict": {"a.weight": torch.randn(5, 3), "b": torch.randn(7).bfloat16()},
        "cfg": {"train": {"lr": 0.1}},
        "identity": {"train.lr": "0.1"},
        "optimizer": {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "scaler": {},
        "rng": {"cpu": torch.get_rng_state(), "cuda": []},
        "data": {"position": 12, "source": None},
        "tokens_seen": 96,
        "metrics": {"loss_last": 1.5},
    }


def same(a: Any, b: Any) -> bool:
    """Whether two contents are equal, bit by bit and type by type."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_what_is_written_is_read_and_nothing_else_is_left(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    path = sharded_io.write(tmp_path, content)
    assert path == tmp_path / "checkpoint_step3"
    assert same(find.read(path), {"version": 1, **content})
    light = find.peek(path)
    assert light["state_dict"]["a.weight"].is_meta and not light["rng"]["cpu"].is_meta
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_step3"]
    assert sorted(p.name for p in path.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
        "state.pt",
    ]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == 1 and manifest["step"] == 3
    assert manifest["bytes"] == sum(f["bytes"] for f in manifest["files"].values())
    assert str(tmp_path) not in (path / ".metadata").read_bytes().decode("latin-1")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_file_and_its_manifest_stay_in_a_folder_that_is_moved_meanwhile(
    tmp_path: Path, content: checkpoint_file.Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    write_text = checkpoint_file.write_text  # type: ignore[attr-defined]

    def move_first(path: Path, text: str) -> None:
        folder.rename(moved)
        folder.mkdir()  # of another run
        write_text(path, text)

    monkeypatch.setattr(checkpoint_file, "write_text", move_first)
    name = checkpoint_file.write(folder, content).name
    assert os.listdir(folder) == []
    checkpoint_file.verify(moved / name)
    assert same(checkpoint_file.read(moved / name), checkpoint_file.read(moved / name) | content)


def test_a_second_write_replaces_the_first(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    sharded_io.write(tmp_path, content)
    sharded_io.write(tmp_path, content | {"tokens_seen": 7})
    assert find.read(tmp_path / "checkpoint_step3")["tokens_seen"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_step3"]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, content: checkpoint_file.Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded_io.write(tmp_path, content)

    def full(path: Path) -> checkpoint_folder.FilePrint:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "print_of", full)
    said: list[str] = []
    saver = Saver(tmp_path, keep=0, backup=None, say=said.append)
    monkeypatch.setattr(saver._ranks, "write_checkpoint", sharded_io.write)
    saver.save(content | {"step": 5})
    assert not saver.wait()
    assert "checkpoint_step5" in said[0] and "No space left on device" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_step3"]


def test_the_newest_of_both_forms_is_found_and_the_oldest_go(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    for step, write in (
        (2, checkpoint_file.write),
        (4, sharded_io.write),
        (6, checkpoint_file.write),
    ):
        write(tmp_path, content | {"step": step})
    sharded_io.write(tmp_path, content | {"step": 8})
    with (tmp_path / "checkpoint_step8" / "__0_0.distcp").open("ab") as file:
        file.write(b"!")
    names = [p.name for p in find.paths_of(tmp_path)]
    assert names == [
        "checkpoint_step8",
        "checkpoint_step6.pt",
        "checkpoint_step4",
        "checkpoint_step2.pt",
    ]
    assert read_run(tmp_path).checkpoints[-2].step == 6
    # Step 8 does not match its manifest: it neither counts nor goes.
    removed = [p.name for p in find.remove_old(tmp_path, 1)]
    assert removed == ["checkpoint_step4", "checkpoint_step2.pt"]
    assert not (tmp_path / "checkpoint_step2.json").exists()


def test_a_new_form_replaces_the_other_of_the_same_step(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    sharded_io.write(tmp_path, content)
    saver = Saver(tmp_path, keep=5, backup=tmp_path / "copies", say=pytest.fail)
    saver.save(content)
    assert saver.wait()
    assert [p.name for p in find.paths_of(tmp_path)] == ["checkpoint_step3.pt"]
    assert find.verify(tmp_path / "copies" / "checkpoint_step3.pt").step == 3


def test_a_backup_of_a_folder_is_a_verified_copy(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    path = sharded_io.write(tmp_path, content)
    copy = find.back_up(path, tmp_path / "copies")
    assert same(find.read(copy), find.read(path))


def test_a_run_converted_to_parts_and_back_goes_on_bit_for_bit(
    tiny_config: BuildConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tiny_config("train.steps=4", "train.save_every=2"), config_path="tiny").folder
    file = folder / "checkpoint_step2.pt"
    there, back = tmp_path / "there" / "checkpoint_step2", tmp_path / "back" / file.name
    for source, target in ((file, there), (there, back)):
        assert main(["checkpoint", "convert", str(source), str(target)]) == 0
        assert main(["checkpoint", "verify", str(target)]) == 0
        assert main(["checkpoint", "show", str(target)]) == 0
    assert same(checkpoint_file.read(back), checkpoint_file.read(file))
    assert "step 2" in capsys.readouterr().out
    expected, _ = load_model(folder / "model.pt")
    rest = tmp_path / "rest"
    overrides = ("train.steps=4", "train.save_every=2", f"train.out_dir={rest}")
    run(tiny_config(*overrides), config_path="tiny", resume=str(there))
    found, _ = load_model(rest / "model.pt")
    assert same(dict(found.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize(
    ("target", "message"),
    [("checkpoint_step4.pt", "checkpoint_step3 or checkpoint_step3.pt"), ("", "exists")],
    ids=["another step", "what is there"],
)
def test_a_wrong_target_is_refused(
    target: str,
    message: str,
    tmp_path: Path,
    content: checkpoint_file.Content,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = checkpoint_file.write(tmp_path, content)
    assert main(["checkpoint", "convert", str(path), str(tmp_path / (target or path.name))]) == 2
    assert message in capsys.readouterr().err


def cut(path: Path) -> None:
    part = path / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])


def flip(path: Path) -> None:
    part = path / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def lose(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def unfinished(path: Path) -> None:
    (path / "manifest.json").unlink()


def rename(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"step": 4}))


def outside(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../secret"] = manifest["files"]["state.pt"]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "was truncated or replaced"),
        (flip, "bytes have changed"),
        (lose, "is missing"),
        (unfinished, "it is unfinished"),
        (rename, "for step 4"),
        (outside, "not written by this program"),
    ],
)
def test_a_damaged_folder_is_refused_and_passed_over(
    damage: Callable[[Path], None], message: str, tmp_path: Path, content: checkpoint_file.Content
) -> None:
    path = sharded_io.write(tmp_path, content)
    damage(path)
    with pytest.raises(BadCheckpoint, match=message):
        find.read(path)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1


class Gadget:
    """Makes a pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def replace_list(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Change the list of parts, as somebody would who also makes the manifest fit."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (path / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    refit(path)


def refit(path: Path) -> None:
    """Make the manifest say what `.metadata` is now."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = checkpoint_folder.print_of(path / ".metadata")._asdict()
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_list_that_would_run_something_is_not_read(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    path = sharded_io.write(tmp_path, content)
    replace_list(path, lambda _: Gadget(f"touch {tmp_path / 'ran'}"))
    with pytest.raises(BadCheckpoint, match="contains (posix|nt).system"):
        find.read(path)
    assert not (tmp_path / "ran").exists()


def elsewhere(metadata: Metadata) -> Metadata:
    next(iter(metadata.storage_data.values())).relative_path = "../checkpoint_step1.pt"
    return metadata


def beyond(metadata: Metadata) -> Metadata:
    next(iter(metadata.storage_data.values())).length = 1 << 40
    return metadata


def uncovered(metadata: Metadata) -> Metadata:
    metadata.state_dict_metadata["state_dict.a.weight"].chunks.clear()  # type: ignore[union-attr]
    return metadata


def larger(metadata: Metadata) -> Metadata:
    entry: Any = metadata.state_dict_metadata["state_dict.b"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40])
    return metadata


def renamed(metadata: Metadata) -> Metadata:
    listed = metadata.state_dict_metadata
    listed["state_dict.c"] = listed.pop("state_dict.b")
    return metadata


class Nothing:
    """Of no use in a list of parts."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (elsewhere, "in no file of the manifest"),
        (beyond, "in no file of the manifest"),
        (uncovered, "do not cover"),
        (larger, "more than its files have"),
        (renamed, r"has state_dict.b as \[7\], .metadata as no tensor"),
        (lambda metadata: {"a": 1}, "not an index of shards"),
        (lambda metadata: Nothing(), "contains .*Nothing"),
    ],
    ids=["elsewhere", "beyond", "uncovered", "larger", "renamed", "no list", "another class"],
)
def test_a_list_that_does_not_fit_is_refused(
    change: Callable[[Metadata], Any],
    message: str,
    tmp_path: Path,
    content: checkpoint_file.Content,
) -> None:
    path = sharded_io.write(tmp_path, content)
    replace_list(path, change)
    with pytest.raises(BadCheckpoint, match=message):
        find.read(path)


def test_a_list_that_is_no_pickle_is_refused(
    tmp_path: Path, content: checkpoint_file.Content
) -> None:
    path = sharded_io.write(tmp_path, content)
    replace_list(path, lambda metadata: metadata)
    for junk in (b"", b"not a pickle", (path / ".metadata").read_bytes()[:-40]):
        (path / ".metadata").write_bytes(junk)
        refit(path)
        with pytest.raises(BadCheckpoint, match="not an index of shards"):
            find.read(path)


def test_torch_reads_the_parts_by_itself(tmp_path: Path, content: checkpoint_file.Content) -> None:
    """The folder is DCP's own format: no tool of ours is needed to get the weights out."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = sharded_io.write(tmp_path, content)
    dcp_to_torch_save(path, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(loaded["state_dict.a.weight"], content["state_dict"]["a.weight"])


KILLED = """
import os, signal, sys
from pathlib import Path
from nsa.files import temporary_name
folder = Path(sys.argv[1])
for name in ("checkpoint_step5.pt", "metrics.json", "notes.txt"):
    temporary_name(folder / name).write_bytes(bytes(1000))
parts = temporary_name(folder / "checkpoint_step6")
parts.mkdir()
(parts / "__0_0.distcp").write_bytes(bytes(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_processes_left_unfinished_goes_when_the_next_run_begins(
    tmp_path: Path, tiny_config: BuildConfig
) -> None:
    """Of this host by the process that is gone; else only what nobody but a run writes there."""
    place, backup = tmp_path / "run", tmp_path / "backup"
    for folder in (place, backup):
        folder.mkdir()
        subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert len(list(place.iterdir())) == 4
    gone = [
        ".model.pt.77-5@elsewhere.tmp",
        ".checkpoint_step7.pt.77.tmp",  # from before names said whose they are
        ".checkpoint_step7.json.77-5@elsewhere.tmp",
        f".model.pt.{os.getpid()}-1@{platform.node()}.tmp",  # this pid, another process
    ]
    kept = [
        ".metrics.json.77-5@elsewhere.tmp",
        ".somebody.tmp",
        "notes.tmp",
        temporary_name(place / "model.pt").name,  # of a process that is alive: this one
    ]
    for name in (*gone, *kept):
        (place / name).write_bytes(bytes(100))
    (backup / gone[0]).touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    for link in (".checkpoint_step8.tmp", ".model.pt.88-5@elsewhere.tmp"):
        (place / link).symlink_to(outside)
        kept.append(link)

    said: list[str] = []
    train = tiny_config(f"train.backup_dir={backup}").train
    new_saver(place, train, said.append)

    assert sorted(p.name for p in place.iterdir()) == sorted(kept)
    assert [p.name for p in backup.iterdir()] == [gone[0]], "another host may be copying there"
    assert (outside / "file").exists()
    assert len(said) == 2
    assert "[boot] removed 8 unfinished files of processes that were killed (0.0 MB): ." in said[0]
