"""What a run shows on the console: the report of a logged step, the progress bar or plain lines,
and the boot messages.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from nsa.config import Config, to_container
from nsa.data import Data, Rows
from nsa.files import size
from nsa.model.stats import LayerMap
from nsa.records import Folder, Metrics, TrainingRow
from nsa.train.runtime import Runtime

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

MIB_PER_GIB = 1024


class FetchTimes(NamedTuple):
    """Wait for the last batch, and percentiles of recent waits; all None before the first."""

    dt_fetch_s: float | None = None
    fetch_p50_ms: float | None = None
    fetch_p95_ms: float | None = None

    @staticmethod
    def of(seconds: Sequence[float]) -> FetchTimes:
        """Summarize the recent waits, oldest first."""
        if not seconds:
            return FetchTimes()
        times = sorted(seconds)
        return FetchTimes(seconds[-1], _percentile_ms(times, 0.50), _percentile_ms(times, 0.95))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """All numbers of a logged step, collected once for every sink."""

    row: TrainingRow
    eta_s: float
    """Estimated seconds to the end of the run."""
    numbers: Mapping[str, float | None]
    """The values of records.numbers.MEASURED by name; None or missing if not known."""
    shows_norm: bool = False
    """Whether the console line shows grad_norm; files always have it."""
    attention: Mapping[str, Any] | None = None
    """AttentionStats.summary(), if collected."""
    layers: Sequence[Mapping[str, float | None]] | None = None
    """AttentionStats.per_layer(), if collected."""
    maps: Sequence[LayerMap] | None = None
    """AttentionStats.selection_maps(), on steps that have them."""


def step_line(report: StepReport) -> str:
    """The line of a logged step in a pipe or a file. Other programs parse its beginning."""
    eta = f"eta {clock(report.eta_s)}"
    return " | ".join([f"step {report.row.step:04d}", *step_numbers(report), eta])


def step_numbers(report: StepReport) -> list[str]:
    """The numbers of a line in order; unknown ones are omitted."""
    row, known = report.row, {k: v for k, v in report.numbers.items() if v is not None}
    parts = [f"loss {row.loss:.4f}", f"lr {row.lr:.2e}", f"toks/s {row.toks_per_s:.0f}"]
    if report.shows_norm:
        parts.append(f"grad_norm {known['grad_norm']:.4f}")
    if "dt_fetch_s" in known:
        parts.append(f"fetch {1e3 * known['dt_fetch_s']:.0f}ms")
        parts.append(f"fetch_p50 {known['fetch_p50_ms']:.0f}ms")
        parts.append(f"fetch_p95 {known['fetch_p95_ms']:.0f}ms")
    if "mfu" in known:
        parts.append(f"mfu {known['mfu']:.1%}")
    if "gpu_mem_alloc" in known:
        parts.append(f"mem {_gib(known['gpu_mem_alloc'])}/{_gib(known['gpu_mem_reserved'])}GiB")
    elif "rss_mib" in known:
        parts.append(f"rss {_gib(known['rss_mib'])}GiB")
    return parts


def clock(seconds: float) -> str:
    """Format a duration as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _gib(mib: float) -> str:
    return f"{mib / MIB_PER_GIB:.2f}"


def _percentile_ms(times: Sequence[float], share: float) -> float:
    return 1e3 * times[min(int(share * len(times)), len(times) - 1)]


# --- progress: a bar in a terminal, plain lines in a pipe or a file ---

SEPARATOR = " | "


class Progress:
    """Shows each logged step with the estimated time left."""

    def __init__(self, out: TextIO, steps: int, *, quiet: bool = False) -> None:
        """`quiet`: for ranks above 0, which print only with `say_from_each`."""
        from rich.console import Console  # here: a refused run starts faster without rich

        self._quiet = quiet
        self._console = Console(file=out, highlight=False, emoji=False, soft_wrap=True)
        self._bar = _build_bar(self._console, shown=not quiet and self._console.is_terminal)
        self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str = "") -> None:
        """Print a line on rank 0; in a terminal it appears above the bar."""
        if not self._quiet:
            self.say_from_each(text)

    def say_from_each(self, text: str) -> None:
        """Print a line from every rank that calls this."""
        self._console.print(text, markup=False)

    def advance(self, steps: int = 1) -> None:
        """Advance the bar by finished steps."""
        self._bar.advance(self._task, steps)

    def show(self, report: StepReport) -> None:
        """Show a logged step."""
        # The bar refreshes itself in a terminal; elsewhere each step is a line.
        if self._console.is_terminal:
            self._bar.numbers = _Numbers(step_numbers(report))
            self._bar.update(self._task, description=f"eta {clock(report.eta_s)}")
        else:
            self.say(step_line(report))


class HangupSafeStream(io.TextIOBase):
    """An output stream that survives a closed terminal or a broken pipe.

    Output is then discarded, so that the run outlives its shell.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._out.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    def write(self, text: str) -> int:
        try:
            return self._out.write(text)
        except OSError:  # EPIPE or EIO: the reader is gone
            self._redirect_to_null()
            return len(text)

    def flush(self) -> None:
        try:
            self._out.flush()
        except OSError:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Redirect the descriptor to /dev/null, and stderr too if it is the same stream."""
        lost = os.fstat(self._out.fileno())
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # dup2 keeps the descriptor number, so other holders of the stream stop failing too.
        for descriptor in {self._out.fileno(), 2}:
            if os.path.samestat(os.fstat(descriptor), lost):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Numbers:
    """Wraps the numbers over several lines, so that a narrow terminal truncates none."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in fill_lines(self._parts, options.max_width):
            yield Text(line, no_wrap=True)


def _build_bar(console: Console, *, shown: bool) -> Any:
    """The bar on one line, and below it `numbers`, those of the last logged step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    class BarAndNumbers(Bar):
        numbers = _Numbers(())

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            yield self.numbers

    return BarAndNumbers(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        expand=True,
        disable=not shown,
    )


def fill_lines(parts: Iterable[str], width: int) -> list[str]:
    """Put as many parts on each line as fit; a part is never split."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return lines


# --- boot messages ---


def print_boot_messages(
    cfg: Config, metrics: Metrics, data: Data, runtime: Runtime, folder: Folder, to: Progress
) -> None:
    """Print the resolved config, the model size, the device, the attention plan and the data."""
    train, checkpointing = cfg.train, "on" if cfg.runtime.gradient_checkpointing else "off"
    to.say(f"[boot] loading config {metrics.config_file}")
    for group, values in to_container(cfg).items():
        to.say(f"  {group}: " + " ".join(f"{key}={value}" for key, value in values.items()))
    to.say(
        f"[boot] effective config: S={train.seq_len} B={train.batch_size} "
        f"accum={train.accumulate_grad_batches} gc={checkpointing}"
    )
    to.say(f"[boot] parameters: {metrics.num_params:,}")
    to.say(f"[boot] tokens per step: {metrics.tokens_per_step:,} | steps: {metrics.steps:,}")
    to.say(f"[boot] device: {runtime.describe_device()}")
    to.say(f"[boot] {runtime.describe_flash()} | precision {runtime.precision.upper()}")
    to.say(f"[boot] {runtime.plan}")
    to.say(
        f"[boot] data: {cfg.data.dataset}, rows of {train.seq_len} tokens: "
        f"{_count(data.train)} to train on, {_count(data.val)} held out"
    )
    if cfg.runtime.sharing > 1:
        for line in _describe_mesh(cfg, metrics.world_size):
            to.say(f"[mesh] {line}")
    to.say(f"[train] gradient_checkpointing={checkpointing}")
    if folder.previous is not None:
        to.say(f"[boot] {folder.path} held an earlier run; its files are now in {folder.previous}")


def _describe_mesh(cfg: Config, world_size: int) -> list[str]:
    """What a rank of a mesh has of a row, and what it gets from the others."""
    from nsa.parallel.traffic import describe_exchange, step_traffic  # with a mesh alone

    cp, tp = cfg.runtime.cp, cfg.runtime.tp
    received = step_traffic(cfg, world_size).items()
    said = [
        f"a rank has {cfg.train.seq_len // cp} tokens of a row and {cfg.model.n_kv_groups // tp} "
        f"KV heads | received per step: {', '.join(f'{size(n)} of {part}' for part, n in received)}"
    ]
    return said if cp == 1 else [*said, describe_exchange(cfg)]


def _count(rows: Rows) -> str:
    return "endless" if rows.num_rows is None else f"{rows.num_rows:,}"
