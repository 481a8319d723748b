"""Tokenizers: what they promise alike, GPT-2's files, tokenizer.json files, and what is missing."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsa.config import Config, ConfigError, DataConfig
from nsa.data import ByteTokenizer, DataError, Tokenizer, open_tokenizer, tokenizers
from nsa.data.tokenizers import EOS_NAME, NUM_MERGES, byte_letters, id_type
from nsa.model.cost import parameter_counts

TEXTS = ["", "a", "Füße & ☕\n\tand  more ", f"before {EOS_NAME} after", "</s> [SEP] <eos>"]


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of GPT-2's size and form, whose merges are the first 50000 pairs of bytes."""
    pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("gpt2")
    write_gpt2(folder, "vocab.json", "merges.txt")
    return folder


def write_gpt2(folder: Path, vocab_name: str, merges_name: str) -> None:
    letters = list(byte_letters())
    pairs = [(a, b) for a in letters for b in letters][:NUM_MERGES]
    names = [*letters, *(a + b for a, b in pairs), EOS_NAME]
    vocab = {name: rank for rank, name in enumerate(names)}
    merges = ["#version: 0.2", *(f"{a} {b}" for a, b in pairs), ""]
    (folder / vocab_name).write_text(json.dumps(vocab), encoding="utf-8")
    (folder / merges_name).write_text("\n".join(merges), encoding="utf-8")


@pytest.fixture(scope="module")
def hf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 ids, with all that must not touch our rows switched on."""
    pytest.importorskip("tokenizers")
    return train_hf(tmp_path_factory.mktemp("hf") / "tokenizer.json", [EOS_NAME, "</s>"])


def train_hf(path: Path, specials: list[str]) -> Path:
    import tokenizers as hf

    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat and the bat"] * 50, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    if specials:
        tokenizer.post_processor = hf.processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)]
        )
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["byte", "gpt2", "hf"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "gpt2":
        folder = request.getfixturevalue("gpt2_folder")
        return open_tokenizer(DataConfig(tokenizer="gpt2", tokenizer_path=str(folder)))
    if request.param == "hf":
        return open_tokenizer(DataConfig(tokenizer=str(request.getfixturevalue("hf_file"))))
    return ByteTokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_and_never_holds_the_end_mark(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.eos not in ids
    assert ids.dtype == id_type(tokenizer.vocab)
    assert 0 <= tokenizer.eos < tokenizer.vocab
    assert all(i < tokenizer.vocab for i in ids)


def test_fingerprints_tell_tokenizers_apart(gpt2_folder: Path, hf_file: Path) -> None:
    configs = [
        DataConfig(),
        DataConfig(tokenizer="gpt2", tokenizer_path=str(gpt2_folder)),
        DataConfig(tokenizer=str(hf_file)),
        DataConfig(tokenizer=str(hf_file), eos="</s>"),
    ]
    prints = [open_tokenizer(config).fingerprint() for config in configs]

    assert len(set(prints)) == len(prints)
    assert all(len(p) == 64 for p in prints)
    assert [open_tokenizer(config).fingerprint() for config in configs] == prints


@pytest.mark.parametrize(
    ("vocab", "name"),
    [(256, "uint8"), (257, "uint16"), (50257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_ids_take_the_smallest_type_that_holds_them(vocab: int, name: str) -> None:
    assert id_type(vocab) == np.dtype(name).newbyteorder("<")


def test_gpt2_has_its_size_under_both_pairs_of_names(gpt2_folder: Path, tmp_path: Path) -> None:
    write_gpt2(tmp_path, "encoder.json", "vocab.bpe")
    one, two = (tokenizers.GPT2Tokenizer(folder) for folder in (gpt2_folder, tmp_path))

    assert (one.vocab, one.eos) == (50257, 50256)
    assert one.encode("the cat").tolist() == two.encode("the cat").tolist()
    assert len(one.encode("thecat")) == 3  # pairs of bytes merge
    assert one.fingerprint() == two.fingerprint()
    assert one.decode([one.eos]) == EOS_NAME


def _drop_vocab(folder: Path) -> None:
    (folder / "vocab.json").unlink()


def _swap_merges(folder: Path) -> None:
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    lines[1], lines[2] = lines[2], lines[1]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


def _lose_a_merge(folder: Path) -> None:
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    (folder / "merges.txt").write_text("\n".join(lines[:-2]), encoding="utf-8")


def _tear_vocab(folder: Path) -> None:
    (folder / "vocab.json").write_text('{"a": 1', encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_vocab, "not a folder with vocab.json and merges.txt or encoder.json and vocab.bpe"),
        (_swap_merges, "do not agree on"),
        (_lose_a_merge, "49999 merges, GPT-2 has 50000"),
        (_tear_vocab, "cannot be read as JSON"),
    ],
)
def test_files_that_are_not_gpt2s_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    write_gpt2(tmp_path, "vocab.json", "merges.txt")
    damage(tmp_path)

    with pytest.raises(DataError, match=message):
        open_tokenizer(DataConfig(tokenizer="gpt2", tokenizer_path=str(tmp_path)))


def test_gpt2_without_a_folder_is_asked_of_tiktoken(
    gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source does not matter to the fingerprint: shards of one fit a run with the other."""
    tiktoken = pytest.importorskip("tiktoken")
    local = tokenizers.GPT2Tokenizer(gpt2_folder)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": local._encoding}[name])

    cached = open_tokenizer(DataConfig(tokenizer="gpt2"))

    assert cached.fingerprint() == local.fingerprint()


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("wrong hash")])
def test_gpt2_that_cannot_be_had_says_what_was_looked_for_and_what_to_do(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiktoken = pytest.importorskip("tiktoken")

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR.*set data.tokenizer_path to a folder"):
        open_tokenizer(DataConfig(tokenizer="gpt2"))


def test_a_download_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken, never = pytest.importorskip("tiktoken"), threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: never.wait(30))
    monkeypatch.setattr(tokenizers, "DOWNLOAD_LIMIT_S", 0.05)

    with pytest.raises(DataError, match="TimeoutError"):
        open_tokenizer(DataConfig(tokenizer="gpt2"))
    never.set()


def test_a_tokenizer_file_neither_cuts_pads_nor_adds(hf_file: Path) -> None:
    tokenizer = open_tokenizer(DataConfig(tokenizer="hf", tokenizer_path=str(hf_file.parent)))

    ids = tokenizer.encode("the cat " * 100)

    assert len(ids) > 64  # truncation was set to 4, padding to 64
    assert tokenizer.eos not in ids  # the template puts it in front
    assert tokenizer.name == "hf"


def test_the_end_mark_of_a_file_is_found_by_its_usual_name_or_chosen(
    hf_file: Path, tmp_path: Path
) -> None:
    nameless = train_hf(tmp_path / "tokenizer.json", ["<fin>"])

    assert open_tokenizer(DataConfig(tokenizer=str(hf_file))).eos == 0
    assert open_tokenizer(DataConfig(tokenizer=str(hf_file), eos="</s>")).eos == 1
    with pytest.raises(DataError, match="set data.eos to one it has"):
        open_tokenizer(DataConfig(tokenizer=str(nameless)))
    assert open_tokenizer(DataConfig(tokenizer=str(nameless), eos="<fin>")).eos == 0
    with pytest.raises(DataError, match="no token '<nope>'"):
        open_tokenizer(DataConfig(tokenizer=str(nameless), eos="<nope>"))


def test_a_text_that_makes_the_end_mark_itself_is_refused(hf_file: Path) -> None:
    """An ordinary piece as end mark: the only case that cannot be kept apart."""
    tokenizer = open_tokenizer(DataConfig(tokenizer=str(hf_file), eos="a"))

    with pytest.raises(DataError, match="the text contains the EOS token 'a'"):
        tokenizer.encode("a")


def test_the_vocabulary_of_a_file_is_known_before_the_data_is_opened(hf_file: Path) -> None:
    data = DataConfig(tokenizer=str(hf_file))
    config, bytes_only = Config(data=data), Config()

    assert data.vocab == open_tokenizer(data).vocab
    per_id = parameter_counts(bytes_only)["embedding"] // 256
    assert parameter_counts(config)["embedding"] == data.vocab * per_id


@pytest.mark.parametrize(
    ("content", "vocab"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),  # ids with gaps
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 4, "content": "</s>"}]}, 5),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}}, 3),  # Unigram
    ],
)
def test_every_kind_of_vocabulary_is_counted(content: Any, vocab: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert DataConfig(tokenizer="hf", tokenizer_path=str(tmp_path)).vocab == vocab


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    config = DataConfig(tokenizer=str(tmp_path / "x.json"))

    with pytest.raises(ConfigError, match=r"x.json: not a Hugging Face tokenizer.json"):
        _ = config.vocab
    with pytest.raises(ConfigError, match="x.json"):
        open_tokenizer(config)


def test_a_model_that_the_package_cannot_load_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_text('{"model": {"type": "Odd", "vocab": {"a": 0}}}')
    with pytest.raises(DataError, match="not a tokenizer that this version can load"):
        open_tokenizer(DataConfig(tokenizer=str(tmp_path / "x.json")))


@pytest.mark.parametrize("package", ["tiktoken", "tokenizers"])
def test_a_missing_package_is_asked_for_by_its_install_line(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    config = DataConfig(tokenizer="gpt2" if package == "tiktoken" else "some.json")
    with pytest.raises(DataError, match=rf"needs the package {package}.*-c constraints.txt"):
        open_tokenizer(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer": "hf"}, "data.tokenizer_path=''.*a tokenizer.json for data.tokenizer=hf"),
        ({"tokenizer": "a.json", "tokenizer_path": "b"}, "data.tokenizer_path='b'"),
        ({"tokenizer": "gpt2", "eos": "x"}, "data.eos='x'"),
        ({"tokenizer": "gpt-2"}, "byte | gpt2 | hf | the path of a tokenizer.json.*'gpt2'"),
    ],
)
def test_settings_that_contradict_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**keys)
