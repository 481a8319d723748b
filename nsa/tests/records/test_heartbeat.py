"""The heartbeat: every line is strict JSON, survives a full disk, and is found fast at the end."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.model.stats import AttentionStats
from nsa.records import (
    BrokenHeartbeat,
    GpuReading,
    Heartbeat,
    age_seconds,
    last_beat,
    read_gpu,
    read_heartbeat,
)
from nsa.records import env as machine
from nsa.records.heartbeat import BASE_FIELDS, SEARCH_BYTES, parse_beat, parse_head
from nsa.records.tables import fallback_counts
from nsa.tail import BLOCK_BYTES, Line
from nsa.tests.support.gpu import on_gpu

NAN, INF = float("nan"), float("inf")


def lines(path: Path) -> list[dict[str, Any]]:
    """Parse as strictly as JSON is: NaN and Infinity are no part of it."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def collected(num_layers: int = 1) -> AttentionStats:
    """Statistics of equal layers, but that the gates of the second one chose a branch each."""
    stats = AttentionStats()
    gates = torch.tensor([[[[0.7, 0.2, 0.1]], [[0.2, 0.3, 0.5]]]])  # [B, S, Hq, 3]
    for layer in range(num_layers):
        chosen = gates if layer != 1 else (gates == gates.amax(dim=-1, keepdim=True)).float()
        selection = torch.tensor([[[[0, -1]], [[0, 1]]]], dtype=torch.int32)
        stats.record(layer, chosen, selection, block_tokens=1)
    return stats


def summary() -> dict[str, Any]:
    return collected().summary()


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_appends_a_line_with_the_base_fields_and_the_extra_ones(tmp_path: Path) -> None:
    before = time.time()
    Heartbeat(tmp_path, rank=0).write(step=7, msg="hello", extra={"loss": 1.5})

    (line,) = lines(tmp_path / "heartbeat_rank0.jsonl")

    assert tuple(line) == (*BASE_FIELDS, "loss")
    assert (line["schema"], line["rank"], line["step"], line["msg"]) == (1, 0, 7, "hello")
    assert line["pid"] == os.getpid() and before - 1 <= line["ts"] <= time.time()
    assert line["iso"].endswith("Z") and len(line["iso"]) == len("2026-01-02T03:04:05.678Z")


def test_each_rank_has_its_file_in_a_folder_that_is_made(tmp_path: Path) -> None:
    for rank in (0, 3):
        Heartbeat(str(tmp_path / "new" / "run"), rank=rank).boot()

    names = sorted(path.name for path in (tmp_path / "new" / "run").iterdir())
    assert names == ["heartbeat_rank0.jsonl", "heartbeat_rank3.jsonl"]


EVENTS: dict[str, tuple[Any, dict[str, Any]]] = {  # msg: (call, fields of the line)
    "boot": (lambda h: h.boot(), {"phase": "start"}),
    "beat": (lambda h: h.beat(3), {"phase": "step_start"}),
    "step_end": (lambda h: h.step_end(3), {"phase": "end"}),
    "fineweb_loader_ready": (lambda h: h.loader_ready(0.25), {"dt": 0.25}),
    "fineweb_loader_error": (
        lambda h: h.loader_error(OSError("no\nroute")),
        {"error": "OSError: no\nroute"},
    ),
    "fineweb_loader_warmup": (
        lambda h: h.loader_warmup(requested=8, filled=5, wait_ms=12.5),
        {"requested": 8, "filled": 5, "wait_ms": 12.5},
    ),
    "watchdog_dump": (lambda h: h.watchdog_dump(Path("a/b.txt")), {"path": "a/b.txt"}),
}


@pytest.mark.parametrize("msg", EVENTS)
def test_an_event_has_its_name_and_its_fields(msg: str, tmp_path: Path) -> None:
    call, fields = EVENTS[msg]
    heartbeat = Heartbeat(tmp_path)

    call(heartbeat)

    (beat,) = read_heartbeat(heartbeat.path)
    assert (beat.msg, beat.extra, beat.pid) == (msg, fields, os.getpid())


def test_progress_has_gate_health_in_both_spellings(tmp_path: Path) -> None:
    heartbeat, stats = Heartbeat(tmp_path), summary()
    heartbeat.progress(
        20,
        loss=2.5,
        toks_per_s=1e5,
        lr=1e-4,
        grad_norm=0.5,
        index_loss=0.3,
        step_time_s=0.1,
        mfu=0.41,
        dt_fetch_s=0.01,
        fetch_p50_ms=9.0,
        fetch_p95_ms=20.0,
        rss_mib=900.0,
        **GpuReading(1200, 2000, 97, 61)._asdict(),
        attention=stats,
        layers=collected().per_layer(),
        fallbacks=fallback_counts({}),
    )

    (line,) = lines(heartbeat.path)

    assert line["entropy_mean"] == line["gate_entropy_mean"] == stats["entropy_mean"]
    assert line["collapse_fraction"] == line["gate_collapse_frac"] == 0.0
    assert (
        line["max_gate_mean"] == pytest.approx(0.6)
        and line["gate_max_gate"] == stats["max_gate_max"]
    )
    assert line["gate_entropy_min"] == stats["entropy_min"]
    assert line["gate_branch_shares"] == pytest.approx([0.45, 0.25, 0.3])
    assert (line["sel_k_mean"], line["sel_k_max"], line["sel_rows"]) == (1.5, 2.0, 2.0)
    assert line["sel_pct_at_max"] == 0.5 and line["mfu"] == 0.41
    assert (line["gpu_mem_alloc"], line["gpu_mem_reserved"]) == (1200, 2000)
    assert (line["gpu_util_pct"], line["gpu_temp_c"]) == (97, 61)
    assert sum(name.startswith("fb_") for name in line) == 7 and line["fb_total_fallbacks"] == 0
    assert all(value is not None for value in line.values())


def test_progress_has_every_layer_and_gate_health_in_both_spellings(tmp_path: Path) -> None:
    heartbeat, stats = Heartbeat(tmp_path), collected(num_layers=3)
    heartbeat.progress(20, loss=2.5, toks_per_s=1e5, lr=1e-4, layers=stats.per_layer())
    (beat,) = read_heartbeat(heartbeat.path)

    layers = beat.layers()

    assert [layer["collapse_fraction"] for layer in layers] == [0.0, 1.0, 0.0]
    assert [layer["gate_collapse_frac"] for layer in layers] == [0.0, 1.0, 0.0]
    for layer, known in zip(layers, stats.per_layer(), strict=True):
        assert layer["entropy_mean"] == layer["gate_entropy_mean"] == known["entropy_mean"]
        assert layer["gate_entropy_min"] == known["entropy_min"]
        assert layer["max_gate_mean"] == known["max_gate_mean"]
        assert layer["gate_max_gate"] == known["max_gate_max"]
        shares = [known["share_cmp"], known["share_sel"], known["share_win"]]
        assert layer["gate_branch_shares"] == shares
        assert (layer["sel_k_mean"], layer["sel_k_max"]) == (1.5, 2.0)
        assert layer["sel_pct_at_max"] == 0.5


def test_a_line_without_statistics_has_no_layers(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.progress(1, loss=2.5, toks_per_s=10.0, lr=1e-4)
    heartbeat.step_end(1)

    assert [beat.layers() for beat in read_heartbeat(heartbeat.path)] == [[], []]


def test_progress_on_a_cpu_without_statistics_has_all_fields_as_null(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.progress(1, loss=2.5, toks_per_s=10.0, lr=1e-4, **read_gpu("cpu")._asdict())

    (line,) = lines(heartbeat.path)

    for name in ("gpu_mem_alloc", "gpu_util_pct", "entropy_mean", "sel_rows", "grad_norm", "mfu"):
        assert line[name] is None


@pytest.mark.parametrize(("loss", "said"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_a_loss_that_is_not_finite_is_null_with_a_note(
    loss: float, said: str, tmp_path: Path
) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.progress(1, loss=loss, toks_per_s=10.0, lr=1e-4)

    (line,) = lines(heartbeat.path)

    assert line["loss"] is None and line["non_finite"] == {"loss": said}


def test_tensors_and_nested_values_become_plain_json(tmp_path: Path) -> None:
    extra = {
        "a": torch.tensor(1.5),
        "b": torch.tensor([1.0, NAN]),
        "c": {"d": (INF, "x")},
        "e": Path("f"),
        "g": True,
    }
    Heartbeat(tmp_path).write(step=1, msg="odd", extra=extra)

    (line,) = lines(tmp_path / "heartbeat_rank0.jsonl")

    assert (line["a"], line["b"], line["c"]) == (1.5, [1.0, None], {"d": [None, "x"]})
    assert (line["e"], line["g"]) == ("f", True)
    assert line["non_finite"] == {"b[1]": "nan", "c.d[0]": "inf"}


def test_an_extra_field_cannot_take_the_place_of_a_base_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'x': rank, step is a field of every line"):
        Heartbeat(tmp_path).write(step=1, msg="x", extra={"step": 2, "rank": 1, "loss": 1.0})


def test_every_limits_the_beats_and_nothing_else(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, every=5)
    for step in range(1, 11):
        heartbeat.beat(step)
    heartbeat.step_end(7)

    found = [(beat.step, beat.msg) for beat in read_heartbeat(heartbeat.path)]
    assert found == [(5, "beat"), (10, "beat"), (7, "step_end")]


def test_each_line_is_one_write_to_an_appending_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat, write = Heartbeat(tmp_path), os.write
    pieces: list[bytes] = []

    def note(descriptor: int, data: bytes) -> int:
        pieces.append(data)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", note)
    heartbeat.beat(1)
    Heartbeat(tmp_path).beat(2)  # another writer of the same file does not overwrite
    heartbeat.beat(3)

    assert [json.loads(piece)["step"] for piece in pieces] == [1, 2, 3]
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert [beat.step for beat in read_heartbeat(heartbeat.path)] == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_cut_last_line_is_left_out_by_readers_and_removed_by_the_next_writer(
    cut: int, tmp_path: Path
) -> None:
    heartbeat = Heartbeat(tmp_path)
    for step in (1, 2, 3):
        heartbeat.beat(step)
    heartbeat.close()
    heartbeat.path.write_bytes(heartbeat.path.read_bytes()[:-cut])

    assert [beat.step for beat in read_heartbeat(heartbeat.path)] == [1, 2]
    last = last_beat(heartbeat.path)
    assert last is not None and last.step == 2
    Heartbeat(tmp_path).boot(2)
    assert [(beat.step, beat.msg) for beat in read_heartbeat(heartbeat.path)] == [
        (1, "beat"),
        (2, "beat"),
        (2, "boot"),
    ]


BROKEN = {
    "half a line": '{"ts": 1.0, "st',
    "no time": '{"step": 1, "msg": "beat"}',
    "a time that is none": '{"ts": "noon", "step": 1, "msg": "beat"}',
    "a step that is none": '{"ts": 1.0, "step": null, "msg": "beat"}',
    "not an object": "17",
    "zero bytes of a lost page": "\0" * 40,
    "a later schema": '{"schema": 2, "ts": 1.0, "step": 1, "msg": "beat", "rank": 0}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_is_named(kind: str, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.beat(1)
    start = heartbeat.path.stat().st_size
    with heartbeat.path.open("a") as file:
        file.write(BROKEN[kind] + "\n")

    with pytest.raises(
        BrokenHeartbeat, match="heartbeat_rank0.jsonl, the line at byte " + str(start)
    ):
        last_beat(heartbeat.path)
    heartbeat.beat(2)
    with pytest.raises(BrokenHeartbeat, match="heartbeat_rank0.jsonl, line 2: "):
        read_heartbeat(heartbeat.path)
    last = last_beat(heartbeat.path)  # what stands before the last line does not disturb it
    assert last is not None and last.step == 2


def test_the_last_line_of_a_kind_is_found_behind_others(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.progress(1, loss=3.0, toks_per_s=1.0, lr=0.1)
    heartbeat.progress(2, loss=2.0, toks_per_s=1.0, lr=0.1)
    heartbeat.step_end(2)
    heartbeat.beat(3)

    beat = last_beat(heartbeat.path, "progress")

    assert beat is not None and beat.extra["loss"] == 2.0
    assert last_beat(heartbeat.path, "boot") is None


def test_without_a_file_or_a_line_there_is_no_last_beat_and_no_age(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    assert last_beat(path) is None and age_seconds(path) is None
    path.write_text("")
    assert last_beat(path) is None and age_seconds(path) is None
    path.write_text('{"ts": 1')
    assert last_beat(path) is None and age_seconds(path) is None


def test_age_counts_from_the_last_sign_of_life_which_a_watchdog_is_not(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.beat(1)
    beat = last_beat(heartbeat.path)
    heartbeat.watchdog_dump("stacks.txt")

    assert beat is not None and age_seconds(heartbeat.path, now=beat.ts + 300) == 300
    recent = age_seconds(heartbeat.path)
    assert recent is not None and 0 <= recent < 60


@pytest.mark.parametrize("size", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_lines_of_any_length_are_read_from_the_end(size: int, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    for step in (1, 2, 3):
        heartbeat.write(step, "long", {"text": "x" * size})
    heartbeat.beat(4)

    beat = last_beat(heartbeat.path, "long")

    assert beat is not None and beat.step == 3 and len(beat.extra["text"]) == size


def test_the_tail_of_a_large_file_is_read_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.progress(1, loss=1.0, toks_per_s=1.0, lr=1.0, attention=summary())
    line = heartbeat.path.read_bytes()
    with heartbeat.path.open("ab") as file:
        file.write(line * (50_000_000 // len(line)))
    heartbeat.beat(99)
    num_read: list[int] = []
    pread = os.pread

    def note(descriptor: int, size: int, at: int) -> bytes:
        num_read.append(size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", note)

    last, progress = last_beat(heartbeat.path), last_beat(heartbeat.path, "progress")
    age = age_seconds(heartbeat.path)

    assert last is not None and last.step == 99 and progress is not None and age is not None
    assert num_read == [BLOCK_BYTES] * 3
    assert last_beat(heartbeat.path, "never") is None
    assert sum(num_read[3:]) == SEARCH_BYTES


def test_a_full_disk_warns_once_counts_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.beat(1)
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        for step in (2, 3, 4):
            heartbeat.beat(step)
    heartbeat.beat(5)

    assert heartbeat.num_dropped == 3
    assert [beat.step for beat in read_heartbeat(heartbeat.path)] == [1, 5]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert "heartbeat_rank0.jsonl: lines are being dropped (No space left on device)" in warnings[0]


def test_what_a_filling_disk_took_of_a_line_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat, write = Heartbeat(tmp_path), os.write
    heartbeat.beat(1)
    with monkeypatch.context() as filling:
        filling.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        heartbeat.beat(2)
    heartbeat.beat(3)

    assert heartbeat.num_dropped == 1
    assert [beat.step for beat in read_heartbeat(heartbeat.path)] == [1, 3]


def test_a_folder_that_cannot_be_made_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    heartbeat = Heartbeat(tmp_path / "file" / "run")
    heartbeat.beat(1)
    heartbeat.beat(2)

    assert heartbeat.num_dropped == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_closed_stderr_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat(tmp_path)
    with (tmp_path / "stderr").open("w") as closed:
        pass
    monkeypatch.setattr("sys.stderr", closed)
    monkeypatch.setattr(os, "write", refuse)

    heartbeat.beat(1)

    assert heartbeat.num_dropped == 1


class FakeDriver:
    """Answers like NVML: results through pointers, 0 for success."""

    def __init__(self, broken: str = "") -> None:
        self._broken = broken

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        rates._obj.gpu = 87
        return 3 if self._broken == "load" else 0

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int, degrees: Any) -> int:
        degrees._obj.value = 61
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.65"
        return 0


@pytest.mark.parametrize(
    ("driver", "uuid", "expected"),
    [
        (FakeDriver(), "GPU-1", (87, 61)),
        (FakeDriver("load"), "GPU-1", (None, 61)),
        (FakeDriver(), "GPU-2", (None, None)),
        (None, "GPU-1", (None, None)),
    ],
    ids=["all", "no load", "unknown GPU", "no driver"],
)
def test_load_is_what_the_driver_says_or_none(
    driver: Any, uuid: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_library", lambda: driver)

    assert machine.read_load(uuid) == expected
    assert machine.driver_version() == (None if driver is None else "580.65")


@pytest.mark.gpu
@on_gpu
def test_the_reading_of_a_gpu_is_complete() -> None:
    held = torch.empty(64 * 1024 * 1024, dtype=torch.uint8, device="cuda")
    reading = read_gpu(held.device)

    assert reading.gpu_mem_alloc is not None and reading.gpu_mem_alloc >= 64
    assert reading.gpu_mem_reserved is not None
    assert reading.gpu_mem_reserved >= reading.gpu_mem_alloc
    assert reading.gpu_util_pct is not None and 0 <= reading.gpu_util_pct <= 100
    assert reading.gpu_temp_c is not None and 0 < reading.gpu_temp_c < 120
    assert machine.driver_version()


def test_the_quick_way_to_read_a_line_gives_what_json_gives(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3)
    heartbeat.boot(7)
    heartbeat.beat(8)
    heartbeat.beat(8, "evaluate")
    heartbeat.progress(8, loss=NAN, toks_per_s=1.0, lr=0.1)
    heartbeat.step_end(8)
    heartbeat.loader_error('a "quoted" \\ error')
    heartbeat.write(9, "beat", {"phase": "save", "more": 1})
    beats = read_heartbeat(heartbeat.path)
    for beat, line in zip(beats, lines(heartbeat.path), strict=True):
        base = {name: line.pop(name) for name in BASE_FIELDS}
        assert base == {name: getattr(beat, name) for name in BASE_FIELDS}
        assert beat.extra == line
    texts = heartbeat.path.read_text().splitlines()
    for beat, text in zip(beats, texts, strict=True):
        head = parse_head(heartbeat.path, Line(text, ""))
        assert (head.ts, head.step, head.pid) == (beat.ts, beat.step, beat.pid)
        assert (head.msg, head.is_pause) == (beat.msg, beat.is_pause)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 1, "ts": 1.0, "iso": "", "pid": 1, "rank": 0, "step": 1, "msg": "beat", ',
        '{"schema": 1, "ts": 1.0, "iso": "", "pid": 1, "rank": 0, "step": 1, "msg": "beat"',
        '{"schema": 2, "ts": 1.0, "iso": "", "pid": 1, "rank": 0, "step": 1, "msg": "beat", '
        '"phase": "step_start"}',
    ],
    ids=["cut", "open", "newer"],
)
def test_the_quick_way_takes_nothing_that_json_would_not(tmp_path: Path, text: str) -> None:
    with pytest.raises(BrokenHeartbeat):
        parse_beat(tmp_path / "x", Line(text, "line 1"))
