"""The variables of many ranks: each does what it says, in a group of one process."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from nsa.config import Config, ConfigError
from nsa.config.env import raw
from nsa.records import read_config, read_metrics
from nsa.train import Halted, RunRefused, run
from nsa.train.distributed import process_group
from nsa.train.distributed.ddp import WIRE_TYPES, Ddp
from nsa.train.distributed.process_group import translate_old_names
from nsa.train.distributed.strategy import AUTO, OFF, ON, Strategy, micro_positions
from nsa.train.step import EagerStep, Updated
from nsa.train.stop import ORPHANED, Stop, launcher_pid

BuildConfig = Callable[..., Config]

TESTED = {
    *("NSA_DDP_BUCKET_MB", "NSA_DDP_COMPRESS", "NSA_DDP_DISABLE_GC", "NSA_DDP_FIND_UNUSED"),
    *("NSA_DDP_SAFE_GC_LAYERS", "NSA_DDP_SAFE_MODE", "NSA_DDP_STATIC_GRAPH", "NSA_PG_TIMEOUT_MIN"),
    "NSA_START_TIMEOUT_MIN",
    *(
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
    ),
    *("TORCH_BACKEND", "IB_DISABLE", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"),
}
"""Variables whose effect is shown here."""


@pytest.fixture
def one_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What torchrun would set for a single rank, on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGTERM)
    yield monkeypatch
    signal.signal(signal.SIGTERM, handler)  # a rank that ends with an error ignores it


def train(cfg: Config, ddp: int = ON) -> str:
    """Train one step as a rank, and return what was printed."""
    out = io.StringIO()
    run(cfg, config_path="tiny.yaml", out=out, ddp=ddp, stop_after=1)
    return out.getvalue()


def wrapped_by(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How DDP is built, from now on."""
    calls: list[dict[str, Any]] = []
    real = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, module: torch.nn.Module, **options: Any) -> None:
        calls.append(options)
        real(self, module, **options)

    monkeypatch.setattr(DistributedDataParallel, "__init__", init)
    return calls


def test_a_group_of_one_says_that_it_is_ready(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    printed = train(tiny_config())
    line = "[ddp] process group ready | backend=gloo world_size=1 timeout_min=15\n"
    assert printed.startswith(line)
    assert "[ddp] gradient compression off: gradients are summed in fp32\n" in printed
    assert "[debug] step 1: input shape torch.Size([2, 32]) | rank 0 of 1\n" in printed
    assert not torch.distributed.is_initialized()


def test_ranks_read_every_row_of_an_update_once_and_those_of_one_process() -> None:
    size, num_micro, first = 2, 3, 60
    for cp, tp in ((1, 1), (2, 1), (2, 2)):
        read: list[range] = []
        for rank in range(4 * cp * tp):
            ranks = Strategy()
            ranks.rank, ranks.world_size, ranks.cp, ranks.tp = rank, 4 * cp * tp, cp, tp
            starts = micro_positions(ranks, first, size, num_micro)
            read += [range(start, start + size) for start in starts]
            # Micro-batch by micro-batch, as one process with four times the rows has them.
            assert [(start - first) // (4 * size) for start in starts] == [0, 1, 2]
        # Those that share rows are neighbours, and read the same.
        rows = sorted(row for rows in read for row in rows)
        assert rows == sorted([*range(60, 84)] * cp * tp)
        assert read[0] == read[3 * (cp * tp - 1)]


def test_the_group_is_left_after_an_error(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    with pytest.raises(ConfigError, match="seq_len"):
        train(tiny_config("train.seq_len=9999999"))
    assert not torch.distributed.is_initialized()


def test_a_request_during_the_last_update_is_obeyed(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    real = EagerStep.__call__

    def call(self: EagerStep, *given: Any) -> Updated:
        (tmp_path / "run" / ".HALT").touch()
        return real(self, *given)

    one_of_one.setattr(EagerStep, "__call__", call)
    with pytest.raises(Halted, match="stopped by .HALT after step 1"):
        train(tiny_config())
    assert not (tmp_path / "run" / ".HALT").exists()


def test_the_timeout_is_that_of_the_group(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    one_of_one.setenv("NSA_PG_TIMEOUT_MIN", "0.5")
    waits: list[float] = []
    real = Ddp.patience_s

    def patience_s(self: Ddp, usual_s: float) -> float:
        waits.append(real(self, usual_s))
        return waits[-1]

    one_of_one.setattr(Ddp, "patience_s", patience_s)
    assert "timeout_min=0.5\n" in train(tiny_config())
    assert waits == [24.0, 24.0], "for the lock of the folder, and for data"
    for name in ("NSA_START_TIMEOUT_MIN", "NSA_PG_TIMEOUT_MIN"):
        one_of_one.setenv(name, "0")
        with pytest.raises(RunRefused, match=f"{name}=0.*use minutes > 0"):
            train(tiny_config())


def test_ranks_wait_for_one_that_starts_late() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))  # the group's
    late = threading.Timer(0.3, store.set, ("started/1", ""))
    late.start()
    process_group._wait_for_all(store, 0, 2)
    assert store.check(["started/0", "started/1"])


def test_a_rank_that_never_starts_is_named(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    one_of_one.setenv("WORLD_SIZE", "3")
    one_of_one.setenv("NSA_START_TIMEOUT_MIN", "0.005")
    one_of_one.setattr(process_group, "_open_store", HashStore)
    with pytest.raises(RunRefused, match="rank 0 of 3 waited 0 s for ranks 1, 2, which did not"):
        train(tiny_config())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("NSA_DDP_BUCKET_MB", "", "bucket_cap_mb", None),
        ("NSA_DDP_BUCKET_MB", "7", "bucket_cap_mb", 7),
        ("NSA_DDP_STATIC_GRAPH", "1", "static_graph", True),
        ("NSA_DDP_FIND_UNUSED", "1", "find_unused_parameters", True),
        ("NSA_DDP_SAFE_MODE", "", "gradient_as_bucket_view", True),
        ("NSA_DDP_SAFE_MODE", "1", "gradient_as_bucket_view", False),
        ("NSA_DDP_SAFE_MODE", "1", "bucket_cap_mb", 2.0),
    ],
)
def test_ddp_is_built_as_told(
    name: str,
    value: str,
    option: str,
    expected: object,
    one_of_one: pytest.MonkeyPatch,
    tiny_config: BuildConfig,
) -> None:
    one_of_one.setenv(name, value)
    calls = wrapped_by(one_of_one)
    train(tiny_config("train.accumulate_grad_batches=2"))
    assert [call[option] for call in calls] == [expected]


def test_safe_mode_says_what_it_does(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    one_of_one.setenv("NSA_DDP_SAFE_MODE", "1")
    printed = train(tiny_config())
    assert "[ddp-safe] Safe mode: buckets of 2 MB" in printed
    assert "[ddp] gradient compression off" in printed
    assert "[boot] flash disabled (runtime.use_flash=false)" in printed


@pytest.mark.parametrize(
    ("chosen", "precision", "wire"),
    [
        ("bf16", "fp32", "bf16"),
        ("fp16", "fp32", "fp16"),
        ("off", "bf16", "off"),
        ("", "fp32", "off"),
        ("auto", "bf16", "bf16"),
        ("", "fp16", "off"),
    ],
)
def test_gradients_travel_in_the_type_that_is_chosen_or_follows_the_precision(
    chosen: str,
    precision: str,
    wire: str,
    one_of_one: pytest.MonkeyPatch,
    tiny_config: BuildConfig,
) -> None:
    one_of_one.setenv("NSA_DDP_COMPRESS", chosen)
    types: set[torch.dtype] = set()
    real = torch.distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        types.add(tensor.dtype)
        return real(tensor, *args, **options)

    one_of_one.setattr(torch.distributed, "all_reduce", all_reduce)
    printed = train(tiny_config(f"runtime.precision={precision}"))
    line = "off: gradients are summed in fp32" if wire == "off" else f"enabled: {wire}"
    assert f"[ddp] gradient compression {line}\n" in printed
    assert types & set(WIRE_TYPES.values()) == ({WIRE_TYPES[wire]} if wire != "off" else set())


@pytest.mark.parametrize(
    ("values", "line", "layers"),
    [
        ({}, "[ddp-safe] Disabled gradient checkpointing under DDP", (False, "")),
        ({"NSA_DDP_DISABLE_GC": "0"}, "gradient_checkpointing=on", (True, "")),
        (
            {"NSA_DDP_SAFE_GC_LAYERS": "0:1"},
            "[ddp-safe] Progressive GC enabled under DDP for layers [0:1)",
            (True, "0:1"),
        ),
    ],
    ids=["off", "on", "range"],
)
def test_gradient_checkpointing_under_ddp(
    values: dict[str, str],
    line: str,
    layers: tuple[bool, str],
    one_of_one: pytest.MonkeyPatch,
    tiny_config: BuildConfig,
    tmp_path: Path,
) -> None:
    for name, value in values.items():
        one_of_one.setenv(name, value)
    printed = train(tiny_config("runtime.gradient_checkpointing=true"))
    assert line in printed
    kept = read_config(tmp_path / "run").runtime
    assert (kept.gradient_checkpointing, kept.gc_layers) == layers


@pytest.mark.parametrize("ddp", [AUTO, OFF])
def test_one_process_is_alone_unless_it_is_told(
    ddp: int, one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    assert "[ddp]" not in train(tiny_config(), ddp)
    assert read_metrics(tmp_path / "run").world_size == 1


def test_ranks_without_a_launcher_are_refused(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunRefused, match="--ddp 1 with WORLD_SIZE=1.*use torchrun"):
        train(tiny_config(), ON)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunRefused, match="--ddp -1 with WORLD_SIZE=2.*use torchrun"):
        train(tiny_config(), AUTO)
    with pytest.raises(RunRefused, match="--ddp 0 with WORLD_SIZE=2: 2 runs would write into one"):
        train(tiny_config(), OFF)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunRefused, match="RANK or MASTER_ADDR is not set"):
        train(tiny_config(), ON)


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({"TORCH_BACKEND": "nccl"}, (), "TORCH_BACKEND=nccl on a CPU"),
        ({}, ("runtime.cuda_graph=true",), "runtime.cuda_graph=true under DDP"),
        ({"NSA_DDP_SAFE_GC_LAYERS": "0:9"}, (), "gc_layers"),
    ],
    ids=["backend", "graph", "layers"],
)
def test_what_cannot_work_under_ddp_is_refused(
    values: dict[str, str],
    overrides: tuple[str, ...],
    message: str,
    one_of_one: pytest.MonkeyPatch,
    tiny_config: BuildConfig,
) -> None:
    for name, value in values.items():
        one_of_one.setenv(name, value)
    with pytest.raises((RunRefused, ConfigError), match=message):
        train(tiny_config(*overrides))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_local_rank_picks_a_device_that_must_exist(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    one_of_one.setenv("LOCAL_RANK", "3")
    with pytest.raises(RunRefused, match="LOCAL_RANK=3 on a machine with 0 CUDA devices"):
        train(tiny_config("runtime.device=cuda"))


def test_a_group_outlives_what_an_error_keeps_of_it(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    """Else DDP's reducer, freed after the error, destroys it while gloo's thread wants the GIL."""
    one_of_one.setattr(process_group, "_left", [])
    with (
        pytest.raises(ValueError, match="of the run"),
        process_group.open_ranks(ON, tiny_config(), print),
    ):
        group = dist.group.WORLD
        raise ValueError("an error of the run")
    assert not dist.is_initialized()
    assert process_group._left == [group]


def test_each_restart_has_names_of_its_own(
    one_of_one: pytest.MonkeyPatch, tiny_config: BuildConfig
) -> None:
    prefixes: list[str] = []
    real = PrefixStore

    def prefixed(prefix: str, store: Any) -> Any:
        prefixes.append(prefix)
        return real(prefix, store)

    one_of_one.setattr("nsa.train.distributed.process_group.PrefixStore", prefixed)
    one_of_one.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    train(tiny_config())
    assert prefixes == ["attempt2"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
        ("IB_DISABLE", "NCCL_IB_DISABLE"),
    ],
)
def test_old_names_are_translated(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(new, "0")
    monkeypatch.setenv(old, "1")
    translate_old_names()
    assert raw(new) == "0"  # the new name wins
    monkeypatch.delenv(new)
    translate_old_names()
    assert raw(new) == "1"


def test_only_ranks_of_torchrun_watch_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under nohup, setsid or tmux outlives the shell that started it."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_pid() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launcher_pid() == os.getppid()
    heard: list[bool] = []
    stop = Stop(tmp_path, parent=os.getppid(), on_request=lambda: heard.append(True))
    assert stop.requested() == "" and not heard
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.requested() == ORPHANED and heard
    assert Stop(tmp_path).requested() == ""
