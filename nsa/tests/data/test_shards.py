"""Prepared shards: what is written, what is refused, what is found, and how rows come out of it."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa.cli.__main__ import main
from nsa.config import BAD_INPUT, Config, DataConfig
from nsa.config.load import REPOSITORY
from nsa.data import ByteTokenizer, Data, DataError, open_data, prepare
from nsa.data.array_rows import Stream, open_shards
from nsa.data.documents import is_held_out
from nsa.data.encode import AHEAD, map_in_order
from nsa.data.shards import FILE_NAME, Manifest, read_manifest, verify_shards
from nsa.data.tokenizers import EOS_NAME
from nsa.operate.limits import CPU
from nsa.operate.preflight.config_checks import PlannedRun
from nsa.operate.preflight.run_checks import shards
from nsa.operate.report.verdict import FAIL, PASS
from nsa.records import read_metrics
from nsa.tests.data.test_sources import TEXTS, read_side, write_jsonl
from nsa.tests.data.test_tokenizers import train_hf
from nsa.train import LoaderFailed, run
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.runtime import resolve_runtime

SHARD_TOKENS = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Byte shards of the test documents, several on the side of training."""
    make(tmp_path / "shards")
    return tmp_path / "shards"


def make(folder: Path, texts: list[str] = TEXTS, **options: Any) -> Manifest:
    source = write_jsonl(folder.with_name(f"{folder.name}-source") / "a.jsonl", texts)
    options = {"shard_tokens": SHARD_TOKENS} | options
    return prepare.prepare(source, folder, ByteTokenizer(), **options)


def open_folder(folder: Path, seq_len: int = 16, seed: int = 1) -> Data:
    return open_data(DataConfig(dataset="shards", local_path=str(folder)), seq_len, seed)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("where", ["before the first step", "in the background"])
def test_a_byte_that_has_changed_ends_the_run_and_no_later_checkpoint_counts(
    where: str,
    folder: Path,
    tmp_path: Path,
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = tiny_config(
        *("data.dataset=shards", f"data.local_path={folder}", "train.seq_len=16"),
        *("train.steps=6", "train.save_every=2", "train.eval_every=0"),
    )
    run(cfg, config_path="tiny.yaml", out=io.StringIO(), stop_after=2)
    if where == "in the background":
        monkeypatch.setattr("nsa.data.shards.SMALL_BYTES", 0)
    mended = (folder / "train-00001.bin").read_bytes()
    flip(folder / "train-00001.bin")

    with pytest.raises((DataError, LoaderFailed), match=r"train-00001.bin: sha256 is") as found:
        run(cfg, config_path="tiny.yaml", out=io.StringIO())

    place = Path(cfg.train.out_dir)
    assert getattr(found.value, "exit_code", BAD_INPUT) == BAD_INPUT
    assert not list(place.glob("previous/*"))
    if where == "in the background":
        assert read_metrics(place).status == "bad_data"
        saved = re.findall(r"checkpoint_step(\d+)\.pt", str(found.value).partition("stopped")[2])
        assert not saved or f"--resume {place / 'checkpoint_step2.pt'}" in str(found.value)
    else:
        assert read_metrics(place).status == "finished", "the run before it"
        assert checkpoint_file.steps_of(place) == [2]
    (folder / "train-00001.bin").write_bytes(mended)
    out = io.StringIO()
    run(cfg, config_path="tiny.yaml", out=out, resume=str(place / "checkpoint_step2.pt"))
    assert read_metrics(place).status == "finished"
    assert ("match their sha256" in out.getvalue()) == (where == "before the first step")


def test_preflight_reads_every_byte_of_the_shards(
    folder: Path, tmp_path: Path, tiny_config: Callable[..., Config]
) -> None:
    cfg = tiny_config("data.dataset=shards", f"data.local_path={folder}")
    plan = PlannedRun(
        config=cfg,
        config_path="tiny.yaml",
        config_named=True,
        ranks=1,
        runtime=resolve_runtime(cfg.runtime, (8, 8)),
        limits=CPU,
        scratch=tmp_path,
    )
    row = shards(plan)
    assert row is not None and row.verdict == PASS
    flip(folder / "val-00000.bin")
    row = shards(plan)
    assert row is not None and row.verdict == FAIL and "val-00000.bin: sha256" in row.value


def test_shards_hold_what_the_documents_hold(folder: Path) -> None:
    source = folder.with_name("shards-source")
    config = DataConfig(dataset="fineweb_edu_local", local_path=str(source))
    direct, mapped = open_data(config, 16, 1), open_folder(folder)

    for side in ("train", "val"):
        assert read_side(mapped, side) == read_side(direct, side)
    assert torch.equal(direct.train.batch(0, 64), mapped.train.batch(0, 64))
    assert mapped.counts == direct.counts


def test_the_manifest_says_what_the_files_are(folder: Path) -> None:
    content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))

    assert content["schema"] == 1 and content["dtype"] == "uint8"
    assert (content["vocab"], content["eos"]) == (256, 0)
    tokenizer = {"name": "byte", "fingerprint": ByteTokenizer().fingerprint()}
    assert content["tokenizer"] == tokenizer
    assert len([s for s in content["shards"] if s["side"] == "train"]) > 3
    for shard in content["shards"]:
        tokens = (folder / shard["file"]).read_bytes()
        assert len(tokens) == shard["tokens"] and tokens.count(b"\0") == shard["documents"]
        assert tokens.endswith(b"\0")  # a document never crosses into the next shard
        assert hashlib.sha256(tokens).hexdigest() == shard["sha256"]
    names = {shard["file"] for shard in content["shards"]}
    assert {p.name for p in folder.iterdir()} == names | {FILE_NAME}
    assert {"train-00000.bin", "train-00001.bin", "val-00000.bin"} <= names


def test_held_out_documents_are_never_in_training_shards(tmp_path: Path) -> None:
    manifest = make(tmp_path / "a", ["", *TEXTS, "  "])

    held_out = {text.encode() for text in TEXTS if is_held_out(text)}
    train, val = (
        {d for s in manifest.of(side) for d in (tmp_path / "a" / s.file).read_bytes().split(b"\0")}
        for side in ("train", "val")
    )
    assert val - {b""} == held_out and not held_out & train
    assert len(train - {b""}) + len(held_out) == len(set(TEXTS))
    counts = manifest.counts
    assert (counts.documents, counts.empty, counts.held_out) == (len(TEXTS), 2, len(held_out))


def test_the_same_documents_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "again")
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_workers_gives_the_same_bytes(
    folder: Path, tmp_path: Path, workers: int
) -> None:
    make(tmp_path / "again", workers=workers)

    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "again").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_stop_at_the_first_broken_document(tmp_path: Path, workers: int) -> None:
    texts = [*TEXTS[:9], "a\0b", *TEXTS[9:], "c\0d"]
    with pytest.raises(DataError, match="line 10: the text has a NUL"):
        make(tmp_path / "a", texts, workers=workers)
    assert list((tmp_path / "a").iterdir()) == []


def test_workers_finish_out_of_order_and_are_put_in_order() -> None:
    read: list[int] = []
    last_done = threading.Event()

    def things() -> Iterator[int]:
        for number in range(40):
            read.append(number)
            yield number

    def slow_first(number: int) -> int:
        if number == 0:
            assert last_done.wait(10)  # until a later one is done
        elif number == 1:
            last_done.set()
        return number

    results = map_in_order(slow_first, things(), workers=2)
    assert next(results) == 0
    assert len(read) <= 2 * AHEAD
    assert list(results) == list(range(1, 40))


def test_workers_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="workers=0 is below 1"):
        make(tmp_path / "a", workers=0)


def test_larger_vocabularies_take_two_bytes(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = train_hf(tmp_path / "tokenizer.json", [EOS_NAME])
    texts = [f"the cat and the hat: {text}" for text in TEXTS]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    words = ["--tokenizer", str(file), "--shard-tokens", "500"]
    out = tmp_path / "out"

    assert main(["data", "prepare", "--input", str(source), "--output", str(out), *words]) == 0

    config = DataConfig(dataset="shards", local_path=str(out), tokenizer=str(file))
    data = open_data(config, seq_len=32, seed=1)
    stored = np.fromfile(out / "train-00000.bin", dtype="<u2")
    first = data.tokenizer.decode(stored[: int(np.argmax(stored == data.tokenizer.eos))].tolist())
    assert first == next(text for text in texts if not is_held_out(text))
    assert stored.max() > 255  # some ids need the second byte
    assert int(data.train.batch(0, 99).max()) < data.tokenizer.vocab == config.vocab


def test_one_changed_byte_is_found_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_shards(folder) == []
    assert main(["data", "verify", str(folder)]) == 0
    path = folder / "train-00002.bin"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)

    (problem,) = verify_shards(folder)
    assert "train-00002.bin: sha256 is" in problem
    capsys.readouterr()
    assert main(["data", "verify", str(folder)]) == 1
    shown = capsys.readouterr()
    assert "train-00002.bin" in shown.err and "problems: 1" in shown.out


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_refused_with_both_sizes(folder: Path, change: int) -> None:
    path = folder / "train-00001.bin"
    content, size = path.read_bytes(), path.stat().st_size
    path.write_bytes(content[:-1] if change < 0 else content + b"x")

    message = f"train-00001.bin: expected {size} bytes, found {size + change}"
    with pytest.raises(DataError, match=message):
        open_folder(folder)
    assert message in verify_shards(folder)[0]


def test_a_missing_shard_is_refused(folder: Path) -> None:
    (folder / "val-00000.bin").unlink()
    with pytest.raises(DataError, match="val-00000.bin: missing"):
        open_folder(folder)
    assert "val-00000.bin: missing" in verify_shards(folder)[0]


def test_verify_names_everything_that_is_wrong(folder: Path) -> None:
    (folder / "val-00000.bin").unlink()
    (folder / "train-00000.bin").write_bytes(b"")
    assert len(verify_shards(folder)) == 2


KILLED = """
import os, sys
from pathlib import Path
from nsa.data import ByteTokenizer, prepare
prepare.write_manifest = lambda *arguments: os._exit(9)  # nothing is cleaned up
prepare.prepare(Path(sys.argv[1]), Path(sys.argv[2]), ByteTokenizer(), shard_tokens=1000)
"""


def test_a_preparation_killed_before_its_manifest_is_not_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out)]
    assert subprocess.run(command, cwd=REPOSITORY, timeout=120).returncode == 9
    assert (out / "train-00000.bin").is_file()

    with pytest.raises(DataError, match="no manifest.json.*did not finish"):
        open_folder(out)
    assert main(["data", "verify", str(out)]) == 1
    assert "did not finish" in capsys.readouterr().err
    with pytest.raises(DataError, match="is not empty"):
        prepare.prepare(source, out, ByteTokenizer())


@pytest.mark.parametrize("failure", ["bad line", "interrupt", "no manifest"])
def test_a_preparation_that_fails_leaves_no_file(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    options: dict[str, Any] = {"shard_tokens": SHARD_TOKENS}
    if failure == "bad line":
        source.write_bytes(source.read_bytes() + b"{")
    elif failure == "interrupt":
        options["say"] = stop  # after the first shard
    else:
        monkeypatch.setattr(prepare, "write_manifest", stop)

    with pytest.raises((DataError, KeyboardInterrupt)):
        prepare.prepare(source, tmp_path / "out", ByteTokenizer(), **options)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_shard_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    seen = []

    def look(line: str) -> None:
        seen.append(sorted(p.name for p in (tmp_path / "a").iterdir() if p.suffix == ".bin"))

    make(tmp_path / "a", say=look)
    assert seen[0] == ["train-00000.bin"] and [len(names) for names in seen] == list(
        range(1, len(seen) + 1)
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", 2, "its schema is 2"),
        ("dtype", "uint16", "dtype='uint16', vocab=256 has uint8"),
        ("vocab", "256", "vocab='256' is not a whole number"),
        ("eos", 256, "eos=256"),
        ("shards", 5, "TypeError"),
        ("empty", True, "empty=True"),
    ],
)
def test_a_manifest_of_another_form_is_refused(
    folder: Path, key: str, value: object, message: str
) -> None:
    change_manifest(folder, lambda content: content | {key: value})
    with pytest.raises(DataError, match=message):
        open_folder(folder)


@pytest.mark.parametrize("name", ["../train-00000.bin", "/etc/passwd", "val-00000.bin", "x.bin"])
def test_a_manifest_names_only_shards_of_its_folder(folder: Path, name: str) -> None:
    def rename(content: dict[str, Any]) -> dict[str, Any]:
        content["shards"][0]["file"] = name
        return content

    change_manifest(folder, rename)
    with pytest.raises(DataError, match="is not the name of a train shard"):
        open_folder(folder)


def change_manifest(folder: Path, change: Any) -> None:
    path = folder / FILE_NAME
    path.write_text(json.dumps(change(json.loads(path.read_text()))), encoding="utf-8")


def test_a_torn_manifest_is_refused(folder: Path) -> None:
    path = folder / FILE_NAME
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="not a manifest of schema 1"):
        open_folder(folder)


def test_another_tokenizer_than_that_of_the_shards_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = train_hf(tmp_path / "tokenizer.json", [EOS_NAME])
    config = DataConfig(dataset="shards", local_path=str(folder), tokenizer=str(file))
    with pytest.raises(DataError, match="was prepared with the tokenizer byte of 256 ids.*hf"):
        open_data(config, seq_len=16, seed=1)


def test_the_order_of_rows_does_not_depend_on_the_size_of_batches(folder: Path) -> None:
    one, two = open_folder(folder).train, open_folder(folder).train
    whole = one.batch(0, 60)
    for size in (1, 7, 16):
        parts = [two.batch(p, min(size, 60 - p)) for p in range(0, 60, size)]
        assert torch.equal(torch.cat(parts), whole)
    ranks = [torch.cat([two.batch(p, 2) for p in range(2 * r, 60, 4)]) for r in range(2)]
    assert torch.equal(torch.cat([r.view(-1, 2, 17) for r in ranks], 1).view(-1, 17), whole)
    assert not torch.equal(open_folder(folder, seed=2).train.batch(0, 60), whole)


@pytest.mark.parametrize("seq_len", [16, 700, 2500])
def test_rows_cross_from_shard_to_shard(folder: Path, seq_len: int) -> None:
    opened = open_shards(folder, ByteTokenizer())
    whole = b"".join((folder / s.file).read_bytes() for s in opened.manifest.of("train"))
    out = np.empty(seq_len + 1, dtype=np.int64)
    for start in range(0, len(whole) - seq_len, 97):
        opened.train.copy_to(out, start)
        assert bytes(out.astype(np.uint8)) == whole[start : start + seq_len + 1]


def test_a_stream_is_one_however_it_is_cut() -> None:
    tokens = np.arange(100, dtype=np.uint8)
    parts = [tokens[:0], tokens[:30], tokens[30:30], tokens[30:31], tokens[31:], tokens[:0]]
    whole, cut = Stream([tokens]), Stream(parts)
    assert len(cut) == 100 and whole.sha256() == cut.sha256()
    for start in range(90):
        out = np.empty(10, dtype=np.int64)
        cut.copy_to(out, start)
        assert out.tolist() == list(range(start, start + 10))


def test_shards_are_mapped_and_not_writable(folder: Path) -> None:
    for part in open_shards(folder, ByteTokenizer()).train._parts:
        assert isinstance(part.base, np.memmap) and not part.flags.writeable


def test_the_fingerprint_of_rows_is_that_of_the_shards(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "same")
    make(tmp_path / "other", [*TEXTS, "one more"])
    one, same, other = (open_folder(folder.with_name(n)) for n in ("shards", "same", "other"))
    assert one.train.fingerprint() == same.train.fingerprint()
    assert one.train.fingerprint() != other.train.fingerprint()
    assert one.train.fingerprint() != one.val.fingerprint()
    assert one.train.fingerprint() != open_folder(folder, seed=2).train.fingerprint()
    assert one.val.fingerprint() == open_folder(folder, seed=2).val.fingerprint()
    assert one.val.fingerprint() != open_folder(folder, seq_len=8).val.fingerprint()


def test_a_folder_with_files_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match=r"is not empty \(it holds thesis.txt\)"):
        make(tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_show_prints_what_the_folder_holds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", str(folder)]) == 0
    manifest, sha256 = read_manifest(folder)
    shown = capsys.readouterr().out
    tokens = sum(shard.tokens for shard in manifest.of("train"))
    assert f"{tokens:,}" in shown and sha256[:12] in shown and "tokenizer: byte" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "nowhere"], "nowhere: no such file or folder"),
        (["--input", "nowhere", "--shard-tokens", "0"], "shard_tokens=0"),
        (["--input", "nowhere", "--tokenizer", "bytes"], "data.tokenizer='bytes'"),
    ],
)
def test_mistakes_in_a_prepare_command_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", "--output", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["", " \n\t\n"], ids=["no-bytes", "white-space"])
def test_to_prepare_nothing_is_an_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(text)
    (tmp_path / "in" / "b.jsonl").write_text("")
    words = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main(["data", "prepare", *words]) == 2
    error = capsys.readouterr().err
    assert "in has no text (documents: 1, all empty)" in error and error.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())
