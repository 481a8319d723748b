"""Overhead of our ranks over plain DistributedDataParallel: same model, data and optimizer.

`torchrun --standalone --nproc_per_node=2 bench/bench_ranks.py [--pairs N] [group.key=value ...]`

Two copies of one model train in turns in the same processes, over gloo on CPUs: one update by the
trainer's own parts (the agreement before it, spans, skipping, the shared loss), one by a plain loop
around DistributedDataParallel with clipping and fused AdamW. The order alternates from pair to
pair. The cost is the median over pairs of the ratio of their times. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nsa.config import Config, StrictParser, load_config
from nsa.config.env import set_default
from nsa.config.load import REPOSITORY
from nsa.model import TinyLM
from nsa.records.spans import here
from nsa.train.build import build_model, build_step
from nsa.train.distributed.process_group import open_ranks
from nsa.train.distributed.strategy import ON, Strategy
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import BETAS
from nsa.train.runtime import Runtime, resolve_runtime
from nsa.train.step import MicroBatch

GOAL = 0.03
WARM_UP = 5
SETTINGS = (
    *("model.dim=96", "model.n_layers=3", "model.n_heads=4", "model.n_kv_groups=2"),
    *("model.d_k=24", "model.d_v=24", "nsa.l=16", "nsa.d=8", "nsa.l_sel=16", "nsa.n_sel=8"),
    *("nsa.w=32", "train.seq_len=128", "train.batch_size=8", "train.accumulate_grad_batches=1"),
    *("runtime.device=cpu", "runtime.precision=fp32", "runtime.gradient_checkpointing=false"),
)
VOCAB = 256


def main(argv: list[str] | None = None) -> int:
    """Measure, print on rank 0; 1 if the goal is missed."""
    parser = StrictParser(prog="bench_ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="pairs of updates (%(default)d)")
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs} is below 1; use 1 or more")
    set_default("NSA_DDP_COMPRESS", "off")
    base = REPOSITORY / "configs" / "base.yaml"
    config = load_config(base, [*SETTINGS, *args.overrides])
    with (
        open_ranks(ON, config, lambda text: None) as ranks,
        tempfile.TemporaryDirectory(prefix="bench_ranks") as folder,
    ):
        here.open(Path(folder), ranks.rank)  # as in a run, every change of place is written
        result = measure(ranks.adapt(config), ranks, args)
        here.close()
    if ranks.is_first:
        print(describe(result))
        print(json.dumps(result))
    return 0 if result["cost"] <= GOAL else 1


def measure(config: Config, ranks: Strategy, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update of both, in turns."""
    heads = (config.model.d_k, config.model.d_v)
    runtime = resolve_runtime(
        ranks.assign_device(config.runtime), heads, config.model.attention_kind
    )
    ways = {"ours": ours(config, runtime, ranks), "plain": plain(config, runtime)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    torch.manual_seed(ranks.rank)
    shape = (config.train.batch_size, config.train.seq_len + 1)
    for pair in range(-WARM_UP, args.pairs):
        rows = torch.randint(0, VOCAB, shape)
        for name in sorted(ways, reverse=pair % 2 == 0):
            ranks.sum_over_ranks(0)  # both begin together
            start = time.perf_counter()
            ways[name](rows)
            if pair >= 0:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    # Every rank has its own times; the ranks agree on one cost.
    cost = ranks.sum_over_ranks(torch.tensor(statistics.median(ratios) - 1))[0] / ranks.world_size
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "cost": round(cost, 4),
        "quartiles_of_ratio": [round(quarter, 4) for quarter in quarters],
        "ours_ms": round(1e3 * middle["ours"], 2),
        "plain_ms": round(1e3 * middle["plain"], 2),
        "pairs": args.pairs,
        "ranks": ranks.world_size,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def ours(config: Config, runtime: Runtime, ranks: Strategy) -> Callable[[Tensor], object]:
    """An update as the trainer does it."""
    model = build_model(config, VOCAB, runtime)
    step = build_step(config, model, runtime, ranks=ranks)
    number = 0

    def update(rows: Tensor) -> object:
        nonlocal number
        number += 1
        here.begin_update(number)
        with ranks.fetching(None, started=True):
            batches = [MicroBatch(rows)]
        return step(batches, config.train.lr)

    return update


class _Loss(nn.Module):
    def __init__(self, model: TinyLM, runtime: Runtime) -> None:
        super().__init__()
        self.model, self._runtime = model, runtime

    def forward(self, rows: Tensor) -> Tensor:
        return next_token_loss(self.model, rows, self._runtime, None, None)


def plain(config: Config, runtime: Runtime) -> Callable[[Tensor], object]:
    """An update as a short script would do it."""
    model = build_model(config, VOCAB, runtime)
    wrapped = DistributedDataParallel(_Loss(model, runtime), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.lr, betas=BETAS, fused=True)

    def update(rows: Tensor) -> object:
        loss = wrapped(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return update


def describe(result: dict[str, Any]) -> str:
    """The result in a sentence."""
    return (
        f"ours {result['ours_ms']} ms, plain {result['plain_ms']} ms an update; ours costs "
        f"{100 * result['cost']:+.2f} % (goal: at most {100 * GOAL:g} %)"
    )


if __name__ == "__main__":
    sys.exit(main())
