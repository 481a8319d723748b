"""`nsa monitor`: show a run folder live in a terminal, or as plain lines in a pipe. Read-only."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nsa.config.describe import duration, printable
from nsa.config.env import check_environment, read
from nsa.files import MIB, size
from nsa.operate.limits import Limits, limits_for
from nsa.operate.run_folder import Rank, Run, number, read_run
from nsa.operate.watch.rules import allowed_silence, judge
from nsa.records import Beat
from nsa.records.alarms import Alarm
from nsa.records.numbers import FALLBACK_PREFIX, SCALARS, SHARES, Number, scalars_of

TAIL_BYTES = 1 << 20
"""Read from the end of each heartbeat: a few hundred logged steps."""
SEPARATOR = " | "
LABEL = 10
"""Width of the label column in characters."""
LONGEST = 60
"""Longer parts get a line of their own and wrap."""
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
"""For terminals without Unicode."""


# --- drawing and following ---


class Report:
    """A snapshot of a run that rich can render at any width."""

    def __init__(self, run: Run, *, unicode: bool = True) -> None:
        self.run, self._unicode = run, unicode
        self._limits = limits_for(run.metrics.device if run.metrics else None)
        # Evaluate the rules here, so that the monitor shows alarms even when no watchdog runs.
        self._alarms = judge(run, self._limits)

    def rows(self, width: int) -> list[Row]:
        """The rows for a width in characters."""
        return status_rows(self.run, self._alarms, self._limits, width, unicode=self._unicode)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Panel]:
        width = options.max_width - 4  # the frame and its padding
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True, width=LABEL)
        table.add_column(ratio=1)
        for label, parts in self.rows(width):
            table.add_row(label, Text("\n").join(_lines(parts, width - LABEL - 2)))
        title = f"nsa monitor: {printable(str(self.run.folder))}"
        at = time.strftime("%H:%M:%S", time.localtime(self.run.now))
        yield Panel(Padding(table, 0), title=Text(title), subtitle=Text(at), title_align="left")

    def plain(self, width: int = 100) -> str:
        """The report as plain text."""
        lines = [f"{self.run.folder}"]
        for label, parts in self.rows(width):
            texts = [text.plain for text in _lines(parts, width - LABEL - 2)]
            lines += [f"{label if i == 0 else '':<{LABEL}}  {t}" for i, t in enumerate(texts)]
        return "\n".join(line.rstrip() for line in lines)

    def line(self) -> str:
        """Key numbers in one line; no ages, or every line would count as a change."""
        # The width is irrelevant: no bar or sparkline is taken from these rows.
        rows = dict(self.rows(40))
        texts = [rows["status"][0].text]
        if self.run.status != "absent":
            texts += [part.text for part in rows["progress"] if part.text.startswith("step")]
            texts += [f"loss {rows['loss'][0].text}", rows["speed"][0].text]
            texts += [f"alarms: {', '.join(alarm.type for alarm in self._alarms) or 'none'}"]
        return SEPARATOR.join(texts)


def _lines(parts: Sequence[Part], width: int) -> list[Text]:
    """Fill lines with as many parts as fit; only a part longer than a line is wrapped."""
    lines: list[Text] = []
    for text, style in parts:
        fits = lines and len(lines[-1]) + len(SEPARATOR) + len(text) <= width
        if fits and len(text) <= LONGEST:
            lines[-1].append(SEPARATOR, "dim").append(text, style)
        else:
            lines.append(Text(text, style))
    return lines


def monitor(folder: Path | None, args: argparse.Namespace, console: Console | None = None) -> int:
    """Show the run until Ctrl-C, or once with --once."""
    check_environment()
    folder = folder or Path(read("OUT_DIR"))
    if not 0 < args.interval < float("inf"):
        raise ValueError(f"--interval {args.interval:g} is not a number of seconds above 0")
    console = console or Console(highlight=False, emoji=False)
    unicode = console.encoding.lower().startswith("utf")

    def look() -> Report:
        return Report(read_run(folder, tail_bytes=TAIL_BYTES), unicode=unicode)

    follow = _follow_screen if console.is_terminal else _follow_lines
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal way to quit
        follow(look, console, 0.0 if args.once else args.interval)
    return 0


def _follow_screen(look: Callable[[], Report], console: Console, interval_s: float) -> None:
    """Redraw every `interval_s` and leave the last frame on screen; 0 draws once."""
    report = look()
    try:
        if interval_s:
            with Live(report, console=console, auto_refresh=False, screen=True) as live:
                while True:
                    live.refresh()
                    time.sleep(interval_s)
                    # `report` is rebound, so that the `finally` below prints the newest frame.
                    report = look()
                    live.update(report)
    finally:
        console.print(report)


def _follow_lines(look: Callable[[], Report], console: Console, interval_s: float) -> None:
    """Print the whole report, then one line per change; 0 prints once."""
    report = look()
    # Plain print: rich would wrap the lines at the width of a pipe, 80.
    print(report.plain(), file=console.file, flush=True)
    said = report.line()
    while interval_s:
        time.sleep(interval_s)
        if (line := look().line()) != said:
            said = line
            print(f"{time.strftime('%H:%M:%S')} {line}", file=console.file, flush=True)


# --- content: the rows, shared by terminal and pipe ---

GOOD, WARN, BAD, PLAIN = "green", "yellow", "bold red", ""
NOT_MEASURED = "not measured"
SHOWN_ALARMS = 3
STATUS_STYLES = {"running": GOOD, "finished": GOOD, "halted": WARN, "interrupted": WARN}


class Part(NamedTuple):
    """A piece of a row that is not split across lines."""

    text: str
    style: str = PLAIN


class Row(NamedTuple):
    """A label and the parts beside it."""

    label: str
    parts: list[Part]


def status_rows(
    run: Run, alarms: Sequence[Alarm], limits: Limits, width: int, *, unicode: bool = True
) -> list[Row]:
    """The rows for a width in characters; `alarms` are the active ones."""
    if run.status == "absent":
        return [Row("status", [Part("no files of a run in this folder yet", WARN)])]
    last = run.progress[-1] if run.progress else None
    bars = BARS if unicode else ASCII_BARS
    rows = [
        Row("status", [*_status(run)]),
        Row("progress", [*_progress(run, width, unicode)]),
        Row("loss", [*_loss(run, width, bars)]),
        Row("speed", [*_speed(run, last)]),
        Row("memory", [*_memory(run, last, limits)]),
        Row("data", [*_data(last, limits)]),
        Row("gates", [*_gates(last, limits)]),
        Row("fallbacks", [*_fallbacks(last)]),
        Row("checkpoint", [*_checkpoint(run)]),
        Row("ranks", [_rank(run, rank, limits) for rank in run.ranks] or [Part(NOT_MEASURED)]),
        Row("alarms", [*_alarms(run, alarms)]),
    ]
    if run.problems:
        rows.append(Row("unreadable", [Part(text, WARN) for text in run.problems]))
    return [
        Row(label, [Part(printable(text), style) for text, style in parts]) for label, parts in rows
    ]


def _status(run: Run) -> Iterator[Part]:
    yield Part(run.standing, STATUS_STYLES.get(run.status, BAD))
    if run.anomaly:
        yield Part(f"anomaly: {run.anomaly}", BAD)
    if run.halt is not None:
        why = run.halt.reason or "touched"
        yield Part(f".HALT, {duration(run.halt.age_s)} old: {why}", WARN)
    if run.metrics is not None:
        yield Part(f"{run.metrics.device}, {run.metrics.dtype}")
        yield Part(f"{run.metrics.num_params / 1e6:.1f}M parameters")


def _progress(run: Run, width: int, unicode: bool) -> Iterator[Part]:
    if run.metrics is None or run.metrics.steps <= 0:
        yield Part(NOT_MEASURED)
        return
    step, steps = max([run.metrics.step, *(beat.step for beat in run.progress)]), run.metrics.steps
    marks = {} if unicode else {"full": "#", "empty": "."}
    bar = progress_bar(step / steps, max(10, width // 4), **marks)
    yield Part(f"{bar} {step / steps:.1%}")
    yield Part(f"step {step:,} of {steps:,}")
    if (eta_s := run.eta_s(step)) is not None and not run.over:
        yield Part(f"eta {duration(eta_s)}")


def _loss(run: Run, width: int, bars: str) -> Iterator[Part]:
    losses = [loss for _, loss in run.losses if loss is not None]
    if not losses:
        yield Part(NOT_MEASURED)
        return
    yield Part(f"{losses[-1]:.4f}")
    yield Part(sparkline(losses, max(10, width // 3), bars))
    yield Part(f"lowest {min(losses):.4f}")
    metrics = run.metrics
    if metrics is not None and metrics.val_loss is not None:
        yield Part(f"held-out {metrics.val_loss:.4f}")
    if metrics is not None and metrics.spikes:
        yield Part(f"spikes {metrics.spikes}", WARN)


def _speed(run: Run, last: Beat | None) -> Iterator[Part]:
    row = run.rows[-1] if run.rows else None
    # Without a heartbeat, training.csv still has the speed and the learning rate.
    values = row._asdict() if row and last is None else {}
    if last is not None:
        values = {name: value for name, value in scalars_of(last.extra) if value is not None}
    if "toks_per_s" not in values:
        yield Part(NOT_MEASURED)
        return
    for entry in _in_row("speed"):
        if entry.name in values:
            is_bad = entry.name == "grad_norm" and values[entry.name] <= 0
            yield Part(_text(entry, values[entry.name]), BAD if is_bad else PLAIN)
        elif entry.name in ("step_time_s", "mfu"):
            yield Part(f"{entry.name} {NOT_MEASURED}")


def _memory(run: Run, last: Beat | None, limits: Limits) -> Iterator[Part]:
    allocated, reserved, rss = (
        number(last, name) if last else None
        for name in ("gpu_mem_alloc", "gpu_mem_reserved", "rss_mib")
    )
    if allocated is not None and reserved is not None:
        yield Part(f"GPU {size(allocated * MIB)} used, {size(reserved * MIB)} held")
    elif rss is not None:
        yield Part(f"process {size(rss * MIB)}")
    else:
        yield Part(NOT_MEASURED)
    yield from _measured(last, "memory")
    if run.free_bytes is not None:
        low = run.free_bytes < limits.free_gib * (1 << 30)
        yield Part(f"disk {size(run.free_bytes)} free", BAD if low else PLAIN)


def _data(last: Beat | None, limits: Limits) -> Iterator[Part]:
    wait_s = number(last, "dt_fetch_s") if last else None
    if wait_s is None:
        yield Part(NOT_MEASURED)
        return
    yield from _measured(last, "data", {"dt_fetch_s": WARN if wait_s > limits.fetch_s else PLAIN})


def _gates(last: Beat | None, limits: Limits) -> Iterator[Part]:
    entropy = number(last, "entropy_mean") if last else None
    largest = number(last, "max_gate_mean") if last else None
    if last is None or entropy is None or largest is None:
        yield Part(NOT_MEASURED)
        return
    styles = {
        "entropy_mean": GOOD if entropy > limits.gate_entropy_low else BAD,
        "max_gate_mean": GOOD if largest < limits.gate_max else BAD,
        "collapse_fraction": WARN if number(last, "collapse_fraction") else GOOD,
    }
    yield from _measured(last, "gates", styles)
    known = dict(scalars_of(last.extra))
    shares = [(part.name, known.get(part.name)) for part in SHARES]
    if any(share is not None for _, share in shares):
        names = ((name.removeprefix("share_"), share) for name, share in shares)
        yield Part(" ".join(f"{name} {share:.2f}" for name, share in names if share is not None))


def _measured(
    last: Beat | None, row: str, styles: Mapping[str, str] | None = None
) -> Iterator[Part]:
    """The numbers of a row that were measured; `styles` by name."""
    for entry in _in_row(row):
        if last is not None and (value := number(last, entry.name)) is not None:
            yield Part(_text(entry, value), (styles or {}).get(entry.name, PLAIN))


def _in_row(row: str) -> list[Number]:
    return [entry for entry in SCALARS if entry.monitor and entry.monitor.row == row]


def _text(entry: Number, value: float) -> str:
    assert entry.monitor is not None and entry.curve is not None
    return entry.monitor.text.format(value * entry.curve.factor)


def _fallbacks(last: Beat | None) -> Iterator[Part]:
    total = number(last, "fb_total_fallbacks") if last else None
    if last is None or total is None:
        yield Part(NOT_MEASURED)
        return
    yield Part(f"{total:.0f}", WARN if total else GOOD)
    for name, count in last.extra.items():
        if name.startswith(FALLBACK_PREFIX) and name != "fb_total_fallbacks" and count:
            yield Part(f"{name.removeprefix(FALLBACK_PREFIX)} {count}", WARN)


def _checkpoint(run: Run) -> Iterator[Part]:
    if not run.checkpoints:
        yield Part("none yet")
        return
    newest = run.checkpoints[-1]
    yield Part(f"step {newest.step:,}")
    yield Part(f"{duration(max(0.0, run.now - newest.written))} ago")
    yield Part(size(newest.num_bytes))
    yield Part(f"{len(run.checkpoints)} in the folder")


def _rank(run: Run, rank: Rank, limits: Limits) -> Part:
    age_s = rank.age_s(run.now)
    if rank.last is None or age_s is None:
        return Part(f"{rank.rank}: {NOT_MEASURED}", WARN)
    style = PLAIN
    if not run.ended:
        is_late = age_s > allowed_silence(run, rank, limits)[0] or bool(rank.gone)
        style = BAD if is_late else GOOD
    gone = ", process gone" if rank.gone and not run.ended else ""
    return Part(f"{rank.rank}: step {rank.last.step:,}, {duration(age_s)} ago{gone}", style)


def _alarms(run: Run, alarms: Sequence[Alarm]) -> Iterator[Part]:
    for alarm in alarms:
        yield Part(f"now {alarm.type}: {alarm.text}", BAD)
    # The log of the watchdog, after what is active now.
    for alarm in run.alarms[-SHOWN_ALARMS:]:
        at = datetime.fromtimestamp(alarm.ts).strftime("%m-%d %H:%M:%S")
        yield Part(f"{at} {alarm.action} {alarm.type}: {alarm.text}", WARN)
    if not alarms and not run.alarms:
        yield Part("none", GOOD)


# --- bars ---


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Draw a curve in at most `width` characters; each is the mean of an equal slice of values."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width <= 0:
        return ""
    count = min(width, len(known))
    edges = [len(known) * i // count for i in range(count + 1)]
    means = [fmean(known[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def progress_bar(share: float, width: int, full: str = "█", empty: str = "░") -> str:
    """Draw a fraction between 0 and 1."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return full * done + empty * (width - done)
