"""`nsa generate` as a user meets it: sources of prompts, outputs, and what is refused."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.cli.__main__ import main
from nsa.config import Config, to_container
from nsa.data import ByteTokenizer
from nsa.generate import Completion, Completions, Limits, Sampling
from nsa.model import TinyLM
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.gpu import needs_gpu
from nsa.train import save_model
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint.model_file import find_model, load_model


@pytest.fixture
def config(tiny_config: Callable[..., Config]) -> Config:
    return tiny_config()


@pytest.fixture
def model_file(config: Config, tmp_path: Path) -> Path:
    """A model that prefers letters, so that texts can be read."""
    torch.manual_seed(1)
    model = TinyLM.from_config(config, vocab=256)
    torch.nn.init.normal_(model.embed.weight)
    assert model.lm_head is not None
    torch.nn.init.normal_(model.lm_head.weight)
    return save_model(tmp_path / "run" / "model.pt", model, config)


@pytest.fixture
def nsa(model_file: Path, capsysbinary: Any) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit code, stdout, stderr."""

    def call(*arguments: str, model: Path = model_file) -> tuple[int, str, str]:
        try:
            code = main(["generate", "--model", str(model), *arguments])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsysbinary.readouterr()
        return code, out.decode("utf-8"), err.decode("utf-8")

    return call


Nsa = Callable[..., tuple[int, str, str]]


def texts(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_the_same_text_comes_from_every_source(
    nsa: Nsa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--max-new-tokens", "20", "--seed", "4")
    code, expected, err = nsa("Füße", *settings)
    assert (code, err) == (0, "") and expected.endswith("\n")
    (tmp_path / "p.txt").write_text("Füße", encoding="utf-8")
    assert nsa("--file", str(tmp_path / "p.txt"), *settings)[1] == expected
    for arguments in ([], ["-"], ["--file", "-"]):
        stdin = io.TextIOWrapper(io.BytesIO("Füße".encode()), encoding="ascii")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert nsa(*arguments, *settings)[1] == expected
    assert nsa("Füße", "--no-stream", *settings)[1] == expected
    assert nsa("Füße", "--echo", *settings)[1] == "Füße" + expected


def test_a_file_of_prompts_gives_what_each_gives_alone(nsa: Nsa, tmp_path: Path) -> None:
    prompts = ["abc", "xyz", "a longer one", "def", "☕"]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    settings = ["--json", "--seed", "9", "--top-p", "0.9", "--max-new-tokens", "15"]
    settings += ["--repetition-penalty", "1.2"]
    code, out, _ = nsa("--prompts", str(tmp_path / "p.txt"), "--batch-size", "2", *settings)
    assert code == 0
    alone = [texts(nsa(prompt, *settings)[1])[0] for prompt in prompts]
    assert texts(out) == alone
    assert [one["prompt"] for one in alone] == prompts


def test_json_has_the_documented_fields(nsa: Nsa) -> None:
    code, out, _ = nsa("Hi", "--json", "--greedy", "--max-new-tokens", "5", "--ignore-eos")
    (one,) = texts(out)
    assert code == 0 and one["version"] == 1
    assert set(one) == {
        *("version", "prompt", "text", "tokens", "num_prompt_tokens", "num_tokens", "finish")
    }
    assert one["num_prompt_tokens"] == 2 and one["num_tokens"] == len(one["tokens"]) == 5
    assert one["text"] == bytes(one["tokens"]).decode("utf-8", errors="replace")
    assert one["finish"] == "length"


def test_a_stop_string_ends_the_text(nsa: Nsa) -> None:
    whole = texts(nsa("Hi", "--json", "--seed", "2", "--max-new-tokens", "60")[1])[0]["text"]
    stop = whole[10:12]
    code, out, _ = nsa(
        *("Hi", "--seed", "2", "--max-new-tokens", "60", "--json"),
        *("--stop", stop, "--stop", "never in it"),
    )
    (one,) = texts(out)
    assert code == 0 and one["finish"] == "stop"
    assert one["text"] == whole[: whole.index(stop)]


def scripted(tokens: bytes, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Completion:
    """Complete "x" with given tokens instead of a model's."""
    monkeypatch.setattr(
        "nsa.generate.complete.next_tokens",
        lambda *_: iter([torch.tensor([token]) for token in tokens]),
    )
    model = TinyLM(256, 8, 1, 1, 1, 4, 4, n_sel=3)
    options = Limits(**{"max_new_tokens": len(tokens), **limits})
    shown: list[str] = []
    completions = Completions(model, ByteTokenizer(), Sampling(), options)
    (one,) = completions.complete(["x"], show=shown.append)
    assert "".join(shown) == one.text
    assert not any("\ufffd" in piece for piece in shown[:-1])
    return one


@pytest.mark.parametrize(
    ("tokens", "limits", "text", "finish", "num_tokens"),
    [
        (b"ab\0cd", {}, "ab", "eos", 3),
        (b"ab\0cd", dict(ignore_eos=True), "ab\0cd", "length", 5),
        ("a☕b".encode(), dict(stops=("☕",)), "a", "stop", 4),
        ("a☕".encode()[:-1], {}, "a\ufffd", "length", 3),
        (b"abEN", dict(stops=("END",)), "abEN", "length", 4),
        (b"abEN\0", dict(stops=("END",)), "abEN", "eos", 5),
    ],
    ids=["eos", "ignored eos", "stop", "half a character", "half a stop", "eos in half a stop"],
)
def test_where_a_text_ends(
    tokens: bytes,
    limits: dict[str, Any],
    text: str,
    finish: str,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = scripted(tokens, monkeypatch, **limits)
    assert (one.text, one.finish, len(one.tokens)) == (text, finish, num_tokens)


def test_the_stream_reaches_a_pipe_token_by_token(model_file: Path) -> None:
    """The first characters are there long before the last token could be."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "nsa.cli",
            "generate",
            "--model",
            str(model_file),
            "a",
            "--greedy",
        ]
        + ["--max-new-tokens", "60000", "--ignore-eos"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert len(process.stdout.read(20)) == 20
    assert process.poll() is None
    process.stdout.close()  # a reader that has seen enough is no error
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_writes(nsa: Nsa, precision: str) -> None:
    code, out, err = nsa("Hi", "--precision", precision, "--max-new-tokens", "40", "--json")
    assert code == 0, err
    assert texts(out)[0]["num_tokens"] > 0


def test_ctrl_c_ends_the_text_without_a_traceback(
    nsa: Nsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        yield torch.tensor([65])
        raise KeyboardInterrupt

    monkeypatch.setattr("nsa.generate.complete.next_tokens", interrupted)
    assert nsa("Hi") == (130, "A\n", "")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"),
     RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes")],
    ids=["cuda", "cpu"],
)  # fmt: skip
def test_a_lack_of_memory_is_said_in_one_line(
    nsa: Nsa, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(TinyLM, "new_cache", full)
    code, _, err = nsa("Hi")
    assert code == 2 and "out of memory" in err and "smaller --batch-size" in err
    assert err.count("\n") == 1


ON_GPU = [pytest.param(precision, marks=needs_gpu) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize("precision", ON_GPU)
def test_a_gpu_writes_what_the_cpu_writes(nsa: Nsa, precision: str) -> None:
    """Close calls may differ by rounding (TF32, bf16), but the first token should not."""
    settings = ["Hi", "--greedy", "--ignore-eos", "--max-new-tokens", "30", "--json"]
    expected = texts(nsa(*settings, "--device", "cpu", "--precision", "fp32")[1])[0]["tokens"]
    code, out, err = nsa(*settings, "--device", "cuda", "--precision", precision)
    assert code == 0, err
    tokens = texts(out)[0]["tokens"]
    assert len(tokens) == 30 and tokens[0] == expected[0]


def write_checkpoint(config: Config, folder: Path) -> Path:
    model, _ = load_model(folder / "model.pt")
    rest: dict[str, Any] = {key: kind() for key, kind in checkpoint_file.KEYS.items()}
    weights = model.state_dict()
    content = {**rest, "state_dict": weights, "cfg": to_container(config), "step": 7}
    return checkpoint_file.write(folder, content)


def test_a_checkpoint_and_a_run_folder_write_what_the_model_file_writes(
    nsa: Nsa, model_file: Path, config: Config
) -> None:
    expected = nsa("Hi", "--greedy", "--max-new-tokens", "12")
    path = write_checkpoint(config, model_file.parent)
    assert nsa("Hi", "--greedy", "--max-new-tokens", "12", model=path) == expected
    assert find_model(model_file.parent) == model_file
    assert nsa("Hi", "--greedy", "--max-new-tokens", "12", model=model_file.parent) == expected
    model_file.unlink()
    assert find_model(model_file.parent) == path
    assert nsa("Hi", "--greedy", "--max-new-tokens", "12", model=model_file.parent) == expected


def test_a_checkpoint_whose_bytes_have_changed_is_refused(
    nsa: Nsa, model_file: Path, config: Config
) -> None:
    path = write_checkpoint(config, model_file.parent)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, _, err = nsa("Hi", model=path)
    assert code == 2 and "does not have the sha256" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt 1 is empty; it needs at least one character"),
        (["a" * 200, "--max-len", "100", "--max-new-tokens", "10"], "200 tokens, which with"),
        (["a", "--max-new-tokens", "10", "--max-len", "10"], "1 tokens.*max_len=10.*shorten it"),
        (["a\0b"], "NUL at byte 1"),
        (["a\udcffb"], "prompt 1 is not valid UTF-8 at character 1"),
        (["a", "--file", "b"], "2 prompt sources"),
        (["--file", "no-such-file"], "no-such-file cannot be read"),
        (["--prompts", "."], r"\. cannot be read"),
        (["a", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["a", "--top-p", "0"], "top_p=0.0 is not allowed"),
        (["a", "--top-k", "-2"], "top_k=-2 is not allowed"),
        (["a", "--max-new-tokens", "0"], "max_new_tokens=0 is not allowed"),
        (["a", "--max-len", str(10**15)], "max_len=1000000000000000 is not allowed"),
        (["a", "--batch-size", "0"], "batch_size=0 is not allowed"),
        (["a", "--stop", ""], "stop string is empty"),
        (["a", "--device", "tpu"], "runtime.device"),
        (["a", "--device", "cuda:99"], "this machine has"),
        (["a", "--tokenizer", "bytes"], "data.tokenizer.*the nearest is 'byte'"),
        (["a", "--temprature", "1"], "nearest known one is '--temperature'"),
    ],
    ids=lambda value: (
        " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else ""
    ),
)
def test_bad_arguments_are_refused_in_one_line(
    nsa: Nsa, arguments: list[str], message: str
) -> None:
    code, out, err = nsa(*arguments)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert re.search(message, err), err


def test_text_that_is_not_utf8_is_refused_with_its_place(nsa: Nsa, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"good\xff")
    for flag in ("--file", "--prompts"):
        code, _, err = nsa(flag, str(tmp_path / "p.txt"))
        assert code == 2 and "is not UTF-8: byte 0xff at 4" in err


def test_an_empty_line_of_a_file_of_prompts_is_refused(nsa: Nsa, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n\nb\n")
    code, _, err = nsa("--prompts", str(tmp_path / "p.txt"))
    assert code == 2 and "prompt 2 is empty" in err


def test_a_prompt_that_cannot_fit_is_not_read_whole(nsa: Nsa) -> None:
    short = ("--max-len", "50", "--max-new-tokens", "1")
    for flag, name in (("--file", "/dev/zero"), ("--prompts", "/dev/zero, line 1")):
        code, _, err = nsa(flag, "/dev/zero", *short)
        assert code == 2 and f"{name} has more than 12,800 bytes" in err


def test_a_file_of_prompts_may_be_longer_than_one_prompt(nsa: Nsa, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"ab\r\n" * 100)  # 400 bytes; a prompt may have 256
    few = ("--max-len", "1", "--max-new-tokens", "1")
    code, _, err = nsa("--prompts", str(tmp_path / "p.txt"), *few)
    assert code == 2 and "bytes" not in err  # tokens are too many; the file was read
    code, out, _ = nsa("--prompts", str(tmp_path / "p.txt"), "--max-len", "3", *few[2:])
    assert code == 0 and len(out.splitlines()) >= 100


def test_a_model_without_flash_generates_without_it(
    nsa: Nsa, tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def complete(self: Completions, prompts: list[str], **_: Any) -> list[Completion]:
        allowed.append(torch.backends.cuda.flash_sdp_enabled())
        return []

    monkeypatch.setattr(Completions, "complete", complete)
    for use_flash in ("true", "false"):
        config = tiny_config(f"runtime.use_flash={use_flash}")
        model = TinyLM.from_config(config, vocab=256)
        assert nsa("a", model=save_model(tmp_path / use_flash / "model.pt", model, config))[0] == 0
    assert allowed == [True, False]


def test_a_tokenizer_of_another_size_is_refused(nsa: Nsa, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from nsa.tests.data.test_tokenizers import train_hf

    file = train_hf(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    code, _, err = nsa("a", "--tokenizer", str(file))
    assert code == 2 and "has 270 ids, the model has 256; use the tokenizer that" in err


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["state_dict"].pop(name)


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    group, _, name = key.partition(".")
    return lambda content: content["cfg"][group].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("model.dim", 1 << 20), "is .*, the model of its config has .*not of one model"),
        (_with("model.n_layers", 1 << 40), "holds 2 layers, its config says"),
        (_with("model.n_heads", 4), "not of one model"),
        (_without("norm.weight"), "norm.weight is not there"),
        (_without("embed.weight"), "no embedding"),
        (_with("model.depth", 3), "model.depth"),
        (lambda content: content.pop("cfg"), "no weights with their config"),
        (lambda content: content["cfg"].update(model=3), "cfg.model is not a group"),
        (lambda content: content["state_dict"].update(x=torch.ones(2)), "no such tensor"),
    ],
    ids=["dim", "layers", "heads", "missing", "no embedding", "key", "no cfg", "group", "extra"],
)
def test_a_model_file_of_another_shape_is_refused(
    nsa: Nsa, model_file: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = torch.load(model_file, weights_only=True)
    change(content)
    torch.save(content, model_file)
    code, _, err = nsa("Hi")
    assert code == 2 and err.count("\n") == 1
    assert re.search(message, err), err


class NotData:
    """What a file must not be able to bring to life."""


@pytest.mark.parametrize("content", [b"", b"not a model", b"PK\x03\x04 torn", None, "code"])
def test_a_file_that_is_no_model_is_refused(
    nsa: Nsa, tmp_path: Path, content: bytes | str | None
) -> None:
    path = tmp_path / "m.pt"
    if content == "code":
        torch.save({"state_dict": NotData(), "cfg": {}}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    code, _, err = nsa("Hi", model=path)
    assert code == 2 and err.count("\n") == 1
    assert "m.pt does not exist" in err if content is None else "cannot be read as a model" in err
