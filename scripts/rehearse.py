"""Run every command of docs/surface.toml for real, on the CPU, in copies of the tree.

`python scripts/rehearse.py [ID ...] [--out-dir DIR] [--keep]`: only sizes differ. It writes
rehearsal.md, rehearsal.json and a log of each command; exit code 0 when every command that is not
exempt did what the list says. A command whose part does not exist yet is MISSING.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.config import BAD_INPUT, StrictParser
from scripts.rehearsal_report import Rehearsal, Row, write_rehearsal
from scripts.rehearsal_run import Lane
from scripts.rehearsal_tree import dataset, make_tree
from scripts.surface import Command, commands

_SAYING = threading.Lock()


def main(arguments: list[str] | None = None) -> int:
    """Rehearse, write the table, and return the exit code."""
    flags = _parser().parse_args(arguments)
    rows = commands()
    if unknown := {*flags.ids} - {row.id for row in rows}:
        print(f"rehearse: error: no such command: {', '.join(sorted(unknown))}", file=sys.stderr)
        return BAD_INPUT
    chosen = [row for row in rows if not flags.ids or row.id in flags.ids]
    out = Path(flags.out_dir)
    shutil.rmtree(out / "logs", ignore_errors=True)
    (out / "logs").mkdir(parents=True)
    start = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="nsa-rehearsal-"))
    try:
        found = _rehearse(chosen, scratch, out)
    finally:
        if not flags.keep:
            shutil.rmtree(scratch)
    order = [row.id for row in rows]
    found.sort(key=lambda row: (row.id[0], int(row.id[1:]), order.index(row.id)))
    rehearsal = Rehearsal(seconds=round(time.perf_counter() - start, 1), rows=found)
    for file in write_rehearsal(out, rehearsal):
        print(f"wrote {file}")
    if flags.keep:
        print(f"kept {scratch}")
    print(rehearsal.summary)
    return 0 if rehearsal.passed else 1


def _parser() -> StrictParser:
    parser = StrictParser(prog="rehearse", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help="these commands alone, in their order")
    parser.add_argument("--out-dir", default="artifacts/rehearsal", metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="leave the copies of the tree")
    return parser


def _rehearse(chosen: list[Command], scratch: Path, out: Path) -> list[Row]:
    exempt = [Row.exempt(command) for command in chosen if command.exempt]
    lanes: dict[int, list[Command]] = {}
    for command in chosen:
        if not command.exempt:
            lanes.setdefault(command.lane, []).append(command)
    with dataset() as hub, ThreadPoolExecutor(max(len(lanes), 1)) as pool:
        environ = hub.environment(scratch / "cache")
        futures = [
            pool.submit(_lane, number, mine, scratch, out, environ)
            for number, mine in lanes.items()
        ]
        return exempt + [row for future in futures for row in future.result()]


def _lane(
    number: int, mine: list[Command], scratch: Path, out: Path, environ: dict[str, str]
) -> list[Row]:
    tree = scratch / f"lane{number}"
    make_tree(tree)
    rows = []
    with Lane(tree, out / "logs", environ) as lane:
        for command in mine:
            row = lane.run(command)
            with _SAYING:
                print(f"{row.verdict:8} {row.id:4} {row.seconds:6.1f} s  {row.reason}", flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
