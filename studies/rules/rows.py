"""The rows of a comparison: text, and documents with needles, as shards that the trainer reads.

Training rows are those of studies/long_context, some of them text alone. Held-out rows are text
alone, one after another: the held-out loss is that of a language model, and what a model answers is
asked in other ways.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nsa.data.documents import TRAIN, VAL
from nsa.data.tokenizers import HFTokenizer
from nsa.evaluate.needles import Ids
from studies.long_context.shards import RowMaker, write_shards
from studies.long_context.stages import LITTLE
from studies.long_context.text import TOKENIZER, Say, prepare_text, read_hay
from studies.long_context.training_rows import Mixture
from studies.long_context.vocabulary import Words, find_words
from studies.nsa_vs_dense.arms import Arm

TEXT_CHARS = 48_000_000
"""Characters of text that are used at most: the first ones."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the rows of a comparison are made of, and whose speed is measured."""

    comparison: str
    vocab: int
    digits: int
    plain: float
    num_keys: int
    growing: tuple[float, float]
    timed: list[str]
    """Variants."""
    is_stage: bool
    """Whether others start from its arms, and it is not measured itself."""


def read_recipes(table: Path) -> list[Recipe]:
    """Of every comparison, in the order of the table."""
    content = tomllib.loads(table.read_text(encoding="utf-8"))
    try:
        return [_recipe(name, part, content) for name, part in content["comparisons"].items()]
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{table} has no recipe of rows ({reason}); see arms.toml") from None


def _recipe(name: str, part: dict[str, Any], content: dict[str, Any]) -> Recipe:
    rows, shared = part["rows"], content["rows"]
    return Recipe(
        comparison=name,
        vocab=shared["vocab"],
        digits=shared["digits"],
        plain=rows["plain"],
        num_keys=rows["num_keys"],
        growing=tuple(rows["growing"]),
        timed=part["timed"],
        is_stage=part.get("stage", False),
    )


@dataclass(frozen=True)
class Text:
    """The text of the study, with its tokenizer."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json."""
        return self.folder / TOKENIZER

    def words(self, recipe: Recipe) -> Words:
        """The ids that needles of a recipe are made of."""
        return find_words(HFTokenizer(self.tokenizer), recipe.digits, recipe.num_keys)

    def held_out(self, recipe: Recipe) -> Ids:
        """The held-out text without keys and values."""
        return read_hay(self.folder, VAL, self.words(recipe))


def make_text(source: Path | None, folder: Path, recipe: Recipe, say: Say) -> Text:
    """Train the tokenizer and encode the text, once; without a source it is the package's."""
    sizes = {"vocab": recipe.vocab, "digits": recipe.digits, "chars": TEXT_CHARS}
    prepare_text(source, folder, **sizes, say=say)
    return Text(folder)


def make_rows(text: Text, folder: Path, recipe: Recipe, arms: Sequence[Arm], say: Say) -> None:
    """Write the shards of a comparison: a row for every turn of its updates."""
    settings, steps = arms[0].settings, arms[0].steps
    seq_len, batch, seed = (settings[f"train.{key}"] for key in ("seq_len", "batch_size", "seed"))
    if any(arm.seed != seed for arm in arms):
        raise ValueError(
            f"{recipe.comparison} has arms of several seeds; every row is made for its turn in the "
            "order of one seed: give all arms the same"
        )
    maker = RowMaker(
        text=text.folder,
        mixture=Mixture(seq_len=seq_len, growing=recipe.growing, plain=recipe.plain),
        digits=recipe.digits,
        num_keys=recipe.num_keys,
        seed=seed,
        plain_held_out=True,
    )
    # A row more is written for the last target.
    held_out = max(2, len(text.held_out(recipe)) // seq_len - 1)
    num_rows = {TRAIN: steps * batch, VAL: held_out}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # starts nobody unasked
        many = pool if num_rows[TRAIN] * seq_len > LITTLE else None
        write_shards(folder, maker, num_rows, say, many)
