"""sample.txt: a text that the trained model wrote, as it came."""

from __future__ import annotations

from pathlib import Path

from nsa.files import read_text
from nsa.telemetry.atomic import write_text

NAME = "sample.txt"


def write_sample(folder: Path, text: str) -> Path:
    """Write the text, prompt first."""
    write_text(folder / NAME, text)
    return folder / NAME


def read_sample(folder: Path) -> str:
    """Read the text back, with its line ends as they are."""
    return read_text(folder / NAME)
