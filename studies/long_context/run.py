"""Long context: train NSA and its dense twin to retrieve, then measure the needle grid of both.

`python studies/long_context/run.py --data DIR --out DIR [--budget-seconds N]` makes the data,
trains both models through the product's trainer, asks them at every length and depth, with and
without scaled positions, and writes OUT/results.json after every part. The same command goes on
where the last one ended. `--tiny` rehearses all of it on a CPU.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

import numpy as np
import torch

from bench.results import describe_command, describe_machine
from nsa.config import BAD_INPUT, StrictParser
from nsa.data.documents import VAL
from nsa.data.tokenizers import HFTokenizer
from studies.long_context.evaluate import Exam, ask, scale_rope
from studies.long_context.presets import MODELS, PRESETS, Preset
from studies.long_context.results import NAME, ROPES, Results, read_results, write_results
from studies.long_context.stages import load_stage, make_data, probe_stage
from studies.long_context.text import TOKENIZER, read_hay
from studies.long_context.train import OutOfTime, TrainingFailed, total, train_stage
from studies.long_context.vocabulary import find_words

UNFINISHED = 3
"""Exit code when the budget ended before the study."""
TASKS_ASKED = ("needle", "multi", "passkey")
DECIDED = (
    *("train.seq_len", "train.batch_size", "train.accumulate_grad_batches", "train.steps"),
    *("train.seed", "train.out_dir", "train.init_from", "model.attention"),
)
"""Settings that decide which rows are read, and when: every row is made for its turn."""


class NotLearned(Exception):
    """A stage left a model that does not retrieve: what comes next would be for nothing."""


def main(argv: list[str] | None = None) -> int:
    """Run the study, or go on with it; 3 where the budget ended first."""
    parser = _parser()
    args = parser.parse_args(argv)
    if unknown := set(args.models.split(",")) - set(MODELS):
        parser.error(f"--models {args.models}: no {min(unknown)}; use {' and '.join(MODELS)}")
    try:
        preset = _preset(args.tiny, args.steps, args.seed, args.set)
    except ValueError as error:
        parser.error(str(error))
    given = sys.argv[1:] if argv is None else argv
    args.out = args.out.resolve()  # the trainer runs in another folder
    until = time.monotonic() + args.budget_seconds
    try:
        results = _open(args.out, preset, given, args.commit)
        with _timed(results, "data", args.out):
            text = make_data(args.data, args.out, preset, _say)
        for attention in args.models.split(","):
            _train_all(attention, preset, args.out, text, results, until)
            with _timed(results, f"ask {attention}", args.out):
                _ask_all(attention, preset, args.out, text, results, until)
    except OutOfTime:
        print(f"the {args.budget_seconds:g} s are over; the same command goes on", flush=True)
        return UNFINISHED
    except ValueError as error:  # bad input, by the convention of this package
        print(f"long_context: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (TrainingFailed, NotLearned) as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 1
    print(f"finished: {args.out / NAME}", flush=True)
    return 0


def plan(preset: Preset) -> Iterator[tuple[str, str, str, int]]:
    """(task, rope, way, length) in the order of their importance.

    Positions within those of training are read as they were trained.
    """
    trained = [length for length in preset.lengths if length <= preset.seq_len]
    longer = [length for length in preset.lengths if length > preset.seq_len]
    for task in TASKS_ASKED:
        yield from ((task, "none", "forward", length) for length in trained)
    for task in TASKS_ASKED:
        for length in longer:
            yield from ((task, rope, "forward", length) for rope in ROPES)
        if task == "needle":
            for length in preset.decode_lengths:
                yield task, "none" if length <= preset.seq_len else "base", "decode", length


def _parser() -> StrictParser:
    parser = StrictParser(prog="long_context", description=(__doc__ or "").splitlines()[0])
    text = "documents to hide needles in, as data.local_path; without it, the package's corpus"
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of all files")
    parser.add_argument("--budget-seconds", type=float, default=540.0, metavar="N", help="(540)")
    parser.add_argument("--steps", type=int, metavar="N", help="updates of the last stage")
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, rows and questions (1)")
    more = "a setting of the trainer, of both models; may come again"
    parser.add_argument("--set", action="append", default=[], metavar="group.key=value", help=more)
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...", help="(all)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to rehearse")
    parser.add_argument("--commit", metavar="NAME", help="what to record (git says)")
    return parser


def _preset(tiny: bool, steps: int | None, seed: int | None, more: list[str]) -> Preset:
    preset = PRESETS["tiny" if tiny else "full"]
    if steps is not None and steps < 1:
        raise ValueError(f"--steps {steps} is below 1; give 1 or more")
    if seed is not None and seed < 0:
        raise ValueError(f"--seed {seed} is below 0; give 0 or more")
    pairs = [setting.partition("=") for setting in more]
    if wrong := [setting for setting, (_, sign, _) in zip(more, pairs, strict=True) if not sign]:
        raise ValueError(f"--set {wrong[0]} has no value; write group.key=value")
    if fixed := [key for key, _, _ in pairs if key in DECIDED]:
        hint = "give --seed" if fixed[0] == "train.seed" else "leave it"
        raise ValueError(f"--set {fixed[0]}: the rows are made for the preset's; {hint}")
    settings = preset.settings | {key: value for key, _, value in pairs}
    last = dataclasses.replace(preset.stages[-1], steps=steps or preset.stages[-1].steps)
    seed = preset.seed if seed is None else seed
    stages = (*preset.stages[:-1], last)
    return dataclasses.replace(preset, stages=stages, settings=settings, seed=seed)


def _open(out: Path, preset: Preset, given: list[str], commit: str | None) -> Results:
    """Those of the folder, if it has some; those of other settings are refused.

    New ones are written at once: whatever the folder gets is known to be of these settings.
    """
    settings = dataclasses.asdict(preset)
    command = ["python", "studies/long_context/run.py", *given]
    environment = describe_command(command, commit)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = Results(environment=environment | describe_machine(device), settings=settings)
    if not (out / NAME).is_file():
        out.mkdir(parents=True, exist_ok=True)
        write_results(out, results)
        return results
    found = read_results(out / NAME)
    if found.settings != json.loads(json.dumps(settings)):
        raise ValueError(f"{out} holds a study of other settings; choose another --out")
    results.models, results.seconds = found.models, found.seconds
    results.probes, results.grids = found.probes, found.grids
    return results


def _train_all(
    attention: str, preset: Preset, out: Path, text: Path, results: Results, until: float
) -> None:
    """Every stage of a model; a probe after each says what it has learned."""
    measured = []
    for number, stage in enumerate(preset.stages):
        with _timed(results, f"train {attention} {stage.seq_len}", out):
            left_s = until - time.monotonic()
            measured.append(train_stage(attention, preset, number, text, out, left_s))
            results.models[attention] = total(measured)
        found = results.find_probe(attention, stage.seq_len)
        if found is None:
            with _timed(results, f"probe {attention} {stage.seq_len}", out):
                found = probe_stage(attention, preset, number, out, text)
                results.probes.append(found)
            _say(f"{attention}, rows of {stage.seq_len}: {found}")
        if stage is not preset.stages[-1] and found.accuracy < preset.pass_mark:
            raise NotLearned(
                f"{attention} gives {found.accuracy:.1%} right answers in rows of {stage.seq_len} "
                f"tokens, {preset.pass_mark:.0%} are needed to go on; change its training, in "
                "another --out"
            )


def _ask_all(
    attention: str, preset: Preset, out: Path, text: Path, results: Results, until: float
) -> None:
    """Every grid of a model that is not there yet."""
    model, cfg = load_stage(attention, preset, len(preset.stages) - 1, out)
    tokenizer = HFTokenizer(text / TOKENIZER)
    words = find_words(tokenizer, preset.digits, preset.num_keys)
    exam = Exam(
        words=words,
        hay=read_hay(text, VAL, words),
        depths=np.linspace(0, 1, preset.depths).round(4).tolist(),
        trials=preset.trials,
        batch_tokens=preset.batch_tokens,
        seed=preset.seed,
    )
    decoded = dataclasses.replace(exam, trials=preset.decode_trials)
    for task, rope, way, length in plan(preset):
        if results.find(attention, task, rope, way, length):
            continue
        if time.monotonic() > until:
            raise OutOfTime
        scale_rope(model, cfg.model, rope, length / preset.seq_len)
        questions = decoded if way == "decode" else exam
        grid = ask(model, questions, attention, task, rope, way, length)
        results.grids.append(grid)
        write_results(out, results)
        name = f"{attention} {task} {length} rope={rope} {way}"
        _say(f"{name}: {grid.accuracy:.1%} of {sum(grid.asked)} in {grid.seconds:.1f} s")


@contextmanager
def _timed(results: Results, part: str, out: Path) -> Iterator[None]:
    """Add the seconds of a part, however it ends, and write what there is."""
    start = time.monotonic()
    try:
        yield
    finally:
        spent = results.seconds.get(part, 0.0) + time.monotonic() - start
        results.seconds[part] = round(spent, 1)
        write_results(out, results)


def _say(line: str) -> None:
    print(f"[long_context] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
