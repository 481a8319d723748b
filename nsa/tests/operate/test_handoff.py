"""nsa handoff: the whole checklist, no secret, a run that is only read, archives verified."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.cli.__main__ import main
from nsa.config import Config
from nsa.operate.handoff.command import examine, hand_over
from nsa.operate.handoff.contents import (
    ITEMS,
    Manifest,
    altered_files,
    manifest_bytes,
    read_manifest,
)
from nsa.operate.handoff.redact import LONGEST_LINE, hide, hide_lines, lines_of, secrets_in
from nsa.operate.run_files import find_run_info
from nsa.records import read_metrics, write_metrics
from nsa.tests.support.recording import dead_pid
from nsa.train import run as train

SECRETS = {
    "env.json": [
        ('"HF_TOKEN": "{}",', "hf_Zq81kLmNoPqRsTuVwXyZ"),
        ('"WANDB_API_KEY": "{}",', "0f1e2d3c4b5a69788796"),
        ('"argv": ["x", "--hub-token", "{}"],', "tok-77-plain-secret"),
    ],
    "train.log": [
        ("downloading https://{}@mirror.example.org/data", "joe:p4ssw0rd-of-joe"),
        ("Authorization: Bearer {}", "abcDEF123456ghi"),
        ("got eyJ and then {}", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSM"),
        ("key id {}", "AKIAIOSFODNN7EXAMPLE"),
        ("POST https://hooks.slack.com/services/{}", "T000/B000/XXXX1234"),
        ("the token again, without a name: {}", "tok-77-plain-secret"),
        ("s3://bucket/x?X-Amz-Signature={}&y=1", "deadbeef00112233"),
    ],
    "config.yaml": [
        ("# hub_password: '{}'", "two words 9 and more"),
        ("# apikey={}", "k3y-in-yaml"),
    ],
    "run.info": [
        ("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", "MIIEow1BAAK")
    ],
}
"""By file: lines with something that must not leave the machine."""


@pytest.fixture
def run_folder(tiny_config: Callable[..., Config], tmp_path: Path) -> Path:
    """A real run of three steps with checkpoints, its launch record, and a report."""
    cfg = tiny_config("train.save_every=1", f"train.out_dir={tmp_path / 'artifacts' / 'm7c_125m'}")
    folder = train(cfg, config_path="tiny.yaml", out=io.StringIO()).folder
    launch = folder.parent / "train_runs" / "m7c_20260102-030405"
    launch.mkdir(parents=True)
    lines = ["run_dir: artifacts/train_runs/m7c_20260102-030405", f"out_dir: {folder}"]
    lines += ["gpus: 2 (max_mem=81920MB)", "altered: configs/base.yaml"]
    (launch / "run.info").write_text("\n".join(lines) + "\n")
    (launch / "train.log").write_text("step 0001 | loss 5.5\nstep 0002 | loss 5.4\n")
    (folder / "report.md").write_text("| loss falls | PASS |\n")
    return folder


def plant(run_folder: Path) -> list[str]:
    """Put every kind of secret into the files of a run; return them."""
    launch = run_folder.parent / "train_runs" / "m7c_20260102-030405"
    for name, planted in SECRETS.items():
        path = (launch if name in ("train.log", "run.info") else run_folder) / name
        path.write_text(path.read_text() + "".join(line.format(s) + "\n" for line, s in planted))
    return [secret for planted in SECRETS.values() for _, secret in planted]


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]


def state(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file below a folder: its time and its bytes."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_archive_has_exactly_the_checklist(run_folder: Path, tmp_path: Path) -> None:
    before = state(run_folder.parent)
    manifest = hand_over(run_folder, tmp_path / "h.tar.gz")
    found = members(tmp_path / "h.tar.gz")

    assert [*found] == [
        "handoff/manifest.json",
        *("handoff/run.info", "handoff/train.log", "handoff/training.csv"),
        *("handoff/checkpoint_step3.json", "handoff/checkpoint_step3.pt", "handoff/env.json"),
        *("handoff/report.md", "handoff/altered/configs/base.yaml", "handoff/config.yaml"),
    ]
    assert {entry.item for entry in manifest.files} == {*ITEMS} and not manifest.missing
    assert found["handoff/training.csv"] == (run_folder / "training.csv").read_bytes()
    content = torch.load(io.BytesIO(found["handoff/checkpoint_step3.pt"]), weights_only=True)
    assert content["step"] == 3
    assert (manifest.status, manifest.step, manifest.run) == ("finished", 3, "m7c_125m")
    assert read_manifest(found["handoff/manifest.json"]) == manifest
    assert state(run_folder.parent) == before


def test_a_run_whose_process_is_gone_is_handed_over_as_died(
    run_folder: Path, tmp_path: Path
) -> None:
    write_metrics(run_folder, dataclasses.replace(read_metrics(run_folder), status="running"))
    beats = run_folder / "heartbeat_rank0.jsonl"
    beats.write_text(beats.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    (run_folder / "span_rank0.json").unlink(missing_ok=True)

    assert hand_over(run_folder, tmp_path / "h.tar.gz").status == "died"


def test_the_same_run_gives_the_same_archive(run_folder: Path, tmp_path: Path) -> None:
    plant(run_folder)
    hand_over(run_folder, tmp_path / "a.tar.gz")
    os.utime(run_folder / "training.csv", (1, 1))
    hand_over(run_folder, tmp_path / "b.tar.gz")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_no_planted_secret_leaves(run_folder: Path, tmp_path: Path) -> None:
    secrets = plant(run_folder)
    manifest = hand_over(run_folder, tmp_path / "h.tar.gz")
    everything = b"\n".join(members(tmp_path / "h.tar.gz").values())

    assert [secret for secret in secrets if secret.encode() in everything] == []
    assert sum(entry.redacted for entry in manifest.files) >= len(secrets)
    assert b"tokenizer: byte" in everything and b"mirror.example.org" in everything
    assert examine(tmp_path / "h.tar.gz")[1] == []


def test_verify_finds_the_secret_that_somebody_put_back(run_folder: Path, tmp_path: Path) -> None:
    hand_over(run_folder, tmp_path / "h.tar.gz")
    files = members(tmp_path / "h.tar.gz")
    files["handoff/train.log"] += b"HF_TOKEN=hf_Zq81kLmNoPqRsTuVwXyZ\n"
    assert problems_of(tmp_path / "x.tar.gz", rehashed(files)) == [
        "train.log, line 3: looks like a secret"
    ]


def test_a_checkpoint_with_a_secret_stays_here(run_folder: Path, tmp_path: Path) -> None:
    from nsa.train.checkpoint import file as checkpoint_file

    content = checkpoint_file.read(run_folder / "checkpoint_step3.pt")
    content["cfg"]["data"]["local_path"] = "https://joe:pa55word@example.org/x"
    checkpoint_file.write(run_folder, {k: v for k, v in content.items() if k != "version"})
    manifest = hand_over(run_folder, tmp_path / "h.tar.gz")
    assert [e.path for e in manifest.files if e.item == "checkpoint"][1] == "checkpoint_step2.pt"
    (lost,) = manifest.missing
    assert "checkpoint_step3.pt contains what looks like a secret" in lost.reason
    assert "pa55word" not in lost.reason


def test_a_damaged_checkpoint_is_passed_over_and_named(run_folder: Path, tmp_path: Path) -> None:
    path = run_folder / "checkpoint_step3.pt"
    path.write_bytes(path.read_bytes()[:-1])
    manifest = hand_over(run_folder, tmp_path / "h.tar.gz")
    assert "handoff/checkpoint_step2.pt" in members(tmp_path / "h.tar.gz")
    assert [lost.item for lost in manifest.missing] == ["checkpoint"]
    assert "was truncated or replaced" in manifest.missing[0].reason


def test_what_is_missing_is_named_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "h.tar.gz"
    assert main(["handoff", str(tmp_path / "empty"), "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert all(f"{item:13} MISSING" in printed for item in ITEMS)
    assert [*members(out)] == ["handoff/manifest.json"]
    assert main(["handoff", "--verify", str(out)]) == 0
    assert "missing when it was written: run_info" in capsys.readouterr().out


def test_a_checkpoint_in_parts_is_handed_over_whole(run_folder: Path, tmp_path: Path) -> None:
    """A folder as a run in parts writes it, here by hand: manifest.json has the other files."""
    folder = run_folder / "checkpoint_step9"
    folder.mkdir()
    files = {"__0_0.distcp": b"hf_tensors00000000000000001", ".metadata": b"\x80parts"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.save({"cfg": {}}, folder / "state.pt")
    prints: dict[str, dict[str, Any]] = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.iterdir()
    }
    total = sum(entry["bytes"] for entry in prints.values())
    manifest = {"version": 1, "step": 9, "bytes": total, "files": prints}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    hand_over(run_folder, tmp_path / "h.tar.gz")
    names = [name for name in members(tmp_path / "h.tar.gz") if "checkpoint" in name]
    assert names == [
        f"handoff/checkpoint_step9/{name}"
        for name in (".metadata", "__0_0.distcp", "manifest.json", "state.pt")
    ]
    assert examine(tmp_path / "h.tar.gz")[1] == []


def test_the_report_may_lie_elsewhere(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "report.md").rename(tmp_path / "report.md")
    manifest = hand_over(run_folder, tmp_path / "a.tar.gz")
    assert [lost.item for lost in manifest.missing] == ["success"]
    assert not hand_over(run_folder, tmp_path / "b.tar.gz", report=tmp_path).missing


def test_links_and_pipes_are_not_followed(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("not for you\n")
    for name in ("training.csv", "env.json"):
        (run_folder / name).unlink()
    (run_folder / "training.csv").symlink_to(tmp_path / "private")
    os.mkfifo(run_folder / "env.json")
    manifest = hand_over(run_folder, tmp_path / "h.tar.gz")
    assert [lost.item for lost in manifest.missing] == ["training_csv", "machine"]
    assert b"not for you" not in b"".join(members(tmp_path / "h.tar.gz").values())


def test_the_launch_record_of_another_run_is_not_taken(run_folder: Path) -> None:
    records = run_folder.parent / "train_runs"
    for name, line in (("m7c_20270101-000000", "out_dir: artifacts/other"), ("m7c_x", "")):
        (records / name).mkdir()
        (records / name / "run.info").write_text(line + "\n")
    assert find_run_info(run_folder) == records / "m7c_20260102-030405" / "run.info"
    (records / "m7c_20260102-030405" / "run.info").write_text("out_dir: artifacts/m7c_125m\n")
    assert find_run_info(run_folder) == records / "m7c_20260102-030405" / "run.info"
    (records / "m7c_20260102-030405" / "run.info").write_text("out_dir: m7c_1\n")
    assert find_run_info(run_folder) is None


def test_altered_files_outside_of_the_repository_stay_here(
    run_folder: Path, tmp_path: Path
) -> None:
    (info,) = run_folder.parent.glob("train_runs/*/run.info")
    info.write_text(f"out_dir: {run_folder}\naltered: ../../etc/passwd\naltered: gone.py\n")
    manifest = hand_over(run_folder, tmp_path / "h.tar.gz")
    assert [lost.item for lost in manifest.missing] == ["altered", "altered"]
    lines = "altered: M nsa/a.py\naltered: ?? b c.py\naltered: plain.py\nunaltered: x\n"
    assert altered_files(lines) == ["b c.py", "nsa/a.py", "plain.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "use either a run folder or --verify FILE"),
        (["{run}", "--verify", "x"], "use either a run folder or --verify FILE"),
        (["{tmp}/none"], "is not a folder"),
        (["{run}", "--out", "{run}/h.tar.gz"], "is inside the run folder"),
        (["{run}", "--out", "{run}/training.csv"], "exists; name another file"),
        (["--verify", "{tmp}/none.tar.gz"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "training.csv").write_text("")
    arguments = [text.format(run=run, tmp=tmp_path) for text in arguments]
    assert main(["handoff", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(run) == ["training.csv"]


# Archives that are not as they should be


def write_archive(path: Path, files: dict[str, bytes], *links: tarfile.TarInfo) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for link in links:
            archive.addfile(link)


def rehashed(files: dict[str, bytes]) -> dict[str, bytes]:
    """With a manifest that fits the files."""
    found = json.loads(files["handoff/manifest.json"])
    for entry in found["files"]:
        content = files[f"handoff/{entry['path']}"]
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**files, "handoff/manifest.json": json.dumps(found).encode()}


def problems_of(path: Path, files: dict[str, bytes], *links: tarfile.TarInfo) -> list[str]:
    write_archive(path, files, *links)
    assert main(["handoff", "--verify", str(path)]) == 1
    return examine(path)[1]


def link_to(target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    link = tarfile.TarInfo("handoff/link")
    link.type, link.linkname = kind, target
    return link


def test_verify_finds_every_change(run_folder: Path, tmp_path: Path) -> None:
    hand_over(run_folder, tmp_path / "h.tar.gz")
    good, bad = members(tmp_path / "h.tar.gz"), tmp_path / "bad.tar.gz"
    assert main(["handoff", "--verify", str(tmp_path / "h.tar.gz")]) == 0

    log = "handoff/train.log"
    assert "train.log: its sha256 differs" in problems_of(bad, good | {log: b"x" * 42})[0]
    assert "train.log: 1 bytes" in problems_of(bad, good | {log: b"x"})[0]
    without = {name: content for name, content in good.items() if name != log}
    assert problems_of(bad, without) == ["train.log: in the manifest, not in the archive"]
    assert "not in the manifest" in problems_of(bad, good | {"handoff/more": b""})[0]
    for name in ("handoff/../x", "/etc/x", "handoff//x"):
        assert "a path outside the archive" in problems_of(bad, good | {name: b""})[0]
    for link in (link_to("/etc/passwd"), link_to("train.log", tarfile.LNKTYPE)):
        assert "is a link" in problems_of(bad, good, link)[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "its first file is not handoff/manifest.json"),
        ({"x": b"1"}, "its first file is not handoff/manifest.json"),
        ({"handoff/manifest.json": b"[]"}, "is not a manifest"),
        ({"handoff/manifest.json": b"{"}, "Expecting"),
        ({"handoff/manifest.json": b"[" * 100_000}, "is not a manifest"),
        ({"handoff/manifest.json": b'{"schema": "nsa-handoff", "version": 2}'}, "version 2"),
        ({"handoff/manifest.json": b" " * (1 << 20) + b"{}"}, "1048576 are allowed"),
    ],
    ids=["empty", "foreign", "list", "torn", "deep", "newer", "huge"],
)
def test_an_archive_of_something_else_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, bytes], message: str
) -> None:
    write_archive(tmp_path / "x.tar.gz", files)
    assert main(["handoff", "--verify", str(tmp_path / "x.tar.gz")]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", gzip.compress(b"no tar")[:-4]],
    ids=["empty", "text", "cut short"],
)
def test_a_file_that_is_no_archive_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    assert main(["handoff", "--verify", str(tmp_path / "x.tar.gz")]) == 1
    assert "BAD" in capsys.readouterr().out


def test_a_manifest_with_a_path_that_leads_out_is_refused() -> None:
    entry = {"item": "altered", "path": "../x", "source": "", "bytes": 0, "sha256": ""}
    found = json.loads(manifest_bytes(Manifest(run="r"))) | {"files": [entry]}
    with pytest.raises(ValueError, match="not a plain relative path"):
        read_manifest(json.dumps(found).encode())


# Secrets


@pytest.mark.parametrize(
    "line",
    [
        *("tokenizer: byte", "tokens_per_step: 4096", "TOKENIZERS_PARALLELISM=false", "monkey: 3"),
        *("git_commit: 840303b8eaea7221e93fab53d52ba352ba68817a", "key: loss", "keep_last: 3"),
        "step 0020 | loss 5.1234 | lr 2.00e-04 | toks/s 98765",
        "reading https://example.org/a@b",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert hide(line) == (line, 0)


def test_a_flag_of_a_secret_hides_the_next_line_of_a_list() -> None:
    lines = ['  "--api-key",\n', '  "s3cr3t-value",\n', '  "--steps"\n']
    assert "".join(text for text, _ in hide_lines(lines)) == (
        '  "--api-key",\n  "***",\n  "--steps"\n'
    )


def test_a_line_without_end_is_left_out_whole() -> None:
    file = io.BytesIO(b"a\n" + b"x" * (3 * LONGEST_LINE) + b"\nb\xff\n")
    first, second, third = lines_of(file)
    assert (first, third) == ("a\n", "b\udcff\n") and "was dropped" in second


def test_hiding_takes_linear_time() -> None:
    start = time.perf_counter()
    for text in ("a", "a:/", "--key", "key=", "-", " "):
        hide(text * (LONGEST_LINE // len(text)))
    assert time.perf_counter() - start < 60  # 3 s; were it quadratic, hours


def test_only_long_values_with_a_digit_are_looked_for_elsewhere() -> None:
    assert secrets_in(["token: synthetic", "token: 5", "token: abcd1234"]) == {"abcd1234"}
