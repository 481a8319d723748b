"""Every command of docs/surface.toml runs for real on the CPU; only sizes differ (`make rehearse`).

Commands of a lane share a copy of the tree, and need what the earlier ones left. A lane is a class,
which `--dist loadscope` gives to one worker; `pytest -m rehearsal -k "[C12] or [N1]"` runs some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.tests.support.rehearsal import Lane, dataset, make_tree
from nsa.tests.support.surface import Command, commands

REHEARSED = [command for command in commands() if not command.exempt]


def of_lane(number: int) -> pytest.MarkDecorator:
    """The commands of a lane, in the order of the file."""
    chosen = [command for command in REHEARSED if command.lane == number]
    return pytest.mark.parametrize("command", chosen, ids=lambda command: command.id)


@pytest.fixture(scope="class")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    """A copy of the tree, and a dataset on this machine."""
    folder = tmp_path_factory.mktemp("lane")
    (folder / "logs").mkdir()
    make_tree(folder / "tree")
    with (
        dataset() as hub,
        Lane(folder / "tree", folder / "logs", hub.environment(folder / "cache")) as lane,
    ):
        yield lane


@pytest.mark.rehearsal
class TestLane1:
    """From the toy run and the launch on two GPUs to the hand-over."""

    @of_lane(1)
    def test_the_command_does_what_the_surface_says(self, command: Command, lane: Lane) -> None:
        check(command, lane)


@pytest.mark.rehearsal
class TestLane2:
    """Tests, benchmarks, stops and resumes, the pilot."""

    @of_lane(2)
    def test_the_command_does_what_the_surface_says(self, command: Command, lane: Lane) -> None:
        check(command, lane)


def check(command: Command, lane: Lane) -> None:
    """Run it; an error shows what is wrong and the end of its output."""
    problems = lane.run(command)
    log = lane.logs / f"{command.id}.log"
    said = log.read_text(encoding="utf-8", errors="replace")[-3000:] if log.exists() else ""
    assert not problems, f"`{command.rehearsed}`: {'; '.join(problems)}\n{said}"


def test_every_command_is_in_a_lane() -> None:
    assert {command.lane for command in REHEARSED} == {1, 2}


def test_a_rehearsal_can_fail(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    os.utime(tmp_path / "old", (1, 1))
    with Lane(tmp_path, tmp_path, {}) as lane:

        def problems(run: str, **fields: Any) -> list[str]:
            return lane.run(Command(id="C1", run=run, lane=1, **fields))

        assert not problems("echo yes; touch new", prints=["yes"], artifact="new")
        assert not problems("exit 3", exit=3)
        assert not problems("sleep 60 & echo up; wait", until_s=20, prints=["up"])
        assert problems("false; true") == ["exit code 1, not 0: no output"]
        assert problems("echo no", prints=["yes"]) == ["it did not print 'yes'"]
        assert problems("true", artifact="none") == ["none is not there"]
        assert problems("true", artifact="old") == ["old is old"]
        assert problems("sleep 60", limit_s=0.2) == ["not done in 0.2 s"]
        assert problems("sleep 60", until_s=0.2, prints=["up"])
        assert problems("bash scripts/none.sh") == ["scripts/none.sh does not exist"]
        assert problems("nsa no-such-command") == ["nsa no-such-command does not exist"]
