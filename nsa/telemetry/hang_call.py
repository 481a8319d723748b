"""Ranks that hang meet in the run folder: one calls, all write where they are, the caller gathers.

Hidden files that last for seconds. `.hang_call.json`: `id` and `by`, the rank that calls; it exists
at most once. `.hang_answer_rank{r}.json`: `id` of the call and the fields of RankState. A rank in
which no Python can run answers nothing; faulthandler leaves its stacks in `.hang_raw_rank{r}.txt`.
Collectives are of no use here: they are what hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nsa.files import read_text
from nsa.telemetry.atomic import write_text
from nsa.telemetry.hang_report import GONE, SILENT, STOPPED, RankState
from nsa.telemetry.proc import STATE, start_ticks, stat_fields
from nsa.telemetry.spans import Place, read_span
from nsa.telemetry.strict_json import strict

CALL = ".hang_call.json"
ANSWER = ".hang_answer_rank{rank}.json"
RAW = ".hang_raw_rank{rank}.txt"
MEETING = ".hang_*"
"""All of them."""
POLL_S = 0.1


class Call(NamedTuple):
    """A rank has found that the run hangs."""

    id: str
    by: int


def make_call(folder: Path, rank: int) -> Call | None:
    """Call all ranks; None where another rank was faster."""
    call = Call(f"{rank}-{time.time_ns()}", rank)
    mine = folder / f"{CALL}.{rank}"
    write_text(mine, json.dumps(call._asdict()))
    try:
        os.link(mine, folder / CALL)  # a name that exists is not replaced
    except FileExistsError:
        return None
    finally:
        mine.unlink(missing_ok=True)
    return call


def read_call(folder: Path) -> Call | None:
    """The call that waits for answers; costs one look at the folder while there is none."""
    content = _read(folder / CALL)
    return Call(str(content["id"]), int(content["by"])) if {"id", "by"} <= content.keys() else None


def end_calls(folder: Path) -> None:
    """Remove what a call has left; also one whose caller has died."""
    for path in folder.glob(MEETING):
        if not path.name.startswith(RAW.partition("{")[0]):
            path.unlink(missing_ok=True)


def answer(folder: Path, call: Call, state: RankState) -> None:
    """Say where this rank is."""
    content = {"id": call.id} | dataclasses.asdict(state)
    write_text(folder / ANSWER.format(rank=state.rank), json.dumps(strict(content)))


def gather(
    folder: Path, call: Call, still_s: Mapping[int, float], patience_s: float
) -> list[RankState]:
    """The states of the ranks, by their answers or, after so many seconds, by what is left of them.

    `still_s` is how long each rank was seen to stay where it is.
    """
    end = time.monotonic() + patience_s
    answers: dict[int, RankState] = {}
    while True:
        for rank in still_s.keys() - answers.keys():
            if (state := _read_answer(folder, call, rank)) is not None:
                answers[rank] = state
        if len(answers) == len(still_s) or time.monotonic() > end:
            break
        time.sleep(POLL_S)
    return [answers.get(rank) or _unheard(folder, rank, still_s[rank]) for rank in sorted(still_s)]


def process_state(place: Place) -> str:
    """stopped, gone or, where that cannot be known from here, silent."""
    if place.host != platform.node() or not place.started:
        return SILENT
    fields = stat_fields(place.pid)
    if fields is None or start_ticks(place.pid) != place.started or fields[STATE] in "ZX":
        return GONE
    return STOPPED if fields[STATE] in "Tt" else SILENT


def kill(place: Place) -> None:
    """SIGKILL to the process of a rank on this machine, and to no other that has its pid now."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(place.pid)
        try:
            if place.started and start_ticks(place.pid) == place.started:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _unheard(folder: Path, rank: int, still_s: float) -> RankState:
    place = read_span(folder, rank)
    if place is None:
        unknown = dict(pid=0, host="an unknown machine", step=0, span="an unknown place")
        return RankState(rank=rank, state=SILENT, waits=False, still_s=still_s, **unknown)  # type: ignore[arg-type]
    stacks: list[str] = []
    with contextlib.suppress(OSError):
        raw = read_text(folder / RAW.format(rank=rank))
        stacks = raw.splitlines()
    return RankState(
        rank=rank,
        pid=place.pid,
        host=place.host,
        state=process_state(place),
        step=place.step,
        span=place.span,
        waits=place.waits,
        still_s=still_s,
        stacks=stacks,
    )


def _read_answer(folder: Path, call: Call, rank: int) -> RankState | None:
    content = _read(folder / ANSWER.format(rank=rank))
    if content.pop("id", None) != call.id:
        return None
    try:
        return RankState(**content)
    except TypeError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
