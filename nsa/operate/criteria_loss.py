"""Criteria about the loss: finite, from where a guess would be, falling, and never too good."""

from __future__ import annotations

import math
from statistics import fmean

from nsa.operate.criterion import judged, known, missing, thirds
from nsa.operate.evidence import Evidence
from nsa.operate.limits import Limits
from nsa.operate.loss_rules import loss_plateau, plateau_window
from nsa.operate.verdict import Row
from nsa.telemetry import TRAINING
from nsa.telemetry.metrics import NAME as METRICS

RANDOM = "synthetic"
"""The dataset that holds nothing to learn."""
LEAST_LINES = 3
"""Logged losses that have a direction."""


def loss_finite(e: Evidence, limits: Limits) -> Row:
    """That every logged loss is a number."""
    points = e.points("loss")
    if not points:
        return missing(
            "loss finite",
            limit="every logged loss",
            evidence="no logged step that can be read",
            advice="wait for the first step",
            essential=True,
        )
    bad = [point for point in points if point.value is None]
    last = points[-1]
    value = f"not finite at step {bad[0].step}" if bad else f"{last.value:.4f} at step {last.step}"
    return judged(
        "loss finite",
        not bad,
        value,
        limit="every logged loss",
        evidence=f"{(bad or points[-1:])[0].where}; {len(points)} lines",
        advice="look at the data and the learning rate of that step; resume from before it",
    )


def loss_start(e: Evidence, limits: Limits) -> Row | None:
    """That the first loss is about that of a guess: more is a broken model, less a leak."""
    guess, metrics = guess_loss(e), e.run.metrics
    if metrics is not None and metrics.resumed_at:
        return None  # the first loss is that of the run before
    limit = "about ln V" if guess is None else f"{guess:.3f} +- {limits.loss_start_nats:g} nats"
    if guess is None or metrics is None or metrics.loss_first is None:
        evidence = f"no config.yaml, or no loss_first in {METRICS}"
        todo = "wait for the first step"
        return missing("first loss", limit=limit, evidence=evidence, advice=todo, essential=False)
    return judged(
        "first loss",
        abs(metrics.loss_first - guess) <= limits.loss_start_nats,
        f"{metrics.loss_first:.4f}",
        limit=limit,
        evidence=f'{METRICS}, "loss_first"',
        advice="compare the tokenizer of the data with the model's; run the causality tests",
    )


def loss_falls(e: Evidence, limits: Limits) -> Row | None:
    """That the last third of the logged losses is below the first."""
    if _dataset(e) == RANDOM:
        return None
    values = known(e.points("loss"))
    if len(values) < LEAST_LINES:
        return missing(
            "loss falls",
            limit="last third below the first",
            evidence=f"{len(values)} logged losses",
            advice="judge again after more steps, or set train.log_every lower",
            essential=False,
        )
    first, last = thirds([value for value, _ in values])
    return judged(
        "loss falls",
        last < first,
        f"{first:.4f} to {last:.4f}",
        limit="last third below the first",
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="look at the learning rate, the gradient norm and the data",
    )


def no_plateau(e: Evidence, limits: Limits) -> Row | None:
    """That the loss still falls at the end of what is recorded."""
    if _dataset(e) == RANDOM:
        return None
    limit = f"falls within {limits.plateau_steps} steps"
    window, span = plateau_window(e.run, limits)
    if not window:
        evidence = f"{len(e.run.losses)} logged losses up to step {e.step}"
        todo = "judge again after more steps"
        return missing("plateau", limit=limit, evidence=evidence, advice=todo, essential=False)
    alarms = loss_plateau(e.run, limits)
    return judged(
        "plateau",
        not alarms,
        alarms[0].text if alarms else "none",
        limit=limit,
        evidence=f"{TRAINING if e.run.rows else e.run.heartbeat}, the last {span} steps",
        advice="expected at the end of a schedule; else look at the rate and the data",
    )


def no_leak(e: Evidence, limits: Limits) -> Row | None:
    """That random tokens are not predicted: who can, sees the targets."""
    guess = guess_loss(e)
    values = [value for value, _ in known(e.points("loss"))]
    if _dataset(e) != RANDOM or guess is None or len(values) < LEAST_LINES:
        return None
    last = fmean(values[-max(1, len(values) // 3) :])
    return judged(
        "no leak",
        last >= guess - limits.leak_nats,
        f"{last:.4f}",
        limit=f">= ln V - {limits.leak_nats:g} = {guess - limits.leak_nats:.4f}",
        evidence=f"{e.points('loss')[-1].where}; the mean of the last third",
        advice="attention reads the future: run scripts/run_gpu_causality_test.sh --full",
    )


def held_out(e: Evidence, limits: Limits) -> Row:
    """That the loss on held-out text was measured."""
    metrics = e.run.metrics
    if metrics is None or metrics.val_loss is None:
        return missing(
            "held-out loss",
            limit="measured and finite",
            evidence=f'{METRICS}, "val_loss": null',
            advice="set train.eval_every",
            essential=False,
        )
    where = f"val.csv, step {e.vals[-1].step}" if e.vals else f'{METRICS}, "val_loss"'
    value = f"{metrics.val_loss:.4f} nats"
    ok = math.isfinite(metrics.val_loss)
    return judged("held-out loss", ok, value, limit="measured and finite", evidence=where)


def guess_loss(e: Evidence) -> float | None:
    """The loss of a model that knows nothing, ln V; None where the vocabulary is not known."""
    try:
        return None if e.config is None else math.log(e.config.data.vocab)
    except (OSError, ValueError):  # a tokenizer.json that is not on this machine
        return None


def _dataset(e: Evidence) -> str | None:
    if e.run.metrics is not None and e.run.metrics.data_fallback:
        return RANDOM
    return e.config.data.dataset if e.config else None
