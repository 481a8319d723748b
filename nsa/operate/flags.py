"""The flags of the commands here, apart from what they do: the command line needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

REPORT_POINTS = ("launch", "100", "500", "checkpoint", "phase1", "phase2", "final")
"""Moments of a run that have criteria of their own."""


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


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa report`."""
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--at", choices=REPORT_POINTS, default="final", help="(%(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write report.md, report.json and report.html"
    )
    parser.add_argument("--json", action="store_true", help="print report.json, not the table")
    _add_limit_flag(parser)


def add_preflight_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa preflight`."""
    parser.add_argument("--config", metavar="FILE", help="default: the variable CONFIG")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes; default: one per GPU")
    parser.add_argument("--price", type=float, metavar="P", help="per hour, of all devices")
    parser.add_argument("--max-cost", type=float, metavar="C", help="NO-GO above it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--json", action="store_true", help="print JSON, not the table")
    _add_limit_flag(parser)
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")


def _add_limit_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a limit of nsa/operate/limits.toml; can be repeated",
    )
