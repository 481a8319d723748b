"""data.respect_documents: a row of two documents trains as the two documents alone would."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa.config import Config
from nsa.data import open_data, packed_bounds
from nsa.model import TinyLM
from nsa.records import TRAINING, TrainingRow, read_rows
from nsa.tests.train.test_resume import stopped
from nsa.train import TrainResult, run
from nsa.train.loss import next_token_loss
from nsa.train.runtime import resolve_runtime

BuildConfig = Callable[..., Config]
EOS = 0


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Short texts, so that every row holds several; each is its own."""
    path = tmp_path / "documents.jsonl"
    lines = (json.dumps({"text": f"document {i:03d} says {i * i}"}) for i in range(400))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def with_documents(build: BuildConfig, path: Path, *overrides: str) -> Config:
    source = ("data.dataset=fineweb_edu_local", f"data.local_path={path}")
    return build(*source, "train.steps=6", "train.eval_every=3", *overrides)


def train(cfg: Config, **options: object) -> TrainResult:
    return run(cfg, config_path="tiny.yaml", out=io.StringIO(), **options)  # type: ignore[arg-type]


def row_of(*lengths: int) -> Tensor:  # [1, sum + 1]
    """Random documents that end with the end mark, and the first token of one more."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(1, 256, (length - 1,), generator=generator) for length in lengths]
    ends = [torch.cat([part, torch.tensor([EOS])]) for part in parts]
    return torch.cat([*ends, torch.tensor([7])])[None]


@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_the_loss_of_a_row_is_that_of_its_documents_alone(
    phi: str, tiny_config: BuildConfig
) -> None:
    """Weighted by their tokens; each brings the token after its end mark as its last target."""
    cfg = tiny_config("nsa.gate=sigmoid", f"nsa.phi={phi}")
    runtime = resolve_runtime(cfg.runtime)
    torch.manual_seed(0)
    model = TinyLM.from_config(cfg, 256).double()
    row, lengths = row_of(21, 30), (21, 30)

    def loss(rows: Tensor, bounds: Tensor | None = None) -> float:
        return next_token_loss(model, rows, runtime, bounds=bounds).item()

    alone = [loss(row[:, :22]), loss(row[:, 21:])]
    expected = sum(n * x for n, x in zip(lengths, alone, strict=True)) / sum(lengths)

    assert loss(row, packed_bounds(row, EOS)) == pytest.approx(expected, rel=1e-6)
    assert abs(loss(row) - expected) > 1e-4


def test_rows_of_a_batch_stay_apart(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    runtime = resolve_runtime(cfg.runtime)
    torch.manual_seed(0)
    model = TinyLM.from_config(cfg, 256)
    batch = torch.cat([row_of(11, 20), row_of(31).flip(1)])
    alone = [next_token_loss(model, b[None], runtime, None, packed_bounds(b[None], EOS)).item()
             for b in batch]  # fmt: skip

    together = next_token_loss(model, batch, runtime, None, packed_bounds(batch, EOS)).item()

    assert packed_bounds(batch, EOS).tolist() == [0, 11, 31, 33, 62]
    assert together == pytest.approx(sum(alone) / 2, rel=1e-6)


def test_a_run_respects_documents_only_when_told(tiny_config: BuildConfig, documents: Path) -> None:
    usual = train(with_documents(tiny_config, documents)).metrics
    packed = train(with_documents(tiny_config, documents, "data.respect_documents=true")).metrics
    assert packed.val_loss is not None and usual.val_loss is not None
    assert packed.loss_first != usual.loss_first
    assert abs(packed.val_loss - usual.val_loss) > 1e-5
    assert math.isclose(packed.loss_first or 0, usual.loss_first or 0, rel_tol=0.05)


def test_documents_stay_apart_in_the_data_of_a_run(
    tiny_config: BuildConfig, documents: Path
) -> None:
    cfg = with_documents(tiny_config, documents, "data.respect_documents=true")
    data = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed)
    batch = data.train.batch(0, 3)
    bounds = data.bounds(batch)
    assert bounds is not None and bounds.device.type == "cpu" and bounds.dtype == torch.int32
    inside = set(bounds.tolist()) - {0, 32, 64, 96}
    inputs = batch[:, :-1].flatten()
    assert inside and all(inputs[i - 1] == EOS for i in inside)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_with_documents_is_exact(
    accumulate: int,
    tiny_config: BuildConfig,
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = (
        "data.respect_documents=true",
        "runtime.gradient_checkpointing=true",
        f"train.accumulate_grad_batches={accumulate}",
    )
    whole, parts = (
        with_documents(tiny_config, documents, *settings, f"train.out_dir={tmp_path / name}")
        for name in ("whole", "parts")
    )
    expected = train(whole)
    stopped(parts, 4, monkeypatch)
    resumed = train(parts)
    assert resumed.metrics.resumed_at == 4
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    rows = [read_rows(TrainingRow, tmp_path / name / TRAINING) for name in ("whole", "parts")]
    assert [row.loss for row in rows[0]] == [row.loss for row in rows[1]]


def test_a_checkpoint_without_the_option_is_of_another_run(
    tiny_config: BuildConfig, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(with_documents(tiny_config, documents), 4, monkeypatch)
    other = with_documents(tiny_config, documents, "data.respect_documents=true")
    with pytest.raises(ValueError, match="data.respect_documents: absent there, True here"):
        train(other, resume="latest")
