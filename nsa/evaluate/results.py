"""eval.json: what `nsa eval` found of a model; writer and reader.

Schema, version 1, one JSON object:
  version      1
  model        the path that was given
  weights      sha256 of the weights (null where lm-eval alone has loaded them)
  settings     the arguments that decide the numbers
  perplexity   null, or the fields of nsa.evaluate.perplexity.Perplexity: losses in nats
  needle       null, or `lengths`, `depths`, `way`; `right` and `asked`: for each length a list with
               a count for each depth
  tasks        by name of an lm-eval task: its metrics
  seconds      by part
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.files import write_text

VERSION = 1
NAME = "eval.json"
WAYS = ("forward", "decode")
"""How answers are asked for (nsa.evaluate.grid)."""
NEEDLE = {"lengths", "depths", "way", "right", "asked"}
PERPLEXITY = {
    "rows", "length", "loss", "until", "loss_at", "targets", "lengths", "loss_of",
}  # fmt: skip


@dataclass(kw_only=True)
class Evaluation:
    """The whole file."""

    model: str
    weights: str | None
    settings: dict[str, Any]
    perplexity: dict[str, Any] | None = None
    needle: dict[str, Any] | None = None
    tasks: dict[str, dict[str, float | None]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, part, fields in (
            ("perplexity", self.perplexity, PERPLEXITY),
            ("needle", self.needle, NEEDLE),
        ):
            if part is not None and set(part) != fields:
                raise ValueError(f"{name} has {sorted(part)}, not {sorted(fields)}")
        if self.needle is not None:
            size = (len(self.needle["lengths"]), len(self.needle["depths"]))
            for name in ("right", "asked"):
                counts = self.needle[name]
                if len(counts) != size[0] or any(len(row) != size[1] for row in counts):
                    raise ValueError(f"needle.{name} is not {size[0]} lists of {size[1]} counts")


def write_evaluation(folder: Path, found: Evaluation) -> Path:
    """Replace eval.json, all or nothing."""
    content = {"version": VERSION, **dataclasses.asdict(found)}
    write_text(folder / NAME, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return folder / NAME


def read_evaluation(path: Path) -> Evaluation:
    """Read an eval.json, or that of a folder; what is not of this schema is refused."""
    file = path / NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, this program reads {VERSION}")
        return Evaluation(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not an evaluation ({error}); name an {NAME} that `nsa eval` has written"
        ) from None
