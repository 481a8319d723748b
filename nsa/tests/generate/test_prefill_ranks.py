"""Ranks read a prompt together: caches, logits and texts are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.config import Config
from nsa.model import TinyLM
from nsa.tests.conftest import REPOSITORY
from nsa.tests.generate.prefill_ranks import CASES
from nsa.tests.support.nursery import Nursery
from nsa.train import save_model

pytestmark = pytest.mark.dist

SCRIPT = REPOSITORY / "nsa" / "tests" / "generate" / "prefill_ranks.py"
ROUNDING = 1e-12
"""Relative, in float64."""
TIMEOUT_S = 100
Outcome = list[tuple[int, str, str]]
"""Exit code, stdout and stderr of each rank."""


def run_ranks(nursery: Nursery, *arguments: object, stdin: str = "", **environ: str) -> Outcome:
    """Two ranks of a program; only rank 0 has something to read."""
    usual = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks = [
        subprocess.Popen(
            [str(nursery.python), *map(str, arguments)],
            env=dict(os.environ) | usual | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [
            rank.communicate(stdin if i == 0 else "", timeout=TIMEOUT_S)
            for i, rank in enumerate(ranks)
        ]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, printed, strict=True)]


@pytest.fixture(scope="module")
def found(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in the cases."""
    folder = tmp_path_factory.mktemp("prefill")
    done = run_ranks(nursery, SCRIPT, folder)
    assert [code for code, *_ in done] == [0, 0], "\n".join(err for *_, err in done)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_caches_and_texts_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    first, other = (rank[name] for rank in found)
    assert {what: e for what, e in first["errors"].items() if e > ROUNDING} == {}
    assert len(first["errors"]) > 4, "a cache has more buffers"
    num_tokens = CASES[name][1]
    assert first["lengths"] == [num_tokens, num_tokens]
    assert first["texts"][0] == first["texts"][1]
    # Two prefills, or none: rank 0 reads what is too short to share.
    assert other["prompts"] == (0 if "too short" in name else 2)


def test_all_ranks_refuse_a_prefill_token_by_token(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "NSA_PREFILL_BATCHED=0 on 2 ranks" in rank["refused"]
        assert "unset it" in rank["refused"]


@pytest.fixture
def model_file(tiny_config: Callable[..., Config], tmp_path: Path) -> Path:
    config = tiny_config()
    torch.manual_seed(1)
    model = TinyLM.from_config(config, vocab=256)
    torch.nn.init.normal_(model.embed.weight)
    return save_model(tmp_path / "run" / "model.pt", model, config)


def generate(nursery: Nursery, model: Path, *arguments: str, stdin: str = "") -> Outcome:
    """`nsa generate` on two ranks, as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = ["-m", "nsa.cli", "generate", "--model", model, "--device", "cpu", *arguments]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NSA_PG_TIMEOUT_MIN": "1"}
    return run_ranks(nursery, *command, stdin=stdin, **where)


def test_the_command_prints_the_text_of_one_process_once(
    nursery: Nursery, model_file: Path
) -> None:
    """A long prompt, one that is too short to share, and one of another length, from stdin."""
    prompts = "\n".join(["long text " * 12, "short", "another text " * 9])
    settings = ("--prompts", "-", "--greedy", "--max-new-tokens", "12", "--json")
    first, other = generate(nursery, model_file, *settings, stdin=prompts)
    alone = subprocess.run(
        [nursery.python, "-m", "nsa.cli", "generate", "--model", model_file, *settings],
        input=prompts, capture_output=True, text=True, check=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert (first[0], other[0]) == (0, 0), (first, other)
    assert first[1] == alone.stdout and other[1] == ""
    assert len(first[1].splitlines()) == 3


def test_a_bad_prompt_ends_all_ranks(nursery: Nursery, model_file: Path) -> None:
    first, other = generate(nursery, model_file, "--file", "no-such-file")
    assert (first[0], other[0]) == (2, 0), (first, other)
    assert "no-such-file cannot be read" in first[2] and "Traceback" not in first[2] + other[2]
