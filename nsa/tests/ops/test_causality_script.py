"""scripts/run_gpu_causality_test.sh: what it prints, where it starts from, and that it rings."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSACache
from nsa.model.paged import PagedCache
from nsa.model.rope import Rope
from nsa.tests.support.helpers import make_module
from scripts.gpu_causality_test import (
    CORE,
    EXTENDED,
    ON_CPU,
    check_causality,
    find_test,
    main,
    make_attention,
    run_checks,
    run_tests,
)

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "run_gpu_causality_test.sh"
PASSED = "Causality test: 3/3 passed"
SMALL = dataclasses.replace(ON_CPU, length=80, num_decoded=20)


class LeaksInForward(NSAAttention):
    def forward(self, x: Tensor, **options: object) -> Tensor:
        return super().forward(x) + 1e-3 * x.mean(dim=1, keepdim=True)


class LeaksInChunks(NSAAttention):
    """In the prompt of decode, too."""

    def prefill(self, x: Tensor, cache: NSACache) -> Tensor:
        return super().prefill(x, cache) + 1e-3 * x[:, -1:]


class ReadsAheadInDecode(NSAAttention):
    """In chunks of one token, too."""

    def step(self, x: Tensor, cache: NSACache | PagedCache, rope: Rope | None = None) -> Tensor:
        ahead = cache.sel.k[:, :, -1].flatten(1)[:, None, : x.shape[-1]]
        return super().step(x, cache, rope) + ahead


class IgnoresItsInput(NSAAttention):
    def forward(self, x: Tensor, **options: object) -> Tensor:
        return torch.zeros_like(x)


class SelectsTheFuture(NSAAttention):
    def forward(self, x: Tensor, **options: object) -> Tensor:
        raise AssertionError("it would read the future")


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_STRICT_ASSERTS", "1")


def run_on(kind: type[NSAAttention], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and lines for a module that has the weights of the real one."""
    attention, x = make_attention(SMALL, "cpu", torch.float32)
    attention.__class__ = kind
    code = run_checks(attention, x, SMALL.num_decoded)
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the words are those of a CPU")
def test_script_runs_from_anywhere_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """The folder holds no package, and no variable leads to one."""
    environ = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    environ["PYTHON"] = sys.executable
    command = ["bash", str(SCRIPT), "--full", "--no-tests"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == PASSED
    assert any("no CUDA device" in line and "instead of 8192" in line for line in lines)
    for name in ("forward", "chunked prefill", "decode", "agreement", "planted selection"):
        assert any(line.startswith(f"{name}: ok") for line in lines), name


def test_the_tests_of_the_operator_come_last_and_count(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    assert run_tests(("masks",), device) == 0
    assert capfd.readouterr().out.endswith("[OK] All requested tests completed on the CPU: masks\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    assert run_tests(("masks",), device) == 1
    assert capfd.readouterr().out == "[FAILED] Tests failed on the CPU: masks\n"


def test_the_tests_that_it_runs_exist() -> None:
    assert all(find_test(name).is_file() for name in CORE + EXTENDED)


def test_script_is_executable_and_leaves_git_alone() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert SCRIPT.stat().st_mode & 0o100
    assert "set -euo pipefail" in text and "git " not in text


def test_without_an_environment_of_its_own_the_script_takes_python(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    copy = shutil.copy(SCRIPT, tmp_path / "scripts")
    called = "import os, sys; print(sys.argv[1:], os.environ['NSA_STRICT_ASSERTS'])"
    (tmp_path / "scripts" / "gpu_causality_test.py").write_text(called)
    environ = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(["bash", copy, "--full"], env=environ, capture_output=True, text=True)
    assert done.stdout == "['--full'] 1\n", done.stderr


def test_wrong_flag_is_an_error_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--ful"])
    assert "the nearest known one is '--full'" in capsys.readouterr().err


def test_the_real_attention_passes(strict: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run_on(NSAAttention, capsys)
    assert (code, lines[-1]) == (0, PASSED)


@pytest.mark.parametrize(
    ("kind", "passed", "message"),
    [
        (LeaksInForward, "2/3", "forward: FAILED: tokens after 0 changed row 0"),
        (LeaksInChunks, "1/3", "chunked prefill: FAILED: tokens after 17 changed row 0"),
        (ReadsAheadInDecode, "1/3", "decode: FAILED: row 60 is not finite"),
        (IgnoresItsInput, "2/3", "forward: FAILED: tokens after 0 left row 1 as it was"),
        (SelectsTheFuture, "2/3", "forward: FAILED: it would read the future"),
    ],
)
def test_a_leak_is_found(
    strict: None,
    capsys: pytest.CaptureFixture[str],
    kind: type[NSAAttention],
    passed: str,
    message: str,
) -> None:
    code, lines = run_on(kind, capsys)
    assert code == 1
    assert lines[-1] == f"Causality test: {passed} passed"
    assert any(line.startswith(message) for line in lines), lines


def test_a_path_of_another_function_is_found(
    strict: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Causal by itself, but not what decode computes."""

    class Doubled(NSAAttention):
        def forward(self, x: Tensor, **options: object) -> Tensor:
            return 2 * super().forward(x)

    code, lines = run_on(Doubled, capsys)
    assert (code, lines[-1]) == (1, f"{PASSED}, but FAILED: agreement")


def test_an_accepted_planted_selection_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the switch nothing refuses it."""
    code, lines = run_on(NSAAttention, capsys)
    assert (code, lines[-1]) == (1, f"{PASSED}, but FAILED: planted selection")


def test_a_leak_of_one_bit_into_one_row_is_found() -> None:
    module = make_module()
    x = torch.randn(1, 40, 24, dtype=torch.float64)

    @torch.no_grad()
    def leaking(x: Tensor) -> Tensor:
        out = module(x)
        out[0, 7, 0] += 1e-15 * x[0, 30, 0].sign()
        return out

    x[0, 30, 0] = 1.0
    cuts = [20 + i for i in range(5)]  # half of them flip the sign
    with torch.no_grad():
        assert check_causality(module, x, cuts) == ""
    assert "changed row 7" in check_causality(leaking, x, cuts)
