"""A run without its costly parts, each of which takes longer than tiny steps do.

The end has no picture and a short sample; the embedded corpus is split once per process; files are
renamed into place without waiting for the disk, which only a loss of power would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from nsa.data.documents import Split, split_works
from nsa.files import replacing
from nsa.records import TrainingRow, ValRow
from nsa.records.results import CURVE_FILE

SAMPLE_TOKENS = 4


def replacements() -> dict[str, object]:
    """By name, what takes the place of a costly part."""
    return {
        "nsa.generate.decode.SAMPLE_TOKENS": SAMPLE_TOKENS,
        "nsa.train.finish.draw_loss_curve": draw_nothing,
        "nsa.data.open.split_works": split_once,
        "nsa.files._fsync": flush_nothing,
    }


def draw_nothing(
    folder: Path, training: Sequence[TrainingRow], val: Sequence[ValRow], title: str
) -> Path:
    """In the place of draw_loss_curve, which test_telemetry.py tests."""
    with replacing(folder / CURVE_FILE) as temporary:
        temporary.write_bytes(b"no picture")
    return folder / CURVE_FILE


def split_once(works: Iterable[str]) -> Split:
    """In the place of split_works, which test_data.py tests."""
    return _split(tuple(works))


@cache
def _split(works: tuple[str, ...]) -> Split:
    return split_works(works)


def flush_nothing(path: Path) -> None:
    """In the place of fsync; runs in processes of their own have the real one."""
    assert path.exists()
