"""`nsa launch`: resolve a profile into a plan, refuse busy folders, then run its phases."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from nsa.config import load_config
from nsa.config.env import check_environment, in_effect, raw, read, with_package
from nsa.config.load import find_config
from nsa.operate.launch import terminal
from nsa.operate.launch.phases import NO_GO, REFUSED, Phases
from nsa.operate.launch.plan import Nodes, Plan, check_mesh, check_requirements, choose_ranks
from nsa.operate.launch.profiles import Profile, load_profile, load_profiles
from nsa.operate.process import Machine, find_gpus, why_not_ours
from nsa.operate.report.command import parse_limits
from nsa.operate.run_folder import read_run
from nsa.records.folder import (
    LAUNCH,
    RUN,
    STOPPING_S,
    FolderHeld,
    FolderLock,
    Holder,
    held_by,
    take_lock,
)
from nsa.records.launch import RUN_INFO_FILE, read_run_info
from nsa.records.sentinels import read_halt, write_halt

STOP_OLD_S = 600.0
"""Seconds for a running job to stop after .HALT, including its last checkpoint."""
OWN = ("NP", "DATASET", "LOCAL_PATH", "OUT_DIR", "NSA_PHASE_STEPS", "NSA_RESTART_COUNT")
"""Variables of the launcher, not passed on: the trainer gets these values as arguments."""
ARTIFACTS = Path("artifacts")
LAUNCHER_LOG = "launcher.log"


def launch(args: argparse.Namespace) -> int:
    """Launch a run; returns the exit code of the run, 1 for NO-GO, 3 if refused."""
    if args.list:
        for profile in load_profiles().values():
            print(f"{profile.name:12}{profile.meaning}")
        return 0
    check_environment()
    plan = make_plan(args, find_gpus())
    for phase in plan.profile.phases:
        plan.resolve(phase)  # a bad config of a later phase must fail now, not hours later
    check_requirements(plan.resolve(plan.profile.phases[-1]), args.require or ())
    check_mesh(plan)
    problem = _too_few_gpus(plan, args.min_gpus)
    if not problem and plan.nodes.rank == 0:
        problem = _why_occupied(plan.out_dir, args.stop_old)
    if problem:
        print(f"nsa: {problem}", file=sys.stderr)
        return REFUSED
    plan.records.mkdir(parents=True, exist_ok=True)
    place = terminal.choose(args.where, _say)
    if place != terminal.FOREGROUND:
        return _run_detached(place, plan, args)
    return _run_here(plan, args)


def make_plan(args: argparse.Namespace, machine: Machine) -> Plan:
    """Resolve flags, then environment variables, then profile defaults."""
    profile = load_profile(args.profile)
    profile = profile.with_steps(args.phase_steps or read("NSA_PHASE_STEPS")).only(args.phases)
    nodes = Nodes(count=args.nnodes, rank=args.node_rank, endpoint=args.rdzv_endpoint)
    named = args.config or raw("CONFIG") or profile.config_for(machine.max_bytes)
    config = str(find_config(named))
    environ = _environment(profile, machine) | {"CONFIG": config}
    out_dir = args.out_dir or raw("OUT_DIR")
    if not out_dir:
        named = load_config(config, [*profile.overrides, *args.overrides], environ)
        out_dir = named.train.out_dir
    return Plan(
        profile=profile,
        machine=machine,
        nodes=nodes,
        ranks=choose_ranks(profile, machine, args.np or raw("NP")),
        config=config,
        overrides=tuple(args.overrides),
        dataset=args.dataset or raw("DATASET") or profile.dataset,
        local_path=args.local_path or read("LOCAL_PATH"),
        out_dir=Path(out_dir),
        artifacts=ARTIFACTS,
        records=args.records or ARTIFACTS / "train_runs" / _record_name(profile.run, nodes),
        environ=environ,
        max_restarts=args.max_restarts,
    )


def _environment(profile: Profile, machine: Machine) -> dict[str, str]:
    """The trainer's environment: ours, with the profile's defaults for unset variables."""
    usual = {**profile.environment, **(profile.gpu_environment if machine.gpus else {})}
    # The user's environment wins over the profile's.
    ours = usual | with_package()
    return {name: value for name, value in ours.items() if name not in OWN}


def _record_name(name: str, nodes: Nodes) -> str:
    node = f"_node{nodes.rank}" if nodes.rank else ""
    return f"{name}_{datetime.now().strftime('%Y%m%d-%H%M%S')}{node}"


def _too_few_gpus(plan: Plan, least: int) -> str:
    found = len(plan.machine.gpus)
    if found < least:
        return f"{found} GPUs here, but this launch needs {least}; see --min-gpus"
    shares = plan.environ.get("TORCH_BACKEND") == "gloo"
    if 0 < found < plan.ranks and not shares:
        return (
            f"{plan.ranks} processes on {found} GPUs: each needs one; set NP={found}, or let them "
            "share with TORCH_BACKEND=gloo"
        )
    return ""


def _why_occupied(out_dir: Path, stop_old: bool) -> str:
    """Why a launch must not start in this folder; empty if it may.

    Waits for a run or launch that is already stopping; `stop_old` asks a running one to stop.
    """
    who, is_ending = _active_run(out_dir)
    if who:
        then = "asking it to stop with .HALT" if stop_old else "waiting for its end" * is_ending
        _say(f"a run is at work in {out_dir} ({who}); {then or 'refused'}")
    # Without --stop-old, wait only for a run that is already on its way out.
    end = time.monotonic() + (STOP_OLD_S if stop_old else STOPPING_S * is_ending)
    while who and time.monotonic() < end:
        if stop_old:
            _ask_to_stop(out_dir)
        time.sleep(1.0)
        who, _ = _active_run(out_dir)
    if who:
        return (
            f"a run is at work in {out_dir} ({who}); stop it with `touch "
            f"{out_dir}/.HALT` or --stop-old, or name another folder with --out-dir"
        )
    return ""


def _active_run(out_dir: Path) -> tuple[str, bool]:
    """Who launches or trains in a folder ("" if nobody), and whether they are stopping."""
    if not out_dir.is_dir():
        return "", False
    # The lock files name their holder; a lock is released when its process ends.
    for name, what in ((RUN, ""), (LAUNCH, "launcher: ")):
        if holder := held_by(out_dir, name):
            is_ending = isinstance(holder, Holder) and holder.is_ending
            return f"{what}{holder}", is_ending or read_halt(out_dir) is not None
    run = read_run(out_dir)  # fallback for file systems without locks: check the heartbeats
    lasts = [rank.last for rank in run.ranks if rank.last is not None]
    pids = [b.pid for b in lasts if b.pid is not None and not why_not_ours(b.pid, b.ts, run.env)]
    return (f"process {pids[0]}", False) if pids else ("", False)


def _ask_to_stop(out_dir: Path) -> None:
    """Write .HALT into the folder of every live run: the folder itself, or that of a phase."""
    locks = [out_dir / RUN, *out_dir.glob(f"*/{RUN}")]
    folders = [lock.parent for lock in locks if held_by(lock.parent)]
    if not held_by(out_dir, LAUNCH):
        folders = folders or [out_dir]  # no locks: the heartbeats showed a run in this folder
    for folder in folders:
        if read_halt(folder) is None:
            write_halt(folder, "launcher: another launch takes its place")


def _run_here(plan: Plan, args: argparse.Namespace) -> int:
    """Run the phases in this process; node 0 holds the launch lock until the end."""
    with ExitStack() as stack:
        lock: FolderLock | None = None
        if plan.nodes.rank == 0:
            try:
                lock = stack.enter_context(take_lock(plan.out_dir, LAUNCH, say=_say))
            except (FolderHeld, OSError) as problem:
                print(f"nsa: the lock of the launch: {problem}", file=sys.stderr)
                return REFUSED
        _announce(plan)
        limits = parse_limits(args.limit)
        phases = Phases(plan, lock, limits=limits, redo=args.redo, go_anyway=args.go_anyway)
        if args.preflight and plan.nodes.rank == 0 and not phases.preflight():
            return NO_GO
        return phases.run()


def _announce(plan: Plan) -> None:
    _say(f"profile {plan.profile.name}: {plan.profile.meaning}")
    print(f"Config: {plan.config}")
    print(f"Dataset: {plan.dataset}")
    print(f"NP: {plan.ranks}" + f" on each of {plan.nodes.count} nodes" * (plan.nodes.count > 1))
    print(f"GPUs: {plan.machine.describe()}")
    print(f"Run folder: {plan.out_dir}")
    print(f"Records: {plan.records}")
    for name, value in in_effect(plan.environ).items():
        print(f"environment: {name}={value}")
    sys.stdout.flush()


def _run_detached(place: str, plan: Plan, args: argparse.Namespace) -> int:
    """Restart this launch in tmux or in the background."""
    command = [sys.executable, "-m", "nsa.cli", *args.arguments]
    # The last flag wins in argparse: this launch must not detach again.
    command += ["--where", terminal.FOREGROUND, "--records", str(plan.records)]
    if place == terminal.BACKGROUND:
        terminal.in_background(command, plan.records / LAUNCHER_LOG, _say)
        return 0
    session = args.session or plan.profile.session
    if terminal.in_tmux(session, command, plan.records, _say):
        _say(f"the launch continues in {session}; logs: {plan.logs(plan.profile.phases[-1])[0]}")
        return 0
    # The tmux session has ended: report the result that it left in run.info.
    try:
        info = read_run_info(plan.records / RUN_INFO_FILE)
    except FileNotFoundError:
        _say(
            f"the launch ended before its first phase; try again with --where {terminal.FOREGROUND}"
        )
        return 1
    _say(info.notes[-1] if info.notes else "it has ended")
    return 1 if info.exit_code is None else info.exit_code


def _say(text: str) -> None:
    print(f"[launch] {text}", flush=True)
