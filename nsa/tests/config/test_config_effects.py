"""Every config key does something: with another value, a tiny real run does something else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from nsa.config import known_keys
from nsa.tests.support import fake_tracker
from nsa.tests.support.effects import Fingerprint, fingerprint
from nsa.train import build

Usual = Callable[[tuple[str, ...]], Fingerprint]

EFFECTS: dict[str, tuple[str, str]] = {  # key: (another value, what it must change)
    "model.dim": ("24", "weights"),
    "model.n_layers": ("3", "weights"),
    "model.n_heads": ("2", "weights"),
    "model.n_kv_groups": ("1", "weights"),
    "model.d_k": ("6", "weights"),
    "model.d_v": ("6", "weights"),
    "model.mlp_dim": ("24", "weights"),
    "model.mlp": ("gated", "weights"),
    "model.norm_eps": ("0.5", "losses"),
    "model.qkv_bias": ("true", "weights"),
    "model.qk_norm": ("true", "weights"),
    "model.attention": ("dense", "weights"),
    "model.rule": ("pooled", "weights"),
    "model.kv": ("shared", "weights"),
    "model.tie_embeddings": ("true", "weights"),
    "model.embed_std": ("0.3", "losses"),
    "model.rope_base": ("100", "losses"),
    "model.rope_scale": ("8", "losses"),
    "model.rope_scaling": ("llama3", "losses"),
    "model.rope_original_len": ("64", "losses"),
    "model.rope_low_freq": ("0.5", "losses"),
    "model.rope_high_freq": ("40", "losses"),
    "nsa.l": ("16", "losses"),
    "nsa.d": ("8", "losses"),
    "nsa.l_sel": ("16", "losses"),
    "nsa.n_sel": ("4", "losses"),
    "nsa.w": ("16", "losses"),
    "nsa.phi": ("mlp", "weights"),
    "nsa.gate": ("sigmoid", "losses"),
    "nsa.num_first": ("0", "losses"),
    "nsa.num_local": ("1", "losses"),
    "nsa.pool": ("moba", "losses"),
    "nsa.pool_block": ("32", "losses"),
    "nsa.d_index": ("6", "weights"),
    "train.index_loss": ("4", "weights"),
    "train.index_lr": ("0.3", "weights"),
    "train.index_warmup_steps": ("2", "losses"),
    "train.index_warmup": ("frozen", "weights"),
    "train.steps": ("3", "losses"),
    "train.seq_len": ("48", "losses"),
    "train.batch_size": ("3", "losses"),
    "train.accumulate_grad_batches": ("2", "losses"),
    "train.optimizer": ("muon", "weights"),
    "train.lr": ("0.02", "rates"),
    "train.lr_schedule": ("constant", "rates"),
    "train.warmup_steps": ("2", "rates"),
    "train.decay_steps": ("3", "rates"),
    "train.weight_decay": ("0.5", "weights"),
    "train.grad_clip": ("0.001", "weights"),
    "train.spike_rule": ("skip", "weights"),
    "train.spike_threshold": ("1e-6", "weights"),
    "train.spike_window": ("4", "weights"),
    "train.log_every": ("2", "losses"),
    "train.eval_every": ("1", "evaluations"),
    "train.eval_batches": ("2", "evaluations"),
    "train.save_every": ("2", "files"),
    "train.keep_last": ("1", "files"),
    "train.backup_dir": ("", "files"),  # the test gives a folder
    "train.tracker": ("trackio", "files"),  # test_trackers.py looks at what it gets
    "train.init_from": ("", "losses"),  # the test gives the model of another run
    "train.seed": ("7", "losses"),
    "train.out_dir": ("", "files"),  # the test gives another folder
    "data.dataset": ("synthetic", "losses"),
    "data.local_path": ("nowhere", "refused"),  # test_sources.py and test_shards.py read from it
    "data.hub_dataset": ("nowhere", "refused"),  # test_fineweb_stream.py reads from one
    "data.hub_subset": ("nowhere", "refused"),
    "data.hub_revision": ("nowhere", "refused"),
    "data.tokenizer": ("nowhere/tokenizer.json", "refused"),
    "data.tokenizer_path": ("nowhere", "refused"),  # test_tokenizers.py reads from it
    "data.eos": ("<end>", "refused"),  # test_tokenizers.py ends documents with it
    "data.respect_documents": ("true", "losses"),
    "runtime.device": ("cuda:99", "refused"),
    "runtime.precision": ("bf16", "losses"),
    "runtime.use_flash": ("false", "plan"),
    "runtime.gradient_checkpointing": ("true", "kept"),
    "runtime.gc_layers": ("0:1", "kept"),
    "runtime.backend": ("reference", "plan"),
    "runtime.compile": ("true", "plan"),
    "runtime.deterministic": ("true", "plan"),  # test_gpu_repeat.py has what it changes there
    "runtime.strategy": ("fsdp", "refused"),  # test_fsdp.py has ranks
    "runtime.cp": ("2", "refused"),  # test_mesh.py has ranks
    "runtime.tp": ("2", "refused"),
    "runtime.cuda_graph": ("true", "refused"),  # test_graph_step.py has one on a GPU
}
MANY_STEPS = ("train.steps=12", "train.lr=1e-6")  # noise alone decides what is above the median
MSA = ("model.rule=msa", "nsa.l_sel=16", "nsa.d_index=8")
GIVEN: dict[str, tuple[str, ...]] = {
    "runtime.gc_layers": ("runtime.gradient_checkpointing=true", "model.n_layers=2"),
    "train.keep_last": ("train.save_every=1",),
    "train.decay_steps": ("train.lr_schedule=wsd",),
    "train.backup_dir": ("train.save_every=2",),
    "train.spike_rule": (*MANY_STEPS, "train.spike_threshold=1e-6", "train.spike_window=4"),
    "train.spike_threshold": (*MANY_STEPS, "train.spike_rule=skip", "train.spike_window=4"),
    "train.spike_window": (*MANY_STEPS, "train.spike_rule=skip", "train.spike_threshold=1e-6"),
    "data.respect_documents": ("train.seq_len=256", "train.seed=3"),  # a document ends in its rows
    "model.rule": ("nsa.l_sel=16",),
    "model.kv": ("nsa.l_sel=16",),
    "nsa.pool": ("model.rule=pooled", "nsa.l_sel=16", "nsa.pool_block=16", "train.seq_len=96"),
    "nsa.pool_block": (
        *("model.rule=pooled", "nsa.pool=moba", "nsa.l_sel=16", "nsa.n_sel=4"),
        *("nsa.pool_block=16", "train.seq_len=96"),
    ),
    **dict.fromkeys(
        ("model.rope_original_len", "model.rope_low_freq", "model.rope_high_freq"),
        ("model.rope_scaling=llama3", "model.rope_scale=8", "model.rope_original_len=32"),
    ),
    "model.rope_scaling": ("model.rope_scale=8",),
    "nsa.d_index": MSA,
    "train.index_loss": MSA,
    "train.index_lr": MSA,
    "train.index_warmup_steps": (*MSA, "train.seq_len=96"),
    "train.index_warmup": (*MSA, "train.index_warmup_steps=2"),
}
"""Settings without which a key is refused or shows nothing, on both sides of the comparison."""
ONLY = {
    "train.log_every": {"losses", "rates"},
    "train.eval_every": {"evaluations"},
    "train.eval_batches": {"evaluations"},
    "train.save_every": {"files"},
    "train.keep_last": {"files"},
    "train.backup_dir": {"files"},
    "train.tracker": {"files"},
    "train.out_dir": {"files"},
    "runtime.use_flash": {"plan"},
    "runtime.gradient_checkpointing": {"kept"},
    "runtime.gc_layers": {"kept"},
}
"""Keys that must change nothing else: they never touch what is learned."""


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Usual:
    """Run each set of given settings once."""

    @cache
    def usual_run(given: tuple[str, ...]) -> Fingerprint:
        return fingerprint(tmp_path_factory.mktemp("usual") / "a", *given)

    return usual_run


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 says so
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's tracer ...
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # ... warns about itself
@pytest.mark.parametrize("key", EFFECTS)
def test_another_value_changes_the_run(
    key: str, usual: Usual, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BACKEND", "eager")  # test_compile.py has the others
    value, field = EFFECTS[key]
    given = GIVEN.get(key, ())
    if key in ("train.out_dir", "train.backup_dir"):
        value = str(tmp_path / "a" / "elsewhere")
    if key == "train.init_from":
        fingerprint(tmp_path / "b", "train.seed=7")
        value = str(tmp_path / "b" / "run" / "model.pt")
    if key == "train.tracker":
        fake_tracker.install(value, tmp_path, monkeypatch)

    other = fingerprint(tmp_path / "a", *given, f"{key}={value}")

    changed = usual(given).differences(other)
    assert field in changed
    assert changed == ONLY.get(key, changed)
    assert bool(other.refused) == (field == "refused"), other.refused


def test_every_key_is_in_the_table() -> None:
    assert EFFECTS.keys() == known_keys().keys()


def test_a_run_repeats_itself(usual: Usual, tmp_path: Path) -> None:
    """Without this, a difference would prove nothing."""
    assert usual(()).differences(fingerprint(tmp_path / "a")) == set()
