"""Data for a run: open the source with a timeout, prefetch batches, and handle failures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nsa.config import Config
from nsa.config.env import read
from nsa.data import (
    DamagedShard,
    Data,
    DataError,
    Loader,
    Rows,
    SourceLost,
    open_data,
    within,
)
from nsa.data.loader import PATIENCE_S
from nsa.records import Heartbeat
from nsa.train.checkpoint import find
from nsa.train.distributed.strategy import Strategy
from nsa.train.errors import BAD_DATA, NO_DATA, LoaderFailed
from nsa.train.runtime import Runtime
from nsa.train.telemetry import Telemetry

STREAMED = "fineweb_edu"
"""The source that is streamed over the network, so it needs a timeout."""
KEPT_STEPS = 3
"""Updates whose batches stay cached, because losses are checked one step late."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Timeouts and fallback for the data of a run."""

    timeout_s: float = 60.0
    """Limit from the start of the run to the first batch of a streamed source."""
    synthetic_on_fail: bool = False
    """On a timeout or an unreadable source, warn and train on random tokens."""
    report_docs: int = 1000
    """Log a line every so many documents of a stream; 0 disables it."""


def open_in_time(cfg: Config, options: LoaderOptions, say: Callable[[str], None]) -> Data:
    """Open the data of a run; a streamed source must open within options.timeout_s."""

    def attempt() -> Data:
        train = cfg.train
        return open_data(
            cfg.data, train.seq_len, train.seed, report_docs=options.report_docs, say=say
        )

    if cfg.data.dataset != STREAMED:
        return attempt()
    note = partial(note_failure, Path(cfg.train.out_dir))
    with converting_data_errors(cfg, started=False, note=note):
        say(f"[data] opening {cfg.data.hub_dataset} ({cfg.data.hub_subset or 'default'})")
        return within(options.timeout_s, attempt, f"the data of {cfg.data.hub_dataset}")


@contextmanager
def verifying_shards(data: Data, ranks: Strategy, say: Callable[[str], None]) -> Iterator[None]:
    """Verify shard hashes in the background during the run, on one rank per machine."""
    check = data.check if read("LOCAL_RANK") == 0 else None
    with ranks.fetching():
        if check is not None:
            check.begin(say)
    try:
        yield
    finally:
        if check is not None:
            check.close()


def read_ahead(rows: Rows, cfg: Config, runtime: Runtime, ranks: Strategy) -> Loader:
    """A prefetching loader for the batches of this rank."""
    # stride: between consecutive batches of one rank are those of all other data ranks.
    return Loader(
        rows,
        depth=max(1, read("NSA_FWE_Q")) if read("NSA_FWE_PREFETCH") else 0,
        stride=ranks.num_data_ranks * cfg.train.batch_size,
        keep=KEPT_STEPS * cfg.train.accumulate_grad_batches,
        patience_s=ranks.patience_s(PATIENCE_S),
        pin=runtime.device.type == "cuda",
    )


def fetch_first(
    loader: Loader,
    cfg: Config,
    done: int,
    position: int,
    options: LoaderOptions,
    opened_s: float,
    telemetry: Telemetry,
    say: Callable[[str], None],
) -> None:
    """Wait for the batch at `position`, the first after `done` updates, and for the warm-up of the
    prefetch queue.

    `opened_s` is the time already spent on opening the source; it counts against the timeout.
    """
    # Local sources deliver at once or raise; only a stream needs a timeout.
    if not cfg.data.dataset.startswith(STREAMED):
        return
    with converting_data_errors(
        cfg, started=False, note=partial(telemetry.heartbeat.loader_error, step=done)
    ):
        left_s = max(options.timeout_s - opened_s, 1.0)
        seconds = opened_s + loader.fetch_first(position, cfg.train.batch_size, left_s)
    say(f"[train] first FineWeb‑Edu batch fetched in {seconds:.2f}s")  # noqa: RUF001
    telemetry.heartbeat.loader_ready(seconds, done)
    if requested := read("NSA_FWE_WARMUP_BATCHES"):
        start = time.perf_counter()
        filled = loader.wait_until_ready(
            requested, read("NSA_FWE_WARMUP_TIMEOUT") or options.timeout_s
        )
        wait_ms = 1e3 * (time.perf_counter() - start)
        say(f"[data] warm-up: {filled} of {requested} batches in {wait_ms:.0f} ms")
        telemetry.heartbeat.loader_warmup(requested, filled, wait_ms, done)


@contextmanager
def converting_data_errors(
    cfg: Config, *, started: bool, note: Callable[[str], None]
) -> Iterator[None]:
    """Record an error of the data source and convert it to LoaderFailed."""
    try:
        yield
    except (SourceLost, DataError) as error:
        when = "no data came any more" if started else "no first batch came"
        damaged = isinstance(error, DamagedShard)
        when = "the data is damaged" if damaged else when
        message = f"data.dataset={cfg.data.dataset}: {when}: {error}"
        note(message)
        exit_code = NO_DATA if isinstance(error, SourceLost) else BAD_DATA
        raise LoaderFailed(
            message, started=started, exit_code=exit_code, damaged=damaged
        ) from error


def with_random_tokens(cfg: Config, error: LoaderFailed, say: Callable[[str], None]) -> Config:
    """The same config on random tokens; raise LoaderFailed if the folder has checkpoints."""
    # A run on random tokens would move the checkpoints of the real run aside.
    folder = Path(cfg.train.out_dir)
    if saved := find.paths_of(folder):
        raise LoaderFailed(
            f"{error}; --synthetic-on-fail was ignored: {folder} has a checkpoint of step "
            f"{find.step_of(saved[0])}, which a run on random tokens would move aside",
            started=False,
            exit_code=error.exit_code,
        ) from error
    for line in (
        "!" * 80,
        f"[data] {error}",
        "[data] --synthetic-on-fail: training continues with RANDOM TOKENS, from which nothing can",
        "[data] be learned; metrics.json records it (data_fallback)",
        "!" * 80,
    ):
        say(line)
    data = dataclasses.replace(cfg.data, dataset="synthetic", hub_subset="", hub_revision="")
    return dataclasses.replace(cfg, data=data)


def note_failure(folder: Path, error: str) -> None:
    """Write a heartbeat line for a run that failed before its first step."""
    folder.mkdir(parents=True, exist_ok=True)
    heartbeat = Heartbeat(folder, read("RANK"))
    heartbeat.loader_error(error)
    heartbeat.close()
