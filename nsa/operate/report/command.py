"""`nsa report`: judge a run from its files at a given point: which criteria apply when."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from nsa.config.describe import duration
from nsa.config.env import check_environment
from nsa.files import write_text
from nsa.operate.limits import Limits, limits_for, with_values
from nsa.operate.report import criteria_run as course
from nsa.operate.report import criteria_run as files
from nsa.operate.report import criteria_run as start
from nsa.operate.report import criteria_training as loss
from nsa.operate.report import criteria_training as speed
from nsa.operate.report import criteria_training as state
from nsa.operate.report.evidence import ALL, Criterion, Evidence, Window, read_evidence
from nsa.operate.report.html import page
from nsa.operate.report.verdict import Verdict, write_report
from nsa.records.heartbeat import iso

MARKDOWN, HTML = "report.md", "report.html"
_SOUND = (course.one_run, course.no_errors, course.heartbeats, course.no_stall, start.data_source)
_LOSS = (loss.loss_finite, loss.loss_falls, loss.no_leak)
_GATES = (state.gate_entropy, state.largest_gate, state.collapsed_gates)
_SETTLED = (
    *(speed.throughput, speed.throughput_stable, speed.steady_steps, speed.fetch),
    *(state.memory_flat, state.fallbacks, *_GATES, course.watchdog),
)
"""Criteria that apply once the run has reached its steady speed."""
POINTS: dict[str, tuple[Criterion, ...]] = {
    "launch": (
        course.steps("steps_launch"),
        *_SOUND,
        *(start.settings, start.precision, start.first_batch),
        *(loss.loss_finite, loss.loss_start, state.memory("memory_gib")),
    ),
    "100": (
        course.steps("100"),
        *_SOUND,
        *_LOSS,
        *(speed.throughput, speed.fetch, state.memory("memory_gib")),
    ),
    "500": (
        course.steps("500"),
        *_SOUND,
        *_LOSS,
        *_SETTLED,
        state.memory("memory_gib"),
    ),
    "checkpoint": (course.one_run, files.saved, files.loads, files.resumed, files.backed_up),
    "phase1": (
        course.steps("steps_phase1"),
        *_SOUND,
        *_LOSS,
        *(speed.throughput, speed.steady_steps, speed.gpu_load, speed.fetch),
    ),
    "phase2": (
        course.steps("steps_phase2"),
        *_SOUND,
        *_LOSS,
        *_SETTLED,
        state.memory("memory_gib_phase2"),
    ),
    "final": (
        course.finished,
        *_SOUND,
        *(start.settings, start.precision),
        *_LOSS,
        *(loss.no_plateau, loss.held_out),
        *_SETTLED,
        state.memory("memory_gib_phase2"),
        *(files.saved, files.loads, files.resumed, files.model_saved, files.long_enough),
    ),
}
"""The criteria of each point; docs/report.md gives their origin."""


def judge(
    run_dir: Path,
    at: str,
    *,
    limits: Mapping[str, float] | None = None,
    now: float | None = None,
) -> Verdict:
    """Judge a run folder at one of POINTS; nothing is written.

    `limits` overrides limits.toml by name, e.g. `steps_phase1` for a rehearsal with fewer steps.
    Raises ValueError for an unknown folder, point or limit.
    """
    return judge_evidence(read_evidence(run_dir, now=now), at, limits=limits)


def judge_evidence(
    evidence: Evidence, at: str, *, limits: Mapping[str, float] | None = None
) -> Verdict:
    """`judge` for evidence that is already read."""
    if at not in POINTS:
        raise ValueError(f"at={at!r} is not a point of a run; choose one of {', '.join(POINTS)}")
    # Order of precedence: the caller's limits, the kind of GPU, the general GPU limits.
    allowed = with_values(_limits(evidence), limits or {})
    seen = _within(evidence, at, allowed)
    rows = [row for criterion in POINTS[at] if (row := criterion(seen, allowed)) is not None]
    return Verdict(
        folder=str(evidence.run.folder),
        at=at,
        made=iso(evidence.run.now),
        facts=_facts(evidence),
        rows=rows,
        problems=evidence.problems,
    )


def report(run_dir: Path, args: argparse.Namespace) -> int:
    """Print the verdict; write report files when a folder is given."""
    check_environment()
    evidence = read_evidence(run_dir)
    verdict = judge_evidence(evidence, args.at, limits=parse_limits(args.limit))
    if args.out is not None:
        write_report(args.out, verdict)
        write_text(args.out / MARKDOWN, verdict.markdown())
        write_text(args.out / HTML, page(verdict, evidence))
        print(f"written: {args.out}: report.json, {MARKDOWN}, {HTML}", file=sys.stderr)
    print(verdict.json() if args.json else verdict.text())
    return verdict.exit_code


def parse_limits(texts: list[str]) -> dict[str, float]:
    """Parse NAME=VALUE pairs."""
    values = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            raise ValueError(
                f"--limit {text!r} is not NAME=NUMBER; limits.toml has the names"
            ) from None
    return values


def _limits(evidence: Evidence) -> Limits:
    metrics, env = evidence.run.metrics, evidence.run.env
    return limits_for(metrics.device if metrics else None, env.gpu_name if env else None)


def _within(evidence: Evidence, at: str, limits: Limits) -> Evidence:
    """The evidence restricted to the steps that this point is about."""
    last = {
        # At launch only the first logged step counts: nothing later says more about the start.
        "launch": float(min((beat.step for beat in evidence.lines), default=1)),
        "100": 100.0,
        "500": 500.0,
        "phase1": float(limits.steps_phase1),
        "phase2": float(limits.steps_phase2),
    }
    # A late verdict about an early point must not see later steps; other points see everything.
    window = Window(0, last[at]) if at in last else ALL
    return dataclasses.replace(evidence, window=window)


def _facts(evidence: Evidence) -> dict[str, str]:
    run = evidence.run
    facts = {"status": run.standing, "step": str(evidence.step)}
    if (metrics := run.metrics) is not None:
        facts["step"] = f"{evidence.step} of {metrics.steps}"
        facts["config"] = f"{metrics.config_file}, {metrics.num_params / 1e6:.1f}M parameters"
        facts["device"] = f"{metrics.world_size} x {metrics.device}, {metrics.dtype}"
        facts["attention"] = " ".join(metrics.attention.split())
        left_s = None if run.over else run.eta_s(evidence.step)
        if left_s is not None:
            facts["time left"] = duration(left_s)
    if (env := run.env) is not None:
        facts["machine"] = f"{env.hostname}, {env.gpu_name or env.platform}"
        facts["versions"] = f"torch {env.torch}, triton {env.triton}, Python {env.python}"
        facts["commit"] = env.git_commit or "unknown"
        facts["started"] = env.time
    return facts
