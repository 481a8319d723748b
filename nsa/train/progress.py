"""What a person sees while a run goes on: a bar in a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from nsa.train.step_report import StepReport, clock, step_line, step_numbers

SEPARATOR = " | "


class Progress:
    """Shows each logged step with the time that is left."""

    def __init__(self, out: TextIO, steps: int, *, quiet: bool = False) -> None:
        """`quiet`: another rank has the console, and this one speaks only when it must."""
        self._quiet = quiet
        self._console = Console(file=out, highlight=False, emoji=False, soft_wrap=True)
        self._bar = _BarAndNumbers(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            expand=True,
            disable=quiet or not self._console.is_terminal,
        )
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
        """Print a line as it is; in a terminal it appears above the bar."""
        if not self._quiet:
            self.say_from_each(text)

    def say_from_each(self, text: str) -> None:
        """Print a line from every rank."""
        self._console.print(text, markup=False)

    def advance(self, steps: int = 1) -> None:
        """Count steps that are done."""
        self._bar.advance(self._task, steps)

    def show(self, report: StepReport) -> None:
        """Show a logged step."""
        if self._console.is_terminal:
            self._bar.numbers = _Numbers(step_numbers(report))
            self._bar.update(self._task, description=f"eta {clock(report.eta_s)}")
        else:
            self.say(step_line(report))


class Steady(io.TextIOBase):
    """A stream that may lose its other end: a terminal that was closed, a pipe without its reader.

    What is written then goes nowhere, and the run goes on; so a run survives its shell.
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
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._out.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        """Lead the descriptor, and stderr where it is the same stream, to nowhere."""
        lost = os.fstat(self._out.fileno())
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in {self._out.fileno(), 2}:
            if os.path.samestat(os.fstat(descriptor), lost):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Numbers:
    """Numbers in as many lines as the terminal needs: none is cut, whatever its width."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in fill_lines(self._parts, options.max_width):
            yield Text(line, no_wrap=True)


class _BarAndNumbers(Bar):
    """The bar in one line, and the numbers of the last logged step below it."""

    numbers: _Numbers = _Numbers(())

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self.numbers


def fill_lines(parts: Iterable[str], width: int) -> list[str]:
    """Put as many parts into each line as fit; a part is never broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return lines
