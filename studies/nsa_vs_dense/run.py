"""Trains NSA and its dense twin, arm by arm, and puts what they reached into results.json.

`python studies/nsa_vs_dense/run.py --data SHARDS --out DIR [--arms NAME,...]`. Every arm is a
process: one that fails leaves the others alone. An arm that is finished is not trained again, one
that was cut short goes on from its checkpoint. `--speed N` then times those that shared the device,
alone. README.md beside this file has the whole story.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

from nsa.config import StrictParser
from nsa.config.env import read
from nsa.data.documents import TRAIN, VAL
from nsa.data.shards import read_manifest
from nsa.records import MODEL
from studies.nsa_vs_dense.arms import INIT, Arm, choose, read_table
from studies.nsa_vs_dense.processes import Job, start_job, stop_jobs
from studies.nsa_vs_dense.results import (
    IDENTITY,
    NAME,
    read_arm,
    read_results,
    write_arm,
    write_results,
)
from studies.nsa_vs_dense.speed import LEAST_STEPS, untimed
from studies.nsa_vs_dense.train_arm import Task

HERE = Path(__file__).resolve().parent
LOOK_S = 0.2
"""Between two looks at who has ended."""
RESULT = ".result.json"
"""Added to the name of an arm: what came of it."""
SPEED = ".speed"
"""Added to the name of an arm, in files and where it failed: the updates that time it alone."""


def main(argv: list[str] | None = None) -> int:
    """Train what is not there yet; 1 where an arm failed, 0 otherwise."""
    return open_study(argv).run()


def open_study(argv: list[str] | None = None) -> Study:
    """The study that the arguments ask for; bad ones end the process."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return Study(args, sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        parser.error(str(error))


class Study:
    """The arms of a call, their folder, and what is known of them so far."""

    def __init__(self, args: argparse.Namespace, argv: list[str]) -> None:
        """Everything that can be refused is refused here."""
        table = Path(args.table)
        steps = {"steps": args.steps, "minutes_each": args.minutes_each}
        self.all_arms = read_table(table, **steps, changes=args.set)
        self.arms = choose(self.all_arms, args.arms)
        self.out, self.work = Path(args.out), Path(args.work or Path(args.out) / "runs")
        self.where, self.data = describe_data(Path(args.data), args.tokenizer_path)
        for arm in self.arms:
            arm.resolve(self.where)
        self.keep_weights, self.commit, self.jobs = args.keep_weights, args.commit, args.jobs
        self.speed_steps: int | None = args.speed
        if self.speed_steps is not None and self.speed_steps < LEAST_STEPS:
            raise ValueError(
                f"--speed {self.speed_steps} is less than {LEAST_STEPS}; the updates that compile "
                "would count: use 50"
            )
        self.deadline = time.monotonic() + (args.budget_seconds or math.inf)
        self.start = time.monotonic()
        price = args.price if args.price is not None else read("NSA_PRICE_PER_H")
        self.call: dict[str, Any] = {
            "command": shlex.join(["python", "studies/nsa_vs_dense/run.py", *argv]),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "price_per_hour": price,
            "cost": None,
        }
        self.known = read_results(Path(args.known))["arms"] if args.known else []
        self.table = table.name
        self.calls: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        if (self.out / NAME).is_file():
            earlier = read_results(self.out / NAME)
            self.calls = earlier["calls"]
            self.failed = {entry["name"]: entry["reason"] for entry in earlier["failed"]}

    def run(self) -> int:
        """Train the arms, then time those that have no speed, where that was asked for."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        for arm in self.known:
            path = self.work / f"{arm['name']}{RESULT}"
            if not path.exists():
                write_arm(path, arm)
        self.train()
        if self.speed_steps is not None:
            self.time_alone(self.speed_steps)
        kinds = ("",) if self.speed_steps is None else ("", SPEED)
        return int(any(arm.name + kind in self.failed for arm in self.arms for kind in kinds))

    def train(self) -> None:
        """Train the arms, `jobs` at a time; results.json is complete after each."""
        waiting = [arm for arm in self.arms if not self.finished(arm)]
        for arm in self.arms:
            if arm not in waiting:
                _say(f"{arm.name}: finished before")
        running: list[Job] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    takes = waiting[0].expected_s * self.jobs  # who shares a device gets a part
                    if self.fits(waiting, takes, "not started"):
                        running.append(self.begin(waiting.pop(0)))
                for job in self.wait(running):
                    running.remove(job)
                    self.end(job)
                    self.write()
        finally:
            stop_jobs(running)

    def time_alone(self, steps: int) -> None:
        """Do so many updates of every variant that has no speed, one process at a time."""
        done = [read_arm(self.result_of(arm)) for arm in self.arms if self.finished(arm)]
        names = untimed(done)
        waiting = [arm for arm in self.arms if arm.name in names]
        for arm in self.arms:
            if arm not in waiting:
                self.failed.pop(arm.name + SPEED, None)  # it has a speed, or another seed is timed
        while waiting and self.fits(waiting, waiting[0].seconds_of(steps), "not timed"):
            running = [self.begin_timing(waiting.pop(0), steps)]
            try:
                self.wait(running)
            finally:
                stop_jobs(running)
            self.end_timing(running[0])
            self.write()

    def fits(self, waiting: list[Arm], takes: float, otherwise: str) -> bool:
        """Whether the next arm can be done within the budget; if not, none is waited for."""
        left = self.deadline - time.monotonic()
        if takes <= left:
            return True
        names = ", ".join(arm.name for arm in waiting)
        _say(f"{left:.0f} s are left, {waiting[0].name} takes about {takes:.0f}")
        _say(f"{otherwise}: {names}; the same command goes on with them")
        waiting.clear()
        return False

    def begin(self, arm: Arm) -> Job:
        """Start to train an arm."""
        number = self.arms.index(arm) + 1
        place = f"{number} of {len(self.arms)}"
        _say(f"{arm.name} ({place}): {arm.steps} steps, about {arm.expected_s:.0f} s")
        self.result_of(arm).unlink(missing_ok=True)  # that of other steps, settings or data
        self.failed.pop(arm.name + SPEED, None)
        return self.start_process(arm, arm.name)

    def begin_timing(self, arm: Arm, steps: int) -> Job:
        """Start to time an arm that is finished."""
        _say(f"{arm.name}: {steps} updates alone, about {arm.seconds_of(steps):.0f} s")
        return self.start_process(arm, arm.name + SPEED, steps)

    def start_process(self, arm: Arm, name: str, speed_steps: int | None = None) -> Job:
        """Start a process that trains the arm, or only times it."""
        self.failed.pop(name, None)
        task = Task(
            arm=arm,
            where=[*self.where, f"train.out_dir={self.work / name}", *self.start_of(arm)],
            data=self.data,
            result=str(self.result_of(arm)),
            selection=str(self.out / f"selection-{arm.name}.npz"),
            keep_weights=self.keep_weights,
            is_alone=self.jobs == 1,
            commit=self.commit,
            speed_steps=speed_steps,
        )
        return start_job(name, task, self.work)

    def start_of(self, arm: Arm) -> list[str]:
        """Where the weights are that an arm starts from, if it does not start from random ones.

        An earlier call has trained that arm and kept its weights, in the same `work`.
        """
        start = arm.settings.get(INIT)
        return [f"{INIT}={self.work / start / MODEL}"] if start else []

    def wait(self, running: list[Job]) -> list[Job]:
        """Until some have ended, and which; at the end of the budget all are asked to leave."""
        while running:
            if ended := [job for job in running if job.child.poll() is not None]:
                return ended
            if time.monotonic() > self.deadline:
                _say("the budget is spent; arms that are running save a checkpoint and stop")
                stop_jobs(running)
                return list(running)
            time.sleep(LOOK_S)
        return []

    def end(self, job: Job) -> None:
        """Say what came of a process."""
        arm = job.arm
        if self.finished(arm):
            result = read_arm(self.result_of(arm))
            speed = result["tokens_per_s"]
            _say(
                f"{arm.name}: held-out {result['held_out']['loss']:.4f} nats, "
                f"{f'{speed:,.0f} tokens/s, ' if speed else ''}"
                f"{result['params']['non_embedding']:,} parameters and "
                f"{result['params']['embedding']:,} of the embedding, {job.seconds:.0f} s"
            )
            return
        self.note_failure(job)

    def end_timing(self, job: Job) -> None:
        """Say how fast an arm was."""
        speed = read_arm(self.result_of(job.arm))["tokens_per_s"]
        if speed is None:
            self.note_failure(job)
        else:
            _say(f"{job.arm.name}: {speed:,.0f} tokens/s alone, {job.seconds:.0f} s")

    @property
    def is_finished(self) -> bool:
        """Whether all arms of this call are trained."""
        return all(self.finished(arm) for arm in self.arms)

    @property
    def is_timed(self) -> bool:
        """Whether the first seed of every variant of this call has a speed."""
        return not untimed([read_arm(self.result_of(arm)) for arm in self.arms])

    def note_failure(self, job: Job) -> None:
        """Keep the last lines of a process that has not done its work."""
        self.failed[job.name] = job.last_words()
        _say(f"{job.name} did not finish; {self.failed[job.name]}\n(see {job.log})")

    def result_of(self, arm: Arm) -> Path:
        """Where the result of an arm is; it outlives the run folder."""
        return self.work / f"{arm.name}{RESULT}"

    def finished(self, arm: Arm) -> bool:
        """Whether there is a result of this very arm on this very data."""
        path = self.result_of(arm)
        if not path.is_file():
            return False
        expected = json.loads(json.dumps(arm.identity() | {"data": self.data}))
        found = read_arm(path)
        return {key: found[key] for key in IDENTITY} == expected

    def write(self) -> None:
        """Put all arms that are finished, of this call and of those before, into results.json."""
        seconds = time.monotonic() - self.start
        price = self.call["price_per_hour"]
        cost = None if price is None else round(price * seconds / 3600, 3)
        self.call |= {"seconds": round(seconds, 1), "cost": cost}
        done = [read_arm(self.result_of(a)) for a in self.all_arms if self.result_of(a).is_file()]
        failed = [{"name": name, "reason": reason} for name, reason in self.failed.items()]
        calls = [*self.calls, self.call]
        content = {"table": self.table, "calls": calls, "arms": done, "failed": failed}
        write_results(self.out / NAME, content)


def describe_data(
    folder: Path, tokenizer_path: str | None = None
) -> tuple[list[str], dict[str, Any]]:
    """The settings that read a folder of shards, and what it is."""
    manifest, sha256 = read_manifest(folder)
    tokens = {side: sum(shard.tokens for shard in manifest.of(side)) for side in (TRAIN, VAL)}
    where = ["data.dataset=shards", f"data.local_path={folder}"]
    where.append(f"data.tokenizer={manifest.tokenizer}")
    if tokenizer_path:
        where.append(f"data.tokenizer_path={tokenizer_path}")
    data = {
        "sha256": sha256,
        "tokenizer": manifest.tokenizer,
        "vocab": manifest.vocab,
        "training_tokens": tokens[TRAIN],
        "held_out_tokens": tokens[VAL],
    }
    return where, data


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR", help="of `nsa data prepare`")
    parser.add_argument("--tokenizer-path", metavar="PATH", help="as data.tokenizer_path")
    parser.add_argument("--out", required=True, metavar="DIR", help="of results.json, selections")
    parser.add_argument("--work", metavar="DIR", help="of run folders and logs (<out>/runs)")
    parser.add_argument("--table", default=HERE / "arms.toml", metavar="FILE", help="of the arms")
    parser.add_argument("--arms", metavar="NAME,...", help="or patterns (all but diagnoses)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, metavar="N", help="of every arm")
    length.add_argument(
        "--minutes-each", type=seconds, metavar="M", help="steps by the guess of the table"
    )
    parser.add_argument(
        "--budget-seconds", type=seconds, metavar="N", help="start no arm that would take longer"
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="arms at a time (1); no speed then"
    )
    parser.add_argument(
        "--speed", type=positive, metavar="N", help="then time who has no speed: N updates alone"
    )
    known = "results.json of arms that need not be trained again where --work is new"
    parser.add_argument("--known", metavar="FILE", help=known)
    parser.add_argument("--keep-weights", action="store_true", help="also keep model.pt")
    parser.add_argument("--price", type=float, metavar="P", help="of an hour (NSA_PRICE_PER_H)")
    parser.add_argument("--commit", metavar="NAME", help="what to record (git says)")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="group.key=value", help="all arms"
    )
    return parser


def positive(text: str) -> int:
    """An argument that counts."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1; use one")
    return int(text)


def seconds(text: str) -> float:
    """An argument that is a time."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0; use one")
    return number


def _say(text: str) -> None:
    print(f"[study] {text}", flush=True)


def leave(number: int, frame: object) -> NoReturn:
    """End as an exception would, so that no arm is left behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
