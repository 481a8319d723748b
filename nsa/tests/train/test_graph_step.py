"""An update as a function: the same as the loop's, and the same again as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from nsa.config import Config
from nsa.model import AttentionStats, TinyLM
from nsa.records import TRAINING, TrainingRow, read_rows
from nsa.tests.support.gpu import needs_gpu
from nsa.train import run
from nsa.train.build import build_step
from nsa.train.optimizer import build_optimizer, load_optimizer, lr_at, set_lr
from nsa.train.runtime import Runtime, resolve_runtime
from nsa.train.spikes import Spikes
from nsa.train.step import WARM_UP, EagerStep, GraphStep, MicroBatch, Updated

BuildConfig = Callable[..., Config]
CPU = torch.device("cpu")


def make(
    cfg: Config, *, captured: bool = False, share: GraphStep | None = None
) -> EagerStep | GraphStep:
    """A step with a model of its own; the weights are the same every time."""
    torch.manual_seed(cfg.train.seed)
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v), cfg.model.attention_kind)
    model = TinyLM.from_config(cfg, 256).to(runtime.device).train()
    cfg = replace(cfg, runtime=replace(cfg.runtime, cuda_graph=captured))
    return build_step(cfg, model, runtime, share=share)


def batches_of(cfg: Config, num_steps: int) -> list[list[MicroBatch]]:
    """By update, its micro-batches."""
    generator = torch.Generator().manual_seed(1)
    train = cfg.train
    size = (num_steps, train.accumulate_grad_batches, train.batch_size, train.seq_len + 1)
    rows = torch.randint(256, size, generator=generator)
    rows = rows.pin_memory() if cfg.runtime.device == "cuda" else rows
    return [[MicroBatch(part) for part in update] for update in rows]


def test_an_eager_step_is_the_update_of_the_loop(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.accumulate_grad_batches=2", "train.eval_every=0", "train.lr=0.01")
    with open("/dev/null", "w", encoding="utf-8") as out:
        result = run(cfg, config_path="tiny.yaml", out=out)
    logged = [row.loss for row in read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)]
    from nsa.data import open_data

    rows = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed).train
    step = make(cfg)
    losses = []
    for number in range(1, cfg.train.steps + 1):
        first = (number - 1) * 4
        batches = [MicroBatch(rows.batch(first + i, 2)) for i in (0, 2)]
        losses.append(step(batches, lr_at(number, cfg.train)).loss.item())
    assert losses == pytest.approx(logged, abs=1e-6)  # the file has six digits
    for (name, ours), theirs in zip(
        step.model.named_parameters(), result.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_step_whose_loss_is_not_finite_changes_nothing(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    step, batch = make(cfg), batches_of(cfg, 1)[0]
    with torch.no_grad():
        step.model.norm.weight[0] = torch.inf
    before = [p.clone() for p in step.model.parameters()]
    loss = step(batch, 0.1).loss
    assert not loss.isfinite()
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("device", "precision", "capturable", "said"),
    [
        ("cpu", "fp32", True, "cannot run on cpu; it needs a CUDA device: use EagerStep"),
        ("cuda", "fp16", True, "use bf16 or fp32"),
        ("cuda", "bf16", False, r"build_optimizer\(..., capturable=True\)"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(
    device: str, precision: str, capturable: bool, said: str, tiny_config: BuildConfig
) -> None:
    cfg = tiny_config()
    model = TinyLM.from_config(cfg, 256)
    runtime = Runtime(device=torch.device(device), precision=precision, use_flash=True, plan="")
    optimizer = build_optimizer(model, cfg.train, capturable=capturable)
    with pytest.raises(ValueError, match=said):
        unused = GradScaler(enabled=False), Spikes(cfg.train, CPU)
        GraphStep(model, optimizer, runtime, 1.0, *unused)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    optimizer = build_optimizer(TinyLM.from_config(cfg, 256), cfg.train)
    rate = torch.zeros(())
    optimizer.param_groups[0]["lr"] = rate
    set_lr(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5
    assert optimizer.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_of_a_graph_is_loaded_by_an_eager_run(
    optimizer: str, tiny_config: BuildConfig
) -> None:
    """Its rate is a tensor, and its optimizer was built for graphs; neither goes over."""
    cfg = tiny_config(f"train.optimizer={optimizer}")
    captured, eager = (
        build_optimizer(TinyLM.from_config(cfg, 256), cfg.train, capturable=graph)
        for graph in (True, False)
    )
    for group in captured.param_groups:
        assert group["capturable"]
        group["lr"] = torch.tensor(0.25)

    load_optimizer(eager, captured.state_dict())

    assert not any(group["capturable"] for group in eager.param_groups)
    assert {group["lr"] for group in eager.param_groups} == {cfg.train.lr}


ON_GPU = (
    *("runtime.device=cuda", "train.seq_len=96", "train.batch_size=4"),
    "nsa.n_sel=12",  # selects everything: rounding cannot choose another block
)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-4), ("bf16", 5e-3)])
@pytest.mark.gpu
@needs_gpu[1]
def test_a_graph_has_the_losses_of_the_eager_loop(
    attention: str,
    optimizer: str,
    accumulate: int,
    precision: str,
    rounding: float,
    tiny_config: BuildConfig,
) -> None:
    cfg = tiny_config(
        *ON_GPU,
        *(f"model.attention={attention}", f"runtime.precision={precision}"),
        f"train.optimizer={optimizer}",
        *("model.dim=64", "model.n_heads=4", "model.n_kv_groups=2", "model.d_k=16"),
        *("model.d_v=16", "nsa.l=16", "nsa.d=8", "nsa.l_sel=16", "nsa.n_sel=8", "nsa.w=32"),
        f"train.accumulate_grad_batches={accumulate}",
    )
    steps = [make(cfg), make(cfg, captured=True)]
    found: list[list[Updated]] = [[], []]
    for number, batch in enumerate(batches_of(cfg, WARM_UP + 7)):
        rate = 3e-3 * (1 + number % 3)  # a rate that were captured would show
        for step, results in zip(steps, found, strict=True):
            results.append(step(batch, rate))
    graph = steps[1]
    assert isinstance(graph, GraphStep) and graph.captured
    for eager, replayed in zip(*found, strict=True):
        torch.testing.assert_close(replayed.loss, eager.loss, rtol=rounding, atol=0)
        torch.testing.assert_close(replayed.norm, eager.norm, rtol=20 * rounding, atol=0)
    assert len({one.loss.item() for one in found[1]}) == WARM_UP + 7  # none was written over


@pytest.mark.gpu
@needs_gpu[1]
def test_a_replay_obeys_its_rate_skips_what_is_not_finite_and_refuses_another_shape(
    tiny_config: BuildConfig,
) -> None:
    cfg = tiny_config(*ON_GPU, "runtime.precision=bf16")
    step = make(cfg, captured=True)
    batches = batches_of(cfg, WARM_UP + 2)
    for batch in batches[:-1]:
        step(batch, 1e-3)
    parameters = list(step.model.parameters())
    before = [p.clone() for p in parameters]
    step(batches[-1], 0.0)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    step(batches[-1], 1e-3)
    assert not any(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    with torch.no_grad():
        step.model.norm.weight[0] = torch.inf
    before = [p.clone() for p in parameters]
    loss = step(batches[-1], 1e-3).loss
    assert not loss.isfinite()
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    with pytest.raises(ValueError, match="a graph takes one shape"):
        step([MicroBatch(part.rows[:2]) for part in batches[-1]], 1e-3)


@pytest.mark.gpu
@needs_gpu[1]
def test_a_step_with_statistics_runs_beside_the_graph(tiny_config: BuildConfig) -> None:
    cfg = tiny_config(*ON_GPU, "runtime.precision=fp32")
    eager, graph = make(cfg), make(cfg, captured=True)
    for number, batch in enumerate(batches_of(cfg, WARM_UP + 6)):
        stats = AttentionStats() if number in (0, WARM_UP + 2) else None
        expected, found = eager(batch, 1e-3)[0], graph(batch, 1e-3, stats)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
        if stats is not None:
            assert stats.summary()["total_gates"] == 2 * 4 * 96 * 2


@pytest.mark.gpu
@needs_gpu[1]
def test_two_graphs_that_share_memory_do_not_disturb_each_other(tiny_config: BuildConfig) -> None:
    cfg = tiny_config(*ON_GPU, "runtime.precision=fp32")
    eager, first = make(cfg), make(cfg, captured=True)
    assert isinstance(first, GraphStep)
    second = make(cfg, captured=True, share=first)
    for batch in batches_of(cfg, WARM_UP + 5):
        expected = eager(batch, 1e-3)[0]
        for step in (first, second):
            torch.testing.assert_close(step(batch, 1e-3)[0], expected, rtol=1e-4, atol=0)
