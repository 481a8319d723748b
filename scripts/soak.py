"""Soak test: kill ranks repeatedly, and check that the result equals that of an undisturbed run.

`python scripts/soak.py [--cycles 30] [--seed 1] [--folder DIR]`: two ranks over gloo, fp32, under
torchrun. In each cycle a random rank gets SIGKILL a few updates after the restart, at a random
point of an update. torchrun restarts both ranks, and they resume from the last checkpoint. Exit
code 0 if all final parameters are bitwise equal. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch

from nsa.config import load_config
from nsa.config.env import changed
from nsa.config.load import REPOSITORY
from nsa.records import write_config
from nsa.records.spans import Place, read_span
from nsa.train.distributed.hang import kill

SAVE_EVERY = 2
STEPS_A_CYCLE = 6
"""Updates of the run for each cycle: a cycle dies at most that many after the last checkpoint."""
SETTINGS = (
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_groups=2"),
    *("model.d_k=8", "model.d_v=8", "nsa.l=8", "nsa.d=4", "nsa.l_sel=8", "nsa.n_sel=4", "nsa.w=16"),
    *("train.seq_len=64", "train.batch_size=2", "train.warmup_steps=4", "train.log_every=1"),
    *("train.eval_every=0", f"train.save_every={SAVE_EVERY}", "train.lr=0.01"),
    *("data.dataset=shakespeare", "runtime.device=cpu", "runtime.precision=fp32"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NSA_DDP_COMPRESS": "off",
    "NSA_PG_TIMEOUT_MIN": "1",
    "NSA_TB_DISABLE": "1",
}
PATIENCE_S = 180.0
"""For one cycle."""


class SoakFailed(RuntimeError):
    """The run did not behave as expected."""


def main(argv: list[str] | None = None) -> int:
    """Run both, compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=30, help="number of kills (%(default)d)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the kill schedule (%(default)d)"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep both runs in this folder; default: a temporary one"
    )
    args = parser.parse_args(argv)
    if args.cycles < 1:
        parser.error(f"--cycles {args.cycles} is below 1; use 1 or more")
    with tempfile.TemporaryDirectory(prefix="soak") as temporary:
        folder = args.folder or Path(temporary)
        try:
            result = soak(folder, args.cycles, random.Random(args.seed))
        except SoakFailed as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    print(json.dumps(result))
    return 0 if result["bit_equal"] else 1


def soak(folder: Path, cycles: int, lot: random.Random) -> dict[str, Any]:
    """Both runs, and how they compare."""
    steps = STEPS_A_CYCLE * cycles
    started = time.perf_counter()
    calm = Job(folder / "undisturbed", steps, restarts=0)
    calm.finish()
    print(f"undisturbed: {steps} updates in {time.perf_counter() - started:.0f} s", flush=True)
    job = Job(folder / "disturbed", steps, restarts=cycles)
    killed = [job.disturb(lot, number) for number in range(1, cycles + 1)]
    job.finish()
    again = [step - 1 - resumed for step, resumed in zip(killed, job.resumed(), strict=True)]
    return {
        "bit_equal": same(calm.weights(), job.weights()),
        "cycles": cycles,
        "updates": steps,
        "save_every": SAVE_EVERY,
        "most_updates_repeated": max(again),
        "updates_repeated": sum(again),
        "seconds": round(time.perf_counter() - started),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


class Job:
    """Two ranks under torchrun."""

    def __init__(self, place: Path, steps: int, restarts: int) -> None:
        self.folder = place / "run"
        place.mkdir(parents=True)
        overrides = [*SETTINGS, f"train.steps={steps}", f"train.out_dir={self.folder}"]
        config = load_config(REPOSITORY / "configs" / "base.yaml", overrides, environ={})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", f"--max-restarts={restarts}"]
        command += [str(REPOSITORY / "scripts" / "train_showcase.py"), "--allow-long-run"]
        command += ["--config", str(write_config(place, config, "soak"))]
        self._log = place / "log.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=changed(ENVIRONMENT), stdout=log, stderr=subprocess.STDOUT
            )
        self._pids: dict[int, int] = {}

    def disturb(self, lot: random.Random, number: int) -> int:
        """Kill a rank some updates after both have come back; return the update it was in."""
        rank, wanted_steps = lot.randrange(2), lot.randint(1, STEPS_A_CYCLE - 2)
        first = self._wait(rank, lambda place: place.pid != self._pids.get(rank) and place.step > 0)
        other = self._wait(1 - rank, lambda place: place.pid != self._pids.get(1 - rank))
        self._pids = {rank: first.pid, 1 - rank: other.pid}
        self._wait(
            rank,
            # A rank that dies before any checkpoint starts anew, which would prove nothing.
            lambda place: place.step >= first.step + wanted_steps and self._has_checkpoint(),
        )
        time.sleep(lot.random() * 0.1)  # anywhere in an update
        place = self._wait(rank, lambda place: True)
        kill(place)
        text = f"cycle {number}: rank {rank} killed in {place.span} of update {place.step}"
        print(text, flush=True)
        return place.step

    def _has_checkpoint(self) -> bool:
        return any(self.folder.glob("checkpoint_step*.json"))  # the manifest comes last

    def finish(self) -> None:
        """Wait for the end."""
        if code := self._process.wait(timeout=20 * PATIENCE_S):
            raise SoakFailed(f"torchrun ended with {code}; the end of its log: {self._end()}")

    def resumed(self) -> list[int]:
        """The updates that were done at each restart."""
        found = re.findall(r"(\d+) of \d+ steps are done", self._log.read_text(errors="replace"))
        return [int(step) for step in found]

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters at the end."""
        loaded = torch.load(self.folder / "model.pt", weights_only=True)
        return dict(loaded["state_dict"])

    def _wait(self, rank: int, condition: Any) -> Place:
        end = time.monotonic() + PATIENCE_S
        while True:
            place = read_span(self.folder, rank)
            if place is not None and condition(place):
                return place
            if time.monotonic() > end or self._process.poll() is not None:
                self._process.kill()
                raise SoakFailed(f"rank {rank} did not restart or made no progress: {self._end()}")
            time.sleep(0.01)

    def _end(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether all parameters are equal, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


if __name__ == "__main__":
    sys.exit(main())
