"""Every environment variable that code honours does something when it is set."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import BlockSpec, nsa_attention
from nsa.cli.__main__ import main
from nsa.config import DataConfig, load_config
from nsa.config.env import TABLE
from nsa.data import Loader, Rows, open_data, streamed_rows
from nsa.model import TinyLM
from nsa.operate.limits import GPU
from nsa.operate.preflight.run_checks import Rehearsal
from nsa.operate.watch.watchdog import with_environment
from nsa.records import Beat, Heartbeat, read_heartbeat
from nsa.tests.distributed.test_ddp_settings import TESTED as UNDER_DDP
from nsa.tests.operate.test_launch_plan import TESTED as IN_A_LAUNCH
from nsa.tests.support.effects import TINY, Fingerprint, fingerprint, tiny_config
from nsa.tests.support.streams import ListDocuments
from nsa.train import run

IN_A_RUN: dict[str, tuple[str, set[str]]] = {  # name: (value, what it changes at least)
    "NSA_SEQ_LEN": ("48", {"losses", "evaluations", "weights", "kept"}),
    "NSA_BATCH_SIZE": ("3", {"losses", "evaluations", "weights", "kept"}),
    "NSA_ACCUM": ("2", {"losses", "evaluations", "weights", "kept"}),
    "NSA_LR": ("0.02", {"losses", "evaluations", "weights", "rates"}),
    "NSA_ROPE_SCALE": ("8", {"losses", "evaluations", "weights"}),
    "NSA_GC_RANGE": ("0:1", {"kept"}),
    "NSA_SEL_RANGES_V2": ("0", {"plan"}),
    "NSA_USE_FA2": ("1", {"plan"}),
    "NSA_USE_FA2_WIN": ("1", {"plan"}),
    "NSA_USE_FA2_CMP": ("1", {"plan"}),
    "NSA_SDPA_AUDIT": ("1", {"plan"}),
    "NSA_SDPA_NO_FLASH": ("1", {"plan"}),
    "NSA_SDPA_FLASH_ONLY": ("1", {"plan"}),
    "NSA_NVTX": ("1", {"plan"}),
    "NSA_FORCE_BRANCH": ("win", {"losses", "evaluations", "weights"}),
    "NSA_DISABLE_CSV_LOGS": ("1", {"losses", "rates", "evaluations", "files"}),
    "NSA_DISABLE_AUX_STATS": ("1", {"stats"}),
    "NSA_TB_DISABLE": ("1", {"files"}),
    "NSA_MEM_DUMP_EVERY": ("2", {"files"}),
}
ELSEWHERE = (
    {
        "CONFIG",
        "NSA_DASHBOARD_TOKEN",
        "NSA_NO_GC",
        "NSA_STRICT_ASSERTS",
        "NSA_PREFILL_BATCHED",
        "NSA_PREFILL_TILE",
        "NSA_HEARTBEAT_EVERY",
        "NSA_LOG_GRAD_NORM",
        "NSA_SCALER_INIT_SCALE",
        "NSA_SCALER_GROWTH_INTERVAL",
        "NSA_SCALER_GROWTH_FACTOR",
        "NSA_SCALER_BACKOFF_FACTOR",
        "NSA_FWE_DOC_BATCH",
        "NSA_FWE_PREFETCH",
        "NSA_FWE_Q",
        "NSA_FWE_WARMUP_BATCHES",
        "NSA_FWE_WARMUP_TIMEOUT",
        "NSA_WATCH_HALT",
        "NSA_WATCH_INTERVAL_S",
        "NSA_WATCH_HEARTBEAT_STALL_S",
        "NSA_WATCH_FLATLINE_N",
        "NSA_WATCH_GATE_COLLAPSE_N",
        "NSA_HANG_LEAST_S",  # test_hang.py
        "NSA_RESTART_COUNT",  # test_resume_rules.py, test_launch.py
        "NSA_PRICE_PER_H",
        "OUT_DIR",
    }
    | UNDER_DDP
    | IN_A_LAUNCH
)
"""Tested below or there, one by one: what they do does not show in a run of these settings."""


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    return fingerprint(tmp_path_factory.mktemp("usual") / "a")


@pytest.mark.parametrize("name", IN_A_RUN)
def test_setting_it_changes_the_run(
    name: str, usual: Fingerprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, expected = IN_A_RUN[name]
    monkeypatch.setenv(name, value)

    changed = usual.differences(fingerprint(tmp_path / "a"))

    assert changed >= expected
    assert "refused" not in changed


def test_every_variable_that_code_honours_is_tested() -> None:
    honoured = {v.name for v in TABLE.values() if v.honoured == "code"}

    assert honoured == IN_A_RUN.keys() | ELSEWHERE


def test_config_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("runtime: {device: cpu}", encoding="utf-8")
    monkeypatch.setenv("CONFIG", str(path))

    assert main(["plan"]) == 0

    assert f"config: {path}\n" in capsys.readouterr().out


def test_no_gc_turns_off_what_the_file_turns_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TINY.replace("{device", "{gradient_checkpointing: true, device"), "utf-8")

    def checkpointed() -> int:
        return len(TinyLM.from_config(load_config(path), vocab=256).checkpointed)

    assert checkpointed() == 1  # layer
    monkeypatch.setenv("NSA_NO_GC", "1")
    assert checkpointed() == 0


def test_strict_asserts_refuse_a_selection_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BlockSpec(l=8, d=4, l_sel=8, n_sel=3, w=8)
    q, k, v = (torch.randn(1, 32, heads, 8) for heads in (2, 1, 1))
    selection = torch.tensor([0, 1, 3], dtype=torch.int32).expand(1, 32, 1, 3)

    def attend() -> object:
        return nsa_attention(
            *(q, k[:, :7], v[:, :7], k, v, k, v, torch.ones(1, 32, 2, 3)),
            spec,
            selection=selection,
        )

    attend()
    monkeypatch.setenv("NSA_STRICT_ASSERTS", "1")
    with pytest.raises(AssertionError):
        attend()


def test_prefill_batched_off_refuses_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "0")

    assert "NSA_PREFILL_BATCHED=0" in fingerprint(tmp_path / "a").refused


def prefill_reads(folder: Path) -> int:
    """Count the tokens that prefilling 20 tokens reads through the decode path of a new model."""
    model = TinyLM.from_config(load_config(tiny_config(folder)), vocab=256)
    cache = model.new_cache(batch=1, max_len=20)
    model.prefill(torch.randint(256, (1, 20)), cache)
    return int(sum(layer.reads.sum() for layer in cache.layers))


def test_prefill_batched_off_sends_every_token_through_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefill_reads(tmp_path / "a") == 0
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "0")
    assert prefill_reads(tmp_path / "b") > 0


def test_prefill_tile_cuts_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 19 leaves one token, which goes through decode; the prompt as a whole does not."""
    monkeypatch.setenv("NSA_PREFILL_TILE", "20")
    assert prefill_reads(tmp_path / "a") == 0
    monkeypatch.setenv("NSA_PREFILL_TILE", "19")
    assert prefill_reads(tmp_path / "b") > 0


def test_heartbeat_lines_come_every_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_HEARTBEAT_EVERY", "2")

    fingerprint(tmp_path / "a")

    lines = read_heartbeat(tmp_path / "a" / "run" / "heartbeat_rank0.jsonl")
    starts = [line for line in lines if line.extra.get("phase") == "step_start"]
    assert [line.step for line in starts if line.msg == "beat"] == [2, 4]


def test_the_loss_scale_follows_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_SCALER_INIT_SCALE", "1024")
    monkeypatch.setenv("NSA_SCALER_GROWTH_INTERVAL", "2")
    monkeypatch.setenv("NSA_SCALER_GROWTH_FACTOR", "3")
    monkeypatch.setenv("NSA_SCALER_BACKOFF_FACTOR", "0.25")

    fingerprint(tmp_path / "a", "runtime.precision=fp16", "train.save_every=4")

    path = tmp_path / "a" / "run" / "checkpoint_step4.pt"
    scaler = torch.load(path, weights_only=True)["scaler"]
    assert scaler["scale"] == 1024 * 3 * 3  # four good steps: it grew twice
    assert scaler["backoff_factor"] == 0.25


def test_the_gradient_norm_is_on_the_step_line_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(name: str) -> list[str]:
        out = io.StringIO()
        path = tiny_config(tmp_path / name)
        config = load_config(path, [f"train.out_dir={tmp_path / name / 'run'}"])
        run(config, config_path=str(path), out=out)
        return [line for line in out.getvalue().splitlines() if re.match(r"step \d+ \| loss", line)]

    assert not any("grad_norm" in line for line in lines("off"))
    monkeypatch.setenv("NSA_LOG_GRAD_NORM", "1")
    shown = lines("on")
    norms = [float(re.search(r"toks/s \d+ \| grad_norm ([\d.]+) \| fetch", x)[1]) for x in shown]  # type: ignore[index]
    assert len(norms) == 4 and all(0 < norm < 100 for norm in norms)
    beats = read_heartbeat(tmp_path / "on" / "run" / "heartbeat_rank0.jsonl")
    said = [beat.extra["grad_norm"] for beat in beats if beat.msg == "progress"]
    assert norms == pytest.approx(said, abs=1e-4)


def depth_of_the_queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train, and return how deep the queue before the batches was made."""
    depths: list[int] = []
    real = Loader.__init__

    def init(self: Loader, rows: Rows, *, depth: int, **options: Any) -> None:
        depths.append(depth)
        real(self, rows, depth=depth, **options)

    monkeypatch.setattr(Loader, "__init__", init)
    fingerprint(folder)
    return depths


@pytest.mark.parametrize(
    ("name", "value", "depth"),
    [
        ("NSA_FWE_Q", "", 4),
        ("NSA_FWE_Q", "7", 7),
        ("NSA_FWE_Q", "0", 1),
        ("NSA_FWE_PREFETCH", "0", 0),
    ],
)
def test_batches_are_read_ahead_as_told(
    name: str, value: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert depth_of_the_queue(tmp_path / "a", monkeypatch) == [depth]


def local_run(folder: Path) -> Beat:
    """Train on local documents, and return what was said about the warm-up."""
    texts = folder.parent / "texts.jsonl"
    lines = (json.dumps({"text": f"document {number} " * 40}) for number in range(200))
    texts.write_text("\n".join(lines), encoding="utf-8")
    fingerprint(folder, "data.dataset=fineweb_edu_local", f"data.local_path={texts}")
    beats = read_heartbeat(folder / "run" / "heartbeat_rank0.jsonl")
    return next(beat for beat in beats if beat.msg == "fineweb_loader_warmup")


def test_the_queue_is_filled_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_FWE_WARMUP_BATCHES", "3")
    found = local_run(tmp_path / "a").extra
    assert (found["requested"], found["filled"]) == (3, 3)

    monkeypatch.setattr(Loader, "num_ready", 0)  # a source too slow for what follows
    monkeypatch.setenv("NSA_FWE_WARMUP_TIMEOUT", "0.05")
    found = local_run(tmp_path / "b").extra
    assert found["filled"] == 0
    assert 50 <= found["wait_ms"] < 5000


def test_documents_are_tokenized_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = set()

    class Hub(ListDocuments):
        def __init__(self, config: object, say: object) -> None:
            super().__init__([f"document {number} " * 9 for number in range(300)])

    def chunks_of(documents: Any, size: int) -> Any:
        chunks.add(size)
        return real(documents, size)

    real = streamed_rows._chunks
    monkeypatch.setattr(streamed_rows, "_chunks", chunks_of)
    monkeypatch.setattr("nsa.data.open.HubDocuments", Hub)
    for value in ("", "5"):
        monkeypatch.setenv("NSA_FWE_DOC_BATCH", value)
        open_data(DataConfig(dataset="fineweb_edu"), seq_len=16, seed=1).train.batch(0, 1)
    assert chunks == {64, 5}


def silent_run(folder: Path) -> None:
    """A heartbeat that is five minutes old when the test asks for the time."""
    Heartbeat(folder).write(step=4, msg="progress")


def test_watch_halt_off_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_run(tmp_path)
    then = time.time() + 300
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: then)
    monkeypatch.setenv("NSA_WATCH_HALT", "0")
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert not (tmp_path / ".HALT").exists()
    monkeypatch.delenv("NSA_WATCH_HALT")
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert (tmp_path / ".HALT").exists()


def test_watch_interval_is_the_time_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("nsa.operate.watch.watchdog.time.sleep", sleep)
    monkeypatch.setenv("NSA_WATCH_INTERVAL_S", "7")
    assert main(["watch", str(tmp_path)]) == 3
    assert waits == [7, 7]


def test_watch_limits_can_be_set_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_WATCH_HEARTBEAT_STALL_S", "30")
    monkeypatch.setenv("NSA_WATCH_FLATLINE_N", "9")
    monkeypatch.setenv("NSA_WATCH_GATE_COLLAPSE_N", "5")
    limits = with_environment(GPU)
    assert limits == replace(GPU, stall_s=30, flatline_n=9, gate_n=5) != GPU


def test_watch_stall_limit_rings_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_run(tmp_path)
    then = time.time() + 60
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: then)
    main(["watch", str(tmp_path), "--once"])
    assert not (tmp_path / ".HALT").exists()
    monkeypatch.setenv("NSA_WATCH_HEARTBEAT_STALL_S", "30")
    main(["watch", str(tmp_path), "--once"])
    assert (tmp_path / ".HALT").exists()


def test_out_dir_is_the_folder_that_the_monitor_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT_DIR", str(tmp_path))
    assert main(["monitor", "--once"]) == 0
    assert str(tmp_path) in capsys.readouterr().out


def test_price_per_hour_is_the_cost_in_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Rehearsal(step_s=3600.0, checkpoint_bytes=1, resumed_at=3)
    monkeypatch.setattr("nsa.operate.preflight.run_checks.rehearse", lambda plan: done)
    monkeypatch.setenv("NSA_PRICE_PER_H", "2.5")
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY, encoding="utf-8")
    flags = ["--config", str(config), "--ranks", "1"]
    main(["preflight", *flags, f"train.out_dir={tmp_path / 'run'}"])
    assert "cost 10.00 at 2.5/h" in capsys.readouterr().out
