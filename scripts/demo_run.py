"""Write a run folder with made-up numbers, to try the dashboard and other readers without a run.

python scripts/demo_run.py artifacts/demo --steps 50000
python scripts/demo_run.py artifacts/demo --steps 50000 --done 31000 --live   # and it continues

Every file goes through the writer that a real run uses, with a simulated clock. Nothing is
trained: the curves are formulas and noise, and no number here was measured anywhere.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nsa.config import load_config
from nsa.files import LineFile
from nsa.model.stats import BINS, LayerMap, distance_edges
from nsa.records import (
    TRAINING,
    VAL,
    CounterFiles,
    CsvLog,
    Heartbeat,
    Metrics,
    TrainingRow,
    ValRow,
    fallback_counts,
    open_folder,
    write_config,
    write_env,
    write_metrics,
)
from nsa.records.alarms import Alarm, append_alarm
from nsa.records.heartbeat import BEAT
from nsa.records.results import PROMPT, Sample, append_sample
from nsa.records.tables import SelectionFile
from nsa.train.progress import StepReport, step_line

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "m7c_125m_2xa100_production.yaml"
MAPS = 64
GROUPS = 2
CHECKPOINT_BYTES = 1 << 20
LOG = "production.log"
TEXT = "What say the people of the house?\n\nQUEEN.\nThey say the king is come, and goes away.\n"


class DemoRun:
    """A run of which every number is made up, step by step."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = open_folder(folder).path, args
        self.random = random.Random(args.seed)
        self.step, self.step_s = 0, args.step_s
        self.now = time.time() - args.done * args.step_s * 1.02
        warmup = min(2000, args.steps // 10)
        self.config = load_config(
            CONFIG,
            [f"train.lr={args.lr}", f"train.steps={args.steps}", f"train.warmup_steps={warmup}"],
        )
        self.num_layers = self.config.model.n_layers
        self.beats = [Heartbeat(folder, rank, clock=lambda: self.now) for rank in range(args.ranks)]
        self.training = CsvLog(TrainingRow, folder / TRAINING)
        self.val = CsvLog(ValRow, folder / VAL)
        self.counters, self.selection = CounterFiles(folder), SelectionFile(folder)
        self.printed = LineFile(folder / LOG)
        self.printed.append(f"[boot] loading config {CONFIG.name}")
        write_env(folder)
        write_config(folder, self.config, str(CONFIG.name))
        tokens = args.ranks * self.config.train.seq_len
        self.metrics = Metrics(
            config_file=CONFIG.name,
            num_params=78_300_000,
            tokens_per_step=tokens,
            flops_per_token=6.1e8,
            peak_flops=None,
            device="cuda:0",
            dtype="bf16",
            attention="made up",
            steps=args.steps,
            seq_len=self.config.train.seq_len,
            world_size=args.ranks,
            batch_global=args.ranks,
            lr=args.lr,
        )
        for beat in self.beats:
            beat.boot()

    def advance(self) -> None:
        """One update, with what is due after it."""
        self.step += 1
        for beat in self.beats:
            beat.beat(self.step)
        slow = 1.0 + (0.8 if self.step % 997 == 0 else 0.0)
        self.now += self.step_s * self.random.uniform(0.94, 1.06) * slow
        if self.step % self.args.log_every == 0 or self.step in (1, self.args.steps):
            self.log()
        train = self.config.train
        if self.step % train.eval_every == 0:
            self.pause("evaluate", 6.0)
            loss = self.loss(0.01) + 0.04
            self.val.append(ValRow(self.step, loss, math.exp(loss)))
            self.metrics.val_loss, self.metrics.val_ppl = loss, math.exp(loss)
        if self.step % train.save_every == 0:
            self.pause("save", 9.0)
            path = self.folder / f"checkpoint_step{self.step}.pt"
            path.write_bytes(b"\0" * CHECKPOINT_BYTES)
            os.utime(path, (self.now, self.now))

    def pause(self, phase: str, seconds: float) -> None:
        """An evaluation or a checkpoint."""
        for beat in self.beats:
            beat.write(self.step, BEAT, {"phase": phase})
        self.now += seconds
        self.metrics.eval_and_save_s += seconds

    def loss(self, noise: float) -> float:
        """A curve that falls, in nats per byte, under noise."""
        base = 0.93 + 4.6 / (1 + self.step / 40) ** 0.62
        hill = self.args.spike and 0.9 * math.exp(-(((self.step - self.args.spike) / 60) ** 2))
        return base + hill + self.args.offset + self.random.gauss(0, noise)

    def log(self) -> None:
        """A logged step."""
        lr = self.args.lr * min(1.0, self.step / max(1, self.config.train.warmup_steps))
        lr *= 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self.args.steps)))
        loss = self.loss(0.035)
        speed = self.metrics.tokens_per_step / self.step_s * self.random.uniform(0.96, 1.02)
        layers = [self.layer(number) for number in range(self.num_layers)]
        attention = self.attention(layers)
        row = TrainingRow(self.step, loss, lr, speed)
        self.training.append(row)
        left_s = (self.args.steps - self.step) * self.step_s
        self.printed.append(step_line(StepReport(row=row, eta_s=left_s, numbers={})))
        counts = fallback_counts({})
        if self.step > 0.6 * self.args.steps and self.args.fallbacks:
            counts |= {"sliding_fa2_fails": 3, "total_fallbacks": 3}
        memory = 18_432 + round(300 * min(1.0, self.step / 500)) + self.random.randrange(60)
        fetch_s = abs(self.random.gauss(0.004, 0.002)) + 0.0005
        fetch_s += self.random.random() < 0.004 and self.random.uniform(0.2, 1.5)
        for rank, beat in enumerate(self.beats):
            beat.progress(
                self.step,
                loss=loss,
                toks_per_s=speed,
                lr=lr,
                grad_norm=0.25 + 1.4 / (1 + self.step / 300) ** 0.5 + self.random.expovariate(9),
                step_time_s=self.metrics.tokens_per_step / speed,
                mfu=0.31 * self.random.uniform(0.97, 1.02),
                dt_fetch_s=fetch_s,
                fetch_p50_ms=3.8 + self.random.gauss(0, 0.2),
                fetch_p95_ms=9.5 + self.random.gauss(0, 0.8),
                gpu_mem_alloc=memory + 40 * rank,
                gpu_mem_reserved=21_504,
                gpu_util_pct=92 + self.random.randrange(7),
                gpu_temp_c=58 + rank,
                attention=attention,
                layers=layers,
                fallbacks=counts,
            )
            beat.step_end(self.step)
        self.counters.append(self.step, attention)
        every = max(1, self.args.steps // MAPS)
        if self.step == 1 or self.step // every > (self.step - self.args.log_every) // every:
            maps = [self.layer_map(number) for number in range(self.num_layers)]
            self.selection.append(self.step, maps, now=self.now)
        self.metrics.step, self.metrics.loss_last = self.step, loss
        self.metrics.loss_first = self.metrics.loss_first or loss
        self.metrics.train_s = self.step * self.step_s
        self.metrics.toks_per_s, self.metrics.mfu = speed, 0.31

    def layer(self, number: int) -> dict[str, float]:
        """Gates of a layer: early layers move towards the window, late ones towards selection."""
        depth, age = number / max(1, self.num_layers - 1), 1 - math.exp(-self.step / 9000)
        weights = [
            1 + age * 0.25 * math.sin(5 * depth),
            1 + age * (1.6 * depth - 0.2),
            1 + age * (1.5 - 1.7 * depth),
        ]
        weights = [w * math.exp(self.random.gauss(0, 0.02)) for w in weights]
        shares = [w / sum(weights) for w in weights]
        entropy = -sum(s * math.log(s) for s in shares) * (1 - 0.22 * age)
        return {
            "entropy_mean": entropy,
            "entropy_min": 0.45 * entropy,
            "max_gate_mean": max(shares) + 0.08 * age,
            "max_gate_max": 0.97,
            "collapse_fraction": max(0.0, self.random.gauss(0.001, 0.001)) * age,
            "share_cmp": shares[0],
            "share_sel": shares[1],
            "share_win": shares[2],
            "sel_k_mean": 12.4,
            "sel_k_max": 16.0,
            "sel_pct_at_max": 0.53,
        }

    def attention(self, layers: list[dict[str, float]]) -> dict[str, Any]:
        """The same over all layers, as AttentionStats.summary() has it."""

        def mean(name: str) -> float:
            return sum(layer[name] for layer in layers) / len(layers)

        names = ("entropy_mean", "max_gate_mean", "collapse_fraction", "sel_k_mean")
        return {name: mean(name) for name in names} | {
            "entropy_min": min(layer["entropy_min"] for layer in layers),
            "max_gate_max": 0.97,
            "branch_shares": [mean(f"share_{branch}") for branch in ("cmp", "sel", "win")],
            "sel_k_max": 16.0,
            "sel_rows": 24_576.0,
            "sel_pct_at_max": 0.53,
        }

    def layer_map(self, number: int) -> LayerMap:
        """Reads that are spread out at first, then concentrate near the query and a few blocks."""
        train, spec = self.config.train, self.config.nsa
        num_blocks = -(-train.seq_len // spec.l_sel)
        bins, age = min(BINS, num_blocks), 1 - math.exp(-self.step / 8000)
        depth = number / max(1, self.num_layers - 1)
        reads, distances = [], []
        for group in range(GROUPS):
            dice = random.Random(1000 * number + group)
            sinks = {dice.randrange(1, bins) for _ in range(2 + group)}
            square = []
            for query in range(bins):
                room = min(1.0, (spec.n_sel - 3) / max(1, query - 1))
                row = []
                for block in range(query + 1):
                    near = math.exp(-(query - block) / (3 + 9 * depth))
                    pull = (1 - age) + age * (1.7 * near + (1.2 if block in sinks else 0.12))
                    forced = block == 0 or query - block <= 1
                    row.append(1.0 if forced else min(1.0, room * pull))
                square.append(row + [0.0] * (bins - query - 1))
            reads.append(square)
            distances.append(_distances(square, num_blocks))
        return LayerMap(spec.l_sel, num_blocks, distance_edges(num_blocks), reads, distances)

    def write_sample(self) -> None:
        """The text that a run leaves at its end."""
        sample = Sample(ts=round(self.now, 3), step=self.step, prompt=PROMPT, text=TEXT)
        append_sample(self.folder, sample)

    def write_status(self, status: str) -> None:
        """metrics.json."""
        self.metrics.status = status
        write_metrics(self.folder, self.metrics)


def _distances(square: list[list[float]], num_blocks: int) -> list[float]:
    """The distances that a square of reads amounts to."""
    edges = distance_edges(num_blocks)
    counts = [0.0] * (len(edges) + 1)
    for query, row in enumerate(square):
        for block, share in enumerate(row[: query + 1]):
            away = query - block
            place = next(i for i, edge in enumerate(edges) if away <= edge)
            counts[-1 if block == 0 and away > 1 else place] += share
    return [count / sum(counts) for count in counts]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of this script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50_000, help="steps of the run (%(default)d)")
    parser.add_argument("--done", type=int, help="steps already in the folder (all)")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.35, help="seconds per step (%(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--offset", type=float, default=0.0, help="added to the loss, in nats")
    parser.add_argument("--spike", type=int, default=0, help="step with a loss spike; 0: none")
    parser.add_argument(
        "--fallbacks", action="store_true", help="add kernel fallbacks late in the run"
    )
    parser.add_argument("--live", action="store_true", help="continue in real time until Ctrl-C")
    args = parser.parse_args(argv)
    args.done = args.steps if args.done is None else args.done
    return args


def main(argv: list[str] | None = None) -> int:
    """Write the folder; with --live, continue at the speed of the run until Ctrl-C."""
    args = arguments(argv)
    run = DemoRun(args.folder, args)
    while run.step < args.done:
        run.advance()
    run.write_status("running" if args.done < args.steps else "finished")
    if args.done >= args.steps:
        run.write_sample()
    if args.spike and args.spike < args.done:
        alarm = Alarm(
            type="loss_spike",
            step=args.spike,
            text=f"loss 2.31 at step {args.spike}, above the median of 1.42",
            advice="check the data of these steps; train.spike_rule=skip skips them",
        )
        append_alarm(args.folder, alarm, now=run.now - (args.done - args.spike) * args.step_s)
    print(f"{args.folder}: {run.step} made-up steps")
    try:
        while args.live and run.step < args.steps:
            run.now = time.time()
            run.advance()
            run.write_status("running")
            time.sleep(args.step_s)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
