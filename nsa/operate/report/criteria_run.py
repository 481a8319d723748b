"""Report criteria about the run itself: its start, its progress, its checkpoints and results."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from statistics import median

from nsa.files import size
from nsa.operate.limits import Limits
from nsa.operate.report.evidence import NO_METRICS, Criterion, Evidence, judged, missing, record
from nsa.operate.report.verdict import Row
from nsa.operate.run_folder import Rank
from nsa.operate.text import first_line
from nsa.operate.watch.rules import RULES, heartbeat_stall
from nsa.records import MODEL
from nsa.records.alarms import ALARMS_FILE
from nsa.records.heartbeat import BEAT, LOADER_ERROR, LOADER_READY, PROGRESS, STEP_END
from nsa.records.metrics import METRICS_FILE
from nsa.records.sentinels import ANOMALY
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find
from nsa.train.errors import LONG_STEPS

# --- start: data, config, precision ---

TOY = "train_showcase.yaml"
"""The trainer's default config: fine for a first try, wrong for a long run."""


def first_batch(e: Evidence, limits: Limits) -> Row | None:
    """The first batch arrived in time; only for sources that can be slow or missing."""
    if e.config is not None and not e.config.data.dataset.startswith("fineweb_edu"):
        return None
    limit = f"<= {limits.first_batch_s:g} s"
    # The trainer writes this line when the first batch has arrived; `dt` is in seconds.
    ready = next((beat for beat in e.events if beat.msg == LOADER_READY), None)
    seconds = ready.extra.get("dt") if ready else None
    if ready is None or not isinstance(seconds, int | float):
        return missing(
            "first batch",
            limit=limit,
            evidence=f"no {LOADER_READY} in the heartbeat",
            advice="look at the log: the source may still be waited for",
            essential=False,
        )
    return judged(
        "first batch",
        seconds <= limits.first_batch_s,
        f"{seconds:.2f} s",
        limit=limit,
        evidence=f"{e.run.heartbeat}, {record(ready)}",
        advice="prepare shards (`nsa data prepare`), or look at the network",
    )


def data_source(e: Evidence, limits: Limits) -> Row:
    """The run reads the dataset it was configured for."""
    limit = "the source that was asked for"
    if e.run.metrics is None:
        todo = "wait for the first step"
        return missing("data", limit=limit, evidence=NO_METRICS, advice=todo, essential=False)
    # Set when --synthetic-on-fail replaced a dead source: the run trains on noise from then on.
    fallback = e.run.metrics.data_fallback
    dataset = e.config.data.dataset if e.config else "as configured"
    return judged(
        "data",
        fallback is None,
        dataset if fallback is None else "random tokens",
        limit=limit,
        evidence=f'{METRICS_FILE}, "data_fallback": {fallback or "null"}',
        advice="the source failed and --synthetic-on-fail replaced it: nothing is learned",
    )


def settings(e: Evidence, limits: Limits) -> Row:
    """A long run uses a deliberately chosen config and saves checkpoints."""
    metrics, limit = e.run.metrics, f"from {LONG_STEPS} steps on: checkpoints, and not the toy"
    if metrics is None:
        todo = "wait for the first step"
        return missing("config", limit=limit, evidence=NO_METRICS, advice=todo, essential=False)
    save_every = e.config.train.save_every if e.config else None
    is_long = metrics.steps >= LONG_STEPS
    saves = "save_every unknown" if save_every is None else f"save_every {save_every}"
    return judged(
        "config",
        not is_long or (bool(save_every) and not metrics.config_file.endswith(TOY)),
        f"{metrics.config_file}, {metrics.num_params / 1e6:.1f}M parameters, {metrics.steps} steps "
        f"of {metrics.tokens_per_step} tokens, {saves}",
        limit=limit,
        evidence=f"{METRICS_FILE}, config.yaml",
        advice="name the config (CONFIG, --config) and set train.save_every",
    )


def precision(e: Evidence, limits: Limits) -> Row:
    """A GPU run uses bf16."""
    limit = "bf16 on a GPU"
    if e.run.metrics is None:
        todo = "wait for the first step"
        return missing("precision", limit=limit, evidence=NO_METRICS, advice=todo, essential=False)
    is_cpu = e.run.metrics.device.startswith("cpu")
    return judged(
        "precision",
        is_cpu or e.run.metrics.dtype == "bf16",
        f"{e.run.metrics.dtype} on {e.run.metrics.device}",
        limit=limit,
        evidence=f'{METRICS_FILE}, "dtype"',
        advice="set runtime.precision=bf16",
    )


# --- progress: one run, it advances, nothing broke ---

BROKEN = ("non_finite", "oom", "no_data", "bad_data", "interrupted")
"""Statuses in metrics.json of a run that failed."""


def steps(limit: str) -> Criterion:
    """At least this many optimizer steps are done; `limit` is the name of the limit."""
    return partial(_steps, limit_name=limit)


def _steps(e: Evidence, limits: Limits, *, limit_name: str) -> Row:
    needed = int(limit_name) if limit_name.isdigit() else int(getattr(limits, limit_name))
    # A run that is still going has not failed this criterion: it cannot be judged yet.
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
        evidence=f'{METRICS_FILE}, "step"',
        advice=f"the run ended ({e.run.standing}) before them; look why, then start it again",
    )


def finished(e: Evidence, limits: Limits) -> Row:
    """The run completed all its steps."""
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
        evidence=f'{METRICS_FILE}, "status" and "step"',
        advice="the same command goes on from the last checkpoint",
    )


def one_run(e: Evidence, limits: Limits) -> Row:
    """The records belong to one run, with one writer process per rank."""
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
    """No NaN, no out-of-memory, no missing data, no error in a log."""
    found = list(e.errors)
    if e.run.status in BROKEN:
        found.append(f'{METRICS_FILE}, "status": "{e.run.status}"')
    # metrics.json of a killed process still says "running".
    if e.run.death:
        found.append(f'{METRICS_FILE}, "status": "running", but it {e.run.standing}')
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
        evidence=found[0] if found else f'{METRICS_FILE}, "status": "{e.run.status}"',
        advice="docs/operate.md says what each kind means; look at that line first",
    )


def heartbeats(e: Evidence, limits: Limits) -> Row:
    """Every rank writes heartbeats, and steps start, are logged and end."""
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
        wanted[BEAT] = "step_start"  # unless beats are thinned out by a setting
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
    """No rank is silent now, and none was ever silent for much longer than its steps take."""
    name, limit = "stalls", f"none over {limits.stall_s:g} s or {limits.stall_gaps:g} x the usual"
    ranks = [rank for rank in _ranks(e) if rank.last is not None]
    if not ranks:
        todo = "wait for the first step"
        return missing(name, limit=limit, evidence="no heartbeat", advice=todo, essential=True)
    # First the present: is a rank silent now? Then the past: the longest interval ever.
    if not e.run.ended and (alarms := heartbeat_stall(e.run, limits)):
        text, advice = alarms[0].text, alarms[0].advice
        return judged(name, False, text, limit=limit, evidence=alarms[0].file, advice=advice)
    found = [(rank, rank.all_gaps(limits.first_step_s)) for rank in ranks]
    longest, gaps = max(found, key=lambda pair: max(pair[1], default=0.0))
    if not gaps:
        value = "ended by itself" if e.run.ended else "alive, no step has followed another yet"
        return judged(name, True, value, limit=limit, evidence=ranks[0].path.name)
    allowed = max(limits.stall_s, limits.stall_gaps * median(gaps))
    return judged(
        name,
        max(gaps) <= allowed,
        f"longest {max(gaps):.1f} s, usual {median(gaps):.2f} s",
        limit=limit,
        evidence=f"{longest.path.name}, {len(gaps)} intervals between beats",
        advice="look at stackdump_*.txt, dt_fetch_s and the other ranks at that time",
    )


def watchdog(e: Evidence, limits: Limits) -> Row:
    """No alarm was raised; alarms.jsonl also shows whether a watchdog ran at all."""
    rung = [alarm for alarm in e.run.alarms if alarm.action != "clear"]
    if rung:
        value, last = f"{len(rung)} of late", rung[-1]
        evidence = f"{ALARMS_FILE}, {last.action} {last.type}: {last.text}"
        advice = last.advice or f"look at {ALARMS_FILE}"
        return judged("alarms", False, value, limit="0", evidence=evidence, advice=advice)
    # `no_stall` judges heartbeat_stall already; do not fail twice for one cause.
    now = [a for rule in RULES if rule is not heartbeat_stall for a in rule(e.run, limits)]
    if now and not e.run.ended:
        value, evidence = f"{len(now)} now", f"{now[0].file}, {now[0].type}: {now[0].text}"
        return judged("alarms", False, value, limit="0", evidence=evidence, advice=now[0].advice)
    # The watchdog creates the file when it starts, so that "no alarm" differs from "not watched".
    if (e.run.folder / ALARMS_FILE).exists():
        return judged("alarms", True, "0", limit="0", evidence=ALARMS_FILE)
    return missing(
        "alarms",
        limit="0",
        evidence=f"no {ALARMS_FILE}: nobody watched",
        advice="let `nsa watch RUN_FOLDER` run beside it",
        essential=False,
    )


def _ranks(e: Evidence) -> list[Rank]:
    """Ranks of this run; a file of a higher rank was left by an earlier run."""
    metrics = e.run.metrics
    return [rank for rank in e.ranks if metrics is None or rank.rank < metrics.world_size]


# --- results: checkpoints that load, the model, enough run time ---

UNLOADABLE = (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""Exceptions that reading a damaged or foreign weights file can raise."""


def saved(e: Evidence, limits: Limits) -> Row:
    """Checkpoints are written as often as configured."""
    every = e.config.train.save_every if e.config else None
    limit = "one" if not every else f"one every {every} steps"
    newest = e.run.checkpoints[-1] if e.run.checkpoints else None
    if newest is None:
        # Too early for the first checkpoint. An unknown save_every counts as too early.
        if not e.run.over and every != 0 and e.step < (every or e.step + 1):
            evidence = f"none yet at step {e.step}"
            todo = "judge again after the first checkpoint"
            return missing(
                "checkpoint", limit=limit, evidence=evidence, advice=todo, essential=True
            )
        return judged(
            "checkpoint",
            False,
            "none",
            limit=limit,
            evidence=f"no checkpoint_step*.pt after step {e.step}",
            advice="set train.save_every; look for [checkpoint] lines in the log",
        )
    behind = e.step - newest.step
    # While the run is alive, one more checkpoint may still be in flight.
    allowed = (every or e.step) * (1 if e.run.over else 2)
    return judged(
        "checkpoint",
        behind <= allowed,
        f"step {newest.step}, {size(newest.num_bytes)}, {len(e.run.checkpoints)} in the folder",
        limit=limit,
        evidence=f"{checkpoint_file.NAME.format(step=newest.step)}, {behind} steps behind",
        advice="look for [checkpoint] lines in the log, and at the room on the disk",
    )


def loads(e: Evidence, limits: Limits) -> Row:
    """The newest checkpoint matches its manifest, and its weights load into a model."""
    limit = "its manifest's bytes and sha256; a model loads"
    path = _newest(e)
    if path is None:
        evidence = "no checkpoint with a manifest"
        todo = "a checkpoint without one was not finished"
        return missing(
            "checkpoint loads", limit=limit, evidence=evidence, advice=todo, essential=True
        )
    try:
        count = _count_parameters(path)
    except UNLOADABLE as error:
        return judged(
            "checkpoint loads",
            False,
            "no",
            limit=limit,
            evidence=first_line(error),
            advice="use an older one; `nsa checkpoint verify RUN_FOLDER` looks at all",
        )
    step = find.step_of(path)
    num_bytes = next((one.num_bytes for one in e.run.checkpoints if one.step == step), 0)
    value = f"{count / 1e6:.1f}M parameters, {size(num_bytes)}"
    manifest = "its manifest" if path.is_dir() else checkpoint_file.manifest_path(path).name
    evidence = f"{path.name}, {manifest}"
    return judged("checkpoint loads", True, value, limit=limit, evidence=evidence)


def resumed(e: Evidence, limits: Limits) -> Row:
    """The run has resumed from a checkpoint."""
    at = e.run.metrics.resumed_at if e.run.metrics else None
    if at is None:
        return missing(
            "resumed",
            limit="from a checkpoint",
            evidence=f'{METRICS_FILE}, "resumed_at": null: nobody stopped it',
            advice="touch .HALT, then the same command; or `nsa prove-resume`",
            essential=False,
        )
    return judged(
        "resumed",
        e.step > at,
        f"at step {at}, now at {e.step}",
        limit="from a checkpoint",
        evidence=f'{METRICS_FILE}, "resumed_at"',
        advice="no step has followed yet: judge again",
    )


def backed_up(e: Evidence, limits: Limits) -> Row:
    """A verified copy of the newest checkpoint exists elsewhere."""
    folder, newest = e.config.train.backup_dir if e.config else "", _newest(e)
    limit = "a verified copy elsewhere"
    if not folder or newest is None:
        return missing(
            "backup",
            limit=limit,
            evidence="train.backup_dir is empty" if newest else "no checkpoint",
            advice="set train.backup_dir, or `nsa checkpoint backup RUN_FOLDER --to DIR`",
            essential=False,
        )
    copy = Path(folder) / newest.name
    try:
        # Bytes and sha256 of the copy; its presence alone proves nothing.
        find.verify(copy)
    except (OSError, ValueError) as error:
        advice = "look for [checkpoint] lines in the log; `nsa checkpoint backup` copies it"
        evidence = str(error)
        return judged("backup", False, "no", limit=limit, evidence=evidence, advice=advice)
    return judged("backup", True, f"{copy}", limit=limit, evidence=f"{copy}, its manifest")


def model_saved(e: Evidence, limits: Limits) -> Row:
    """The final model exists and loads."""
    path, limit = e.run.folder / MODEL, "there, and loads"
    if not path.exists() and not e.run.over:
        todo = "judge again when the run has ended"
        evidence = f"no {MODEL} yet"
        return missing("model", limit=limit, evidence=evidence, advice=todo, essential=True)
    try:
        count = _count_parameters(path)
    except UNLOADABLE as error:
        advice = "`nsa checkpoint export` makes one of a checkpoint; --save may have put it away"
        return judged("model", False, "no", limit=limit, evidence=first_line(error), advice=advice)
    value = f"{count / 1e6:.1f}M parameters, {size(path.stat().st_size)}"
    return judged("model", True, value, limit=limit, evidence=MODEL)


def long_enough(e: Evidence, limits: Limits) -> Row:
    """The run lasted long enough to be trusted, or until its end."""
    metrics, limit = e.run.metrics, f">= {limits.pilot_h:g} h, or all steps"
    hours = metrics.train_s / 3600 if metrics else 0.0
    # A short run that is complete needs no minimum duration.
    is_done = metrics is not None and metrics.step >= metrics.steps
    if metrics is None or (hours < limits.pilot_h and not is_done and not e.run.over):
        evidence = f"{hours:.2f} h so far"
        todo = "judge again later"
        return missing("time", limit=limit, evidence=evidence, advice=todo, essential=False)
    return judged(
        "time",
        is_done or hours >= limits.pilot_h,
        f"{hours:.2f} h, {metrics.step} of {metrics.steps} steps",
        limit=limit,
        evidence=f'{METRICS_FILE}, "train_s"',
        advice="the same command goes on from the last checkpoint",
    )


def _newest(e: Evidence) -> Path | None:
    """The newest checkpoint, file or folder, that has a manifest: one in flight has none yet."""
    for path in find.paths_of(e.run.folder):
        is_folder = path.is_dir()
        if find.is_complete(path) if is_folder else checkpoint_file.manifest_path(path).exists():
            return path
    return None


def _count_parameters(path: Path) -> int:
    """Build the model from a file; raises one of UNLOADABLE if that fails."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    from nsa.train.checkpoint.model_file import (
        load_model,  # importing torch takes seconds, so only when there is a file
    )

    model, _ = load_model(path)
    return sum(p.numel() for p in model.parameters())
