"""Report criteria about the run itself: its start, its progress, its checkpoints and results."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from statistics import median

from nsa.config.describe import first_line
from nsa.files import size
from nsa.operate.limits import Limits
from nsa.operate.report.evidence import NO_METRICS, Criterion, Evidence, Question, record
from nsa.operate.report.verdict import Row
from nsa.operate.run_folder import Rank
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
    asked = Question("first batch", f"<= {limits.first_batch_s:g} s")
    # The trainer writes this line when the first batch has arrived; `dt` is in seconds.
    ready = next((beat for beat in e.events if beat.msg == LOADER_READY), None)
    seconds = ready.extra.get("dt") if ready else None
    if ready is None or not isinstance(seconds, int | float):
        return asked.missing(
            f"no {LOADER_READY} in the heartbeat",
            "check the log: the run may still wait for the source",
        )
    return asked.judged(
        seconds <= limits.first_batch_s,
        f"{seconds:.2f} s",
        evidence=f"{e.run.heartbeat}, {record(ready)}",
        advice="prepare shards (`nsa data prepare`), or look at the network",
    )


def data_source(e: Evidence, limits: Limits) -> Row:
    """The run reads the dataset it was configured for."""
    asked = Question("data", "the configured source")
    if e.run.metrics is None:
        return asked.missing(NO_METRICS, "wait for the first step")
    # Set when --synthetic-on-fail replaced a dead source: the run trains on noise from then on.
    fallback = e.run.metrics.data_fallback
    dataset = e.config.data.dataset if e.config else "as configured"
    return asked.judged(
        fallback is None,
        dataset if fallback is None else "random tokens",
        evidence=f'{METRICS_FILE}, "data_fallback": {fallback or "null"}',
        advice="the source failed, and --synthetic-on-fail fell back to random tokens: nothing is "
        "learned",
    )


def settings(e: Evidence, limits: Limits) -> Row:
    """A long run uses a deliberately chosen config and saves checkpoints."""
    asked = Question(
        "config", f"from {LONG_STEPS} steps on: checkpoints, and not the default config"
    )
    metrics = e.run.metrics
    if metrics is None:
        return asked.missing(NO_METRICS, "wait for the first step")
    save_every = e.config.train.save_every if e.config else None
    is_long = metrics.steps >= LONG_STEPS
    saves = "save_every unknown" if save_every is None else f"save_every {save_every}"
    return asked.judged(
        not is_long or (bool(save_every) and not metrics.config_file.endswith(TOY)),
        f"{metrics.config_file}, {metrics.num_params / 1e6:.1f}M parameters, {metrics.steps} steps "
        f"of {metrics.tokens_per_step} tokens, {saves}",
        evidence=f"{METRICS_FILE}, config.yaml",
        advice="name the config (CONFIG, --config) and set train.save_every",
    )


def precision(e: Evidence, limits: Limits) -> Row:
    """A GPU run uses bf16."""
    asked = Question("precision", "bf16 on a GPU")
    if e.run.metrics is None:
        return asked.missing(NO_METRICS, "wait for the first step")
    is_cpu = e.run.metrics.device.startswith("cpu")
    return asked.judged(
        is_cpu or e.run.metrics.dtype == "bf16",
        f"{e.run.metrics.dtype} on {e.run.metrics.device}",
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
    asked = Question("steps", f"{needed}")
    # A run that is still going has not failed this criterion: it cannot be judged yet.
    if e.step < needed and not e.run.over:
        return asked.missing(
            f"{e.step} so far, {e.run.status}",
            "judge again once that step is reached",
            essential=True,
        )
    return asked.judged(
        e.step >= needed,
        f"{e.step}",
        evidence=f'{METRICS_FILE}, "step"',
        advice=f"the run ended ({e.run.standing}) before them; find the cause, then start it again",
    )


def finished(e: Evidence, limits: Limits) -> Row:
    """The run completed all its steps."""
    metrics, asked = e.run.metrics, Question("finished", "finished, every step")
    if metrics is None or not e.run.over:
        return asked.missing(
            NO_METRICS if metrics is None else f"{e.run.status} at step {e.step}",
            "judge again when it has ended",
            essential=True,
        )
    return asked.judged(
        metrics.status == "finished" and metrics.step >= metrics.steps,
        f"{e.run.status}, {e.step} of {metrics.steps} steps",
        evidence=f'{METRICS_FILE}, "status" and "step"',
        advice="the same command resumes from the last checkpoint",
    )


def one_run(e: Evidence, limits: Limits) -> Row:
    """The records belong to one run, with one writer process per rank."""
    asked = Question("one run", "one run in the folder")
    if not e.events and not e.rows:
        return asked.missing(
            "no records in the folder", "name the folder of a run (train.out_dir)", essential=True
        )
    return asked.judged(
        not e.mixed,
        "two" if e.mixed else "one",
        evidence=e.mixed or f"{e.run.heartbeat or 'training.csv'}, every line that was read",
        advice="stop all but one of the processes; start again in an empty folder",
    )


def no_errors(e: Evidence, limits: Limits) -> Row:
    """No NaN, no out-of-memory, no missing data, no error in a log."""
    asked = Question("errors", "0")
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
        return asked.missing(
            NO_METRICS,
            "it has the status of the run; wait for the first step, or check the log",
            essential=True,
        )
    return asked.judged(
        not found,
        f"{len(found)}",
        evidence=found[0] if found else f'{METRICS_FILE}, "status": "{e.run.status}"',
        advice="check that line first; docs/operate.md explains each kind",
    )


def heartbeats(e: Evidence, limits: Limits) -> Row:
    """Every rank writes heartbeats, and steps start, are logged and end."""
    asked = Question("heartbeats", "every rank; progress, step_end, step_start")
    if not e.run.ranks or not e.events:
        return asked.missing(
            "no heartbeat_rank*.jsonl that can be read",
            "wait for the first step, or check the log for the cause",
            essential=True,
        )
    world_size = e.run.metrics.world_size if e.run.metrics else len(e.run.ranks)
    alive = [rank for rank in _ranks(e) if rank.last is not None]
    kinds = {beat.msg for beat in e.events}
    wanted = {PROGRESS: "progress", STEP_END: "step_end"}
    if e.run.env is None or not e.run.env.env.get("NSA_HEARTBEAT_EVERY"):
        wanted[BEAT] = "step_start"  # unless beats are thinned out by a setting
    seen = [name for kind, name in wanted.items() if kind in kinds]
    return asked.judged(
        len(alive) >= world_size and len(seen) == len(wanted),
        f"{len(alive)} of {world_size} ranks; {', '.join(seen) or 'none of them'}",
        evidence=", ".join(rank.path.name for rank in alive) or "no line that can be read",
        advice="a rank without a heartbeat never started; check its output",
    )


def no_stall(e: Evidence, limits: Limits) -> Row:
    """No rank is silent now, and none was ever silent for much longer than its steps take."""
    asked = Question(
        "stalls", f"none over {limits.stall_s:g} s or {limits.stall_gaps:g} x the median"
    )
    ranks = [rank for rank in _ranks(e) if rank.last is not None]
    if not ranks:
        return asked.missing("no heartbeat", "wait for the first step", essential=True)
    # First the present: is a rank silent now? Then the past: the longest interval ever.
    if not e.run.ended and (alarms := heartbeat_stall(e.run, limits)):
        text, advice = alarms[0].text, alarms[0].advice
        return asked.judged(False, text, evidence=alarms[0].file, advice=advice)
    found = [(rank, rank.all_gaps(limits.first_step_s)) for rank in ranks]
    longest, gaps = max(found, key=lambda pair: max(pair[1], default=0.0))
    if not gaps:
        value = "ended by itself" if e.run.ended else "alive, but fewer than two steps so far"
        return asked.judged(True, value, evidence=ranks[0].path.name)
    allowed = max(limits.stall_s, limits.stall_gaps * median(gaps))
    return asked.judged(
        max(gaps) <= allowed,
        f"longest {max(gaps):.1f} s, median {median(gaps):.2f} s",
        evidence=f"{longest.path.name}, {len(gaps)} intervals between beats",
        advice="look at stackdump_*.txt, dt_fetch_s and the other ranks at that time",
    )


def watchdog(e: Evidence, limits: Limits) -> Row:
    """No alarm was raised; alarms.jsonl also shows whether a watchdog ran at all."""
    asked = Question("alarms", "0")
    rung = [alarm for alarm in e.run.alarms if alarm.action != "clear"]
    if rung:
        value, last = f"{len(rung)} of late", rung[-1]
        evidence = f"{ALARMS_FILE}, {last.action} {last.type}: {last.text}"
        advice = last.advice or f"look at {ALARMS_FILE}"
        return asked.judged(False, value, evidence=evidence, advice=advice)
    # `no_stall` judges heartbeat_stall already; do not fail twice for one cause.
    now = [a for rule in RULES if rule is not heartbeat_stall for a in rule(e.run, limits)]
    if now and not e.run.ended:
        value, evidence = f"{len(now)} now", f"{now[0].file}, {now[0].type}: {now[0].text}"
        return asked.judged(False, value, evidence=evidence, advice=now[0].advice)
    # The watchdog creates the file when it starts, so that "no alarm" differs from "not watched".
    if (e.run.folder / ALARMS_FILE).exists():
        return asked.judged(True, "0", evidence=ALARMS_FILE)
    return asked.missing(
        f"no {ALARMS_FILE}: no watchdog ran", "run `nsa watch RUN_FOLDER` alongside"
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
    asked = Question("checkpoint", "one" if not every else f"one every {every} steps")
    newest = e.run.checkpoints[-1] if e.run.checkpoints else None
    if newest is None:
        # Too early for the first checkpoint. An unknown save_every counts as too early.
        if not e.run.over and every != 0 and e.step < (every or e.step + 1):
            return asked.missing(
                f"none yet at step {e.step}",
                "judge again after the first checkpoint",
                essential=True,
            )
        return asked.judged(
            False,
            "none",
            evidence=f"no checkpoint_step*.pt after step {e.step}",
            advice="set train.save_every; look for [checkpoint] lines in the log",
        )
    behind = e.step - newest.step
    # While the run is alive, one more checkpoint may still be in flight.
    allowed = (every or e.step) * (1 if e.run.over else 2)
    return asked.judged(
        behind <= allowed,
        f"step {newest.step}, {size(newest.num_bytes)}, {len(e.run.checkpoints)} in the folder",
        evidence=f"{checkpoint_file.NAME.format(step=newest.step)}, {behind} steps behind",
        advice="look for [checkpoint] lines in the log, and check the free disk space",
    )


def loads(e: Evidence, limits: Limits) -> Row:
    """The newest checkpoint matches its manifest, and its weights load into a model."""
    asked = Question("checkpoint loads", "its manifest's bytes and sha256; a model loads")
    path = _newest(e)
    if path is None:
        return asked.missing(
            "no checkpoint with a manifest",
            "a checkpoint without a manifest is unfinished",
            essential=True,
        )
    try:
        count = _count_parameters(path)
    except UNLOADABLE as error:
        return asked.judged(
            False,
            "no",
            evidence=first_line(error),
            advice="use an older one; `nsa checkpoint verify RUN_FOLDER` checks all of them",
        )
    step = find.step_of(path)
    num_bytes = next((one.num_bytes for one in e.run.checkpoints if one.step == step), 0)
    value = f"{count / 1e6:.1f}M parameters, {size(num_bytes)}"
    manifest = "its manifest" if path.is_dir() else checkpoint_file.manifest_path(path).name
    evidence = f"{path.name}, {manifest}"
    return asked.judged(True, value, evidence=evidence)


def resumed(e: Evidence, limits: Limits) -> Row:
    """The run has resumed from a checkpoint."""
    asked = Question("resumed", "from a checkpoint")
    at = e.run.metrics.resumed_at if e.run.metrics else None
    if at is None:
        return asked.missing(
            f'{METRICS_FILE}, "resumed_at": null: never resumed',
            "touch .HALT, then the same command; or `nsa prove-resume`",
        )
    return asked.judged(
        e.step > at,
        f"at step {at}, now at {e.step}",
        evidence=f'{METRICS_FILE}, "resumed_at"',
        advice="no step has followed yet: judge again",
    )


def backed_up(e: Evidence, limits: Limits) -> Row:
    """A verified copy of the newest checkpoint exists elsewhere."""
    folder, newest = e.config.train.backup_dir if e.config else "", _newest(e)
    asked = Question("backup", "a verified copy in another folder")
    if not folder or newest is None:
        return asked.missing(
            "train.backup_dir is empty" if newest else "no checkpoint",
            "set train.backup_dir, or `nsa checkpoint backup RUN_FOLDER --to DIR`",
        )
    copy = Path(folder) / newest.name
    try:
        # Bytes and sha256 of the copy; its presence alone proves nothing.
        find.verify(copy)
    except (OSError, ValueError) as error:
        advice = "look for [checkpoint] lines in the log; `nsa checkpoint backup` copies it"
        evidence = str(error)
        return asked.judged(False, "no", evidence=evidence, advice=advice)
    return asked.judged(True, f"{copy}", evidence=f"{copy}, its manifest")


def model_saved(e: Evidence, limits: Limits) -> Row:
    """The final model exists and loads."""
    path, asked = e.run.folder / MODEL, Question("model", "there, and loads")
    if not path.exists() and not e.run.over:
        return asked.missing(
            f"no {MODEL} yet", "judge again when the run has ended", essential=True
        )
    try:
        count = _count_parameters(path)
    except UNLOADABLE as error:
        advice = (
            "--save may have put it elsewhere; `nsa checkpoint export` makes one from a checkpoint"
        )
        return asked.judged(False, "no", evidence=first_line(error), advice=advice)
    value = f"{count / 1e6:.1f}M parameters, {size(path.stat().st_size)}"
    return asked.judged(True, value, evidence=MODEL)


def long_enough(e: Evidence, limits: Limits) -> Row:
    """The run lasted long enough to be trusted, or until its end."""
    metrics, asked = e.run.metrics, Question("time", f">= {limits.pilot_h:g} h, or all steps")
    hours = metrics.train_s / 3600 if metrics else 0.0
    # A short run that is complete needs no minimum duration.
    is_done = metrics is not None and metrics.step >= metrics.steps
    if metrics is None or (hours < limits.pilot_h and not is_done and not e.run.over):
        return asked.missing(f"{hours:.2f} h so far", "judge again later")
    return asked.judged(
        is_done or hours >= limits.pilot_h,
        f"{hours:.2f} h, {metrics.step} of {metrics.steps} steps",
        evidence=f'{METRICS_FILE}, "train_s"',
        advice="the same command resumes from the last checkpoint",
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
