"""Shapes drawn at random against float64, each where a crash takes no other down with it.

    python -m nsa.tests.support.matrix --seed 1 --cases 200 --workers 12 [--seconds 400]

on a GPU. A worker is a process that takes one case after another; one that dies is replaced, and
the case it held counts as failed. test_triton.py draws from the same generator, small, for Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nsa import BlockSpec
from nsa.tests.support.helpers import Case, careless_selection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STRIDES = (1, 2, 4, 8, 16, 32)
L_SEL = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 512, 1024)
GROUPS = (*range(1, 17), 24, 32, 64)
DIMS = (8, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 200, 256)


@dataclass(frozen=True)
class Drawn:
    """A case, its dtype, and how it is run."""

    case: Case
    dtype: str
    deterministic: bool = False
    careless: bool = False
    """With a given selection that repeats blocks, in no order."""

    def __str__(self) -> str:
        marks = ("-deterministic" if self.deterministic else "") + (
            "-careless" if self.careless else ""
        )
        return f"{self.dtype}-{self.case}{marks}"


def draw(seed: int, count: int, *, small: bool = False) -> list[Drawn]:
    """The first `count` cases of a seed; `small` ones are for the interpreter."""
    lot = random.Random(seed)
    return [_draw_small(lot) if small else _draw(lot) for _ in range(count)]


def _draw(lot: random.Random) -> Drawn:
    l_sel = lot.choice(L_SEL)
    d = lot.choice([d for d in STRIDES if l_sel % d == 0])
    # A short stride makes as many compressed tokens as tokens, which the float64 side stores.
    longest = 6500 if d >= 8 else 2500
    n_sel = lot.choice([n for n in (3, 4, 5, 8, 16, 33, 64) if n * l_sel <= 4 * longest or n == 3])
    spec = BlockSpec(
        l=d * lot.choice((1, 2, 3, 4)),
        d=d,
        l_sel=l_sel,
        n_sel=n_sel,
        w=lot.choice((1, 17, 64, 512)),
    )
    # Half of them long enough for the orders that go to the blocks.
    beyond = 2 * n_sel * l_sel + lot.randrange(1, 700)
    seq_len = beyond if beyond <= longest and lot.random() < 0.7 else lot.randrange(1, longest)
    per_group = lot.choice(GROUPS)
    docs: tuple[int, ...] = ()
    if seq_len > 8 and lot.random() < 0.3:
        cuts = sorted(lot.sample(range(1, seq_len), lot.randint(1, 4)))
        docs = tuple(b - a for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True))
    d_k = lot.choice(DIMS)
    d_v = d_k if lot.random() < 0.5 else lot.choice(DIMS)
    batch = 1 if docs or seq_len > 1500 else lot.choice((1, 2))
    num_groups = 1 if per_group > 8 else lot.choice((1, 2, 3))
    case = Case(spec, seq_len, batch, num_groups, per_group, d_k, d_v, docs)
    dtype = lot.choice(("bf16", "bf16", "fp16", "fp32"))
    return Drawn(case, dtype, lot.random() < 0.25, lot.random() < 0.15)


def _draw_small(lot: random.Random) -> Drawn:
    l_sel = lot.choice((1, 2, 4, 8, 12, 32, 160))
    d = lot.choice([d for d in (1, 2, 4) if l_sel % d == 0])
    spec = BlockSpec(
        l=d * lot.choice((1, 2, 3)),
        d=d,
        l_sel=l_sel,
        n_sel=lot.choice((3, 4, 7)),
        w=lot.choice((1, 9)),
    )
    seq_len = lot.randrange(1, 34)
    docs = (seq_len // 3, seq_len - seq_len // 3) if seq_len > 8 and lot.random() < 0.3 else ()
    case = Case(spec, seq_len, 1, 1, lot.choice((1, 3, 9)), lot.choice((8, 20)), 12, docs)
    return Drawn(case, "fp32", lot.random() < 0.3, lot.random() < 0.3)


def check(drawn: Drawn) -> None:
    """Outputs and gradients of the Triton path against float64 under one selection."""
    from nsa.tests.support.gpu import DEVICE, compare

    selection = careless_selection(drawn.case).to(DEVICE) if drawn.careless else None
    torch.use_deterministic_algorithms(drawn.deterministic, warn_only=True)
    try:
        compare(drawn.case, DTYPES[drawn.dtype], selection)
    finally:
        torch.use_deterministic_algorithms(False)


def run_all(cases: list[Drawn], workers: int, seconds: float) -> dict[str, str]:
    """What became of each case: "" if it passed, "not run" for those that time did not allow."""
    results = {str(x): "not run" for x in cases}
    queue, lock, deadline = iter(cases), threading.Lock(), time.monotonic() + seconds

    def take() -> Iterator[Drawn]:
        while time.monotonic() < deadline:
            with lock:
                drawn = next(queue, None)
            if drawn is None:
                return
            yield drawn

    def work() -> None:
        worker: subprocess.Popen[str] | None = None
        for drawn in take():
            worker = worker or _new_worker()
            answer = _ask(worker, drawn)
            if answer is None:
                worker.wait()
                answer, worker = f"the process died with code {worker.returncode}", None
            results[str(drawn)] = answer
            if answer:
                print(f"FAILED {drawn}: {answer}", flush=True)
        if worker:
            worker.communicate()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _new_worker() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nsa.tests.support.matrix", "--worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1
    )


def _ask(worker: subprocess.Popen[str], drawn: Drawn) -> str | None:
    """The worker's verdict; None: it died."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps(asdict(drawn)) + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("verdict "):
            return str(json.loads(line.removeprefix("verdict ")))
    return None


def _serve() -> None:
    """Cases come as lines and leave as verdicts; a broken CUDA context ends the process."""
    for line in sys.stdin:
        given: dict[str, Any] = json.loads(line)
        case = given.pop("case")
        spec, docs = BlockSpec(**case.pop("spec")), tuple(case.pop("docs"))
        drawn = Drawn(Case(spec, docs=docs, **case), **given)
        verdict = ""
        try:
            check(drawn)
            torch.cuda.synchronize()
        except (AssertionError, ValueError, NotImplementedError) as error:
            verdict = f"{type(error).__name__}: {str(error)[:300]}"
        print("verdict " + json.dumps(verdict), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--worker", action="store_true", help="take cases from standard input")
    args = parser.parse_args()
    if args.worker:
        _serve()
        return 0
    began = time.monotonic()
    results = run_all(draw(args.seed, args.cases), args.workers, args.seconds)
    verdicts = list(results.values())
    done = len(verdicts) - verdicts.count("not run")
    failed = done - verdicts.count("")
    print(
        f"seed {args.seed}: {done} of {args.cases} cases in {time.monotonic() - began:.0f} s, "
        f"{failed} failed"
    )
    return int(failed > 0 or done == 0)


if __name__ == "__main__":
    sys.exit(main())
