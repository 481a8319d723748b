"""Fine-tuning: a new run starts from the weights of another one, and from nothing else of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa.config import Config, DataConfig
from nsa.data import open_data
from nsa.model import TinyLM
from nsa.records import TRAINING, VAL, TrainingRow, ValRow, read_metrics, read_rows
from nsa.tests.distributed.test_ranks import PLAIN, ROUNDING, config
from nsa.tests.distributed.test_ranks import train as train_ranks
from nsa.tests.support.nursery import Nursery
from nsa.tests.train.test_resume import losses, stopped, train, weights
from nsa.train import BadModelFile, load_model
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find, sharded_io
from nsa.train.checkpoint.commands import export_hf
from nsa.train.checkpoint.identity import INITIAL
from nsa.train.checkpoint.init_from import read_origin
from nsa.train.checkpoint.model_file import weights_sha256
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import lr_at
from nsa.train.runtime import resolve_runtime

BuildConfig = Callable[..., Config]
LONG = ("train.steps=6", "train.save_every=3", "train.eval_every=3")
OTHER = ("train.seed=7", "train.lr=0.01", "train.steps=4", "train.save_every=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with model.pt, a checkpoint file and a checkpoint folder of step 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(config(folder, *OTHER))
    content = checkpoint_file.read(folder / "checkpoint_step4.pt")
    content.pop("version")
    sharded_io.write(folder, content)
    return folder


def first_loss(cfg: Config, path: Path) -> float:
    """What a model says to the first batch of a run."""
    model, _ = load_model(path)
    data = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed)
    rows = data.train.batch(0, cfg.train.batch_size)
    with torch.no_grad():
        return next_token_loss(model, rows, resolve_runtime(cfg.runtime)).item()


@pytest.mark.parametrize("name", ["model.pt", "checkpoint_step4.pt", "checkpoint_step4", "."])
def test_the_first_loss_is_that_of_the_model(
    name: str, trained: Path, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    cfg = tiny_config(*LONG, f"train.init_from={trained / name}")
    result, printed = train(cfg)

    rows = read_rows(TrainingRow, tmp_path / "run" / TRAINING)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert result.metrics.loss_first == first_loss(cfg, trained / "model.pt")
    rates = [lr_at(row.step, cfg.train) for row in rows]
    assert [row.lr for row in rows] == pytest.approx(rates, rel=1e-6)
    before, _ = load_model(trained / "model.pt")
    assert not torch.equal(result.model.embed.weight, before.embed.weight)
    digest = weights_sha256(before.state_dict())
    assert f"(sha256 {digest[:12]}); the optimizer, the schedule" in printed
    assert printed.count("[init]") == 1
    metrics = read_metrics(tmp_path / "run")
    assert (metrics.init_sha256, metrics.resumed_at, metrics.step) == (digest, None, 6)
    assert Path(metrics.init_from or "").parent == trained
    content = find.read(tmp_path / "run" / "checkpoint_step3.pt")
    assert content["identity"][INITIAL] == digest
    assert content["optimizer"]["state"][0]["step"] == 3  # a new optimizer


def test_without_it_a_run_starts_from_random_weights(
    trained: Path, tiny_config: BuildConfig
) -> None:
    cfg = tiny_config()
    result, printed = train(cfg)
    assert "[init]" not in printed
    assert (result.metrics.init_from, result.metrics.init_sha256) == (None, None)
    assert losses(cfg)[0][1] > first_loss(cfg, trained / "model.pt") + 0.1


def test_a_fine_tuned_run_resumes_bit_for_bit_and_without_the_file(
    trained: Path, tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.pt"
    shutil.copy(trained / "model.pt", source)
    whole, parts = (
        tiny_config(*LONG, f"train.init_from={source}", f"train.out_dir={tmp_path / name}")
        for name in ("whole", "parts")
    )
    expected, _ = train(whole)
    stopped(parts, 2, monkeypatch)
    stopped(parts, 4, monkeypatch)  # the file is still there
    source.unlink()

    resumed, printed = train(parts)

    assert "4 of 6 steps are done" in printed
    assert f"[init] {source} is not used (and could not be: train.init_from: " in printed
    assert losses(parts) == losses(whole)
    assert read_rows(ValRow, tmp_path / "parts" / VAL) == read_rows(
        ValRow, tmp_path / "whole" / VAL
    )
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    digest = read_metrics(tmp_path / "whole").init_sha256
    assert digest and read_metrics(tmp_path / "parts").init_sha256 == digest
    content = checkpoint_file.read(tmp_path / "parts" / "checkpoint_step6.pt")
    assert content["identity"][INITIAL] == digest


def test_the_weights_identify_a_run_and_their_path_does_not(
    trained: Path, tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny_config(*LONG, f"train.init_from={trained / 'model.pt'}"), 4, monkeypatch)
    same = tiny_config(*LONG, f"train.init_from={trained / 'checkpoint_step4.pt'}")
    other = tiny_config(*LONG, f"train.init_from={trained / 'checkpoint_step2.pt'}")
    gone = tiny_config(*LONG, "train.init_from=gone/model.pt")
    for wanted in (other, tiny_config(*LONG)):
        with pytest.raises(ValueError, match=f"is of another run .{INITIAL}: "):
            train(wanted, resume="latest")
    with pytest.raises(BadModelFile, match="gone/model.pt does not exist"):
        train(gone, resume="none")
    assert checkpoint_file.steps_of(folder) == [4, 3]  # nothing was moved aside

    _, printed = train(same)

    assert "4 of 6 steps are done" in printed
    assert f"checkpoint_step4.pt is not used: the run resumes from {folder}" in printed


def test_weights_that_are_gone_do_not_stand_for_random_ones(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny_config(*LONG), 4, monkeypatch)
    gone = tiny_config(*LONG, "train.init_from=gone/model.pt")
    with pytest.raises(BadModelFile, match="gone/model.pt does not exist"):
        train(gone)
    assert checkpoint_file.steps_of(folder) == [4, 3]


def test_a_longer_context_with_another_rope_is_said_and_trained(
    trained: Path, tiny_config: BuildConfig
) -> None:
    cfg = tiny_config(
        *(f"train.init_from={trained / 'model.pt'}", "train.seq_len=64", "nsa.n_sel=4"),
        *("model.rope_base=50000", "model.rope_scale=2", "data.dataset=synthetic_copy"),
        *("train.optimizer=muon", "train.lr_schedule=constant", "model.embed_std=0.2"),
    )
    result, printed = train(cfg)
    assert result.metrics.step == 3
    assert (
        "[init] settings differ from those it was trained with: model.rope_base: 10000.0 there, "
        "50000.0 here; model.rope_scale: 1.0 there, 2.0 here; nsa.n_sel: 3 there, 4 here; "
        "train.seq_len: 32 there, 64 here\n"
    ) in printed
    assert "WARNING" not in printed


SHAPES = {
    "model.dim=24": "model.dim: 16 there, 24 here",
    "model.n_layers=3": "model.n_layers: 2 there, 3 here",
    "model.n_kv_groups=2": "model.n_kv_groups: 1 there, 2 here",
    "model.attention=dense": "model.attention: nsa there, dense here",
    "model.tie_embeddings=true": "model.tie_embeddings: False there, True here",
    "nsa.gate=sigmoid": "nsa.gate: softmax there, sigmoid here",
    "nsa.phi=mlp": "nsa.phi: avg there, mlp here",
}


def test_a_model_of_another_shape_is_refused_with_all_that_differs(
    trained: Path, tiny_config: BuildConfig
) -> None:
    start = f"train.init_from={trained / 'model.pt'}"
    for override, said in SHAPES.items():
        assert said in read_origin(tiny_config(start, override), 256).problem
    problem = read_origin(tiny_config(start), 300).problem
    assert "ids of data.tokenizer: 256 there, 300 here" in problem
    # As many numbers in every tensor, and another model.
    cfg = tiny_config(start, "model.n_heads=4", "model.d_k=4", "model.d_v=4", "train.seq_len=64")
    with pytest.raises(BadModelFile) as refused:
        train(cfg)
    assert (
        "has a model of another shape (model.n_heads: 2 there, 4 here; model.d_k: 8 there, 4 "
        "here; model.d_v: 8 there, 4 here); set these keys to match it, or"
    ) in str(refused.value)
    assert not Path(cfg.train.out_dir).exists()


def test_a_block_is_a_shape_where_it_is_compressed_by_an_mlp(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    train(tiny_config("nsa.phi=mlp", f"train.out_dir={tmp_path / 'mlp'}"))
    start = ("nsa.phi=mlp", f"train.init_from={tmp_path / 'mlp' / 'model.pt'}")
    assert "nsa.l: 8 there, 16 here" in read_origin(tiny_config(*start, "nsa.l=16"), 256).problem
    assert not read_origin(tiny_config(*start, "nsa.w=16"), 256).problem


def test_another_tokenizer_of_as_many_ids_is_said(
    trained: Path, tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataConfig, "vocab", 256)
    start = f"train.init_from={trained / 'model.pt'}"
    cfg = tiny_config(start, "data.tokenizer=other/tokenizer.json")
    [note] = read_origin(cfg, 256).notes
    assert note.startswith(
        "WARNING: it was trained with the tokenizer byte, but this run uses other/tokenizer.json"
    )


def _flip(path: Path, place: int = 1000) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_or_missing_file_is_named(
    trained: Path, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    _flip(copy / "checkpoint_step4.pt")
    _flip(copy / "checkpoint_step4" / "__0_0.distcp")
    (copy / "checkpoint_step2.json").unlink()
    (copy / "model.pt").write_bytes((trained / "model.pt").read_bytes()[:-3000])
    shutil.copy(trained / "model.pt", copy / "flipped.pt")
    weight = load_model(trained / "model.pt")[0].embed.weight.detach()
    _flip(copy / "flipped.pt", (copy / "flipped.pt").read_bytes().index(weight.numpy().tobytes()))
    (copy / "text.pt").write_text("no model")
    torch.save({"weights": {}}, copy / "foreign.pt")
    said = {
        "checkpoint_step4.pt": "does not have the sha256 of its manifest",
        "checkpoint_step4": "does not have the sha256 of its manifest",
        "checkpoint_step2.pt": "has no manifest",
        "checkpoint_step3.pt": "does not exist",
        "model.pt": "cannot be read as a model",
        "flipped.pt": "cannot be read as a model .the bytes of .* have changed",
        "text.pt": "cannot be read as a model",
        "foreign.pt": "has no weights with their config",
        "nowhere": "does not exist",
    }
    for name, problem in said.items():
        cfg = tiny_config(f"train.init_from={copy / name}")
        with pytest.raises(BadModelFile, match=rf"^train.init_from: .*{name}.*{problem}"):
            train(cfg)
        assert not Path(cfg.train.out_dir).exists()


def test_a_file_that_would_run_code_is_refused(tiny_config: BuildConfig, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"state_dict": Trap(), "cfg": {}}, tmp_path / "trap.pt")
    with pytest.raises(BadModelFile, match=r"trap.pt cannot be read as a model"):
        train(tiny_config(f"train.init_from={tmp_path / 'trap.pt'}"))
    assert not (tmp_path / "sprung").exists()


SHORT = ("train.steps=3", "train.save_every=0", "train.eval_every=0")


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_start_from_the_weights_that_the_first_has_read(
    strategy: str, trained: Path, nursery: Nursery, tmp_path: Path
) -> None:
    start = (*SHORT, f"train.init_from={trained / 'model.pt'}")
    train(config(tmp_path / "one", *start, "train.batch_size=4"))
    settings = ("train.batch_size=2", f"runtime.strategy={strategy}")

    codes, printed = train_ranks(nursery, tmp_path / "two", *start, *settings, **PLAIN)

    assert codes == [0, 0], printed
    assert printed.count("[init] weights from") == 1
    found, expected = (
        [row.loss for row in read_rows(TrainingRow, folder / TRAINING)]
        for folder in (tmp_path / "two" / "run", tmp_path / "one")
    )
    assert found == pytest.approx(expected, rel=ROUNDING)
    assert read_metrics(tmp_path / "two" / "run").init_sha256


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_make_a_dense_model_sparse_and_draw_the_same_indexer(
    strategy: str, nursery: Nursery, tmp_path: Path
) -> None:
    train(config(tmp_path / "dense", *OTHER, "model.attention=dense"))
    rule = ("model.rule=msa", "nsa.l_sel=16", "nsa.d_index=8", "train.steps=2", "train.lr=1e-9")
    start = (*rule, f"train.init_from={tmp_path / 'dense'}", f"runtime.strategy={strategy}")
    codes, printed = train_ranks(nursery, tmp_path / "two", *start, **PLAIN)
    assert codes == [0, 0], printed
    assert printed.count("the indexers of 2 layers start from random weights") == 1
    cfg = config(tmp_path, *rule)
    torch.manual_seed(cfg.train.seed)
    drawn = TinyLM.from_config(cfg, 256).state_dict()
    dense, found = (
        load_model(folder / "model.pt")[0].state_dict()
        for folder in (tmp_path / "dense", tmp_path / "two" / "run")
    )
    assert found.keys() == drawn.keys() and len(found) > len(dense)
    for name, weight in found.items():
        expected = dense.get(name, drawn[name])
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-7, msg=name)


def test_an_exported_folder_is_the_same_start_as_the_file(
    trained: Path, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    """Bit-equal weights: the same identity, the same first loss."""
    export_hf(trained, tmp_path / "folder")
    start = f"train.init_from={tmp_path / 'folder'}"
    cfg = tiny_config(start, *SHORT, "model.n_layers=2")
    origin = read_origin(cfg, 256)
    assert origin.problem == "" and origin.notes == [] and origin.fresh == []
    model, _ = load_model(trained / "model.pt")
    assert origin.sha256 == weights_sha256(model.state_dict())
    assert losses_of(cfg)[0] == pytest.approx(first_loss(cfg, trained / "model.pt"), rel=1e-6)


def losses_of(cfg: Config) -> list[float]:
    train(cfg)
    return [row.loss for row in read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)]


@pytest.mark.dist
def test_a_bad_file_ends_all_ranks_alike(nursery: Nursery, tmp_path: Path) -> None:
    start = f"train.init_from={tmp_path / 'none.pt'}"
    codes, printed = train_ranks(nursery, tmp_path / "bad", start)
    assert codes == [2, 2], printed
    assert printed.count(f"train.init_from: {tmp_path / 'none.pt'} does not exist") == 1
    assert not (tmp_path / "bad" / "run").exists()
