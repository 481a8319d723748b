"""results.json of the study: what was trained, and how many answers of each cell were right.

Schema, version 2, one JSON object:
  version      2
  environment  commit, command, device, torch, cuda, triton, python
  settings     the preset, by name
  models       by attention (nsa, dense): what training left (parameters, steps, tokens, seconds,
               tokens_per_s, loss, val_loss): sums over all stages, and the last one's losses
  probes       [{model, seq_len, distances, right, asked, seconds, chosen}, ...], one for each
               stage: answers in held-out training rows, counted by the tokens between needle and
               answer; each of `distances` is the largest of its class; `chosen` counts those whose
               needle lies in a block that NSA selected, by the KV head, of all layers, that
               selects most of them (null: it has none, or nobody has looked)
  grids        [{model, task, rope, way, length, depths, right, asked, seconds}, ...]: `right` and
               `asked` have a count for each of `depths` (0 is the start of the text, 1 its end);
               `rope` is one of none, linear, base; `way` is forward (one pass over the context)
               or decode (prefill in tiles, then a decode step)
  seconds      wall time by part of the study
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.evaluate.results import WAYS
from nsa.files import write_text
from studies.long_context.presets import MODELS

VERSION = 2
NAME = "results.json"
ROPES = ("none", "linear", "base")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The answers of one model at one length."""

    model: str
    task: str
    rope: str
    way: str
    length: int
    depths: list[float]
    right: list[int]
    asked: list[int]
    seconds: float

    def __post_init__(self) -> None:
        for name, allowed in ((self.model, MODELS), (self.rope, ROPES), (self.way, WAYS)):
            if name not in allowed:
                raise ValueError(f"a grid of {name!r}, where one of {', '.join(allowed)} is needed")
        if not len(self.depths) == len(self.right) == len(self.asked):
            raise ValueError(f"{self.name}: depths, right and asked differ in length")
        if any(not 0 <= r <= a for r, a in zip(self.right, self.asked, strict=True)):
            raise ValueError(f"{self.name}: more right answers than questions, or fewer than none")

    @property
    def name(self) -> tuple[str, str, str, str, int]:
        """What no other grid of a file is."""
        return self.model, self.task, self.rope, self.way, self.length

    @property
    def accuracy(self) -> float:
        """Share of right answers over all depths."""
        return sum(self.right) / sum(self.asked)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The answers of one model in the held-out rows of a stage."""

    model: str
    seq_len: int
    distances: list[int]
    right: list[int]
    asked: list[int]
    seconds: float
    chosen: list[int] | None = None

    def __post_init__(self) -> None:
        counts = [self.right, self.asked, *([self.chosen] if self.chosen is not None else [])]
        if any(len(count) != len(self.distances) for count in counts):
            raise ValueError(f"probe of {self.model}: distances and counts differ in length")

    @property
    def accuracy(self) -> float:
        """Share of right answers over all distances."""
        return sum(self.right) / max(1, sum(self.asked))

    def __str__(self) -> str:
        cells = zip(self.distances, self.right, self.asked, strict=True)
        by = ", ".join(f"{right / asked:.0%} up to {limit}" for limit, right, asked in cells)
        text = f"{self.accuracy:.1%} of {sum(self.asked)} answers ({by} tokens away)"
        if self.chosen is None:
            return text
        shares = [f"{chosen / of:.0%}" for chosen, of in zip(self.chosen, self.asked, strict=True)]
        return f"{text}; blocks of the needles chosen by the best head: {', '.join(shares)}"


@dataclass(kw_only=True)
class Results:
    """The whole file."""

    environment: dict[str, str]
    settings: dict[str, Any]
    models: dict[str, dict[str, float]] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def find(self, model: str, task: str, rope: str, way: str, length: int) -> Grid | None:
        """The grid of that name, if it was measured."""
        wanted = (model, task, rope, way, length)
        return next((grid for grid in self.grids if grid.name == wanted), None)

    def find_probe(self, model: str, seq_len: int) -> Probe | None:
        """The probe of a model after the stage with rows of that length, if it was made."""
        wanted = (model, seq_len)
        return next(
            (probe for probe in self.probes if (probe.model, probe.seq_len) == wanted), None
        )


def merge_grids(parts: Sequence[Results]) -> Results:
    """The grids of several files as one: those of other seeds are added to each other, and of a
    grid that comes twice with one seed, the later one counts."""
    first = parts[0]
    if any(_recipe(part) != _recipe(first) for part in parts):
        raise ValueError("the results are of other settings; give those of one recipe")
    latest = {(part.settings.get("seed"), g.name): g for part in parts for g in part.grids}
    by_name: dict[tuple[str, str, str, str, int], list[Grid]] = {}
    for (_, name), grid in latest.items():
        by_name.setdefault(name, []).append(grid)
    commits = dict.fromkeys(part.environment["commit"][:12] for part in parts)
    return Results(
        environment=first.environment | {"commit": ", ".join(commits)},
        settings=_recipe(first),
        grids=[_sum(grids) for grids in by_name.values()],
    )


def _recipe(results: Results) -> dict[str, Any]:
    """All settings but the seed."""
    return {name: value for name, value in results.settings.items() if name != "seed"}


def _sum(grids: Sequence[Grid]) -> Grid:
    """All answers to the questions of one name."""
    return dataclasses.replace(
        grids[0],
        right=[sum(counts) for counts in zip(*(grid.right for grid in grids), strict=True)],
        asked=[sum(counts) for counts in zip(*(grid.asked for grid in grids), strict=True)],
        seconds=sum(grid.seconds for grid in grids),
    )


def write_results(folder: Path, results: Results) -> Path:
    """Replace results.json, all or nothing."""
    content = {"version": VERSION, **dataclasses.asdict(results)}
    head = {key: value for key, value in content.items() if key != "grids"}
    lines = ",\n".join("  " + json.dumps(grid) for grid in content["grids"])
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    write_text(folder / NAME, f'{text},\n "grids": [\n{lines}\n ]\n}}\n')
    return folder / NAME


def read_results(path: Path) -> Results:
    """Read a results.json, or that of a folder; what is not of this schema is refused."""
    file = path / NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, this program reads {VERSION}")
        grids = [Grid(**grid) for grid in content.pop("grids")]
        probes = [Probe(**probe) for probe in content.pop("probes")]
        return Results(grids=grids, probes=probes, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a result of this study ({error}); name a results.json that "
            "studies/long_context/run.py has written"
        ) from None
