"""Goals of the kernels on an H200, all in one run: what was measured, and how far it is away.

`python bench/bench_goals.py [--parts attention,decode] [--json FILE]`; the goals are those of
bench/goals.py. Each part is a process of its own: what crashes there costs no other part. `--device
cpu --tiny` rehearses it without a GPU. The table comes last; the exit code is 1 if a goal is missed
or not measured, in a rehearsal if something failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch

from bench.goals import PARTS, STDERR, Row, Run
from bench.results import describe_command, describe_machine, write_json
from nsa.config import StrictParser
from nsa.config.describe import text_table

VERSION = 1
"""Of the JSON: `environment`, and `rows`: the fields of Row (bench/goals.py), and `missed_by`."""


def main(argv: list[str] | None = None) -> int:
    """Measure the parts, print the table and a JSON line."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        parts = _check(args)
    except ValueError as error:
        parser.error(str(error))
    if args.child:
        _measure(parts[0], Run(args.device, args.tiny), args.child)
        return 0
    given = sys.argv[1:] if argv is None else argv
    result = new_result(["python", "bench/bench_goals.py", *given], args.commit, args.device)
    for part in parts:
        start = time.perf_counter()
        result["rows"] += [as_json(row) for row in _in_child(part, args)]
        print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if args.json:  # after every part: a run that is stopped leaves what it had
            write_json(args.json, result)
    print(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    print(table(result["rows"], tiny=args.tiny))
    print(json.dumps(result))
    rows = result["rows"]
    return int(any(row["reason"] if args.tiny else not is_met(row) for row in rows))


def new_result(command: list[str], commit: str | None, device: str) -> dict[str, Any]:
    environment = describe_command(command, commit) | describe_machine(device)
    return {"version": VERSION, "environment": environment, "rows": []}


def as_json(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "missed_by": row.missed_by}


def is_met(row: dict[str, Any]) -> bool:
    return row["missed_by"] is not None and row["missed_by"] <= 0


def table(rows: list[dict[str, Any]], *, tiny: bool = False) -> str:
    """A line for each goal; a rehearsal meets and misses none."""
    lines = [("part", "what", "measured", "goal", "unit", "")]
    for row in rows:
        sign = ">=" if row["at_least"] else "<="
        measured = "-" if row["value"] is None else _number(row["value"])
        goal = f"{sign} {_number(row['limit'])}"
        verdict = "" if tiny and not row["reason"] else _verdict(row)
        lines.append((row["part"], row["what"], measured, goal, row["unit"], verdict))
    return text_table(lines, right=(2, 3))


def _verdict(row: dict[str, Any]) -> str:
    if row["missed_by"] is None:
        return f"not measured: {row['reason'] or 'no value'}"
    return "met" if is_met(row) else f"missed by {row['missed_by']:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _in_child(part: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a part, as far as its process came."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.touch()
        command = [sys.executable, __file__, "--parts", part, "--child", str(path)]
        command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
        code = subprocess.run(command, stdout=STDERR).returncode
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [Row(*json.loads(line)) for line in lines if line.endswith("\n")]
    if code:
        rows.append(Row(part, "the rest", "", 0.0, reason=f"its process ended with code {code}"))
    return rows


def _measure(part: str, run: Run, path: str) -> None:
    """Rows of a part as lines of JSON, each written when it is known."""
    with open(path, "a", encoding="utf-8") as file:
        for row in PARTS[part](run):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(row, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    names = ",".join(PARTS)
    parser.add_argument("--parts", default=names, metavar="NAME,...", help=f"of {names} (all)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a rehearsal")
    parser.add_argument("--commit", metavar="NAME", help="commit to record if git is not available")
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    return parser


def _check(args: argparse.Namespace) -> list[str]:
    """The parts; refuses what could only fail later."""
    parts = [part.strip() for part in args.parts.split(",")]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--parts {part!r} is not known; choose from {', '.join(PARTS)}")
    if args.device == "cpu" and not args.tiny:
        raise ValueError("the goals are those of a GPU; add --tiny to rehearse on a cpu")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json} is in a folder that does not exist; create it first")
    return list(dict.fromkeys(parts))


if __name__ == "__main__":
    sys.exit(main())
