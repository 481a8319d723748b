"""`nsa monitor`: a run folder in a terminal, live; in a pipe, plain lines. It only reads."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nsa.config.env import check_environment, read
from nsa.operate.board import Part, Row, board
from nsa.operate.limits import limits_for
from nsa.operate.rules import judge
from nsa.operate.snapshot import Run, read_run
from nsa.operate.text import printable

TAIL_BYTES = 1 << 20
"""Of each heartbeat: some hundred logged steps."""
SEPARATOR = " | "
LABEL = 10
"""Characters of the longest label."""
LONGEST = 60
"""A part that is longer gets a line of its own, and wraps."""


class Report:
    """A run at a moment, as something that rich can draw for any width."""

    def __init__(self, run: Run, *, unicode: bool = True) -> None:
        self.run, self._unicode = run, unicode
        self._limits = limits_for(run.metrics.device if run.metrics else None)
        self._alarms = judge(run, self._limits)

    def rows(self, width: int) -> list[Row]:
        """What is shown, for a width."""
        return board(self.run, self._alarms, self._limits, width, unicode=self._unicode)

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
        """The same as lines of text."""
        lines = [f"{self.run.folder}"]
        for label, parts in self.rows(width):
            texts = [text.plain for text in _lines(parts, width - LABEL - 2)]
            lines += [f"{label if i == 0 else '':<{LABEL}}  {t}" for i, t in enumerate(texts)]
        return "\n".join(line.rstrip() for line in lines)

    def line(self) -> str:
        """The most important numbers in one line, without ages: they would always be new."""
        rows = dict(self.rows(40))
        texts = [rows["status"][0].text]
        if self.run.status != "absent":
            texts += [part.text for part in rows["progress"] if part.text.startswith("step")]
            texts += [f"loss {rows['loss'][0].text}", rows["speed"][0].text]
            texts += [f"alarms: {', '.join(alarm.type for alarm in self._alarms) or 'none'}"]
        return SEPARATOR.join(texts)


def _lines(parts: Sequence[Part], width: int) -> list[Text]:
    """Put as many parts into each line as fit; none is broken unless it is longer than a line."""
    lines: list[Text] = []
    for text, style in parts:
        fits = lines and len(lines[-1]) + len(SEPARATOR) + len(text) <= width
        if fits and len(text) <= LONGEST:
            lines[-1].append(SEPARATOR, "dim").append(text, style)
        else:
            lines.append(Text(text, style))
    return lines


def monitor(folder: Path | None, args: argparse.Namespace, console: Console | None = None) -> int:
    """Show the run until Ctrl-C, or once."""
    check_environment()
    folder = folder or Path(read("OUT_DIR"))
    if not 0 < args.interval < float("inf"):
        raise ValueError(f"--interval {args.interval:g} is not a number of seconds above 0")
    console = console or Console(highlight=False, emoji=False)
    unicode = console.encoding.lower().startswith("utf")

    def look() -> Report:
        return Report(read_run(folder, tail_bytes=TAIL_BYTES), unicode=unicode)

    follow = _follow_screen if console.is_terminal else _follow_lines
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        follow(look, console, 0.0 if args.once else args.interval)
    return 0


def _follow_screen(look: Callable[[], Report], console: Console, interval_s: float) -> None:
    """Draw again and again, and leave the last picture; once without an interval."""
    report = look()
    try:
        if interval_s:
            with Live(report, console=console, auto_refresh=False, screen=True) as live:
                while True:
                    live.refresh()
                    time.sleep(interval_s)
                    report = look()
                    live.update(report)
    finally:
        console.print(report)


def _follow_lines(look: Callable[[], Report], console: Console, interval_s: float) -> None:
    """Write the whole report, then a line whenever something is new."""
    report = look()
    print(report.plain(), file=console.file, flush=True)
    said = report.line()
    while interval_s:
        time.sleep(interval_s)
        if (line := look().line()) != said:
            said = line
            print(f"{time.strftime('%H:%M:%S')} {line}", file=console.file, flush=True)
