"""Pretrained models become sparse ones: the same function where all blocks are chosen."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nsa.cli.__main__ import main
from nsa.config import Config, load_config
from nsa.generate import Sampling, generate
from nsa.model import TinyLM
from nsa.model.folder import load_folder
from nsa.model.pretrained import read_settings
from nsa.train import run
from nsa.train.checkpoint.model_file import load_model
from nsa.train.sparsify import parse_layer_list, sparsify

transformers = pytest.importorskip("transformers")

BuildConfig = Callable[..., Config]
LENGTH = 75
SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-3}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": {**YARN, "rope_type": "linear"}}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": YARN}),
}
ALL = ("nsa.l_sel=16", "nsa.n_sel=8", "nsa.d_index=8")
"""More blocks than the rows have."""
FEW = ("nsa.l=16", "nsa.d=8", "nsa.l_sel=16", "nsa.n_sel=3", "nsa.d_index=8")


class Source(NamedTuple):
    folder: Path
    ids: Tensor  # [2, LENGTH]
    logits: Tensor  # [2, LENGTH, V] of transformers


def new_source(name: str, folder: Path) -> Source:
    """A tiny model of the family with random weights: norms and biases, too."""
    family, settings = FAMILIES[name]
    torch.manual_seed(3)
    made = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6)  # logits of ordinary size
        ids = torch.randint(97, (2, LENGTH))
        model.save_pretrained(folder, max_shard_size="20KB" if name == "qwen2" else "1GB")
        return Source(folder, ids, model(ids).logits)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    folder = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield {name: new_source(name, folder / name) for name in FAMILIES}


def converted(source: Path, target: Path, rule: str, *given: str, layers: str = "") -> TinyLM:
    said: list[str] = []
    sparsify(source, target, rule=rule, layers=layers, overrides=given, say=said.append)
    assert len(said) == 2 and f"rule {rule}" in said[0] and str(target / "train.yaml") in said[1]
    settings, weights = load_folder(target)
    cfg = load_config(target / "train.yaml", environ={})
    built = TinyLM.arguments(cfg, settings["vocab"])
    assert {name: built[name] for name in settings} == settings, "the config of the trainer"
    model = TinyLM(**settings)
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize("rule", ["pooled", "msa", "nsa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_all_blocks_a_converted_model_equals_its_source(
    name: str, rule: str, sources: dict[str, Source], tmp_path: Path
) -> None:
    source = sources[name]
    model = converted(source.folder, tmp_path / "sparse", rule, *ALL)
    with torch.no_grad():
        logits = model(source.ids)
    error = (logits - source.logits).abs().max() / source.logits.abs().max()
    assert error < 1e-5
    assert source.logits.std() > 0.5, "a flat model would prove nothing"
    few = converted(source.folder, tmp_path / "few", rule, *FEW)
    with torch.no_grad():
        assert (few(source.ids) - source.logits).abs().max() > 1e-3, "some blocks are not read"


@pytest.mark.parametrize("rule", ["pooled", "msa", "nsa"])
def test_decode_of_a_converted_model_equals_its_own_forward(
    rule: str, sources: dict[str, Source], tmp_path: Path
) -> None:
    """Of Qwen3, in one dense and one sparse layer; and nsa.hf loads the folder."""
    source = sources["qwen3"]
    model = converted(source.folder, tmp_path / "sparse", rule, *FEW, layers="1")
    kinds = [type(block.attn).__name__ for block in model.layers]
    assert kinds == ["DenseAttention", "SparseAttention"]
    ids = source.ids
    with torch.no_grad():
        expected = model(ids)
    cache = model.new_cache(2, LENGTH)
    parts = [model.prefill(ids[:, :30], cache), model.prefill(ids[:, 30:60], cache)]
    parts += [model.step(ids[:, t], cache)[:, None] for t in range(60, LENGTH)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    from nsa.hf import NSAForCausalLM

    loaded = NSAForCausalLM.from_pretrained(tmp_path / "sparse").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)
    assert loaded.config.eos_token_id == 2 and loaded.config.max_position_embeddings == 256


def test_settings_of_files_that_older_transformers_wrote() -> None:
    """`rope_theta` and `rope_scaling` at the top, and keys left out that have a default."""
    old = {
        **{"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 5e5, "head_dim": None},
        "rope_scaling": {name: x for name, x in LLAMA3.items() if name != "rope_theta"},
    }
    found = read_settings(old, Path("config.json"))
    assert (found["n_kv_groups"], found["d_k"], found["d_v"]) == (4, 8, 8)
    assert (found["rope_base"], found["rope_scale"], found["rope_scaling"]) == (5e5, 8.0, "llama3")
    assert (found["rope_original_len"], found["rope_high_freq"]) == (32, 4.0)
    older = old | {"rope_scaling": {"type": "linear", "factor": 2}}
    found = read_settings(older, Path("config.json"))
    assert (found["rope_scaling"], found["rope_scale"]) == ("linear", 2.0)
    assert "rope_scale" not in read_settings(old | {"rope_scaling": None}, Path("config.json"))


def test_weights_keep_their_dtype_and_the_indexer_has_it(
    sources: dict[str, Source], tmp_path: Path
) -> None:
    half = tmp_path / "half"
    model = transformers.AutoModelForCausalLM.from_pretrained(sources["llama3"].folder)
    model.to(torch.bfloat16).save_pretrained(half)
    sparsify(half, tmp_path / "sparse", rule="msa", overrides=ALL, say=print)
    weights = load_file(tmp_path / "sparse" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    before = load_file(half / "model.safetensors")
    assert torch.equal(weights["model.embed.weight"], before["model.embed_tokens.weight"])


# --- into the trainer ---


def test_nsa_train_continues_from_the_folder(
    sources: dict[str, Source], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and the config that it wrote; the first loss is that of the converted model."""
    folder, target = tmp_path / "bytes", tmp_path / "sparse"
    small = transformers.Qwen3Config(**{**SIZES, "vocab_size": 256, "head_dim": 12})
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(small).save_pretrained(folder)
    flags = ["--rule", "msa", "--layers", "1:2"]
    assert main(["sparsify", str(folder), str(target), *flags, *sets(*FEW)]) == 0
    assert "1 of 2 layers have rule msa" in capsys.readouterr().out
    given = [
        *("train.steps=3", "train.seq_len=64", "train.batch_size=2", "train.index_warmup_steps=2"),
        *("data.dataset=shakespeare", "runtime.device=cpu", "runtime.precision=fp32"),
        *("train.eval_every=0", "train.save_every=2", "train.lr=0.01"),
    ]
    cfg = load_config(target / "train.yaml", given, environ={})
    assert (cfg.model.rule, cfg.model.kv, cfg.model.qk_norm) == ("dense,msa", "shared", True)
    out = io.StringIO()
    result = run(cfg, config_path="train.yaml", out=out)
    assert f"[init] weights from {target} (sha256" in out.getvalue()
    start = load_folder(target)[1]
    saved = torch.load(result.folder / "checkpoint_step2.pt", weights_only=True)["state_dict"]
    for name, weight in start.items():
        moved = [not torch.equal(weight, w[name]) for w in (saved, result.model.state_dict())]
        assert moved == [".rule." in name, True], name


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_generate_reads_a_folder(sources: dict[str, Source], tmp_path: Path) -> None:
    model, cfg = load_model(sources["qwen2"].folder)
    assert cfg.model.attention == "dense" and cfg.model.qkv_bias
    prompt = sources["qwen2"].ids[:1, :20]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sources["qwen2"].folder)
    expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(generate(model, prompt, 12, Sampling(temperature=0.0)), expected)


# --- our own dense model ---


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a dense model."""
    from nsa.tests.conftest import REPOSITORY, TINY

    folder = tmp_path_factory.mktemp("own") / "run"
    base = REPOSITORY / "configs" / "base.yaml"
    given = [*TINY, "model.attention=dense", "train.steps=2", f"train.out_dir={folder}"]
    run(load_config(base, given, environ={}), config_path="tiny.yaml", out=io.StringIO())
    return folder


def test_our_own_dense_model_is_converted(own: Path, tmp_path: Path) -> None:
    dense, _ = load_model(own / "model.pt")
    ids = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    for rule in ("pooled", "msa", "nsa"):
        model = converted(own, tmp_path / rule, rule, *ALL)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), dense(ids), rtol=1e-5, atol=1e-5)


def test_init_from_makes_a_dense_model_sparse(
    own: Path, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    """Without a conversion: the same weights under a rule, and a fresh indexer."""
    dense = load_model(own / "model.pt")[0].state_dict()
    rule = ("model.rule=dense,msa", "model.n_layers=2", "nsa.l_sel=16", "nsa.d_index=8")
    out = io.StringIO()
    cfg = tiny_config(*rule, f"train.init_from={own}", "train.steps=1", "train.lr=1e-9")
    result = run(cfg, config_path="tiny.yaml", out=out)
    assert "the indexers of 1 layers start from random weights" in out.getvalue()
    for name, weight in result.model.state_dict().items():
        if ".rule." not in name:
            torch.testing.assert_close(weight, dense[name], rtol=0, atol=1e-7)
    # And back: the indexer is left out.
    back = tiny_config(
        *("model.attention=dense", "model.n_layers=2", "train.steps=1", "train.lr=1e-9"),
        *(f"train.init_from={cfg.train.out_dir}", f"train.out_dir={tmp_path / 'back'}"),
    )
    out = io.StringIO()
    run(back, config_path="tiny.yaml", out=out)
    assert "the indexers of 1 layers of the file are left out" in out.getvalue()
    with pytest.raises(ValueError, match="model.attention: dense there, nsa here"):
        branches = tiny_config("model.n_layers=2", f"train.init_from={own}")
        run(branches, config_path="tiny.yaml", out=io.StringIO())


# --- what cannot be converted ---

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "mamba"}, "model_type is 'mamba'.*llama, qwen2, qwen3"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    "a bias on the output": ({"attention_bias": True}, "attention_bias is True.*False or absent"),
    "an MLP with biases": ({"mlp_bias": True}, "mlp_bias is True"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*'silu'"),
    "a window": ({"sliding_window": 64}, "sliding_window is 64.*null or absent"),
    "windows": ({"use_sliding_window": True}, "use_sliding_window is True"),
    "a windowed layer": ({"layer_types": ["sliding_attention"]}, "layer_types is 'sliding_att"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8"),
    "a soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "half of a head rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "the same, nested": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor of its positions is 0.5",
    ),
    "other positions": ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
    "a factor of its own": (
        {"rope_parameters": {**YARN, "attention_factor": 1.5}},
        "attention_factor of its positions is 1.5.*absent",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "text for a number": ({"hidden_size": "32"}, "hidden_size is '32'.*a whole number >= 1"),
    "an odd head": ({"head_dim": 7}, "d_k=7.*even"),
    "another size": ({"intermediate_size": 40}, "up_proj.weight is .48, 32. of F32.*.40, 32."),
    "more layers": ({"num_hidden_layers": 3}, "weights of 2 layers, its config says 3"),
    "a tied head": ({"tie_word_embeddings": True}, "has a lm_head.weight of its own.*must equal"),
    "biases that are not there": ({"model_type": "qwen2", "architectures": []}, "has no tensor"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_a_config_asks_for_and_we_cannot_do_is_refused(
    case: str, sources: dict[str, Source], tmp_path: Path
) -> None:
    changed, message = CONFIGS[case]
    folder = copied(sources["llama"].folder, tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=message):
        sparsify(folder, tmp_path / "sparse", rule="pooled", overrides=ALL)
    assert not (tmp_path / "sparse").exists()


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_weights_that_do_not_fit_are_refused(sources: dict[str, Source], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"

    def drop(folder: Path, weights: dict[str, Tensor]) -> None:
        del weights[name]

    def add(folder: Path, weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(32)

    def quantize(folder: Path, weights: dict[str, Tensor]) -> None:
        weights[name] = weights[name].to(torch.int8)

    def forget_config(folder: Path, weights: dict[str, Tensor]) -> None:
        (folder / "config.json").unlink()

    def pickle(folder: Path, weights: dict[str, Tensor]) -> None:
        torch.save(weights, folder / "pytorch_model.bin")

    def crowd(folder: Path, weights: dict[str, Tensor]) -> None:
        words = {"model": {"vocab": {str(i): i for i in range(98)}}}
        (folder / "tokenizer.json").write_text(json.dumps(words))

    cases = {
        drop: f"has no tensor {name}; its config describes",
        add: "has an unknown tensor model.layers.1.self_attn.o_proj.bias",
        quantize: "is .32, 32. of I8, its config needs",
        forget_config: "has no config.json, no model.pt and no checkpoint",
        pickle: "pickled weights .pytorch_model.bin.*can run any code",
        crowd: "has ids up to 97, the embedding has 97 rows",
    }
    for change, message in cases.items():
        folder = copied(sources["llama"].folder, tmp_path / change.__name__)
        weights = load_file(folder / "model.safetensors")
        change(folder, weights)
        if change is pickle:
            (folder / "model.safetensors").unlink()
        else:
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            sparsify(folder, tmp_path / "sparse", rule="msa", overrides=ALL)
        assert not (tmp_path / "sparse").exists(), change.__name__


def test_settings_that_cannot_be_are_refused(
    sources: dict[str, Source], tiny_config: BuildConfig, tmp_path: Path
) -> None:
    source, target = sources["llama"].folder, tmp_path / "sparse"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rule": "reuse"}, "rule='reuse'.*pooled | msa | nsa"),
        ({"layers": "2"}, "layers='2' is not allowed.*0 to 1"),
        ({"layers": "1:1"}, "ranges A:B with A < B"),
        ({"layers": "last"}, "write for example 0,2:2"),
        ({"overrides": ["nsa.l_sel=24"]}, "nsa.l_sel=24.*multiple of"),
        ({"overrides": ["model.dim=24"]}, "only keys of group nsa"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            sparsify(source, target, **{"rule": "pooled", **given})
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(ValueError, match="exists; a model is written to a new or an empty folder"):
        sparsify(source, target, rule="pooled")
    sparsify(source, tmp_path / "once", rule="pooled", say=print)
    with pytest.raises(ValueError, match="only a dense model can be converted"):
        sparsify(tmp_path / "once", tmp_path / "twice", rule="msa")


def test_a_list_of_layers() -> None:
    assert parse_layer_list("", 3) == {0, 1, 2}
    assert parse_layer_list("0, 2:4", 5) == {0, 2, 3}


def words(count: int) -> str:
    """A tokenizer.json of so many words, the last of which ends a document."""
    vocab = {f"w{i}": i for i in range(count - 1)} | {"</s>": count - 1}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


def test_a_tokenizer_comes_along_and_must_fit(
    sources: dict[str, Source], tiny_config: BuildConfig, tmp_path: Path
) -> None:
    folder, target = copied(sources["llama"].folder, tmp_path / "source"), tmp_path / "sparse"
    (folder / "tokenizer.json").write_text(words(90))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    said: list[str] = []
    sparsify(folder, target, rule="nsa", overrides=FEW, say=said.append)
    assert "the embedding has 97 rows, tokenizer.json has 90 ids" in said[0]
    assert (target / "tokenizer.json").read_text() == words(90)
    cfg = load_config(target / "train.yaml", ["data.dataset=synthetic"], environ={})
    assert cfg.data.vocab == 90 and cfg.data.eos == "</s>"
    model, _ = load_model(target)
    with torch.no_grad():
        shown = model(sources["llama"].ids.clamp(max=89)[:, :30])
    assert shown.shape[-1] == 90
    other = tmp_path / "other.json"
    given = ["train.steps=1", "train.seq_len=48", "runtime.device=cpu", "data.eos=</s>"]
    for text, message in ((words(91), "90 there, 91 here"), (swapped(90), "ids of the tokens")):
        other.write_text(text)
        changed = [*given, "data.dataset=synthetic", f"data.tokenizer={other}"]
        cfg = load_config(target / "train.yaml", changed, environ={})
        with pytest.raises(ValueError, match=message):
            run(cfg, config_path="train.yaml", out=io.StringIO())


def swapped(count: int) -> str:
    return words(count).replace('"w1"', '"x1"')
