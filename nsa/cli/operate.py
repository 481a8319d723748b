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
         "launch a run by a profile: phase by phase, each judged before the next"),
        ("watch", _add_watch, _watch,
         "judge a run folder from outside, again and again, and stop a run that must be stopped"),
        ("monitor", add_monitor_flags, _monitor,
         "show a run folder: live in a terminal, as lines in a pipe; it only reads"),
        ("triage", add_triage_flags, _triage,
         "switch one thing at a time, in short real runs, until a fault is gone"),
        ("handoff", add_handoff_flags, _handoff,
         "pack what whoever takes over a run needs into one archive, without secrets"),
        ("preflight", add_preflight_flags, _preflight,
         "check a run before it starts: config, machine, kernels, data, checkpoint, time, cost"),
        ("report", add_report_flags, _report,
         "judge a run from its files: each criterion, its evidence; exit code 0 is GO"),
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
    add("--profile", default="production", metavar="NAME", help="(%(default)s); --list has all")
    add("--list", action="store_true", help="list the profiles")
    add("--config", metavar="FILE", help="default: the variable CONFIG, or the profile's")
    add("--dataset", metavar="NAME", help="default: the variable DATASET, or the profile's")
    add("--local-path", metavar="PATH", help="default: the variable LOCAL_PATH")
    add("--out-dir", metavar="DIR", help="default: the variable OUT_DIR, or the config's")
    add("--np", metavar="N", help="processes here; default: the variable NP, or the profile's")
    add("--phases", default="", metavar="A,B", help="only these phases, by their names")
    add("--phase-steps", metavar="N,N,...", help="of each phase; default: NSA_PHASE_STEPS")
    add("--max-restarts", type=int, metavar="N", help="of a long phase, after a crash")
    add("--redo", action="store_true", help="phases that had GO before run again")
    add("--go-anyway", action="store_true", help="on after NO-GO; run.info keeps that")
    add("--preflight", action="store_true", help="first `nsa preflight`; NO-GO ends the launch")
    _add_limit_flag(parser)
    add("--require", action="append", metavar="KEY=VALUE", help="of the config; also > and >=")
    add("--min-gpus", type=int, default=0, metavar="N", help="refuse to start with fewer")
    add("--stop-old", action="store_true", help="ask a run in the same folder to stop, and wait")
    places = ("auto", "tmux", "background", "foreground")
    add("--where", choices=places, default="auto", help="auto: tmux in a terminal that has it")
    add("--session", metavar="NAME", help="of tmux; default: the profile's")
    add("--records", type=Path, metavar="DIR", help="of run.info and logs; default: a new one")
    add("--nnodes", type=int, default=1, metavar="N", help="machines that train together (1)")
    add("--node-rank", type=int, default=0, metavar="R", help="which of them this is (0)")
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where they meet: on node 0")


def _launch(args: argparse.Namespace) -> int:
    from nsa.operate.launch.command import launch

    return launch(args)


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="train.out_dir")
    add_watch_flags(parser)


def add_watch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa watch` and scripts/_watchdog.py."""
    parser.add_argument("--once", action="store_true", help="judge once; the exit code says how")
    parser.add_argument(
        "--until-ended", action="store_true", help="stop watching when the run has ended or died"
    )
    parser.add_argument("--interval", type=float, metavar="S", help="default NSA_WATCH_INTERVAL_S")
    parser.add_argument(
        "--halt", type=int, choices=(0, 1), help="write .HALT or not; default NSA_WATCH_HALT"
    )
    parser.add_argument(
        "--kill", action="store_true", help="after .HALT also SIGUSR1, SIGTERM and SIGKILL"
    )
    parser.add_argument("--webhook", metavar="URL", help="POST every alarm there as JSON")


def _watch(args: argparse.Namespace) -> int:
    from nsa.operate.watch.watchdog import watch

    return watch(args.folder, args)


def add_monitor_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa monitor`."""
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="default: the variable OUT_DIR"
    )
    parser.add_argument("--once", action="store_true", help="print one report and end")
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="%(default)g s")


def _monitor(args: argparse.Namespace) -> int:
    from nsa.operate.monitor import monitor

    return monitor(args.folder, args)


def add_triage_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa triage`."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="default: the variable CONFIG")
    add("--steps", type=int, default=20, metavar="N", help="of every run (%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of every run (%(default)g s)")
    add("--np", type=int, default=1, metavar="N", help="ranks, on this machine (%(default)s)")
    add("--only", metavar="NAME,NAME", help="these toggles alone; --list names them")
    add("--all", action="store_true", help="go on after a toggle that cleared the fault")
    add("--list", action="store_true", help="print the toggles of this run, and end")
    add("--out-dir", default="artifacts/triage", metavar="DIR", help="(%(default)s)")
    add("overrides", nargs="*", metavar="group.key=value", help=OVERRIDE)


def _triage(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.operate.triage.command import command

    return command(args)


def add_handoff_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa handoff`."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="train.out_dir; only read")
    add("--out", type=Path, metavar="FILE.tar.gz", help="default: <folder>-handoff.tar.gz, here")
    where = "launch record; default: the newest in train_runs/ that names the folder"
    add("--run-info", type=Path, metavar="FILE", help=where)
    where = "folder of report.md and report.json; default: the run's, or the launch record's"
    add("--report", type=Path, metavar="DIR", help=where)
    add("--verify", type=Path, metavar="FILE.tar.gz", help="check an archive; nothing is extracted")


def _handoff(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.operate.handoff.command import command

    return command(args)


def add_preflight_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa preflight`."""
    parser.add_argument("--config", metavar="FILE", help="default: the variable CONFIG")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes; default: one per GPU")
    parser.add_argument("--price", type=float, metavar="P", help="per hour, of all devices")
    parser.add_argument("--max-cost", type=float, metavar="C", help="NO-GO above it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--json", action="store_true", help="print JSON, not the table")
    _add_limit_flag(parser)
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help=OVERRIDE)


def _preflight(args: argparse.Namespace) -> int:
    path, config = load(args, quiet=args.json)
    from nsa.operate.preflight.command import preflight

    return preflight(config, path, bool(args.config or raw("CONFIG")), args)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `nsa report`."""
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="train.out_dir")
    parser.add_argument("--at", choices=REPORT_POINTS, default="final", help="(%(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write report.md, report.json and report.html"
    )
    parser.add_argument("--json", action="store_true", help="print report.json, not the table")
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
        help="replace a limit of nsa/operate/limits.toml; can be repeated",
    )
