"""Hang detection: a watchdog thread in every rank that reports a hang and ends the hung rank.

The thread runs while the main thread is inside a C call. A hang is suspected if a rank stays in a
span longer than allowed (records/spans.py), or if all ranks wait. Then all ranks write their state,
and the rank that noticed writes the report. The first updates, evaluations and checkpoints are
allowed half an hour. Shortly before the timeout of the process group, which would end the waiting
ranks with a less useful message, the watchdog ends the hung rank, so that a launcher can restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from nsa.files import (
    STATE,
    best_effort,
    is_at,
    open_regular,
    read_text,
    start_ticks,
    stat_fields,
    write_text,
)
from nsa.records import Heartbeat
from nsa.records.dumps import OWN, WATCHDOG_PREFIX, write_dump
from nsa.records.hang_report import GONE, RUNS, SILENT, STOPPED, RankState, sentence, write_report
from nsa.records.heartbeat import strict
from nsa.records.spans import Place, Spans, here, read_span
from nsa.train.distributed.strategy import Strategy
from nsa.train.errors import STALLED

THREAD = f"{OWN}hang-watch"
REPORT_AT, END_AT, GRACE = 0.7, 0.85, 0.05
"""Shares of the group's timeout: when to report, when to end the hung rank, and how much later the
waiting ranks end themselves. The hung rank ends first, so that the launcher names it."""
LONGEST_POLL_S = 1.0
GATHER_S = 5.0
"""How long to wait for the answers of other ranks."""


class HangWatch:
    """Watches this rank inside the `with` block; disabled if NSA_HANG_LEAST_S is 0."""

    def __init__(
        self, folder: Path, ranks: Strategy, heartbeat: Heartbeat, spans: Spans = here
    ) -> None:
        self._folder, self._ranks, self._heartbeat, self._spans = folder, ranks, heartbeat, spans
        self._timeout_s = ranks.timeout_s
        limits = [LONGEST_POLL_S, spans.least_s / 8, (ranks.timeout_s or 60.0) / 60]
        self._poll_s = min(limits)
        self._awake_s = 0.0  # time in which this process could run; excludes SIGSTOP
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: count, and _awake_s at its change
        self._answered = ""  # id of the last call answered
        self._explained = -1  # span count of this rank at the last report
        self._unheard: set[int] = set()  # ranks that did not answer the last call of this one
        self._raw: BinaryIO | None = None
        self._is_stale = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD, daemon=True)

    def __enter__(self) -> HangWatch:
        if self._spans.least_s > 0:
            self._open_raw()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * GATHER_S)
        if self._raw is not None:
            faulthandler.cancel_dump_traceback_later()
            path = Path(self._raw.name)
            if is_at(path, self._raw.fileno()):  # the folder may belong to another run by now
                path.unlink(missing_ok=True)
            self._raw.close()

    def renew(self, step: int) -> None:
        """After the folder was removed: make the watchdog thread reopen its file."""
        self._is_stale = True

    def _watch(self) -> None:
        slept = looked = time.monotonic()
        while not self._over.wait(self._poll_s):
            # A pause far above the poll interval means that the process was stopped: cap it.
            slept, before = time.monotonic(), slept
            self._awake_s += looked - before + min(slept - looked, 4 * self._poll_s)
            with best_effort(self._folder):
                self._look()
            looked = time.monotonic()

    def _look(self) -> None:
        """One poll: answer a call, and if this rank is suspect, look at the others."""
        self._arm_raw()
        rank = self._ranks.rank
        still_s = self._still(rank, self._spans.count)
        call = read_call(self._folder)
        if call is not None and call.id != self._answered:
            self._answer(call, still_s)
        if not self._is_suspect(still_s):
            self._seen = {rank: self._seen[rank]}
            return
        places = self._places()
        still = {r: self._still(r, place.count if place else 0) for r, place in places.items()}
        if self._explained != self._spans.count and (why := self._stall(places, still)):
            self._explain(why, still)
        self._end_in_time(places, still[rank])

    def _is_suspect(self, still_s: float) -> bool:
        """Whether to read the files of the other ranks; never true in a healthy run."""
        limit_s = self._spans.allowed_s()
        return still_s > min(limit_s, REPORT_AT * (self._timeout_s or limit_s)) / 2

    def _still(self, rank: int, count: int) -> float:
        """Seconds since the span count of a rank changed, as observed by this rank's clock."""
        if self._seen.get(rank, (None, 0.0))[0] != count:
            self._seen[rank] = (count, self._awake_s)
        return self._awake_s - self._seen[rank][1]

    def _places(self) -> dict[int, Place | None]:
        ranks = range(self._ranks.world_size)
        read = {rank: read_span(self._folder, rank) for rank in ranks if rank != self._ranks.rank}
        return read | {self._ranks.rank: self._spans.place()}

    def _stall(self, places: Mapping[int, Place | None], still: Mapping[int, float]) -> str:
        """Text saying what took too long; empty if nothing did."""
        busy = [(rank, place) for rank, place in places.items() if place and not place.waits]
        for rank, place in busy:
            if still[rank] > place.allowed_s:
                return f"rank {rank} in {place.span} for more than {place.allowed_s:.1f} s"
        mine = places[self._ranks.rank]
        if mine is None:
            return ""
        if not busy and all(still[r] > place.allowed_s for r, place in places.items() if place):
            return f"all ranks have waited for more than {mine.allowed_s:.1f} s"
        limit_s = REPORT_AT * (self._timeout_s or float("inf"))
        if mine.waits and still[mine.rank] > limit_s:
            return (
                f"rank {mine.rank} has waited for more than {limit_s:.1f} s, close to the timeout"
            )
        return ""

    def _explain(self, why: str, still: Mapping[int, float]) -> None:
        self._explained = self._spans.count
        call = make_call(self._folder, self._ranks.rank)
        if call is None:
            return  # another rank was faster; the next poll answers its call
        try:
            self._answer(call, still[self._ranks.rank])
            ranks = gather(self._folder, call, still, self._patience_s(still[self._ranks.rank]))
            path = write_report(self._folder, ranks, by=self._ranks.rank, why=why)
            self._say(f"{sentence(ranks)} ({path})")
            self._unheard = {state.rank for state in ranks if state.state != RUNS}
        finally:
            end_calls(self._folder)

    def _patience_s(self, still_s: float) -> float:
        """How long to wait for answers: a few seconds, leaving time to end the hung rank."""
        if self._timeout_s is None:
            return GATHER_S
        left_s = END_AT * self._timeout_s - still_s
        return min(GATHER_S, max(left_s - 2 * GRACE * self._timeout_s, 1.0))

    def _answer(self, call: Call, still_s: float) -> None:
        self._answered, self._explained = call.id, self._spans.count
        place = self._spans.place()
        cause = f"No progress for {still_s:.0f} s in {place.span}"
        dump = write_dump(self._folder, cause, self._ranks.rank, prefix=WATCHDOG_PREFIX)
        if dump is not None:
            self._heartbeat.watchdog_dump(dump, place.step)
        state = RankState(
            rank=place.rank,
            pid=os.getpid(),
            host=platform.node(),
            state=RUNS,
            step=place.step,
            span=place.span,
            waits=place.waits,
            still_s=still_s,
            stacks=read_text(dump).splitlines() if dump else [],
            recorder=read_in_time(),
        )
        answer(self._folder, call, state)

    def _end_in_time(self, places: Mapping[int, Place | None], still_s: float) -> None:
        """Shortly before the group's timeout, end this rank; kill ranks that cannot end themselves.

        A rank that waits first gives the hung rank GRACE to end.
        """
        mine = places[self._ranks.rank]
        if self._timeout_s is None or mine is None or still_s <= END_AT * self._timeout_s:
            return
        if not any(place and place.waits for place in places.values()):
            return
        if mine.waits:
            for place in places.values():
                if place and place.rank != mine.rank and self._is_stuck(place):
                    self._say(f"rank {place.rank} does not respond and is killed: pid {place.pid}")
                    kill(place)
            if self._over.wait(GRACE * self._timeout_s) or self._spans.count != mine.count:
                return
        self._say(
            f"rank {mine.rank} exits after {still_s:.0f} s in {mine.span} of update "
            f"{mine.step}: NSA_PG_TIMEOUT_MIN is {self._timeout_s:.0f} s; a "
            "restart by the launcher resumes from the last checkpoint"
        )
        os._exit(STALLED)

    def _is_stuck(self, place: Place) -> bool:
        """Whether a rank is on this machine and only SIGKILL can end it."""
        state = process_state(place)
        here = place.host == platform.node()
        return state == STOPPED or (state == SILENT and here and place.rank in self._unheard)

    def _open_raw(self) -> None:
        self._is_stale = False
        before, self._raw = self._raw, None
        if before is not None:
            faulthandler.cancel_dump_traceback_later()
            before.close()
        path = self._folder / RAW.format(rank=self._ranks.rank)
        with best_effort(path):
            self._raw = open(path, "wb", buffering=0, opener=open_regular)  # noqa: SIM115

    def _arm_raw(self) -> None:
        """(Re)start faulthandler's timer: it dumps the stacks if this thread cannot run in time."""
        if self._is_stale:
            self._open_raw()
        if self._raw is not None:
            faulthandler.cancel_dump_traceback_later()
            os.ftruncate(self._raw.fileno(), 0)
            os.lseek(self._raw.fileno(), 0, os.SEEK_SET)
            seconds = max(self._spans.least_s / 2, 4 * self._poll_s)
            faulthandler.dump_traceback_later(seconds, file=self._raw)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"[hang] {text}", file=sys.stderr, flush=True)


# --- exchange of states through files, because collectives are what hangs ---
# One rank creates `.hang_call.json` (`id`, and `by`: its rank; at most one exists). All ranks write
# `.hang_answer_rank{r}.json` (`id` of the call, fields of RankState). A rank in which no Python can
# run does not answer; faulthandler writes its stacks to `.hang_raw_rank{r}.txt`.

CALL = ".hang_call.json"
ANSWER = ".hang_answer_rank{rank}.json"
RAW = ".hang_raw_rank{rank}.txt"
MEETING = ".hang_*"
"""Pattern of all these files."""
POLL_S = 0.1


class Call(NamedTuple):
    """A request to all ranks to write their state."""

    id: str
    by: int


def make_call(folder: Path, rank: int) -> Call | None:
    """Create a call; None if another rank was faster."""
    call = Call(f"{rank}-{time.time_ns()}", rank)
    mine = folder / f"{CALL}.{rank}"
    write_text(mine, json.dumps(call._asdict()))
    try:
        os.link(mine, folder / CALL)  # atomic, and fails if the name exists
    except FileExistsError:
        return None
    finally:
        mine.unlink(missing_ok=True)
    return call


def read_call(folder: Path) -> Call | None:
    """The current call, or None; without one this is a single failed open."""
    content = _read(folder / CALL)
    return Call(str(content["id"]), int(content["by"])) if {"id", "by"} <= content.keys() else None


def end_calls(folder: Path) -> None:
    """Remove the files of a call, also of one whose caller has died; RAW files stay."""
    for path in folder.glob(MEETING):
        if not path.name.startswith(RAW.partition("{")[0]):
            path.unlink(missing_ok=True)


def answer(folder: Path, call: Call, state: RankState) -> None:
    """Write the state of this rank."""
    content = {"id": call.id} | dataclasses.asdict(state)
    write_text(folder / ANSWER.format(rank=state.rank), json.dumps(strict(content)))


def gather(
    folder: Path, call: Call, still_s: Mapping[int, float], patience_s: float
) -> list[RankState]:
    """The states of all ranks: their answers or, after `patience_s`, what their files say.

    `still_s` is how long each rank was observed in its span.
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
    return [
        answers.get(rank) or _state_without_answer(folder, rank, still_s[rank])
        for rank in sorted(still_s)
    ]


def process_state(place: Place) -> str:
    """stopped, gone, or silent if this machine cannot tell."""
    if place.host != platform.node() or not place.started:
        return SILENT
    fields = stat_fields(place.pid)
    if fields is None or start_ticks(place.pid) != place.started or fields[STATE] in "ZX":
        return GONE
    return STOPPED if fields[STATE] in "Tt" else SILENT


def gone_ranks(folder: Path, world_size: int) -> list[int]:
    """The ranks of a run whose process has ended, as far as this machine can tell."""
    places = [read_span(folder, rank) for rank in range(world_size)]
    return [place.rank for place in places if place and process_state(place) == GONE]


def kill(place: Place) -> None:
    """Send SIGKILL to the process of a rank on this machine."""
    # pidfd and start time: the pid must not have been reused by another process.
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(place.pid)
        try:
            if place.started and start_ticks(place.pid) == place.started:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _state_without_answer(folder: Path, rank: int, still_s: float) -> RankState:
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


# --- torch's flight recorder: which collectives a rank has begun and completed ---
# torch keeps it for NCCL, and since 2.8 for gloo (without device times). It is read from memory
# without communication, so it works while collectives hang.

RECENT = 8
"""Number of recent collectives to report."""


def read_in_time(patience_s: float = 1.0) -> dict[str, Any] | None:
    """`read_recorder` with a timeout: the hung collective may hold the recorder's lock."""
    found: list[dict[str, Any] | None] = []
    reader = threading.Thread(target=lambda: found.append(read_recorder()), daemon=True)
    reader.start()
    reader.join(patience_s)
    return found[0] if found else None


def read_recorder() -> dict[str, Any] | None:
    """Numbers of `begun` and `ended` collectives over all groups, and the `recent` ones as text.

    None without a process group: entries of an earlier group of this process are ignored.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return None
    try:
        content = json.loads(dump() or b"{}")
    except ValueError:  # invalid JSON: torch does not escape group names
        return None
    groups = (content.get("pg_status") or {}).values()
    entries = content.get("entries") or []
    if not groups and not entries:
        return None
    return {
        "begun": sum(_number(group, "last_enqueued_collective") for group in groups),
        "ended": sum(_number(group, "last_completed_collective") for group in groups),
        "recent": [_line(entry) for entry in entries[-RECENT:]],
    }


def _line(entry: dict[str, Any]) -> str:
    number, what = entry.get("collective_seq_id"), entry.get("profiling_name")
    then = "over" if entry.get("retired") else entry.get("state")
    return f"{number}: {what} of sizes {entry.get('input_sizes')}, {then}"


def _number(group: dict[str, Any], name: str) -> int:
    return max(0, int(group.get(name, 0)))
