"""What a person sees while a run goes on: a bar in a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from nsa.telemetry import TrainingRow


class Progress:
    """Shows each logged step with the time that is left."""

    def __init__(self, out: TextIO, steps: int) -> None:
        self._console = Console(file=out, highlight=False, emoji=False, soft_wrap=True)
        self._steps = steps
        self._bar = Bar(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            expand=True,
            disable=not self._console.is_terminal,
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
        self._console.print(text, markup=False)

    def advance(self, steps: int = 1) -> None:
        """Count steps that are done."""
        self._bar.advance(self._task, steps)

    def show(self, row: TrainingRow, eta_s: float, grad_norm: float | None = None) -> None:
        """Show a logged step; the gradient norm where it is given."""
        numbers = f"loss {row.loss:.4f} | lr {row.lr:.2e} | toks/s {row.toks_per_s:.0f}"
        if grad_norm is not None:
            numbers += f" | grad_norm {grad_norm:.4f}"
        numbers += f" | eta {clock(eta_s)}"
        if self._console.is_terminal:
            self._bar.update(self._task, description=numbers)
        else:
            self.say(f"step {row.step:04d} | {numbers}")


def clock(seconds: float) -> str:
    """Write a duration as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
