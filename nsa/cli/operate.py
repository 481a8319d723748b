"""`nsa launch`, `watch`, `monitor`, `triage`, `handoff`, `preflight` and `report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nsa.cli.settings import OVERRIDE, load
from nsa.config.env import check_environment, raw

# A copy of the keys of POINTS in operate/report/command.py, whose import takes longer.
REPORT_POINTS = ("launch", "100", "500", "checkpoint", "phase1", "phase2", "final")
"""Points of a run that have their own criteria."""


def register(commands: Any) -> None:
    """Add the commands to the `nsa` parser."""
    for name, add_flags, command, text in (
        ("launch", add_launch_flags, _launch,
         "launch a run from a profile, in phases; each phase must get GO before the next starts"),
        ("watch", _add_watch, _watch,
         "watchdog: judge a run folder at intervals, and stop the run on a fatal alarm"),
        ("monitor", add_monitor_flags, _monitor,
         "show a run folder: live in a terminal, plain lines in a pipe; read-only"),
        ("triage", add_triage_flags, _triage,
         "find the cause of a fault: toggle one setting at a time in short runs until it is gone"),
        ("handoff", add_handoff_flags, _handoff,
         "pack the files that the next operator of a run needs into one archive, without secrets"),
        ("preflight", add_preflight_flags, _preflight,
         "check a run before it starts: config, machine, kernels, data, checkpoint, time, cost"),
        ("report", add_report_flags, _report,
         "judge a run from its files, criterion by criterion, with evidence; exit code 0 is GO"),
    ):  # fmt: skip
        parsed = commands.add_parser(name, help=text, description=text)
        add_flags(parsed)
        parsed.set_defaults(command=command)


# --- flags and calls, command by command ---


# Calls import their module when they run, so that `nsa --help` stays fast.
def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa launch`."""
    add = parser.add_argument
    add("overrides", nargs="*", metavar="group.key=value", help=OVERRIDE)
    add(
        "--profile",
        default="production",
        metavar="NAME",
        help="launch profile (%(default)s); see --list",
    )
    add("--list", action="store_true", help="list the profiles")
    add("--config", metavar="FILE", help="config file; default: $CONFIG, else the profile's")
    add(
        "--dataset", metavar="NAME", help="sets data.dataset; default: $DATASET, else the profile's"
    )
    add("--local-path", metavar="PATH", help="sets data.local_path; default: $LOCAL_PATH")
    add("--out-dir", metavar="DIR", help="run folder; default: $OUT_DIR, else the config's")
    add("--np", metavar="N", help="ranks on this machine; default: $NP, else the profile's")
    add("--phases", default="", metavar="A,B", help="run only these phases, by name")
    add("--phase-steps", metavar="N,N,...", help="steps of each phase; default: $NSA_PHASE_STEPS")
    add("--max-restarts", type=int, metavar="N", help="restarts of a long phase after crashes")
    add("--redo", action="store_true", help="run phases again that already have GO")
    add("--go-anyway", action="store_true", help="continue after NO-GO; run.info records it")
    add("--preflight", action="store_true", help="run `nsa preflight` first; abort on NO-GO")
    _add_limit_flag(parser)
    add(
        "--require",
        action="append",
        metavar="KEY=VALUE",
        help="abort unless the config has this value; also > and >=",
    )
    add("--min-gpus", type=int, default=0, metavar="N", help="abort with fewer visible GPUs")
    add(
        "--stop-old",
        action="store_true",
        help="stop a run in the same folder first, and wait for it",
    )
    places = ("auto", "tmux", "background", "foreground")
    add(
        "--where",
        choices=places,
        default="auto",
        help="auto: tmux if started from a terminal and installed",
    )
    add("--session", metavar="NAME", help="tmux session; default: the profile's")
    add(
        "--records",
        type=Path,
        metavar="DIR",
        help="folder for run.info and logs; default: a new one",
    )
    add("--nnodes", type=int, default=1, metavar="N", help="number of machines (1)")
    add("--node-rank", type=int, default=0, metavar="R", help="index of this machine (0)")
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="rendezvous address on node 0")


def _launch(args: argparse.Namespace) -> int:
    from nsa.operate.launch.command import launch

    return launch(args)


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="train.out_dir")
    add_watch_flags(parser)


def add_watch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa watch` and scripts/_watchdog.py."""
    parser.add_argument(
        "--once", action="store_true", help="judge once; the exit code is the verdict"
    )
    parser.add_argument(
        "--until-ended", action="store_true", help="exit when the run has ended or died"
    )
    parser.add_argument(
        "--interval",
        type=float,
        metavar="S",
        help="seconds between checks; default: $NSA_WATCH_INTERVAL_S",
    )
    parser.add_argument(
        "--halt",
        type=int,
        choices=(0, 1),
        help="whether it may write .HALT; default: $NSA_WATCH_HALT",
    )
    parser.add_argument(
        "--kill", action="store_true", help="if .HALT has no effect: SIGUSR1, SIGTERM, then SIGKILL"
    )
    parser.add_argument("--webhook", metavar="URL", help="POST every alarm to this URL as JSON")


def _watch(args: argparse.Namespace) -> int:
    from nsa.operate.watch.watchdog import watch

    return watch(args.folder, args)


def add_monitor_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa monitor`."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="RUN_FOLDER",
        help="train.out_dir; default: $OUT_DIR",
    )
    parser.add_argument("--once", action="store_true", help="print one report and exit")
    parser.add_argument(
        "--interval",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between updates (%(default)g)",
    )


def _monitor(args: argparse.Namespace) -> int:
    from nsa.operate.monitor import monitor

    return monitor(args.folder, args)


def add_triage_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa triage`."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="config file; default: $CONFIG")
    add("--steps", type=int, default=20, metavar="N", help="steps per run (%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds per run (%(default)g)")
    add("--np", type=int, default=1, metavar="N", help="ranks on this machine (%(default)s)")
    add("--only", metavar="NAME,NAME", help="try only these toggles; see --list")
    add("--all", action="store_true", help="continue after a toggle has cleared the fault")
    add("--list", action="store_true", help="print the toggles for this config, and exit")
    add("--out-dir", default="artifacts/triage", metavar="DIR", help="(%(default)s)")
    add("overrides", nargs="*", metavar="group.key=value", help=OVERRIDE)


def _triage(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.operate.triage.command import command

    return command(args)


def add_handoff_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa handoff`."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="train.out_dir; read-only")
    add(
        "--out",
        type=Path,
        metavar="FILE.tar.gz",
        help="default: <folder>-handoff.tar.gz in the working directory",
    )
    where = "launch record; default: the newest in train_runs/ for this run folder"
    add("--run-info", type=Path, metavar="FILE", help=where)
    where = "folder with report.md and report.json; default: the run's, else the launch record's"
    add("--report", type=Path, metavar="DIR", help=where)
    add(
        "--verify", type=Path, metavar="FILE.tar.gz", help="verify an archive without extracting it"
    )


def _handoff(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.operate.handoff.command import command

    return command(args)


def add_preflight_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa preflight`."""
    parser.add_argument("--config", metavar="FILE", help="config file; default: $CONFIG")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks; default: one per GPU"
    )
    parser.add_argument("--price", type=float, metavar="P", help="price per hour of all devices")
    parser.add_argument(
        "--max-cost", type=float, metavar="C", help="NO-GO if the run would cost more"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    _add_limit_flag(parser)
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help=OVERRIDE)


def _preflight(args: argparse.Namespace) -> int:
    path, config = load(args, quiet=args.json)
    from nsa.operate.preflight.command import preflight

    return preflight(config, path, bool(args.config or raw("CONFIG")), args)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa report`."""
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="train.out_dir")
    parser.add_argument(
        "--at", choices=REPORT_POINTS, default="final", help="point of the run (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write report.md, report.json and report.html"
    )
    parser.add_argument(
        "--json", action="store_true", help="print report.json instead of the table"
    )
    _add_limit_flag(parser)


def _report(args: argparse.Namespace) -> int:
    from nsa.operate.report.command import report

    return report(args.folder, args)


def _add_limit_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a limit of nsa/operate/limits.toml; can be repeated",
    )
