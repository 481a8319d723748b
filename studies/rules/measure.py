"""What the trained models of the study do: recall of the dense top blocks, and the needle grid.

Schema of rules.json, version 1, one JSON object:
  schema   1
  rows     of text that recall was measured on, by comparison
  chance   by comparison, the recall of blocks drawn at random
  arms     by name of the arm: `weights` (sha256), `recall` by rule (`own`, or for dense attention
           the rules without weights) and layer: recall, read_mass, best_mass (recall.py says what
           these are); `grids`: task, length, depths, right, asked; `seconds`
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nsa.config import Config
from nsa.files import write_text
from nsa.model import TinyLM
from nsa.model.cost import block_spec
from nsa.records import MODEL
from nsa.train.checkpoint.model_file import load_model, weights_sha256
from nsa.train.runtime import resolve_runtime
from studies.long_context.evaluate import Exam, ask
from studies.nsa_vs_dense.arms import Arm
from studies.rules.recall import chance_recall, measure_recall
from studies.rules.rows import Recipe, Text

SCHEMA = 1
NAME = "rules.json"
DEPTHS, TRIALS = 11, 8
"""Of the needle grid: depths, and questions at each."""
RECALL_ROWS = 8
"""At most: rows of held-out text on which recall is measured."""
BATCH_TOKENS = 65536
SHORTER = (4, 2, 1)
"""The needle is asked for in contexts of a row divided by these."""


def read_measures(path: Path) -> dict[str, Any]:
    """Read rules.json; an empty one where there is none yet."""
    if not path.is_file():
        return {"schema": SCHEMA, "rows": {}, "chance": {}, "arms": {}}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {content.get('schema')!r}; this program reads {SCHEMA}: measure "
            "again into another folder"
        )
    return content


def measure_arms(
    arms: list[Arm],
    recipe: Recipe,
    text: Text,
    work: Path,
    out: Path,
    until: float,
    say: Callable[[str], None],
) -> bool:
    """Measure every arm whose weights are there and were not measured; whether all were."""
    measures = read_measures(out / NAME)
    complete = True
    for arm in arms:
        path = work / arm.name / MODEL
        if not path.is_file() or time.monotonic() > until:
            complete = False
            continue
        model, cfg = load_model(path)
        weights = weights_sha256(model.state_dict())
        if measures["arms"].get(arm.name, {}).get("weights") == weights:
            continue
        rows = held_out_rows(text, recipe, cfg)
        measures["rows"][recipe.comparison] = len(rows)
        chance = chance_recall(cfg.train.seq_len, block_spec(cfg))
        measures["chance"][recipe.comparison] = round(chance, 5)
        found = measure_model(model, cfg, rows, _exam(text, recipe, arm.seed))
        measures["arms"][arm.name] = {"weights": weights, **found}
        write_text(out / NAME, json.dumps(measures, allow_nan=False) + "\n")
        say(f"{arm.name}: {_describe(found)}")
    return complete


def held_out_rows(text: Text, recipe: Recipe, cfg: Config) -> torch.Tensor:  # [rows, S]
    """Rows of held-out text, the same for all arms of a comparison."""
    ids, length = text.held_out(recipe), cfg.train.seq_len
    num = max(1, min(RECALL_ROWS, len(ids) // length))
    return torch.from_numpy(np.resize(ids, (num, length)))


def measure_model(model: TinyLM, cfg: Config, rows: torch.Tensor, exam: Exam) -> dict[str, Any]:
    """Recall and grids of a model, in the precision of its training."""
    start = time.perf_counter()
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v), cfg.model.attention_kind)
    model = model.to(runtime.device).eval()
    length = cfg.train.seq_len
    asked = [("needle", length // part) for part in SHORTER] + [("multi", length)]
    with runtime.compute():
        recall = measure_recall(model, cfg, rows.to(runtime.device))
        grids = [
            ask(model, exam, cfg.model.attention, task, "none", "forward", tokens)
            for task, tokens in asked
        ]
    kept = ("task", "length", "depths", "right", "asked")
    return {
        "recall": recall,
        "grids": [{key: getattr(grid, key) for key in kept} for grid in grids],
        "seconds": round(time.perf_counter() - start, 2),
    }


def _exam(text: Text, recipe: Recipe, seed: int) -> Exam:
    return Exam(
        words=text.words(recipe),
        hay=text.held_out(recipe),
        depths=np.linspace(0, 1, DEPTHS).round(4).tolist(),
        trials=TRIALS,
        batch_tokens=BATCH_TOKENS,
        seed=seed,
    )


def accuracy(found: dict[str, Any], task: str) -> float:
    """Right answers of a task at the longest length, as a share."""
    grid = max((g for g in found["grids"] if g["task"] == task), key=lambda g: g["length"])
    return float(sum(grid["right"]) / sum(grid["asked"]))


def mean_recall(found: dict[str, Any], rule: str, column: int = 0) -> float:
    """Mean over the layers of recall (0), read_mass (1) or best_mass (2)."""
    layers = found["recall"][rule]
    return float(sum(layer[column] for layer in layers) / len(layers))


def _describe(found: dict[str, Any]) -> str:
    recalls = ", ".join(f"{rule} {mean_recall(found, rule):.1%}" for rule in found["recall"])
    answers = ", ".join(f"{task} {accuracy(found, task):.0%}" for task in ("needle", "multi"))
    return f"recall {recalls}; {answers}; {found['seconds']:.0f} s"
