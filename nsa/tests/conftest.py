"""What all tests share: thread limits, a clean environment, a config that trains in a second."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.config import Config, load_config
from nsa.tests.support import quick
from nsa.tests.support.nursery import Nursery

REPOSITORY = Path(__file__).resolve().parents[2]

TINY = (
    "model.dim=16",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.n_kv_groups=1",
    "model.d_k=8",
    "model.d_v=8",
    "nsa.l=8",
    "nsa.d=4",
    "nsa.l_sel=8",
    "nsa.n_sel=3",
    "nsa.w=8",
    "train.steps=3",
    "train.seq_len=32",
    "train.batch_size=2",
    "train.warmup_steps=0",
    "train.log_every=1",
    "train.eval_every=3",
    "train.eval_batches=2",
    "data.dataset=shakespeare",
    "runtime.device=cpu",
    "runtime.precision=fp32",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give each xdist worker one thread: two workers with two threads each fight for two cores.

    Where the kernels are interpreted, make that faster."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("numprocesses", None) and not is_worker:
        return  # it hands out tests and runs none: workers wait while it imports torch
    import torch

    if is_worker:
        torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from nsa.tests.support.interpreter import speed_up

        speed_up()
    elif torch.cuda.is_available():
        from nsa.ops.triton import problem

        # Hundreds of kinds of calls, each at one length; test_launch_device.py has the others.
        problem.AHEAD_LENGTHS = ()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device, or Triton's interpreter."""
    of_kernels = [item for item in items if item.get_closest_marker("gpu")]
    if not of_kernels or os.environ.get("TRITON_INTERPRET") == "1":
        return
    import torch

    if not torch.cuda.is_available():
        for item in of_kernels:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, or TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def _tf32_as_before() -> Iterator[None]:
    """A training run on a GPU allows TF32 in its process; tests of exact kernels may come next."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable in the developer's shell must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("NSA_") or name == "CONFIG":
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    """A test leaves signals as they were: children of later tests would inherit what it ignores."""
    before = _signal_state()
    yield
    after = _signal_state()
    signal.pthread_sigmask(signal.SIG_SETMASK, before[1])
    for number, handler in before[0].items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    assert after == before, "the test changed a signal handler or the mask of this process"


def _signal_state() -> tuple[dict[int, Any], set[int]]:
    """Handlers of the signals that runs use, and the mask."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return {n: signal.getsignal(n) for n in numbers}, signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture(autouse=True)
def _quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave out what costs more than their steps; quick.py says what."""
    for name, value in quick.replacements().items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def tiny_config(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that builds a config of a run of a second, with overrides."""

    def build(*overrides: str) -> Config:
        base = REPOSITORY / "configs" / "base.yaml"
        return load_config(
            base, [*TINY, f"train.out_dir={tmp_path / 'run'}", *overrides], environ={}
        )

    return build


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Processes of the trainer without the time of imports; one server for all tests."""
    with Nursery() as process:
        yield process


@pytest.fixture(scope="module")
def forked_python(nursery: Nursery) -> Iterator[None]:
    """Whatever starts sys.executable forks from the nursery instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(nursery.python))
        yield
