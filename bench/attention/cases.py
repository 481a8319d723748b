"""What the prefill benchmark measures: head counts, lengths, batches, and the inputs of a case."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LENGTHS = (4096, 8192, 16384, 32768, 65536)
REPEATS = 9
FEWER_REPEATS = {32768: 5, 65536: 3}
"""Timed calls from this length on, where the caller names no number."""


class Shape(NamedTuple):
    """Heads and head dims."""

    Hq: int
    Hkv: int
    Dk: int
    Dv: int


class Case(NamedTuple):
    """One line of inputs that every implementation gets."""

    shape: Shape
    batch: int
    length: int
    repeats: int
    left_out: tuple[tuple[str, str], ...] = ()
    """Peers that are not measured here: (name, reason)."""


def grid(
    shapes: list[Shape], lengths: list[int], batch: int = 1, repeats: int | None = None
) -> list[Case]:
    """Every shape at every length."""
    return [
        Case(shape, batch, length, repeats or _repeats(length))
        for shape in shapes
        for length in lengths
    ]


def preset_speed(repeats: int | None = None) -> list[Case]:
    """The shapes of the published table; meant for four minutes on an H200, compilation included.

    flash-linear-attention tunes about 50 variants for every head dim it meets, so it is left out
    where the head dim is not that of the first shape.
    """
    shapes = [Shape(64, 4, 128, 128), Shape(12, 2, 64, 64), Shape(32, 8, 128, 128)]
    wide = Shape(64, 4, 192, 128)
    reason = (
        "left out of the preset, where its tuning for one more head dim takes too long; "
        "run --shape 64,4,192,128"
    )
    lengths = list(LENGTHS)
    without_fla = [
        case._replace(left_out=(("fla", reason),))
        for case in grid([wide], lengths[1:], repeats=repeats)
    ]
    many = grid([Shape(12, 2, 64, 64)], [2048], batch=16, repeats=repeats)
    return [*grid(shapes, lengths, repeats=repeats), *without_fla, *many]


PRESETS = {"speed": preset_speed}


def parse_shape(text: str) -> Shape:
    """`64,4,128,128` -> Shape; refuses what cannot be heads and head dims."""
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"shape {text!r} is not four whole numbers; use Hq,Hkv,Dk,Dv as in 12,2,64,64"
        )
    shape = Shape(*(int(part) for part in parts))
    if min(shape) < 1 or shape.Hq % shape.Hkv:
        raise ValueError(
            f"shape {text!r} has Hq={shape.Hq} and Hkv={shape.Hkv}; all four must be at least 1 "
            f"and Hq a multiple of Hkv, as in 12,2,64,64"
        )
    return shape


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, then raw K and V of the three branches, then gates (fp32); all leaves with gradients."""
    shape = case.shape
    torch.manual_seed(0)
    kv = 3 * [(shape.Hkv, shape.Dk), (shape.Hkv, shape.Dv)]
    sizes = [(case.batch, case.length, *size) for size in [(shape.Hq, shape.Dk), *kv]]
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes]
    gates = torch.randn(case.batch, case.length, shape.Hq, 3, device=device)
    return [x.requires_grad_() for x in [*tensors, gates.softmax(dim=-1)]]


def _repeats(length: int) -> int:
    fewer = [count for start, count in FEWER_REPEATS.items() if length >= start]
    return min([REPEATS, *fewer])
