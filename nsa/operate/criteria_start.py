"""Criteria about what a run was started with: its data, its config, its precision."""

from __future__ import annotations

from nsa.operate.criterion import NO_METRICS, judged, missing
from nsa.operate.evidence import Evidence, record
from nsa.operate.limits import Limits
from nsa.operate.verdict import Row
from nsa.telemetry.heartbeat import LOADER_READY
from nsa.telemetry.metrics import NAME as METRICS
from nsa.train.guard import LONG_STEPS

TOY = "train_showcase.yaml"
"""The default config of the trainer: right for a first look, wrong for a long run."""


def first_batch(e: Evidence, limits: Limits) -> Row | None:
    """That data came soon enough; only sources that may not come are timed."""
    if e.config is not None and not e.config.data.dataset.startswith("fineweb_edu"):
        return None
    limit = f"<= {limits.first_batch_s:g} s"
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
    """That the run reads what it was started with."""
    limit = "the source that was asked for"
    if e.run.metrics is None:
        todo = "wait for the first step"
        return missing("data", limit=limit, evidence=NO_METRICS, advice=todo, essential=False)
    fallback = e.run.metrics.data_fallback
    dataset = e.config.data.dataset if e.config else "as configured"
    return judged(
        "data",
        fallback is None,
        dataset if fallback is None else "random tokens",
        limit=limit,
        evidence=f'{METRICS}, "data_fallback": {fallback or "null"}',
        advice="the source failed and --synthetic-on-fail replaced it: nothing is learned",
    )


def settings(e: Evidence, limits: Limits) -> Row:
    """That a long run has a config that was chosen, and checkpoints."""
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
        evidence=f"{METRICS}, config.yaml",
        advice="name the config (CONFIG, --config) and set train.save_every",
    )


def precision(e: Evidence, limits: Limits) -> Row:
    """That a GPU computes in bf16."""
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
        evidence=f'{METRICS}, "dtype"',
        advice="set runtime.precision=bf16",
    )
