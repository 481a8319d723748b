"""Criteria about the course of a run: it is one run, it moves, and it did not break."""

from __future__ import annotations

from functools import partial
from statistics import median

from nsa.operate.criterion import NO_METRICS, Criterion, judged, missing
from nsa.operate.evidence import Evidence, record
from nsa.operate.limits import Limits
from nsa.operate.rules import RULES
from nsa.operate.snapshot import Rank
from nsa.operate.speed_rules import heartbeat_stall
from nsa.operate.verdict import Row
from nsa.telemetry.alarms import NAME as ALARMS
from nsa.telemetry.heartbeat import BEAT, LOADER_ERROR, PROGRESS, STEP_END
from nsa.telemetry.metrics import NAME as METRICS
from nsa.telemetry.sentinels import ANOMALY

BROKEN = ("non_finite", "oom", "no_data", "bad_data", "interrupted")
"""What metrics.json says of a run that did not end as it should."""


def steps(limit: str) -> Criterion:
    """That so many updates are done; `limit` names the limit that says how many."""
    return partial(_steps, limit_name=limit)


def _steps(e: Evidence, limits: Limits, *, limit_name: str) -> Row:
    needed = int(limit_name) if limit_name.isdigit() else int(getattr(limits, limit_name))
    if e.step < needed and not e.run.over:
        return missing(
            "steps",
            limit=f"{needed}",
            evidence=f"{e.step} so far, {e.run.status}",
            advice="judge again when it has come so far",
            essential=True,
        )
    return judged(
        "steps",
        e.step >= needed,
        f"{e.step}",
        limit=f"{needed}",
        evidence=f'{METRICS}, "step"',
        advice=f"the run ended ({e.run.standing}) before them; look why, then start it again",
    )


def finished(e: Evidence, limits: Limits) -> Row:
    """That the run did all that it was meant to do."""
    metrics, limit = e.run.metrics, "finished, every step"
    if metrics is None or not e.run.over:
        evidence = NO_METRICS if metrics is None else f"{e.run.status} at step {e.step}"
        todo = "judge again when it has ended"
        return missing("finished", limit=limit, evidence=evidence, advice=todo, essential=True)
    return judged(
        "finished",
        metrics.status == "finished" and metrics.step >= metrics.steps,
        f"{e.run.status}, {e.step} of {metrics.steps} steps",
        limit=limit,
        evidence=f'{METRICS}, "status" and "step"',
        advice="the same command goes on from the last checkpoint",
    )


def one_run(e: Evidence, limits: Limits) -> Row:
    """That the records are of one run, written by one process for each rank."""
    if not e.events and not e.rows:
        return missing(
            "one run",
            limit="one run in the folder",
            evidence="no records in the folder",
            advice="name the folder of a run (train.out_dir)",
            essential=True,
        )
    return judged(
        "one run",
        not e.mixed,
        "two" if e.mixed else "one",
        limit="one run in the folder",
        evidence=e.mixed or f"{e.run.heartbeat or 'training.csv'}, every line that was read",
        advice="end all but one of the processes; start again in an empty folder",
    )


def no_errors(e: Evidence, limits: Limits) -> Row:
    """That nothing broke: no NaN, no lack of memory or data, no error in a log."""
    found = list(e.errors)
    if e.run.status in BROKEN:
        found.append(f'{METRICS}, "status": "{e.run.status}"')
    if e.run.death:
        found.append(f'{METRICS}, "status": "running", but it {e.run.standing}')
    if e.run.anomaly:
        found.append(f"{ANOMALY}: {e.run.anomaly}")
    found += [
        f"{e.run.heartbeat}, {record(beat)}: {str(beat.extra.get('error'))[:120]}"
        for beat in e.events
        if beat.msg == LOADER_ERROR
    ]
    if e.run.metrics is None and not found:
        todo = "the status of the run is in it; wait for the first step, or look at the log"
        return missing("errors", limit="0", evidence=NO_METRICS, advice=todo, essential=True)
    return judged(
        "errors",
        not found,
        f"{len(found)}",
        limit="0",
        evidence=found[0] if found else f'{METRICS}, "status": "{e.run.status}"',
        advice="docs/operate.md says what each kind means; look at that line first",
    )


def heartbeats(e: Evidence, limits: Limits) -> Row:
    """That every rank beats, and that steps begin, are logged and end."""
    limit = "every rank; progress, step_end, step_start"
    if not e.run.ranks or not e.events:
        return missing(
            "heartbeats",
            limit=limit,
            evidence="no heartbeat_rank*.jsonl that can be read",
            advice="wait for the first step; the log says why it does not come",
            essential=True,
        )
    world_size = e.run.metrics.world_size if e.run.metrics else len(e.run.ranks)
    alive = [rank for rank in _ranks(e) if rank.last is not None]
    kinds = {beat.msg for beat in e.events}
    wanted = {PROGRESS: "progress", STEP_END: "step_end"}
    if e.run.env is None or not e.run.env.env.get("NSA_HEARTBEAT_EVERY"):
        wanted[BEAT] = "step_start"  # unless they were thinned out
    seen = [name for kind, name in wanted.items() if kind in kinds]
    return judged(
        "heartbeats",
        len(alive) >= world_size and len(seen) == len(wanted),
        f"{len(alive)} of {world_size} ranks; {', '.join(seen) or 'none of them'}",
        limit=limit,
        evidence=", ".join(rank.path.name for rank in alive) or "no line that can be read",
        advice="a rank without a heartbeat never started; look at its output",
    )


def no_stall(e: Evidence, limits: Limits) -> Row:
    """That no rank is silent now, and that none was for much longer than its steps take."""
    name, limit = "stalls", f"none over {limits.stall_s:g} s or {limits.stall_gaps:g} x the usual"
    ranks = [rank for rank in _ranks(e) if rank.last is not None]
    if not ranks:
        todo = "wait for the first step"
        return missing(name, limit=limit, evidence="no heartbeat", advice=todo, essential=True)
    if not e.run.ended and (alarms := heartbeat_stall(e.run, limits)):
        text, advice = alarms[0].text, alarms[0].advice
        return judged(name, False, text, limit=limit, evidence=alarms[0].file, advice=advice)
    longest = max(ranks, key=lambda rank: max(rank.gaps, default=0.0))
    gaps = longest.gaps
    if not gaps:
        value = "ended by itself" if e.run.ended else "alive, no step has followed another yet"
        return judged(name, True, value, limit=limit, evidence=ranks[0].path.name)
    allowed = max(limits.stall_s, limits.stall_gaps * median(gaps))
    return judged(
        name,
        max(gaps) <= allowed,
        f"longest {max(gaps):.1f} s, usual {median(gaps):.2f} s",
        limit=limit,
        evidence=f"{longest.path.name}, the last {len(gaps)} beats",
        advice="look at stackdump_*.txt, dt_fetch_s and the other ranks at that time",
    )


def watchdog(e: Evidence, limits: Limits) -> Row:
    """That nothing rang; whether somebody watched is seen from alarms.jsonl."""
    rung = [alarm for alarm in e.run.alarms if alarm.action != "clear"]
    if rung:
        value, last = f"{len(rung)} of late", rung[-1]
        evidence = f"{ALARMS}, {last.action} {last.type}: {last.text}"
        advice = last.advice or f"look at {ALARMS}"
        return judged("alarms", False, value, limit="0", evidence=evidence, advice=advice)
    now = [a for rule in RULES if rule is not heartbeat_stall for a in rule(e.run, limits)]
    if now and not e.run.ended:
        value, evidence = f"{len(now)} now", f"{now[0].file}, {now[0].type}: {now[0].text}"
        return judged("alarms", False, value, limit="0", evidence=evidence, advice=now[0].advice)
    if (e.run.folder / ALARMS).exists():
        return judged("alarms", True, "0", limit="0", evidence=ALARMS)
    return missing(
        "alarms",
        limit="0",
        evidence=f"no {ALARMS}: nobody watched",
        advice="let `nsa watch RUN_FOLDER` run beside it",
        essential=False,
    )


def _ranks(e: Evidence) -> list[Rank]:
    """Those of this run: a file of a rank that it does not have is from an earlier one."""
    metrics = e.run.metrics
    return [rank for rank in e.run.ranks if metrics is None or rank.rank < metrics.world_size]
