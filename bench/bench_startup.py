"""Startup time of every command, compared with bare Python and with `import torch`.

`python bench/bench_startup.py [--rounds N] [--against DIR] [--only TEXT]`

Every command runs for real, on a tiny run folder and a few shards, so that little but its startup
is measured. A round runs all commands in turn, with --against also those of another checkout of
this repository, so that a busy machine slows all of them alike. Goals are on CPU time (user and
system), which depends less on other load. The last line is JSON; the exit code is 1 if a goal is
missed.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.config import StrictParser
from nsa.config.describe import text_table
from nsa.config.env import changed
from nsa.config.load import REPOSITORY
from nsa.records.env import git_commit

FILES, OPERATOR, TRAINS = "files", "operator", "trains"
"""What a command needs: no torch; torch; torch, and it trains, draws and samples, so that no goal
is set."""
FILES_S = 0.5
"""Goal in CPU seconds for a command that only reads files."""
OPERATOR_S = 0.3
"""Goal in CPU seconds beyond `import torch`, for a command that computes."""
PYTHON, TORCH = "python -c pass", "python -c 'import torch'"
OPTIMIZER = (
    "python -c 'import torch; torch.optim.AdamW([torch.zeros(1, requires_grad=True)])'"  # torch's
)


class Start(NamedTuple):
    """A command line, what it needs, and its exit code."""

    line: str
    needs: str
    code: int = 0


COMMANDS = (
    Start("nsa --version", FILES),
    Start("nsa --help", FILES),
    Start("nsa env", FILES),
    Start("nsa keys", FILES),
    Start("nsa launch --list", FILES),
    Start("nsa watch {run} --once", FILES),
    Start("nsa monitor {run} --once", FILES),
    Start("nsa report {started}", FILES, 1),
    Start("nsa handoff {run} --out {new}.tar.gz", FILES, 1),
    Start("nsa handoff --verify {archive}", FILES),
    Start("nsa triage --list --config {config}", FILES),
    Start("nsa data prepare --input {texts} --output {new}", FILES),
    Start("nsa data verify {shards}", FILES),
    Start("nsa data show {shards}", FILES),
    Start("nsa checkpoint verify {run}", FILES),
    Start("nsa checkpoint backup {run} --to {new}", FILES),
    Start("python -c 'import nsa.cli.dashboard'", FILES),
    Start("python scripts/_watchdog.py --dir {run} --once", FILES),
    Start("python -c 'import nsa; nsa.nsa_attention, nsa.TinyLM'", OPERATOR),
    Start("nsa info --config {config}", OPERATOR),
    Start("nsa plan --config {config}", OPERATOR),
    Start("nsa warmup --config {config}", OPERATOR, 2),
    Start("nsa generate a --model {run} --max-new-tokens 2", OPERATOR),
    Start("nsa eval {run} --no-perplexity --no-needle", OPERATOR, 2),
    Start("nsa checkpoint show {run}", OPERATOR),
    Start("nsa checkpoint export {run} --to {new}.safetensors", OPERATOR),
    Start("nsa report {run}", OPERATOR),
    Start("nsa sparsify {run} {new} --rule pooled", OPERATOR, 2),
    Start("nsa train --config {config} train.steps=9000", OPERATOR, 3),
    Start("nsa prove-resume --config {config} --out-dir {new} --steps 1", OPERATOR, 2),
    Start("python -c 'import gc, nsa.operate.preflight.command; gc.freeze()'", OPERATOR),
    Start("nsa train --config {config} train.out_dir={new} train.steps=1", TRAINS),
)
"""Every command, with the names of what `prepare` makes; {new} is another path at each call.

`nsa train` with 9000 steps is refused, because it would keep no checkpoint: all of it is loaded,
and nothing is trained. `nsa sparsify` is refused because the model is not dense, `nsa prove-resume`
because one step cannot be cut in two, `nsa warmup` because the config is for a CPU, `nsa eval`
because nothing is left to measure. `nsa preflight` trains, so only its imports are measured, with
the exit of a command. `nsa report` builds a model where the folder has weights, and says NO-GO
where it has none. `nsa handoff` exits with 1: a part is missing, here the report."""
CONFIG = """inherits: {base}
model: {{dim: 16, n_layers: 2, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8}}
nsa: {{l: 8, d: 4, l_sel: 8, n_sel: 3, w: 8}}
train: {{steps: 3, seq_len: 32, batch_size: 2, warmup_steps: 0, eval_batches: 2, save_every: 0}}
data: {{dataset: shakespeare}}
runtime: {{device: cpu, precision: fp32}}
"""
"""Trains in a second."""


class Times(NamedTuple):
    """Seconds of one process: CPU time of user and system, and by the clock."""

    cpu_s: float
    wall_s: float


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and a JSON line; 1 if a goal is missed."""
    parser = StrictParser(description=str(__doc__).split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="rounds over all commands (%(default)d)"
    )
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="another checkout to compare with, in turns"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only commands that contain this text"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is below 1; use 1 or more")
    starts = [start for start in COMMANDS if args.only in start.line]
    trees = {"here": REPOSITORY} | ({"against": args.against} if args.against else {})
    with tempfile.TemporaryDirectory(prefix="startup") as folder:
        times = measure(starts, trees, Path(folder), args.rounds)
    result = summarize(starts, times, list(trees)) | {
        "rounds": args.rounds,
        "commit": git_commit(REPOSITORY),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
    print(describe(result))
    print(json.dumps(result))
    return 0 if all(row["met"] for row in result["commands"]) else 1


def measure(
    starts: list[Start], trees: dict[str, Path], folder: Path, rounds: int
) -> dict[tuple[str, str], list[Times]]:
    """Times of every command by tree and line, of the bare ones under the tree ``."""
    names = {tree: prepare(folder / tree, place) for tree, place in trees.items()}
    bare = [Start(line, FILES) for line in (PYTHON, TORCH, OPTIMIZER)]
    times: dict[tuple[str, str], list[Times]] = {}
    for number in range(rounds + 1):  # the first warms the disk and __pycache__, and is left out
        for start in bare:
            times.setdefault(("", start.line), []).append(run(start, REPOSITORY, {}))
        for start, tree in itertools.product(starts, trees):
            times.setdefault((tree, start.line), []).append(run(start, trees[tree], names[tree]))
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return {key: found[1:] for key, found in times.items()}


def prepare(
    folder: Path,
    tree: Path = REPOSITORY,
    do: Callable[[Start, Path, dict[str, str]], object] | None = None,
) -> dict[str, str]:
    """Make what the commands read: a config, a run, one without weights, shards, an archive.

    `do` runs a command; by default in a process of its own.
    """
    names = {name: str(folder / name) for name in ("run", "started", "texts", "shards")}
    names |= {"config": str(folder / "tiny.yaml"), "archive": str(folder / "run.tar.gz")}
    folder.mkdir(parents=True)
    text = CONFIG.format(base=tree / "configs" / "base.yaml")
    Path(names["config"]).write_text(text, encoding="utf-8")
    Path(names["texts"]).mkdir()
    Path(names["texts"], "a.txt").write_text("to be or not to be\n" * 50, encoding="utf-8")
    for start in (
        Start("nsa train --config {config} train.out_dir={run} train.save_every=3", TRAINS),
        Start("nsa data prepare --input {texts} --output {shards}", FILES),
        Start("nsa handoff {run} --out {archive}", FILES, 1),
    ):
        (do or run)(start, tree, names)
    weights = shutil.ignore_patterns("model.pt", "checkpoint_*")
    shutil.copytree(names["run"], names["started"], ignore=weights)
    return names


def run(start: Start, tree: Path, names: dict[str, str]) -> Times:
    """Run a command in its own process; RuntimeError if its exit code is not the expected one."""
    arguments = argv_of(start, names)
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tree,
            env=changed({"PYTHONPATH": str(tree)}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != start.code:
            output.seek(0)
            said = output.read().decode(errors="replace")[-2000:]
            ended = f"exit code {process.returncode}, not {start.code}"
            raise RuntimeError(f"`{start.line}` in {tree}: {ended}: {said}")
    return Times(usage.ru_utime + usage.ru_stime, seconds)


_count = itertools.count()


def argv_of(start: Start, names: dict[str, str]) -> list[str]:
    """The arguments of Python that run a command."""
    if "{new}" in start.line:
        folder = Path(names["config"]).parent
        names = {**names, "new": str(folder / f"new{next(_count)}")}
    program, *rest = shlex.split(start.line)
    filled = [text.format(**names) for text in rest]
    return ["-m", "nsa.cli", *filled] if program == "nsa" else filled


def summarize(
    starts: list[Start], times: dict[tuple[str, str], list[Times]], trees: list[str]
) -> dict[str, Any]:
    """Medians, and whether each command meets the goal of its kind."""

    def cpu_s(tree: str, line: str) -> float:
        return median(t.cpu_s for t in times[tree, line])

    python_s, torch_s = cpu_s("", PYTHON), cpu_s("", TORCH)
    limits = {FILES: FILES_S, OPERATOR: torch_s + OPERATOR_S, TRAINS: float("inf")}
    rows = []
    for start in starts:
        row: dict[str, Any] = {"command": start.line, "needs": start.needs}
        for tree in trees:
            row[f"{tree}_cpu_s"] = round(cpu_s(tree, start.line), 3)
            row[f"{tree}_wall_s"] = round(median(t.wall_s for t in times[tree, start.line]), 3)
        row["per_python"] = round(row["here_cpu_s"] / python_s, 2)
        row["per_torch"] = round(row["here_cpu_s"] / torch_s, 2)
        row["met"] = row["here_cpu_s"] <= limits[start.needs]
        rows.append(row)
    return {
        "python_cpu_s": round(python_s, 3),
        "torch_cpu_s": round(torch_s, 3),
        "optimizer_cpu_s": round(cpu_s("", OPTIMIZER), 3),
        "torch_wall_s": round(median(t.wall_s for t in times["", TORCH]), 3),
        "commands": rows,
    }


def describe(result: dict[str, Any]) -> str:
    """As a table for people."""
    against = "against_cpu_s" in result["commands"][0]
    heads = ("command", "needs", "CPU s", "wall s", "/ python", "/ torch", "goal")
    rows: list[tuple[str, ...]] = [(*heads, *(("against: CPU s",) if against else ()))]
    for row in result["commands"]:
        goal = "-" if row["needs"] == TRAINS else "met" if row["met"] else "MISSED"
        numbers = [f"{row[key]:.2f}" for key in ("here_cpu_s", "here_wall_s")]
        numbers += [f"{row[key]:.2f}" for key in ("per_python", "per_torch")]
        other = (f"{row['against_cpu_s']:.2f}",) if against else ()
        rows.append((row["command"], row["needs"], *numbers, goal, *other))
    bare = f"python {result['python_cpu_s']:.3f} s, torch {result['torch_cpu_s']:.2f} s of CPU; "
    bare += f"an optimizer of torch's: {result['optimizer_cpu_s']:.2f} s"
    return "\n".join([text_table(rows, right=[2, 3, 4, 5, 7][: 5 if against else 4]), bare])


if __name__ == "__main__":
    sys.exit(main())
