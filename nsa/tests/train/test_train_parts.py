"""The parts of training by themselves: schedule, optimizer, guard, evaluation, device, progress."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.config import Config, ConfigError, RuntimeConfig, TrainConfig
from nsa.data import ByteTokenizer, Data, open_data
from nsa.data.array_rows import AnyOrder
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.records import GpuReading, TrainingRow
from nsa.train import RunRefused, run
from nsa.train import loss as loss_functions
from nsa.train.build import build_step
from nsa.train.errors import LONG_STEPS, refuse_waste
from nsa.train.loss import Evaluation, evaluate, next_token_loss
from nsa.train.optimizer import build_optimizer, clip_gradients, lr_at, set_lr
from nsa.train.progress import (
    FetchTimes,
    HangupSafeStream,
    Progress,
    StepReport,
    clock,
    fill_lines,
    step_line,
    step_numbers,
)
from nsa.train.runtime import resolve_runtime
from nsa.train.step import MicroBatch


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def tiny_model(cfg: Config) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM.from_config(cfg, vocab=256)


def test_wsd_stays_and_then_falls_to_zero_after_the_last_step() -> None:
    train = TrainConfig(steps=100, warmup_steps=10, lr=1.0, lr_schedule="wsd", decay_steps=20)
    rates = [lr_at(step, train) for step in range(1, 101)]
    assert rates[9:80] == [1.0] * 71
    assert rates[80] == pytest.approx(20 / 21) and rates[99] == pytest.approx(1 / 21)
    default = TrainConfig(steps=100, lr=1.0, lr_schedule="wsd")
    assert lr_at(80, default) == 1.0 > lr_at(81, default)


@pytest.mark.parametrize("chosen", [True, False])
def test_deterministic_algorithms_are_on_in_the_run_alone(
    chosen: bool, tiny_config: Callable[..., Config]
) -> None:
    seen: list[bool] = []

    def sampler(*given: object) -> str:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return ""

    cfg = tiny_config("train.steps=1", f"runtime.deterministic={str(chosen).lower()}")
    run(cfg, config_path="tiny.yaml", out=io.StringIO(), sampler=sampler)
    assert seen == [chosen]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    train = TrainConfig(steps=100, warmup_steps=10, lr=1.0)
    assert [lr_at(step, train) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_falls_from_the_peak_to_nearly_zero() -> None:
    train = TrainConfig(steps=100, warmup_steps=10, lr=1.0)
    rates = [lr_at(step, train) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert lr_at(55, train) == pytest.approx(0.5, abs=0.02)
    assert 0 < rates[-1] < 0.001


def test_constant_rate_stays_after_the_warm_up() -> None:
    train = TrainConfig(steps=100, warmup_steps=2, lr=0.5, lr_schedule="constant")
    assert [lr_at(step, train) for step in (1, 2, 3, 100)] == [0.25, 0.5, 0.5, 0.5]


def test_schedule_without_warm_up_and_with_warm_up_only() -> None:
    assert lr_at(1, TrainConfig(steps=1, lr=1.0)) == pytest.approx(0.5)
    assert lr_at(5, TrainConfig(steps=5, warmup_steps=5, lr=1.0)) == 1.0


@pytest.mark.parametrize("tied", ["true", "false"])
def test_weight_decay_spares_norms_biases_and_embeddings(
    tiny_config: Callable[..., Config], tied: str
) -> None:
    cfg = tiny_config("train.weight_decay=0.5", f"model.tie_embeddings={tied}", "nsa.phi=mlp")
    model = tiny_model(cfg)
    groups = build_optimizer(model, cfg.train).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert len(decay) == len(names)
    assert names["embed.weight"] == 0.0
    assert names["norm.weight"] == names["blocks.0.norm1.weight"] == 0.0
    assert names["blocks.0.attn.gate.bias"] == 0.0
    assert names["blocks.0.attn.qkv.weight"] == names["blocks.1.mlp.fc2.weight"] == 0.5


def test_set_lr_reaches_every_group(tiny_config: Callable[..., Config]) -> None:
    optimizer = build_optimizer(tiny_model(tiny_config()), TrainConfig())
    set_lr(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize(("max_norm", "after"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping_scales_down_only_and_reports_the_norm_before(
    max_norm: float, after: float
) -> None:
    layer = torch.nn.Linear(1, 2, bias=False)
    layer.weight.grad = torch.tensor([[3.0], [4.0]])
    assert clip_gradients(layer, max_norm).item() == pytest.approx(5.0)
    assert layer.weight.grad.norm().item() == pytest.approx(after, abs=1e-5)


def test_backward_runs_in_the_thread_of_the_step(tiny_config: Callable[..., Config]) -> None:
    cfg = tiny_config()
    model = tiny_model(cfg).train()
    runtime = resolve_runtime(cfg.runtime, (8, 8), cfg.model.attention_kind)
    step = build_step(cfg, model, runtime)
    seen: list[bool] = []
    parameter = next(iter(model.parameters()))
    parameter.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
    step([MicroBatch(torch.randint(256, (2, 33)))], 1e-3)
    assert seen and not any(seen) and torch._C._is_multithreading_enabled()


def test_long_run_without_checkpoints_is_refused(tiny_config: Callable[..., Config]) -> None:
    cfg = tiny_config(f"train.steps={LONG_STEPS}")
    with pytest.raises(RunRefused, match=r"5000 steps with train.save_every=0") as refused:
        refuse_waste(cfg, LONG_STEPS, config_path="x.yaml", config_named=True)
    assert refused.value.exit_code == 3
    refuse_waste(cfg, LONG_STEPS - 1, config_path="x.yaml", config_named=True)


def test_long_run_with_a_config_that_nobody_named_is_refused(
    tiny_config: Callable[..., Config],
) -> None:
    cfg = tiny_config(f"train.steps={LONG_STEPS}", "train.save_every=100")
    with pytest.raises(RunRefused, match=r"x.yaml, which is only the default"):
        refuse_waste(cfg, LONG_STEPS, config_path="x.yaml", config_named=False)
    refuse_waste(cfg, LONG_STEPS, config_path="x.yaml", config_named=True)


def test_loss_is_the_mean_over_all_targets_of_a_row(tiny_config: Callable[..., Config]) -> None:
    cfg = tiny_config()
    model, runtime = tiny_model(cfg), resolve_runtime(cfg.runtime)
    batch = open_data(cfg.data, 32, 0).train.batch(0, 3)  # [3, 33]
    log_p = model(batch[:, :32]).detach().double().log_softmax(-1)  # [3, 32, 256]
    expected = -sum(log_p[b, t, batch[b, t + 1]] for b in range(3) for t in range(32)) / 96
    assert next_token_loss(model, batch, runtime).item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_statistics_in_their_own_pass_are_of_the_first_rows(
    packed: bool, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_functions, "SAMPLE", 2 * 64)
    cfg = tiny_config()
    model, runtime = tiny_model(cfg), resolve_runtime(cfg.runtime)
    batch = torch.randint(256, (3, 65), generator=torch.Generator().manual_seed(3))
    bounds = torch.tensor([0, 50, 100, 150, 192], dtype=torch.int32) if packed else None
    found, expected = AttentionStats(maps=True), AttentionStats(maps=True)
    loss_functions.collect_stats(model, batch, runtime, found, bounds)

    rows = batch[:2, :-1]
    cut = None
    if packed:
        rows, cut = rows.reshape(1, -1), torch.tensor([0, 50, 100, 128], dtype=torch.int32)
    model.hidden(rows, cu_seqlens=cut, stats=expected)
    assert found.per_layer() == expected.per_layer()
    assert found.selection_maps() == expected.selection_maps()
    assert found.summary()["total_gates"] == cfg.model.n_layers * cfg.model.n_heads * 128


def test_evaluation_is_the_mean_over_different_rows(tiny_config: Callable[..., Config]) -> None:
    cfg = tiny_config("train.eval_batches=3", "train.batch_size=2")
    model, runtime = tiny_model(cfg), resolve_runtime(cfg.runtime)
    rows = open_data(cfg.data, 32, 0).val
    model.train()
    found = evaluate(model, Data(rows, rows, ByteTokenizer()), cfg.train, runtime)
    expected = next_token_loss(model, rows.batch(0, 6), runtime).item()
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.num_tokens == 6 * 32
    assert model.training


def test_evaluation_counts_no_row_twice(tiny_config: Callable[..., Config]) -> None:
    class FiveRows(AnyOrder):
        num_rows = 5

        def batch(self, position: int, size: int) -> Tensor:
            seen.extend(range(position, position + size))
            return torch.zeros(size, 33, dtype=torch.int64)

        def fingerprint(self) -> str:
            return "five"

    seen: list[int] = []
    cfg = tiny_config("train.eval_batches=100", "train.batch_size=2")
    data = Data(FiveRows(), FiveRows(), ByteTokenizer())
    found = evaluate(tiny_model(cfg), data, cfg.train, resolve_runtime(cfg.runtime))
    assert seen == [0, 1, 2, 3, 4]
    assert found.num_tokens == 5 * 32


def test_bits_per_byte_count_the_bytes_of_the_text(tiny_config: Callable[..., Config]) -> None:
    class Pairs:
        """Every id but the end mark stands for two bytes."""

        name, vocab, eos = "pairs", 255, 254

        def encode(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
            raise NotImplementedError

        def decode(self, ids: Iterable[int]) -> str:
            return "ab" * len(list(ids))

        def token_bytes(self, token: int) -> bytes:
            return b"ab"

        def fingerprint(self) -> str:
            return "pairs"

    class Rows(AnyOrder):
        num_rows = 1

        def fingerprint(self) -> str:
            return "rows"

        def batch(self, position: int, size: int) -> Tensor:
            return torch.tensor([[1, 2, 3, 254, 4]])

    cfg = tiny_config("train.eval_batches=1", "train.batch_size=1", "train.seq_len=4")
    data = Data(Rows(), Rows(), Pairs())
    found = evaluate(tiny_model(cfg), data, cfg.train, resolve_runtime(cfg.runtime))
    assert (found.num_tokens, found.num_bytes) == (4, 7)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * 4 / 7)


def test_evaluation_speaks_in_nats_perplexity_and_bits() -> None:
    found = Evaluation(loss=math.log(8), num_tokens=1, num_bytes=1)
    assert found.ppl == pytest.approx(8.0)
    assert found.bits_per_byte == pytest.approx(3.0)
    assert Evaluation(loss=1e6, num_tokens=1, num_bytes=1).ppl == math.inf


def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runtime.device=cuda:99: this machine has"):
        resolve_runtime(RuntimeConfig(device="cuda:99"))


def test_auto_takes_the_gpu_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_runtime(RuntimeConfig(device="auto")).device.type == expected


def test_bf16_computes_in_bf16() -> None:
    runtime = resolve_runtime(RuntimeConfig(device="cpu", precision="bf16"))
    with runtime.compute():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_use_flash_off_allows_math_only_and_the_plan_says_so() -> None:
    runtime = resolve_runtime(RuntimeConfig(device="cpu", use_flash=False))
    assert "math only" in runtime.plan
    assert runtime.describe_flash() == "flash disabled (runtime.use_flash=false)"
    with runtime.compute():
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def report(**changes: Any) -> StepReport:
    """A logged step on a GPU, late in a long run."""
    fields: dict[str, Any] = {
        "row": TrainingRow(12340, 10.1234, 2e-4, 1234567.4),
        "eta_s": 123456.0,
        "numbers": {"grad_norm": 1.25, "mfu": 0.4123}
        | FetchTimes(0.0123, 12.0, 3456.0)._asdict()
        | GpuReading(130000, 140000, 99, 60)._asdict(),
    }
    fields["numbers"] |= changes.pop("numbers", {})
    return StepReport(**(fields | changes))


ON_A_CPU = {
    "row": TrainingRow(1, 5.5, 1e-3, 1234.4),
    "eta_s": 75.0,
    "numbers": {"mfu": None, "rss_mib": 614.4} | GpuReading()._asdict(),
}
SHOWN: dict[str, dict[str, Any]] = {"gpu": {}, "norm": {"shows_norm": True}, "cpu": ON_A_CPU}


def test_step_line_is_the_one_that_other_programs_read() -> None:
    begins = "step 12340 | loss 10.1234 | lr 2.00e-04 | toks/s 1234567"
    fetch = " | fetch 12ms | fetch_p50 12ms | fetch_p95 3456ms"
    ends = " | mfu 41.2% | mem 126.95/136.72GiB | eta 34:17:36"

    assert step_line(report()) == begins + fetch + ends
    assert step_line(report(shows_norm=True)) == begins + " | grad_norm 1.2500" + fetch + ends
    assert step_line(report(numbers=FetchTimes()._asdict())) == begins + ends


def test_fetch_times_are_the_last_and_the_percentiles() -> None:
    seconds = [i / 1000 for i in range(100, 0, -1)]

    assert FetchTimes.of(seconds) == (0.001, 51.0, 96.0)
    assert FetchTimes.of([]) == (None, None, None)


def test_progress_in_a_pipe_is_one_line_for_each_logged_step() -> None:
    out = io.StringIO()
    with Progress(out, steps=50) as progress:
        progress.advance()
        progress.show(report(**ON_A_CPU))
        progress.say("[boot] a line that is longer than eighty columns " + "x" * 80)
    assert out.getvalue().splitlines() == [
        "step 0001 | loss 5.5000 | lr 1.00e-03 | toks/s 1234 | fetch 12ms | fetch_p50 12ms | "
        "fetch_p95 3456ms | rss 0.60GiB | eta 1:15",
        "[boot] a line that is longer than eighty columns " + "x" * 80,
    ]


@pytest.mark.parametrize("columns", [80, 120, 200])
@pytest.mark.parametrize(
    "changes", [{}, {"shows_norm": True}, ON_A_CPU], ids=["gpu", "norm", "cpu"]
)
def test_progress_in_a_terminal_cuts_no_number(
    columns: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    shown, out = report(**changes), Terminal()
    with Progress(out, steps=50000) as progress:
        progress.advance(12340)
        progress.show(shown)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    last = lines[-1 - len(fill_lines(step_numbers(shown), columns)) - 1 :]

    assert max(len(line) for line in lines) <= columns
    bar, *numbers = (line for line in last if line)
    assert "━" in bar and "12340/50000" in bar and bar.endswith(f"eta {clock(shown.eta_s)}")
    assert " | ".join(line.rstrip() for line in numbers) == " | ".join(step_numbers(shown))


def test_a_console_whose_reader_is_gone_does_not_end_the_run() -> None:
    ear, mouth = os.pipe()
    os.close(ear)
    before = os.fstat(2)
    with os.fdopen(mouth, "w", encoding="utf-8") as out:  # flushes what is left
        stream = cast("TextIO", HangupSafeStream(out))
        with Progress(stream, steps=5) as progress:
            progress.say("nobody reads this")
        print("nor this", file=stream, flush=True)
    assert os.path.samestat(os.fstat(2), before), "stderr is another stream"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03")]
)
def test_clock_writes_durations(seconds: float, text: str) -> None:
    assert clock(seconds) == text
