"""The YAML files say what the documentation and the runbooks say of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nsa.config import Config, known_keys, load_config, to_container
from nsa.config.load import REPOSITORY

CONFIGS = REPOSITORY / "configs"
MODEL_125M: dict[str, Any] = {
    "model.dim": 768,
    "model.n_layers": 12,
    "model.n_heads": 12,
    "model.n_kv_groups": 2,
    "model.d_k": 64,
    "model.d_v": 64,
    "model.tie_embeddings": False,
    "nsa.l": 32,
    "nsa.d": 16,
    "nsa.l_sel": 64,
    "nsa.n_sel": 16,
    "nsa.w": 512,
    "nsa.phi": "avg",
    "train.lr": 2.0e-4,
    "train.lr_schedule": "cosine",
    "train.warmup_steps": 2000,
    "train.weight_decay": 0.01,
    "train.grad_clip": 1.0,
    "train.seed": 1337,
    "runtime.precision": "bf16",
    "runtime.use_flash": True,
}
PRODUCTION = MODEL_125M | {
    "train.steps": 50000,
    "train.seq_len": 2048,
    "train.batch_size": 1,
    "train.accumulate_grad_batches": 1,
    "train.log_every": 20,
    "train.eval_every": 1000,
    "train.save_every": 5000,
    "train.out_dir": "artifacts/m7c_125m_2xa100_prod",
    "data.tokenizer": "byte",
    "runtime.gradient_checkpointing": False,
}
LARGE = MODEL_125M | {
    "train.steps": 200000,
    "train.seq_len": 4096,
    "train.log_every": 50,
    "train.eval_every": 2000,
    "train.save_every": 10000,
    "train.out_dir": "artifacts/m7c_125m",
    "data.tokenizer": "gpt2",
    "data.dataset": "fineweb_edu",
}


def by_vram(batch_size: int, accumulate: int, checkpointing: bool) -> dict[str, Any]:
    return LARGE | {
        "train.batch_size": batch_size,
        "train.accumulate_grad_batches": accumulate,
        "runtime.gradient_checkpointing": checkpointing,
    }


EXPECTED: dict[str, dict[str, Any]] = {
    "base.yaml": {
        "model.dim": 2560,
        "model.n_heads": 64,
        "model.n_kv_groups": 4,
        "model.d_k": 192,
        "model.d_v": 128,
        "nsa.l": 32,
        "nsa.d": 16,
        "nsa.l_sel": 64,
        "nsa.n_sel": 16,
        "nsa.w": 512,
    },
    "train_showcase.yaml": {
        "model.dim": 128,
        "model.n_layers": 1,
        "model.n_heads": 8,
        "model.n_kv_groups": 2,
        "model.d_k": 16,
        "model.d_v": 16,
        "nsa.l": 16,
        "nsa.d": 8,
        "nsa.l_sel": 32,
        "nsa.n_sel": 8,
        "nsa.w": 64,
        "train.steps": 200,
        "train.seq_len": 128,
        "train.batch_size": 8,
        "train.lr": 3.0e-4,
        "train.log_every": 20,
        "train.save_every": 0,
        "train.out_dir": "artifacts/train_showcase",
        "runtime.device": "auto",
        "runtime.precision": "fp32",
        "runtime.use_flash": False,
        "runtime.gradient_checkpointing": False,
    },
    "quickstart.yaml": {
        "data.dataset": "shakespeare",
        "data.tokenizer": "byte",
        "train.out_dir": "artifacts/quickstart",
        "runtime.precision": "fp32",
    },
    "m7c_125m_2xa100_production.yaml": PRODUCTION,
    "m7c_125m_2xa100_production_tuned.yaml": PRODUCTION | {"train.batch_size": 4},
    "m7c_125m_80g.yaml": by_vram(4, 2, False),
    "m7c_125m_40g.yaml": by_vram(2, 4, True),
    "m7c_125m_24g.yaml": by_vram(1, 8, True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shipped_config_has_its_documented_values(name: str) -> None:
    container = to_container(load_config(CONFIGS / name, environ={}))

    values = {f"{g}.{k}": v for g, keys in container.items() for k, v in keys.items()}

    assert {key: values[key] for key in EXPECTED[name]} == EXPECTED[name]


def test_every_shipped_config_is_in_this_table() -> None:
    assert {path.name for path in CONFIGS.glob("*.yaml")} == EXPECTED.keys()


def test_base_states_every_key_at_its_default() -> None:
    text = (CONFIGS / "base.yaml").read_text(encoding="utf-8")
    stated = re.findall(r"^  (\w+):", text, flags=re.MULTILINE)

    assert load_config(CONFIGS / "base.yaml", environ={}) == Config()
    assert stated == [key.partition(".")[2] for key in known_keys()]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_other_configs_inherit_and_stay_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()

    assert path.name == "base.yaml" or any(line.startswith("inherits:") for line in lines)
    assert path.name == "base.yaml" or len(lines) <= 30


def test_quickstart_is_really_sparse() -> None:
    config = load_config(CONFIGS / "quickstart.yaml", environ={})

    assert config.nsa.n_sel * config.nsa.l_sel < config.train.seq_len
    assert config.nsa.w < config.train.seq_len
