"""A thread in every rank that notices a standstill, has it explained, and ends what is stuck.

It runs while the main thread waits in C. A rank that does something of its own for longer than its
span may take (telemetry/spans.py), or that waits while all do, makes all ranks write where they
are; the one that called writes the report. The first updates, evaluations and checkpoints have half
an hour. Shortly before the timeout of the process group, which would end the waiting ranks with
less to say, the rank that is waited for is ended, and a launcher can start them again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from nsa.files import is_at, open_regular, read_text
from nsa.telemetry import Heartbeat
from nsa.telemetry.best_effort import best_effort
from nsa.telemetry.flight_recorder import read_in_time
from nsa.telemetry.hang_call import (
    RAW,
    Call,
    answer,
    end_calls,
    gather,
    kill,
    make_call,
    process_state,
    read_call,
)
from nsa.telemetry.hang_report import RUNS, SILENT, STOPPED, RankState, sentence, write_report
from nsa.telemetry.spans import Place, Spans, here, read_span
from nsa.telemetry.stack_dump import OWN, WATCHDOG_PREFIX, write_dump
from nsa.train.errors import STALLED
from nsa.train.ranks import Alone

THREAD = f"{OWN}hang-watch"
REPORT_AT, END_AT, GRACE = 0.7, 0.85, 0.05
"""Shares of the group's timeout: ranks may wait so long before the report, and before the end; the
rank that is waited for has the last to end first, so that the launcher's report names it."""
LONGEST_POLL_S = 1.0
GATHER_S = 5.0
"""How long the answers of other ranks are waited for."""


class HangWatch:
    """Watches this rank while the block lasts; does nothing where NSA_HANG_LEAST_S is 0."""

    def __init__(
        self, folder: Path, ranks: Alone, heartbeat: Heartbeat, spans: Spans = here
    ) -> None:
        self._folder, self._ranks, self._heartbeat, self._spans = folder, ranks, heartbeat, spans
        self._timeout_s = ranks.timeout_s
        limits = [LONGEST_POLL_S, spans.least_s / 8, (ranks.timeout_s or 60.0) / 60]
        self._poll_s = min(limits)
        self._awake_s = 0.0  # time in which this process could run: not while it is stopped
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: count, and when it was new
        self._answered = ""
        self._explained = -1  # the count of this rank at the last report
        self._unheard: set[int] = set()  # ranks that have not answered the last call of this one
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
            if is_at(path, self._raw.fileno()):  # the folder may be another run's by now
                path.unlink(missing_ok=True)
            self._raw.close()

    def renew(self, step: int) -> None:
        """The folder was removed, and made anew: the thread that uses the file opens it again."""
        self._is_stale = True

    def _watch(self) -> None:
        slept = looked = time.monotonic()
        while not self._over.wait(self._poll_s):
            slept, before = time.monotonic(), slept
            self._awake_s += looked - before + min(slept - looked, 4 * self._poll_s)
            with best_effort(self._folder):
                self._look()
            looked = time.monotonic()

    def _look(self) -> None:
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
        """Whether it is worth a look at the others: a healthy run never is."""
        limit_s = self._spans.allowed_s()
        return still_s > min(limit_s, REPORT_AT * (self._timeout_s or limit_s)) / 2

    def _still(self, rank: int, count: int) -> float:
        """How long a rank has been where it is, as far as this one has seen."""
        if self._seen.get(rank, (None, 0.0))[0] != count:
            self._seen[rank] = (count, self._awake_s)
        return self._awake_s - self._seen[rank][1]

    def _places(self) -> dict[int, Place | None]:
        ranks = range(self._ranks.world_size)
        read = {rank: read_span(self._folder, rank) for rank in ranks if rank != self._ranks.rank}
        return read | {self._ranks.rank: self._spans.place()}

    def _stall(self, places: Mapping[int, Place | None], still: Mapping[int, float]) -> str:
        """What has taken too long; empty while nothing has."""
        busy = [(rank, place) for rank, place in places.items() if place and not place.waits]
        for rank, place in busy:
            if still[rank] > place.allowed_s:
                return f"rank {rank} in {place.span} for more than {place.allowed_s:.1f} s"
        mine = places[self._ranks.rank]
        if mine is None:
            return ""
        if not busy and all(still[r] > place.allowed_s for r, place in places.items() if place):
            return f"all ranks wait for more than {mine.allowed_s:.1f} s"
        limit_s = REPORT_AT * (self._timeout_s or float("inf"))
        if mine.waits and still[mine.rank] > limit_s:
            return f"rank {mine.rank} waits for more than {limit_s:.1f} s, and soon in vain"
        return ""

    def _explain(self, why: str, still: Mapping[int, float]) -> None:
        self._explained = self._spans.count
        call = make_call(self._folder, self._ranks.rank)
        if call is None:
            return  # the next look answers whoever has called
        try:
            self._answer(call, still[self._ranks.rank])
            ranks = gather(self._folder, call, still, self._patience_s(still[self._ranks.rank]))
            path = write_report(self._folder, ranks, by=self._ranks.rank, why=why)
            self._say(f"{sentence(ranks)} ({path})")
            self._unheard = {state.rank for state in ranks if state.state != RUNS}
        finally:
            end_calls(self._folder)

    def _patience_s(self, still_s: float) -> float:
        """For answers: some seconds, and little enough to end what is stuck in time."""
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
        """End the rank that is waited for, if it can be reached, and a rank that waits for it."""
        mine = places[self._ranks.rank]
        if self._timeout_s is None or mine is None or still_s <= END_AT * self._timeout_s:
            return
        if not any(place and place.waits for place in places.values()):
            return
        if mine.waits:
            for place in places.values():
                if place and place.rank != mine.rank and self._is_stuck(place):
                    self._say(f"rank {place.rank} cannot end itself, and is killed: {place.pid}")
                    kill(place)
            if self._over.wait(GRACE * self._timeout_s) or self._spans.count != mine.count:
                return
        self._say(
            f"rank {mine.rank} is ended after {still_s:.0f} s in {mine.span} of update "
            f"{mine.step}: NSA_PG_TIMEOUT_MIN would end the waiting at {self._timeout_s:.0f} s; a "
            "launcher that restarts goes on from the last checkpoint"
        )
        os._exit(STALLED)

    def _is_stuck(self, place: Place) -> bool:
        """Whether a rank is on this machine, and beyond any reach but that of SIGKILL."""
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
        """Have faulthandler write the stacks if this thread does not come back in time."""
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
