"""A packed corpus comes back as it was, or not at all."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from nsa.tests.support.corpora import served, sha256, tiny_sources
from studies.corpus import __main__ as command
from studies.corpus import pack as packing
from studies.corpus.build import build
from studies.corpus.pack import FILE_NAME, pack, read_pack_manifest, unpack
from studies.corpus.sources import LIST
from studies.corpus.text import CorpusError

WHOLE = {"LICENCES.md", "corpus.json", "gpt2/encoder.json", "gpt2/vocab.bpe", "prose.jsonl"}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The corpus of the tiny packages, with parts so small that there are many."""
    monkeypatch.setattr(packing, "PROSE_BYTES", 3000)
    monkeypatch.setattr(packing, "CODE_BYTES", 4000)
    build(tiny_sources(tmp_path), tmp_path / "corpus", tmp_path / "cache", download=served)
    return tmp_path / "corpus"


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Change fields of the first file in pack.json."""
    path = folder / FILE_NAME
    content = json.loads(path.read_text())
    content["files"][0] |= changes
    path.write_text(json.dumps(content))


def test_pack_restores_every_file(corpus: Path, tmp_path: Path) -> None:
    packed = pack(corpus, tmp_path / "pack", jobs=2)
    unpack(tmp_path / "pack", tmp_path / "out", jobs=3)

    for name in WHOLE:
        assert (tmp_path / "out" / name).read_bytes() == (corpus / name).read_bytes()
    lines = [p.joinpath("code.jsonl").read_bytes().splitlines() for p in (corpus, tmp_path / "out")]
    assert sorted(lines[0]) == sorted(lines[1])
    targets = [entry.target for entry in packed]
    assert targets.count("prose.jsonl") > 2 and targets.count("code.jsonl") > 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "LICENCES.md", "corpus.json", "gpt2", "prose.jsonl", "code.jsonl",
    }  # fmt: skip


def test_same_corpus_gives_the_same_pack(corpus: Path, tmp_path: Path) -> None:
    pack(corpus, tmp_path / "a", jobs=1)
    pack(corpus, tmp_path / "b", jobs=4)

    contents = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "ab"]
    assert contents[0] == contents[1]


def test_code_fills_what_the_limit_leaves(corpus: Path, tmp_path: Path) -> None:
    everything = pack(corpus, tmp_path / "all")
    sizes = [(tmp_path / "all" / entry.file).stat().st_size for entry in everything]
    room = sum(sizes[:-2]) + packing.MANIFEST_BYTES + 1  # two parts of code do not fit

    some = pack(corpus, tmp_path / "some", max_mb=room / packing.MIB)
    assert some == everything[:-2] and some[-1].target == "code.jsonl"
    total = sum(path.stat().st_size for path in (tmp_path / "some").iterdir())
    assert total <= room
    unpack(tmp_path / "some", tmp_path / "out")
    lines = (tmp_path / "out" / "code.jsonl").read_bytes().splitlines()
    assert 0 < len(lines) < 19
    assert set(lines) < set((corpus / "code.jsonl").read_bytes().splitlines())


def test_limit_below_the_prose_is_refused_and_leaves_no_pack(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"--pack-mb 0.07 is too little: .* exceed it by"):
        pack(corpus, tmp_path / "pack", max_mb=0.07)
    with pytest.raises(CorpusError, match="not the list of a complete pack"):
        unpack(tmp_path / "pack", tmp_path / "out")


def test_pack_goes_into_an_empty_folder(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is not empty"):
        pack(corpus, corpus)


def test_corpus_that_was_changed_is_not_packed(corpus: Path, tmp_path: Path) -> None:
    with (corpus / "prose.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(CorpusError, match=r"prose.jsonl is not that of corpus.json"):
        pack(corpus, tmp_path / "pack")


def test_changed_file_is_refused_and_nothing_is_restored(corpus: Path, tmp_path: Path) -> None:
    packed = pack(corpus, tmp_path / "pack")
    path = tmp_path / "pack" / packed[-1].file
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    with pytest.raises(CorpusError, match=r"code-.* was changed or cut"):
        unpack(tmp_path / "pack", tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_missing_file_is_refused(corpus: Path, tmp_path: Path) -> None:
    packed = pack(corpus, tmp_path / "pack")
    (tmp_path / "pack" / packed[0].file).unlink()
    with pytest.raises(CorpusError, match=f"{packed[0].file}: No such file"):
        unpack(tmp_path / "pack", tmp_path / "out")


def test_content_that_is_longer_than_it_says_is_refused(corpus: Path, tmp_path: Path) -> None:
    packed = pack(corpus, tmp_path / "pack")
    bomb = lzma.compress(b"\0" * 10_000_000)
    (tmp_path / "pack" / packed[0].file).write_bytes(bomb)
    edit_manifest(tmp_path / "pack", sha256=sha256(bomb))
    with pytest.raises(CorpusError, match="its content is not what pack.json says"):
        unpack(tmp_path / "pack", tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "../evil"},
        {"target": "/etc/evil"},
        {"target": "a/b/c"},
        {"file": "../x.xz"},
        {"sha256": "0"},
        {"bytes": -1},
        {"bytes": True},
        {"other": 1},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_manifest_that_leads_elsewhere_is_refused(
    corpus: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    pack(corpus, tmp_path / "pack")
    edit_manifest(tmp_path / "pack", **changes)
    with pytest.raises(CorpusError, match="not the list of a complete pack of schema 1"):
        unpack(tmp_path / "pack", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_page_in_the_docs_names_every_field(corpus: Path, tmp_path: Path) -> None:
    pack(corpus, tmp_path / "pack")
    page = (LIST.parents[2] / "docs/schemas/corpus_pack_json.md").read_text(encoding="utf-8")
    content = json.loads((tmp_path / "pack" / FILE_NAME).read_text())
    for name in {*content, *content["files"][0]}:
        assert f"`{name}`" in page, name
    assert len(read_pack_manifest(tmp_path / "pack")) == len(content["files"])


def test_commands_pack_and_unpack(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["pack", str(corpus), "--pack", str(tmp_path / "pack")]) == 0
    assert command.main(["unpack", str(tmp_path / "pack"), "--out", str(tmp_path / "out")]) == 0
    assert "prose.jsonl: " in capsys.readouterr().out
    assert (tmp_path / "out" / "prose.jsonl").read_bytes() == (corpus / "prose.jsonl").read_bytes()
