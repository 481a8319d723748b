"""Every command of docs/surface.toml runs for real on the CPU; only sizes differ (`make rehearse`).

Commands of a lane need what the earlier ones left. xdist gives each lane to one worker, in order;
`pytest -m rehearsal -k "C12 or N1"` runs some of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nsa.tests.support.rehearsal import Lane, dataset, make_tree
from nsa.tests.support.surface import Command, commands

REHEARSED = [command for command in commands() if not command.exempt]
OpenLane = Callable[[int], Lane]


@pytest.fixture(scope="module")
def open_lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenLane]:
    """The lane of a number: a copy of the tree of its own, made when it is first asked for."""
    lanes: dict[int, Lane] = {}
    with ExitStack() as stack:

        def opened(number: int) -> Lane:
            if number not in lanes:
                folder = tmp_path_factory.mktemp(f"lane{number}")
                (folder / "logs").mkdir()
                environ = stack.enter_context(dataset()).environment(folder / "cache")
                make_tree(folder / "tree")
                lane = Lane(folder / "tree", folder / "logs", environ)
                lanes[number] = stack.enter_context(lane)
            return lanes[number]

        yield opened


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c.id, marks=pytest.mark.xdist_group(f"lane{c.lane}")) for c in REHEARSED],
)
def test_the_command_does_what_the_surface_says(command: Command, open_lane: OpenLane) -> None:
    lane = open_lane(command.lane)
    problems = lane.run(command)
    log = lane.logs / f"{command.id}.log"
    said = log.read_text(encoding="utf-8", errors="replace")[-3000:] if log.exists() else ""
    assert not problems, f"`{command.rehearsed}`: {'; '.join(problems)}\n{said}"


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
