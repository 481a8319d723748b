"""The benchmarks run as their documentation calls them, here at tiny sizes."""

import json
import subprocess
import sys
from typing import Any

from nsa.tests.conftest import REPOSITORY


def run_bench(*arguments: str) -> dict[str, Any]:
    """Run a benchmark from the repository root; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_torch_bench_measures_time_and_memory():
    result = run_bench("bench/bench_torch.py", "--lengths", "256", "--repeats", "1")
    (row,) = result["rows"]
    assert row["nsa_ms"] > 0 and row["dense_ms"] > 0
    assert row["ratio"] == row["nsa_ms"] / row["dense_ms"]
    assert row["nsa_mib"] > 0


def test_prefill_bench_takes_heads_and_blocks_from_a_config():
    config = ["--config", "configs/train_showcase.yaml", "--device", "cpu"]
    result = run_bench("bench/bench_prefill.py", *config, "--lengths", "96", "--repeats", "1")
    assert (result["Hq"], result["Hkv"], result["Dk"], result["Dv"]) == (8, 2, 16, 16)
    (row,) = result["rows"]
    assert row["nsa_both_ms"] > 0 and row["nsa_fwd_ms"] > 0
    assert row["math_both_ms"] > 0
