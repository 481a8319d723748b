"""A config is resolved in a fixed order, and every mistake in it is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nsa.config import Config, ConfigError, Setting, build, known_keys, load_config, to_container
from nsa.config.describe import install_line, needs_of
from nsa.config.load import REPOSITORY, find_config
from nsa.data import ByteTokenizer

BASE = REPOSITORY / "configs" / "base.yaml"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_later_sources_win_over_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, "parent.yaml", "train: {seq_len: 101, batch_size: 101, lr: 101, steps: 101}")
    child = write(
        tmp_path,
        "child.yaml",
        "inherits: parent.yaml\ntrain: {batch_size: 102, accumulate_grad_batches: 102, lr: 102}",
    )
    environ = {"NSA_ACCUM": "103", "NSA_LR": "103"}

    train = load_config(child, ["train.lr=104"], environ).train

    assert train.log_every == Config().train.log_every  # nobody sets it: the default
    assert train.steps == 101  # only the parent
    assert train.batch_size == 102  # the child over the parent
    assert train.accumulate_grad_batches == 103  # the environment over the child
    assert train.lr == 104.0  # the command line over all


def test_inheritance_reaches_through_three_files(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "model: {dim: 8}")
    write(tmp_path, "b.yaml", "inherits: a.yaml\nmodel: {n_layers: 2}")
    path = write(tmp_path, "c.yaml", "inherits: b.yaml\nmodel: {d_v: 4}")

    model = load_config(path, environ={}).model

    assert (model.dim, model.n_layers, model.d_v) == (8, 2, 4)


def test_inheritance_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "a.yaml", "model: {dim: 8}")
    path = write(tmp_path / "deep", "b.yaml", "inherits: ../a.yaml")

    assert load_config(path, environ={}).model.dim == 8


def test_a_circle_of_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "inherits: b.yaml")
    path = write(tmp_path, "b.yaml", "inherits: a.yaml")

    with pytest.raises(ConfigError, match=r"is circular \(b.yaml -> a.yaml -> b.yaml\)"):
        load_config(path, environ={})


def test_the_same_file_twice_without_a_circle_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "model: {dim: 8}")
    write(tmp_path, "b.yaml", "inherits: a.yaml")
    path = write(tmp_path, "c.yaml", "inherits: b.yaml")

    assert load_config(path, environ={}) == load_config(tmp_path / "a.yaml", environ={})


def test_a_missing_file_names_the_configs_that_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE.with_name("quickstrat.yaml"), environ={})

    assert "quickstrat.yaml: no such config file" in str(caught.value)
    assert all(p.name in str(caught.value) for p in BASE.parent.glob("*.yaml"))


FILES = {
    "an unknown key": ("train: {stepz: 3}", "unknown key 'train.stepz'", "'train.steps'"),
    "an unknown group": ("trian: {steps: 3}", "unknown group 'trian'", "'train'"),
    "a group without keys": ("train: 3", "train=3 is not a group", "put keys under it"),
    "a list of files": ("inherits: [a, b]", "inherits=['a', 'b']", "name one file"),
    "a list at the top": ("- train", "contains a list", "groups of keys"),
    "broken YAML": ("train: {steps: 3", "cannot be read as YAML", "correct the file"),
    "a key given twice": ("train: {steps: 3, steps: 4}", "duplicate key", "correct the file"),
    "code in YAML": ("train: !!python/object/apply:os.getcwd []", "cannot be read", "correct"),
    "a number for text": ("runtime: {gc_layers: 1:3}", "runtime.gc_layers=63", "quote it"),
    "text for a number": ("train: {steps: many}", "train.steps='many'", "a whole number"),
    "a fraction for a count": ("train: {steps: 3.0}", "train.steps=3.0", "a whole number"),
    "yes for a number": ("train: {lr: true}", "train.lr=True", "a number"),
    "a number for yes": ("runtime: {use_flash: 2}", "runtime.use_flash=2", "true or false"),
    "an empty file": ("", "is empty", "write at least one of model"),
    "only comments": ("# train: {steps: 3}\n", "is empty", "`inherits: base.yaml`"),
    "another program's file": ("server: {port: 80}", "is not a config", "write at least one of"),
    "5,000 levels": (f"train: {'[' * 5000}{']' * 5000}", "more than 16 levels", "correct"),
    "5,000 levels by blanks": (
        "train:\n" + "\n".join(f"{' ' * n}a:" for n in range(1, 500)),
        "more than 16 levels",
        "correct",
    ),
    "a bomb of aliases": (
        "train:\n  a0: &a0 [x, x]\n"
        + "\n".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)),
        "10000 values",
        "correct",
    ),
    "5,000 digits": (f"train: {{steps: {'9' * 5000}}}", "cannot be read as YAML", "correct"),
    "a megabyte": ("train: {steps: 3}\n" + "# much\n" * 150_000, "has more than", "not a config"),
    "nothing": ("train: {steps: null}", "train.steps=None", "a whole number"),
    "a subtree for a value": ("train: {steps: {a: 1}}", "train.steps={'a': 1}", "whole number"),
    "the environment by the back door": (
        "train: {out_dir: '${oc.env:HOME}'}",
        "train.out_dir='${oc.env:HOME}'",
        "no ${...}",
    ),
}


@pytest.mark.parametrize(("text", "given", "todo"), FILES.values(), ids=FILES.keys())
def test_a_mistake_in_a_file_names_file_key_and_remedy(
    tmp_path: Path, text: str, given: str, todo: str
) -> None:
    path = write(tmp_path, "mine.yaml", text)

    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})

    message = str(caught.value)
    assert "mine.yaml" in message and given in message and todo in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["root:x:0:0:/bin/sh\nme:x:1", "token: 7f3a\nport: 7f3a"])
def test_of_a_file_that_is_no_config_no_content_is_shown(tmp_path: Path, content: str) -> None:
    (tmp_path / "private").write_text(content)
    path = write(tmp_path, "mine.yaml", f"inherits: {tmp_path / 'private'}")

    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})

    assert f"{tmp_path / 'private'}: " in str(caught.value)
    assert not any(word in str(caught.value) for word in ("x:0", "me:x", "7f3a", "token"))


REFUSED = {
    "model.dim=0": ">= 1",
    "model.n_layers=-1": ">= 1",
    "model.n_heads=63": "use 60 or 64",
    "model.n_kv_groups=128": "multiple of model.n_kv_groups=128",
    "model.d_k=191": "even",
    "model.d_v=0": ">= 1",
    "model.mlp_dim=-1": ">= 0",
    "model.mlp=swiglu": "plain | gated",
    "model.norm_eps=0": "> 0",
    "model.attention=sparse": "nsa | dense",
    "model.rule=mosa": "the nearest is 'msa'",
    "model.kv=split": "separate | shared",
    "model.rope_scale=0": "> 0",
    "model.rope_scaling=dynamic": "linear | llama3 | yarn",
    "model.rope_original_len=0": ">= 1",
    "model.rope_low_freq=0": "> 0",
    "model.rope_high_freq=1": "more than model.rope_low_freq=1",
    "model.embed_std=0": "> 0",
    "model.rope_base=inf": "> 0",
    "nsa.l=40": "use 32 or 48",
    "nsa.l_sel=8": "use 16",
    "nsa.d=0": ">= 1",
    "nsa.n_sel=2": ">= 3",
    "nsa.w=0": ">= 1",
    "nsa.phi=conv": "avg | mlp",
    "nsa.gate=softmx": "the nearest is 'softmax'",
    "nsa.num_first=-1": ">= 0",
    "nsa.num_local=0": ">= 1",
    "nsa.pool=mean": "infllm | moba",
    "nsa.pool_block=0": ">= 1",
    "nsa.d_index=3": "even",
    "train.index_loss=0": "> 0",
    "train.index_lr=0.001": "0 for model.rule=nsa, which has no indexer",
    "train.index_warmup_steps=-1": ">= 0",
    "train.index_warmup=frozen": "joint for model.rule=nsa, which has no indexer",
    "train.steps=0": ">= 1",
    "train.seq_len=0": ">= 1",
    "train.batch_size=0": ">= 1",
    "train.accumulate_grad_batches=0": ">= 1",
    "train.optimizer=muo": "the nearest is 'muon'",
    "train.lr=nan": "> 0",
    "train.lr_schedule=linear": "cosine | constant",
    "train.warmup_steps=1001": "at most steps=1000",
    "train.weight_decay=-0.1": "from 0 to 1",
    "train.grad_clip=-1": "from 0",
    "train.spike_rule=rollback": "off, log or skip with save_every=0",
    "train.spike_threshold=0": "> 0",
    "train.spike_window=3": ">= 4",
    "train.log_every=0": ">= 1",
    "train.eval_every=-1": ">= 0",
    "train.eval_batches=0": ">= 1",
    "train.save_every=-1": ">= 0",
    "train.keep_last=-1": ">= 0",
    "train.tracker=tensorboard": "none | wandb | trackio",
    "train.backup_dir=artifacts/base": "another folder",
    "train.init_from=artifacts/base/model.pt": "outside train.out_dir",
    "train.seed=-1": ">= 0",
    "train.out_dir=": "folder",
    "data.dataset=shakespear": "the nearest is 'shakespeare'",
    "data.tokenizer=bytes": "the nearest is 'byte'",
    "data.local_path=corpus": "it must be empty for synthetic",
    "data.hub_subset=sample-10BT": "it must be empty for synthetic",
    "data.hub_revision=main": "it must be empty for synthetic",
    "data.hub_dataset=fineweb-edu": "it must be NAMESPACE/NAME",
    "data.tokenizer_path=corpus": "it must be empty for data.tokenizer=byte",
    "data.eos=<end>": "it must be empty for data.tokenizer=byte, which has its own",
    "data.respect_documents=True": "false for data.dataset=synthetic, which has no documents",
    "runtime.device=gpu": "cuda:N",
    "runtime.device=cuda:x": "cuda:N",
    "runtime.precision=fp8": "fp32 | bf16 | fp16",
    "runtime.strategy=zero": "auto | ddp | fsdp",
    "runtime.cp=0": ">= 1",
    "runtime.tp=0": ">= 1",
    "train.decay_steps=2000": "at most steps - warmup_steps",
    "runtime.backend=cuda": "auto | reference | torch | triton",
    "runtime.gc_layers=0:2": "gradient_checkpointing=true",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_out_of_range_is_refused_when_the_tree_is_built(override: str) -> None:
    key, _, value = override.partition("=")

    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [override], environ={})

    message = str(caught.value)
    assert REFUSED[override] in message
    assert key in message and value in message


def test_a_refused_value_names_who_set_it(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "train: {steps: 0}")
    sources: list[tuple[list[str], dict[str, str], str]] = [
        ([], {}, "train.steps=0 .*mine.yaml"),
        (["train.steps=5", "train.lr=-1"], {}, "train.lr=-1.0 .*command line"),
        (["train.steps=5"], {"NSA_ACCUM": "0"}, "batches=0 .*environment NSA_ACCUM"),
        (["train.steps=5", "nsa.d=24"], {}, "nsa.l=32 .*nsa.d=24.*default"),
    ]

    for overrides, environ, said in sources:
        with pytest.raises(ConfigError, match=said):
            load_config(path, overrides, environ)


def test_every_key_is_refused_somewhere_or_is_a_plain_switch() -> None:
    switches = {"model.tie_embeddings", "runtime.use_flash", "runtime.gradient_checkpointing"}
    switches |= {"model.qkv_bias", "model.qk_norm"}
    switches |= {"runtime.compile", "runtime.cuda_graph", "runtime.deterministic"}

    assert known_keys().keys() - {o.partition("=")[0] for o in REFUSED} == switches


COMBINATIONS = {
    "layers outside the model": (
        ["runtime.gradient_checkpointing=true", "runtime.gc_layers=0:31"],
        'inside "0:30"',
    ),
    "an empty range of layers": (
        ["runtime.gradient_checkpointing=true", "runtime.gc_layers=3:3"],
        "A < B",
    ),
    "no range of layers": (
        ["runtime.gradient_checkpointing=true", "runtime.gc_layers=3"],
        "A:B",
    ),
    "kernels of NSA for dense attention": (
        ["model.attention=dense", "runtime.backend=triton"],
        "auto or torch for model.attention=dense",
    ),
    "a graph of fp16": (["runtime.cuda_graph=true", "runtime.precision=fp16"], "scales its loss"),
    "a graph of the reference": (
        ["runtime.cuda_graph=true", "runtime.backend=reference"],
        "backend=reference",
    ),
    "a graph of documents": (
        ["runtime.cuda_graph=true", "data.dataset=shakespeare", "data.respect_documents=true"],
        "borders change",
    ),
    "a compiled reference": (["runtime.compile=true", "runtime.backend=reference"], "looks at"),
    "compiled documents": (
        ["runtime.compile=true", "data.dataset=shakespeare", "data.respect_documents=true"],
        "compiled anew",
    ),
    "kernels without flash": (["runtime.use_flash=false", "runtime.backend=triton"], "use_flash"),
    "an odd row for two ranks": (["runtime.cp=2", "train.seq_len=1026"], "use 1024 or 1028, or"),
    "a row shorter than its parts": (["runtime.cp=4", "train.seq_len=6"], "; use 8, or another"),
    "more ranks than KV heads": (["runtime.tp=8"], "a divisor of model.n_kv_groups=4"),
    "replicas of split matrices": (["runtime.tp=2", "runtime.strategy=ddp"], "auto or fsdp for"),
    "a graph of many ranks": (["runtime.cp=2", "runtime.cuda_graph=true"], "exchange tokens"),
}


@pytest.mark.parametrize(("overrides", "said"), COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_a_wrong_combination_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(BASE, overrides, environ={})


@pytest.mark.parametrize("override", ["train.steps", "steps=3", "trian.steps=3", "=3"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="command line"):
        load_config(BASE, [override], environ={})


def test_overrides_take_every_type() -> None:
    overrides = ["train.steps=7", "train.lr=3e-4", "model.tie_embeddings=yes", "train.out_dir=a=b"]

    config = load_config(BASE, overrides, environ={})

    assert config.train.steps == 7
    assert config.train.lr == 3e-4
    assert config.model.tie_embeddings is True
    assert config.train.out_dir == "a=b"


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    config = Config()

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3  # type: ignore[misc]


def test_the_container_is_plain_and_builds_the_same_config() -> None:
    config = load_config(BASE.with_name("quickstart.yaml"), environ={})

    container = to_container(config)

    assert {type(v) for group in container.values() for v in group.values()} == {
        int,
        float,
        bool,
        str,
    }
    settings = [
        Setting(f"{g}.{k}", v, "test") for g, keys in container.items() for k, v in keys.items()
    ]
    assert build(settings) == config
    assert OmegaConf.create(container).model.dim == config.model.dim


def test_without_flash_the_torch_backend_runs() -> None:
    def backend(*overrides: str) -> str:
        return load_config(BASE, overrides, environ={}).runtime.attention_backend

    assert backend() == "auto"
    assert backend("runtime.backend=reference") == "reference"
    assert backend("runtime.use_flash=false") == "torch"


def test_the_vocabulary_is_that_of_the_tokenizer() -> None:
    assert Config().data.vocab == ByteTokenizer.vocab == 256
    assert load_config(BASE, ["data.tokenizer=gpt2"], environ={}).data.vocab == 50257


def test_the_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


# Bundled configs


def test_a_bundled_config_is_found_by_name_and_a_file_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = find_config("quickstart")
    assert bundled.name == "quickstart.yaml" and bundled.is_file()
    assert find_config("configs/quickstart.yaml") == bundled == find_config("quickstart.yaml")
    for name in ("./quickstart", "./quickstart.yaml", "elsewhere/quickstart.yaml"):
        assert find_config(name) == Path(name), "a path is a path, also where no file is"
    Path("quickstart").mkdir()
    Path("quickstart.yaml").write_text("train: {seed: 5}\n")
    assert find_config("quickstart") == bundled
    assert load_config("quickstart.yaml", environ={}).train.seed == 5


def test_a_file_anywhere_inherits_from_a_bundled_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("inherits: quickstart.yaml\ntrain: {seed: 5}\n")
    config = load_config(tmp_path / "mine.yaml", environ={})
    assert config == load_config("quickstart", ["train.seed=5"], environ={})


def test_a_name_that_is_not_bundled_lists_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"quickstrat: no such .*base, .*quickstart.*\./quickstrat"
    ):
        load_config("quickstrat", environ={})


def test_an_extra_is_installed_by_the_packages_that_it_names() -> None:
    """As the metadata of a wheel lists them; an extra that names another brings its packages."""
    listed = [
        "torch>=2.11",
        "nsa[data]; extra == 'stream'",
        "datasets>=5.2; extra == 'stream'",
        "pyarrow>=16; extra == 'data'",
        "matplotlib>=3.8; extra == 'plot'",
    ]
    assert needs_of("stream", listed) == ["pyarrow>=16", "datasets>=5.2"]
    assert needs_of("plot", listed) == ["matplotlib>=3.8"]
    assert install_line("plot") == "pip install -c constraints.txt -e '.[plot]'", "in a clone"
