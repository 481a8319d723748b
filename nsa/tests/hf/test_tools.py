"""An exported model in other people's tools: AutoTokenizer, transformers serve, lm-eval."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.cli.__main__ import main
from nsa.config import Config, DataConfig, load_config
from nsa.data import ByteTokenizer, open_tokenizer
from nsa.data.tokenizer_files import TOKENIZER, tokenizer_files
from nsa.data.tokenizers import EOS_NAME, NUM_MERGES, Tokenizer, byte_letters
from nsa.generate import Sampling, generate
from nsa.model import TinyLM
from nsa.model.folder import load_folder
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.tests.data.test_tokenizers import train_hf
from nsa.train.checkpoint.model_file import load_model, save_model

transformers = pytest.importorskip("transformers", reason="the extra hf installs it")
pytest.importorskip("nsa.hf")
TEXTS = ["", "a", "Füße & ☕\n\tand  more ", "</s> [SEP] Ā the cat"]
START_LIMIT_S = 120


def config(*settings: str) -> Config:
    return load_config(REPOSITORY / "configs" / "base.yaml", [*TINY, *settings], environ={})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model.pt, of random weights."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    cfg = config("data.tokenizer=byte", "runtime.gradient_checkpointing=true")
    save_model(folder / "model.pt", TinyLM.from_config(cfg, 256), cfg)
    return folder


@pytest.fixture(scope="module")
def exported(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert main(["checkpoint", "export", str(run_folder), "--hf", str(folder)]) == 0
    return folder


def test_an_exported_model_has_the_weights_and_the_text_of_its_run(
    run_folder: Path, exported: Path
) -> None:
    ours, _ = load_model(run_folder / "model.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    settings, weights = load_folder(exported)
    for name, one in ours.state_dict().items():
        assert torch.equal(one, weights[name]) and torch.equal(one, model.model.state_dict()[name])
    assert settings["vocab"] == 256 and not settings["grad_checkpointing"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer("To be", return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(text, generate(ours, prompt["input_ids"], 20, Sampling(temperature=0)))
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ByteTokenizer.eos


def test_export_says_what_it_wrote_and_why_not(
    run_folder: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", "export", str(run_folder), "--hf"]
    assert main([*command, str(exported)]) == 2
    assert "exists; a model is written to a new or an empty folder" in capsys.readouterr().err
    cfg = config("data.tokenizer=byte")
    save_model(tmp_path / "model.pt", TinyLM.from_config(cfg, 100), cfg)
    assert main(["checkpoint", "export", str(tmp_path), "--hf", str(tmp_path / "new")]) == 0
    assert "no tokenizer: byte has 256 ids, and the model 100" in capsys.readouterr().out
    assert not (tmp_path / "new" / TOKENIZER).exists() and load_folder(tmp_path / "new")


# --- tokenizers ---


def write_gpt2(folder: Path) -> None:
    """Files of GPT-2's size and form: merges of two bytes, and of three."""
    letters = list(byte_letters())
    pairs = [(a, b) for a in letters for b in letters][:40_000]
    triples = [(a + b, c) for a, b in pairs[:200] for c in letters][: NUM_MERGES - len(pairs)]
    names = [*letters, *(a + b for a, b in pairs + triples), EOS_NAME]
    vocab = {name: rank for rank, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges = "".join(f"{a} {b}\n" for a, b in pairs + triples)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")


def some_tokenizers(folder: Path) -> Iterator[Tokenizer]:
    yield ByteTokenizer()
    yield open_tokenizer(DataConfig(tokenizer=str(train_hf(folder / "t.json", [EOS_NAME]))))
    write_gpt2(folder)
    yield open_tokenizer(DataConfig(tokenizer="gpt2", tokenizer_path=str(folder)))


def test_every_tokenizer_keeps_its_ids_for_the_auto_class(tmp_path: Path) -> None:
    for ours in some_tokenizers(tmp_path):
        folder = tmp_path / ours.name
        folder.mkdir()
        for name, content in tokenizer_files(ours).items():
            (folder / name).write_bytes(content)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        for text in TEXTS:
            ids = theirs(text)["input_ids"]
            assert ids == ours.encode(text).tolist(), (ours.name, text)
            assert theirs.decode(ids) == text
        assert theirs.eos_token_id == ours.eos and len(theirs) == ours.vocab
        assert theirs(EOS_NAME)["input_ids"] == [ours.eos]


# --- tools ---


def test_transformers_serve_answers_the_openai_client(exported: Path, tmp_path: Path) -> None:
    """In a process that nobody told about nsa.hf: the folder's auto_map does."""
    openai = pytest.importorskip("openai", reason="the extra eval installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(sys.executable).with_name("transformers"))
    flags = ["--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", port]
    settings = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    settings["PYTHONPATH"] = str(REPOSITORY)
    with (tmp_path / "log").open("wb") as log:
        command = [program, "serve", str(exported), *flags]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=settings)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/health", server, tmp_path / "log")
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model=str(exported), prompt="To be", max_tokens=8, temperature=0
        )
    finally:
        server.terminate()
        server.wait()
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].text


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)


@pytest.mark.filterwarnings("ignore")  # of a dozen packages that only lm-eval imports
def test_lm_eval_scores_padded_choices_as_single_rows(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="the extra eval installs it")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    sums = [(1, 2), (3, 40), (25, 2)]
    docs = [{"text": f"the sum of {a} and {b} is", "sum": f" {a + b}"} for a, b in sums]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": ["{{sum}}", " unknown"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
    }
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "trust_remote_code": True},
        tasks=[task],
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),  # thousands of files
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert len(found["samples"]["sums"]) == 3
    for sample in found["samples"]["sums"]:
        pairs = zip(sample["arguments"], sample["filtered_resps"], strict=True)
        for (prompt, choice), (score, _) in pairs:
            assert float(score) == pytest.approx(_score(model, prompt, choice), abs=1e-4)


def _score(model: Any, prompt: str, choice: str) -> float:
    """Log-probability of a text after another, in a row of its own."""
    ids = torch.tensor([ByteTokenizer().encode(prompt + choice).tolist()])
    start = len(prompt.encode())
    log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return float(log_probs.gather(1, ids[0, start:, None]).sum().detach())
