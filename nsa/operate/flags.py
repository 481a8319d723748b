"""The flags of the commands here, apart from what they do: the command line needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_watch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa watch` and scripts/_watchdog.py."""
    parser.add_argument("--once", action="store_true", help="judge once; the exit code says how")
    parser.add_argument(
        "--until-ended", action="store_true", help="stop watching when the run has ended"
    )
    parser.add_argument("--interval", type=float, metavar="S", help="default NSA_WATCH_INTERVAL_S")
    parser.add_argument(
        "--halt", type=int, choices=(0, 1), help="write .HALT or not; default NSA_WATCH_HALT"
    )
    parser.add_argument(
        "--kill", action="store_true", help="after .HALT also SIGUSR1, SIGTERM and SIGKILL"
    )
    parser.add_argument("--webhook", metavar="URL", help="POST every alarm there as JSON")


def add_monitor_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa monitor`."""
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="default: the variable OUT_DIR"
    )
    parser.add_argument("--once", action="store_true", help="print one report and end")
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="%(default)g s")


def add_handoff_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa handoff`."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="train.out_dir; only read")
    add("--out", type=Path, metavar="FILE.tar.gz", help="default: <folder>-handoff.tar.gz, here")
    where = "launch record; default: the newest in train_runs/ that names the folder"
    add("--run-info", type=Path, metavar="FILE", help=where)
    add("--verify", type=Path, metavar="FILE.tar.gz", help="check an archive; nothing is extracted")


def add_triage_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa triage`."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="default: the variable CONFIG")
    add("--steps", type=int, default=20, metavar="N", help="of every run (%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of every run (%(default)g s)")
    add("--np", type=int, default=1, metavar="N", help="ranks, on this machine (%(default)s)")
    add("--only", metavar="NAME,NAME", help="these toggles alone; --list names them")
    add("--all", action="store_true", help="go on after a toggle that cleared the fault")
    add("--list", action="store_true", help="print the toggles of this run, and end")
    add("--out-dir", default="artifacts/triage", metavar="DIR", help="(%(default)s)")
    add("overrides", nargs="*", metavar="group.key=value")
