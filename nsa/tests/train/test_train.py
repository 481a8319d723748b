"""Whole runs: what they compute, what they write, and how they end."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from nsa.config import Config, to_container
from nsa.data import ByteTokenizer
from nsa.model import TinyLM
from nsa.model.cost import training_flops_per_token
from nsa.records import (
    TRAINING,
    VAL,
    TrainingRow,
    ValRow,
    draw_loss_curve,
    read_config,
    read_heartbeat,
    read_metrics,
    read_rows,
    read_sample,
)
from nsa.records.results import last_samples
from nsa.records.sinks import read_scalars
from nsa.train import (
    Interrupted,
    NonFiniteLoss,
    OutOfMemory,
    RunRefused,
    TrainResult,
    load_model,
    log,
    run,
)

BuildConfig = Callable[..., Config]


def train(cfg: Config, **options: object) -> tuple[TrainResult, str]:
    """Run and return the result with what was printed."""
    out = io.StringIO()
    result = run(cfg, config_path="configs/tiny.yaml", out=out, **options)  # type: ignore[arg-type]
    return result, out.getvalue()


def losses(cfg: Config) -> list[float]:
    rows = read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)
    return [row.loss for row in rows]


def test_run_leaves_every_file_and_each_reads_back(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.train.finish.draw_loss_curve", draw_loss_curve)  # the real one
    cfg = tiny_config("train.save_every=2")
    text = "KING.\nsample of seed"
    result, printed = train(cfg, sampler=lambda model, tokenizer, seed: f"{text} {seed}")
    folder = Path(cfg.train.out_dir)
    names = {"config.yaml", "training.csv", "val.csv", "metrics.json", "checkpoint_step2.pt"}
    names |= {"model.pt", "loss_curve.png", "sample.txt", "samples.jsonl"}
    beside = {"checkpoint_step2.json", "heartbeat_rank0.jsonl", "env.json", "tb"}
    beside |= {"k_stats.csv", "fallback_counters.csv", "dtypes_report.txt", "opt_state_mb.txt"}
    beside |= {"selection.jsonl", "span_rank0.json", ".lock"}
    assert {path.name for path in folder.iterdir()} == names | beside
    assert {path.name for path in result.files} == names
    assert all(str(path) in printed for path in result.files)

    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert read_config(folder) == cfg
    training = read_rows(TrainingRow, folder / TRAINING)
    assert [row.step for row in training] == [1, 2, 3]
    assert all(row.toks_per_s > 0 for row in training)
    val = read_rows(ValRow, folder / VAL)
    assert [row.step for row in val] == [3]
    assert val[0].ppl == pytest.approx(math.exp(val[0].loss), rel=1e-4)
    assert read_sample(folder) == f"{text} 1337" and f"{text} 1337" in printed
    (sample,) = last_samples(folder, 5)
    assert (sample.step, sample.prompt, sample.text) == (3, "KING.\n", "sample of seed 1337")

    metrics = read_metrics(folder)
    assert metrics == result.metrics
    assert (metrics.status, metrics.step, metrics.steps) == ("finished", 3, 3)
    assert metrics.loss_first == pytest.approx(training[0].loss, abs=1e-6)
    assert metrics.loss_last == pytest.approx(training[-1].loss, abs=1e-6)
    assert metrics.val_loss == pytest.approx(val[0].loss, abs=1e-6)
    assert metrics.val_bits_per_byte == pytest.approx(val[0].loss / math.log(2), rel=1e-5)
    assert (metrics.tokens_per_step, metrics.batch_global, metrics.seq_len) == (64, 2, 32)
    assert metrics.attention_stats["entropy_mean"] == pytest.approx(math.log(3), abs=0.01)


def test_run_says_first_what_it_will_do(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.accumulate_grad_batches=3")
    result, printed = train(cfg)
    count = sum(p.numel() for p in result.model.parameters())
    before = printed.split("step 0001")[0]
    for text in (
        "loading config configs/tiny.yaml",
        "dim=16 n_layers=2",
        "effective config: S=32 B=2 accum=3 gc=off",
        f"parameters: {count:,}",
        "tokens per step: 192",
        "device: cpu",
        "flash enabled | precision FP32",
        "attention backend: torch",
        "gradient_checkpointing=off",
    ):
        assert text in before
    assert f"out_dir={cfg.train.out_dir}" in before
    assert "eta" in printed


def test_mfu_is_the_same_in_line_heartbeat_and_metrics(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with a known peak; a CPU has none."""
    plain, printed = train(tiny_config())
    assert plain.metrics.mfu is None and "| mfu" not in printed and " | rss " in printed

    monkeypatch.setattr("nsa.model.cost.PEAKS", (("cpu", 1.0),))
    monkeypatch.setattr("nsa.model.cost.HALF", ("fp32",))
    cfg = tiny_config("train.seed=5")
    result, printed = train(cfg)
    metrics = result.metrics
    assert metrics.flops_per_token == sum(training_flops_per_token(cfg).values())
    rate = metrics.flops_per_token * (metrics.toks_per_s or 0)
    assert metrics.mfu == pytest.approx(rate / 1e12)
    assert metrics.peak_mem_mib is not None and metrics.peak_mem_mib > 10
    lines = read_heartbeat(Path(cfg.train.out_dir) / "heartbeat_rank0.jsonl")
    beats = [beat.extra for beat in lines if beat.msg == "progress"]
    assert [beat["mfu"] for beat in beats] == pytest.approx(
        [metrics.flops_per_token * beat["toks_per_s"] / 1e12 for beat in beats]
    )
    assert f" | mfu {beats[-1]['mfu']:.1%} | rss " in printed


def test_every_layer_has_its_statistics_on_logged_steps(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=4", "train.log_every=2")
    train(cfg)
    folder = Path(cfg.train.out_dir)
    lines = read_heartbeat(folder / "heartbeat_rank0.jsonl")
    beats = {beat.step: beat.layers() for beat in lines if beat.msg == "progress"}
    curves = read_scalars(folder)

    assert beats.keys() == {1, 2, 4}
    assert [len(layers) for layers in beats.values()] == [cfg.model.n_layers] * 3
    for layer in range(cfg.model.n_layers):
        points = [(step, found[layer]["entropy_mean"]) for step, found in beats.items()]
        steps, values = zip(*curves[f"layer_entropy_mean/{layer:02d}"], strict=True)
        assert steps == (1, 2, 4)
        assert values == pytest.approx([value for _, value in points], abs=1e-6)


def logged_layers(folder: Path) -> list[tuple[int, object]]:
    lines = read_heartbeat(folder / "heartbeat_rank0.jsonl")
    return [(beat.step, beat.layers()) for beat in lines if beat.msg == "progress"]


def test_a_device_that_goes_on_meanwhile_has_its_lines_one_step_late(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lines; an evaluation, a checkpoint and the end find them written."""
    settings = ("train.steps=7", "train.log_every=2", "train.eval_every=4", "train.save_every=6")
    train(tiny_config(*settings))
    folder = Path(tiny_config().train.out_dir)
    expected = [(row.step, row.loss, row.lr) for row in read_rows(TrainingRow, folder / TRAINING)]
    layers = logged_layers(folder)
    seen: list[tuple[int, int]] = []
    write_line = log.RunLog._write_line

    def write(self: log.RunLog, line: log.Line) -> None:
        seen.append((line.step, line.step + len(self._in_flight)))
        write_line(self, line)

    monkeypatch.setattr(log, "LATE", ("cpu",))
    monkeypatch.setattr(log.RunLog, "_write_line", write)
    again = tiny_config(*settings, f"train.out_dir={folder.parent / 'late'}")
    train(again)
    late = Path(again.train.out_dir)
    rows = read_rows(TrainingRow, late / TRAINING)
    assert [(row.step, row.loss, row.lr) for row in rows] == expected
    assert seen == [(1, 1), (2, 3), (4, 4), (6, 6), (7, 7)]  # step, the last one handed over
    assert logged_layers(late) == layers


def test_training_learns_the_text(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=60", "train.lr=1e-2", "train.eval_every=60")
    result, _ = train(cfg)
    assert result.metrics.loss_first == pytest.approx(math.log(256), abs=0.3)
    assert result.metrics.val_loss is not None and result.metrics.val_loss < 3.5


def loss_on_random_tokens(cfg: Config) -> float:
    """Mean training loss of the last 50 steps on fresh uniform tokens, with S > w."""
    train(cfg)
    last = losses(cfg)[-50:]
    return sum(last) / len(last)


RANDOM_TOKENS = (
    "data.dataset=synthetic",
    "train.steps=100",
    "train.lr=1e-2",
    "train.batch_size=8",
    "train.eval_every=0",
)


def test_random_tokens_cannot_be_learned(tiny_config: BuildConfig) -> None:
    assert loss_on_random_tokens(tiny_config(*RANDOM_TOKENS)) >= math.log(256) - 0.02


def test_random_tokens_show_a_leak_of_targets(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm of the test above rings when the model sees its targets."""

    def leaking_loss(model: TinyLM, batch: Tensor, *_: object) -> Tensor:
        return F.cross_entropy(model(batch[:, 1:]).flatten(0, 1), batch[:, 1:].flatten())

    monkeypatch.setattr("nsa.train.step.next_token_loss", leaking_loss)
    monkeypatch.setenv("NSA_DISABLE_AUX_STATS", "1")
    assert loss_on_random_tokens(tiny_config(*RANDOM_TOKENS)) < math.log(256) - 1


def test_same_seed_gives_the_same_run_and_another_seed_another(tiny_config: BuildConfig) -> None:
    first, _ = train(tiny_config())
    again, _ = train(tiny_config())
    other, _ = train(tiny_config("train.seed=2"))
    weights = first.model.state_dict()
    assert all(torch.equal(w, weights[name]) for name, w in again.model.state_dict().items())
    assert again.metrics.loss_last == first.metrics.loss_last
    assert other.metrics.loss_first != first.metrics.loss_first


def test_accumulation_equals_the_larger_batch(tiny_config: BuildConfig) -> None:
    large, _ = train(tiny_config("train.batch_size=4"))
    small, _ = train(tiny_config("train.batch_size=1", "train.accumulate_grad_batches=4"))
    assert small.metrics.tokens_per_step == large.metrics.tokens_per_step
    assert small.metrics.loss_first == pytest.approx(large.metrics.loss_first, rel=1e-5)
    assert small.metrics.loss_last == pytest.approx(large.metrics.loss_last, rel=1e-4)


@pytest.mark.parametrize("layers", ["", "0:1"])
def test_gradient_checkpointing_changes_no_loss(tiny_config: BuildConfig, layers: str) -> None:
    plain, _ = train(tiny_config())
    cfg = tiny_config("runtime.gradient_checkpointing=true", f"runtime.gc_layers={layers}")
    recomputed, printed = train(cfg)
    assert recomputed.metrics.loss_last == pytest.approx(plain.metrics.loss_last, rel=1e-5)
    assert "gradient_checkpointing=on" in printed


def test_bf16_keeps_fp32_weights_and_nearly_the_same_losses(tiny_config: BuildConfig) -> None:
    exact, _ = train(tiny_config())
    rounded, _ = train(tiny_config("runtime.precision=bf16"))
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}
    assert rounded.metrics.loss_last != exact.metrics.loss_last
    assert rounded.metrics.loss_last == pytest.approx(exact.metrics.loss_last, abs=0.02)


def test_stopping_earlier_keeps_the_learning_rates(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=4")
    train(cfg)
    whole = read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)
    result, _ = train(cfg, stop_after=2)
    part = read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)
    assert [(r.step, r.lr, r.loss) for r in part] == [(r.step, r.lr, r.loss) for r in whole[:2]]
    assert result.metrics.steps == 2 and result.metrics.val_loss is not None


def test_logging_less_often_logs_first_every_nth_and_last(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=7", "train.log_every=3", "train.eval_every=0")
    train(cfg)
    rows = read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)
    assert [row.step for row in rows] == [1, 3, 6, 7]
    assert read_rows(ValRow, Path(cfg.train.out_dir) / VAL) == []


def test_non_finite_loss_ends_the_run_without_a_model(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    train(cfg)
    good = (Path(cfg.train.out_dir) / "model.pt").read_bytes()

    cfg = tiny_config("train.lr=1e30", "train.steps=10", "train.log_every=4", "train.save_every=3")
    with pytest.raises(NonFiniteLoss, match=r"\[FATAL\] non-finite loss .* Step [23]") as error:
        train(cfg)
    assert error.value.exit_code == 10
    folder = Path(cfg.train.out_dir)
    assert read_metrics(folder).status == "non_finite"
    (found,) = folder.glob("*.pt")
    assert found.name in ("anomaly_step2.pt", "anomaly_step3.pt")
    (previous,) = (folder / "previous").iterdir()
    assert (previous / "model.pt").read_bytes() == good


def test_non_finite_gradient_of_the_last_step_is_caught(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is still finite, and its update is not done."""
    cfg = tiny_config("train.steps=1", "train.eval_every=0")
    original = TinyLM.hidden

    def poisoned(self: TinyLM, ids: Tensor, **options: object) -> Tensor:
        hidden = original(self, ids, **options)  # type: ignore[arg-type]
        hidden.register_hook(lambda grad: grad * float("nan"))
        return hidden

    monkeypatch.setattr(TinyLM, "hidden", poisoned)
    with pytest.raises(NonFiniteLoss, match="Step 1: loss"):
        train(cfg)
    assert not (Path(cfg.train.out_dir) / "model.pt").exists()


def test_out_of_memory_says_what_to_try(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr("nsa.train.step.next_token_loss", full)
    cfg = tiny_config("train.batch_size=3")
    with pytest.raises(OutOfMemory) as error:
        train(cfg)
    message = str(error.value)
    assert "Tried to allocate 2.00 GiB" in message and "more" not in message
    assert "train.batch_size=2 train.accumulate_grad_batches=2" in message
    assert "runtime.gradient_checkpointing=true" in message
    assert read_metrics(Path(cfg.train.out_dir)).status == "oom"
    assert (Path(cfg.train.out_dir) / ".anomaly_type").read_text().strip() == "oom"


def test_fp16_overflows_are_skipped_and_the_scale_falls(tiny_config: BuildConfig) -> None:
    """A scale that no gradient survives: the first steps change nothing, then training starts."""
    cfg = tiny_config("runtime.precision=fp16", "train.steps=12", "train.save_every=12")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_SCALER_INIT_SCALE", str(2.0**24))
        result, _ = train(cfg)
    scale = torch.load(result.folder / "checkpoint_step12.pt", weights_only=True)["scaler"]["scale"]
    assert scale < 2.0**24
    assert result.metrics.status == "finished"


def test_interrupt_is_recorded_and_is_no_failure(tiny_config: BuildConfig) -> None:
    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            if "step 0002" in text:
                raise KeyboardInterrupt
            return super().write(text)

    cfg = tiny_config()
    with pytest.raises(Interrupted, match="interrupted after step 2") as error:
        run(cfg, config_path="x.yaml", out=Impatient())
    assert error.value.exit_code == 0
    assert read_metrics(Path(cfg.train.out_dir)).status == "interrupted"
    assert not (Path(cfg.train.out_dir) / "model.pt").exists()


def test_files_of_an_earlier_run_move_aside_aloud(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    train(cfg)
    first = losses(cfg)
    _, printed = train(tiny_config("train.seed=3"))
    (previous,) = (Path(cfg.train.out_dir) / "previous").iterdir()
    assert f"its files are now in {previous}" in printed
    assert [row.loss for row in read_rows(TrainingRow, previous / TRAINING)] == first
    assert losses(cfg) != first


def test_refused_run_touches_nothing(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=5000")
    with pytest.raises(RunRefused):
        train(cfg)
    assert not Path(cfg.train.out_dir).exists()
    train(cfg, stop_after=1)  # short after all
    result, _ = train(tiny_config("train.steps=3"), config_named=False)
    assert result.metrics.status == "finished"


def test_override_starts_a_run_that_would_be_refused(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.train.errors.LONG_STEPS", 3)
    with pytest.raises(RunRefused):
        train(tiny_config())
    assert train(tiny_config(), allow_long_run=True)[0].metrics.status == "finished"


def test_saved_model_is_the_trained_one(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("nsa.phi=mlp", "nsa.gate=sigmoid", "model.tie_embeddings=true")
    result, _ = train(cfg)
    loaded, its_cfg = load_model(Path(cfg.train.out_dir) / "model.pt")
    ids = torch.randint(256, (2, 20))
    assert its_cfg == cfg
    assert torch.equal(loaded(ids), result.model.eval()(ids))


def test_checkpoints_hold_the_weights_of_their_step(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=4", "train.save_every=2")
    train(cfg)
    folder = Path(cfg.train.out_dir)
    middle, last = (
        torch.load(folder / f"checkpoint_step{step}.pt", weights_only=True) for step in (2, 4)
    )
    final = torch.load(folder / "model.pt", weights_only=True)
    assert (middle["step"], last["step"]) == (2, 4)
    assert last["cfg"] == final["cfg"] == to_container(cfg)
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(last["state_dict"][name], final["state_dict"][name])
    assert not torch.equal(middle["state_dict"][name], final["state_dict"][name])


def test_model_path_can_be_chosen(tiny_config: BuildConfig, tmp_path: Path) -> None:
    cfg = tiny_config()
    train(cfg, model_path=tmp_path / "elsewhere" / "m.pt")
    assert load_model(tmp_path / "elsewhere" / "m.pt")[1] == cfg
    assert not (Path(cfg.train.out_dir) / "model.pt").exists()


def test_greedy_inference_as_in_the_runbook_runs_on_a_saved_model(
    tiny_config: BuildConfig,
) -> None:
    from scripts.train_showcase import TinyLM

    cfg = tiny_config()
    train(cfg)
    ckpt = torch.load(Path(cfg.train.out_dir) / "model.pt", map_location="cpu")
    saved = OmegaConf.create(ckpt["cfg"])
    model = TinyLM(
        vocab=256,
        dim=int(saved.model.dim), n_layers=int(saved.model.get("n_layers", 1)),
        n_heads=int(saved.model.n_heads), n_kv_groups=int(saved.model.n_kv_groups),
        d_k=int(saved.model.d_k), d_v=int(saved.model.d_v),
        l=int(saved.nsa.l), d=int(saved.nsa.d), l_sel=int(saved.nsa.l_sel),
        n_sel=int(saved.nsa.n_sel), w=int(saved.nsa.w),
        grad_checkpointing=False,
    ).eval().to(dtype=torch.bfloat16)  # fmt: skip
    model.load_state_dict(ckpt["state_dict"], strict=True)
    ids = torch.tensor([list(b"Hello NSA! ")], dtype=torch.long)
    for _ in range(64):
        logits = model(ids)[:, -1, :]
        ids = torch.cat([ids, torch.argmax(logits, dim=-1, keepdim=True)], dim=1)
    assert ids.shape == (1, 75)
    assert ByteTokenizer().decode(ids[0].tolist()).startswith("Hello NSA! ")


def test_csv_logs_can_be_switched_off(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_DISABLE_CSV_LOGS", "1")
    monkeypatch.setattr("nsa.train.finish.draw_loss_curve", draw_loss_curve)  # the real one
    result, _ = train(tiny_config())
    assert list(result.folder.glob("*.csv")) == []
    assert (result.folder / "loss_curve.png").exists()


def test_attention_statistics_can_be_switched_off(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_DISABLE_AUX_STATS", "1")
    result, _ = train(tiny_config())
    assert read_metrics(result.folder).attention_stats == {}


def test_eta_leaves_the_slow_first_step_out(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([0.0, 100.0, 101.0, 102.0, 103.0])  # the start, then the end of each step
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("nsa.train.log.time", clock)
    _, printed = train(tiny_config("train.steps=4", "train.eval_every=0"))
    etas = [line.rsplit("eta ", 1)[1] for line in printed.splitlines() if " | eta " in line]
    assert etas == ["5:00", "0:02", "0:01", "0:00"]
