"""`nsa eval` as a user meets it: on model files and folders, with tasks, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.cli.__main__ import main
from nsa.config import load_config
from nsa.data.tokenizers import EOS_NAME, HFTokenizer
from nsa.evaluate.results import read_evaluation
from nsa.model import TinyLM
from nsa.model.folder import load_folder, save_folder
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.tests.evaluate.test_evaluate import SIZES
from nsa.train import save_model

PNG = b"\x89PNG"
SMALL = ("--lengths", "64,128", "--tokens", "512", "--depths", "3", "--trials", "1", "--bins", "4")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte model whose training rows were 256 tokens."""
    folder = tmp_path_factory.mktemp("run")
    config = load_config(
        REPOSITORY / "configs" / "base.yaml",
        [*TINY, "train.seq_len=256", f"train.out_dir={folder}"],
        environ={},
    )
    torch.manual_seed(0)
    return save_model(folder / "model.pt", TinyLM.from_config(config, vocab=256), config)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer of its own: bytes, and EOS."""
    hf = pytest.importorskip("tokenizers")
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=257, special_tokens=[EOS_NAME], show_progress=False,
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(["a"], trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_NAME}
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    sizes = SIZES | {"vocab": 257}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf") / "model"
    return save_folder(TinyLM(**sizes), sizes, folder, files=files, extra={"eos_token_id": 0})


def test_a_model_file_gets_its_numbers_and_pictures(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["eval", str(model_file), "--out", str(tmp_path), *SMALL]) == 0

    found, said = read_evaluation(tmp_path), capsys.readouterr().out
    assert found.perplexity is not None and found.needle is not None and not found.tasks
    assert found.perplexity["lengths"] == found.needle["lengths"] == [64, 128]
    assert found.needle["depths"] == [0.0, 0.5, 1.0]
    assert found.needle["asked"] == [[1, 1, 1], [1, 1, 1]]
    assert len(found.perplexity["loss_at"]) == 4 and found.perplexity["rows"] == 4
    assert 3 < found.perplexity["loss"] < 8 and len(found.weights or "") == 64
    for picture in ("needle.png", "perplexity.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
        assert f"wrote {tmp_path / picture}" in said
    assert "perplexity " in said and "  128 tokens: " in said


def test_lengths_come_from_training_rows_and_text_from_the_caller(
    model_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    options = ["--text", str(text), "--depths", "2", "--trials", "1"]
    for name, more in (("both", []), ("one", ["--no-needle"])):
        out = ["--out", str(tmp_path / name)]
        assert main(["eval", str(model_file.parent), *options, *more, *out]) == 0

    both, one = read_evaluation(tmp_path / "both"), read_evaluation(tmp_path / "one")
    assert both.perplexity is not None and both.perplexity["lengths"] == [64, 128, 256]
    assert both.needle is not None and both.needle["lengths"] == [128, 256], "64 has no room"
    assert both.settings["text"] == str(text) and one.perplexity == both.perplexity
    assert one.needle is None and not (tmp_path / "one" / "needle.png").exists()


def test_a_model_folder_is_asked_either_way(model_folder: Path, tmp_path: Path) -> None:
    grids = []
    for way in ("forward", "decode"):
        options = ["--way", way, "--no-perplexity", "--out", str(tmp_path / way), *SMALL]
        assert main(["eval", str(model_folder), *options]) == 0
        found = read_evaluation(tmp_path / way)
        assert found.needle is not None and found.perplexity is None
        grids.append((found.needle["right"], found.needle["asked"], found.weights))
    assert grids[0] == grids[1]


ROWS = [{"text": f"{a} then {b}", "good": a, "bad": b} for a, b in ("ab", "xy", "ez", "st", "qk")]


def write_task(folder: Path) -> Path:
    """A task with two choices of a letter, whose examples are a local file."""
    folder.mkdir()
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "letters.yaml").write_text(
        f"""task: nsa_letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{[good, bad]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""
    )
    return folder


def direct_accuracy(folder: Path) -> float:
    """How often the good letter is more likely than the bad one, by all logits."""
    settings, weights = load_folder(folder)
    model = TinyLM(**settings).eval()
    model.load_state_dict(weights)
    tokenizer = HFTokenizer(folder / "tokenizer.json")

    def likelihood(text: str, more: str) -> float:
        ids = torch.tensor([[*tokenizer.encode(text), *tokenizer.encode(more)]]).long()
        with torch.no_grad():
            logs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        return logs[-len(tokenizer.encode(more)) :].sum().item()

    right = [
        likelihood(row["text"], row["good"]) > likelihood(row["text"], row["bad"]) for row in ROWS
    ]
    return sum(right) / len(right)


def test_a_local_task_of_lm_eval_gives_what_a_direct_computation_gives(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = write_task(tmp_path / "tasks")
    options = ["--tasks", "nsa_letters", "--tasks-dir", str(tasks), "--device", "cpu"]
    skipped = ["--no-perplexity", "--no-needle", "--out", str(tmp_path / "out")]
    assert main(["eval", str(model_folder), *options, *skipped]) == 0

    found = read_evaluation(tmp_path / "out")
    expected = direct_accuracy(model_folder)
    assert found.tasks["nsa_letters"]["acc,none"] == pytest.approx(expected) and 0 < expected < 1
    assert found.perplexity is None and found.needle is None and "tasks" in found.seconds


REFUSED: dict[str, tuple[Callable[[Path, Path], list[Any]], str]] = {
    "no model": (lambda file, folder: ["gone.pt"], "gone.pt.*does not exist; use"),
    "nothing to do": (
        lambda file, folder: [file, "--no-perplexity", "--no-needle"],
        "nothing is left to measure; drop",
    ),
    "tasks of a file": (
        lambda file, folder: [file, "--tasks", "x"],
        "has no config.json; lm-eval reads a model folder: write",
    ),
    "a folder of tasks alone": (
        lambda file, folder: [folder, "--tasks-dir", folder],
        "--tasks-dir without --tasks names no task; add",
    ),
    "no folder of tasks": (
        lambda file, folder: [folder, "--tasks", "x", "--tasks-dir", "gone"],
        "--tasks-dir gone is not a folder; name",
    ),
    "text that is too short": (
        lambda file, folder: [file, "--lengths", "9999999"],
        "has no row of 9999999 tokens.*; use shorter",
    ),
    "no room for a needle": (
        lambda file, folder: [file, "--no-perplexity", "--lengths", "20"],
        "21 tokens have no room for 1 needles.*; give",
    ),
    "another tokenizer": (
        lambda file, folder: [file, "--tokenizer", folder / "tokenizer.json"],
        "the tokenizer \\(hf\\) has 257 ids and the model 256; .*: name",
    ),
    "a folder without a tokenizer": (
        lambda file, folder: [file.parent / "bare"],
        "the tokenizer \\(byte\\) has 256 ids and the model 300; .*: name",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_in_a_line(
    what: str,
    model_file: Path,
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = model_file.parent / "bare"
    if not bare.exists():
        sizes = SIZES | {"vocab": 300}
        save_folder(TinyLM(**sizes), sizes, bare)
    arguments, message = REFUSED[what]
    given = [str(word) for word in arguments(model_file, model_folder)]
    assert main(["eval", *given, "--out", str(tmp_path / "out")]) == 2

    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "out" / "eval.json").exists()
