"""Trains dense attention, NSA and the rules on the same rows, and measures what they have learned.

`python studies/rules/run.py --out DIR [--budget-seconds N] [--jobs N] [--speed N]` makes the rows,
trains the arms of every comparison in the order of the table (studies/nsa_vs_dense does that), and
then writes results.json and rules.json. What is finished is not done again: the same command goes
on. Exit code 3 says that the budget ended first.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

from nsa.config import BAD_INPUT, StrictParser
from nsa.records import MODEL
from studies.long_context.run import UNFINISHED
from studies.nsa_vs_dense.arms import INIT, Arm, choose, read_table
from studies.nsa_vs_dense.run import RESULT, leave, open_study, positive, seconds
from studies.rules.measure import measure_arms
from studies.rules.rows import Recipe, Text, make_rows, make_text, read_recipes

TABLE = Path(__file__).resolve().parent / "arms.toml"
RUNS = "runs"
"""The folder of the run folders in `--out`."""


def main(argv: list[str] | None = None) -> int:
    """Run the study, or go on with it; 3 where the budget ended first, 1 where an arm failed."""
    args = _parser().parse_args(argv)
    try:
        return RulesStudy(args).run()
    except (OSError, ValueError) as error:
        print(f"rules: error: {error}", file=sys.stderr)
        return BAD_INPUT


class RulesStudy:
    """The comparisons of a table, in their order."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.until = time.monotonic() + args.budget_seconds
        self.recipes = read_recipes(args.table)
        self.has_failed = False

    def run(self) -> int:
        """Train and measure one comparison after the other, then time all; the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = make_text(self.args.data, self.out / "text", self.recipes[0], _say)
        complete = True
        for recipe in self.recipes:
            if not self.arms_of(recipe):
                continue
            complete &= self.train(recipe, text)
            if not recipe.is_stage:
                arms, work = self.arms_of(recipe), self.out / RUNS
                complete &= measure_arms(arms, recipe, text, work, self.out, self.until, _say)
        if self.args.speed and (complete or self.has_failed):
            for recipe in self.recipes:
                complete &= self.time_alone(recipe, text)
        return 1 if self.has_failed else 0 if complete else UNFINISHED

    def arms_of(self, recipe: Recipe) -> list[Arm]:
        """The chosen arms of a comparison, with the steps that were asked for."""
        arms = read_table(self.args.table, steps=self.steps_of(recipe))
        chosen = choose(arms, self.args.arms)
        return [arm for arm in chosen if arm.comparison == recipe.comparison]

    def steps_of(self, recipe: Recipe) -> int | None:
        """The steps that were asked for; None: those of the table."""
        steps: int | None = self.args.stage_steps if recipe.is_stage else self.args.steps
        return steps

    def train(self, recipe: Recipe, text: Text) -> bool:
        """Train the arms that are not trained yet and whose first weights are there; whether all
        are trained."""
        arms = self.arms_of(recipe)
        make_rows(text, self.shards(recipe), recipe, arms, _say)
        ready = [arm for arm in arms if self.can_start(arm)]
        if not ready or self.left_s <= 0:
            return False
        names = ",".join(arm.name for arm in ready)
        arguments = ["--arms", names, "--jobs", str(self.args.jobs)]
        study = open_study([*self.common(recipe, text), *arguments])
        self.note(study.run())
        return study.is_finished and len(ready) == len(arms)

    def can_start(self, arm: Arm) -> bool:
        """Whether the weights that an arm starts from are there, or its own."""
        start = arm.settings.get(INIT)
        runs = self.out / RUNS
        if not start or any((runs / name / MODEL).is_file() for name in (start, arm.name)):
            return True
        _say(f"{arm.name} starts from {start}, which is not trained; left out")
        return False

    def time_alone(self, recipe: Recipe, text: Text) -> bool:
        """Measure the speed of those that have none; whether there was time for it."""
        timed = [arm.name for arm in self.arms_of(recipe) if arm.variant in recipe.timed]
        names = [name for name in timed if (self.out / RUNS / f"{name}{RESULT}").is_file()]
        if not names:
            return True
        if self.left_s <= 0:
            return False
        arguments = ["--arms", ",".join(names), "--speed", str(self.args.speed)]
        study = open_study([*self.common(recipe, text), *arguments])
        self.note(study.run())
        return study.is_timed

    def note(self, code: int) -> None:
        """Remember that an arm failed; one that was stopped at the end of the budget has not."""
        self.has_failed |= bool(code) and self.left_s > 0

    def common(self, recipe: Recipe, text: Text) -> list[str]:
        """Arguments of studies/nsa_vs_dense/run.py."""
        arguments = ["--data", self.shards(recipe), "--tokenizer-path", text.tokenizer]
        arguments += ["--table", self.args.table, "--out", self.out, "--work", self.out / RUNS]
        arguments += ["--keep-weights", "--budget-seconds", f"{self.left_s:.1f}"]
        if steps := self.steps_of(recipe):
            arguments += ["--steps", str(steps)]
        if self.args.commit:
            arguments += ["--commit", self.args.commit]
        return [str(argument) for argument in arguments]

    def shards(self, recipe: Recipe) -> Path:
        """The folder of the rows of a comparison; rows are made for a number of updates."""
        return self.out / f"shards-{recipe.comparison}-{self.arms_of(recipe)[0].steps}"

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.until - time.monotonic()


def _parser() -> StrictParser:
    parser = StrictParser(prog="rules", description=(__doc__ or "").splitlines()[0])
    text = "documents, as data.local_path; without it, the package's corpus"
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of all files")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="of the arms")
    parser.add_argument("--budget-seconds", type=seconds, default=520.0, metavar="N", help="(520)")
    steps = "updates of what is measured; without it, the table's"
    parser.add_argument("--steps", type=positive, metavar="N", help=steps)
    stage = "updates in each stage of shorter rows, from which the others start"
    parser.add_argument("--stage-steps", type=positive, metavar="N", help=stage)
    parser.add_argument("--arms", metavar="NAME,...", help="or patterns (all)")
    jobs = "arms at a time (1); no speed then"
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help=jobs)
    speed = "in the end, time who has no speed: N updates alone"
    parser.add_argument("--speed", type=positive, metavar="N", help=speed)
    parser.add_argument("--commit", metavar="NAME", help="what to record (git says)")
    return parser


def _say(line: str) -> None:
    print(f"[rules] {line}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
