"""The arms of the study: read from a table, each with its fixed steps and all of its settings."""

from __future__ import annotations

import fnmatch
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.config import Config, load_config
from nsa.config.load import REPOSITORY

SCHEMA = 1
WARMUP_SHARE = 0.07
INIT = "train.init_from"
"""In the settings of an arm it is the name of another arm, whose weights this one starts from."""
EVALUATIONS, LOG_LINES, CHECKPOINTS = 15, 75, 3
"""In a run, about; they do not change what is learned."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run, decided in full before it starts."""

    name: str
    comparison: str
    variant: str
    seed: int
    steps: int
    config: str
    """The file that the settings are added to, from the root of the repository."""
    settings: dict[str, Any]
    environ: dict[str, str]
    """Variables that its process gets: one branch alone is asked for by NSA_FORCE_BRANCH."""
    held_out_tokens: int
    """Tokens of the evaluation at the end."""
    step_ms: float
    start_s: float
    is_diagnosis: bool = field(default=False)

    @property
    def expected_s(self) -> float:
        """Seconds that the arm is thought to take."""
        return self.seconds_of(self.steps)

    def seconds_of(self, steps: int) -> float:
        """Seconds that a process which does so many of its steps is thought to take."""
        return self.start_s + steps * self.step_ms / 1e3

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of the arm, beside the data and the code."""
        return {
            "name": self.name,
            "comparison": self.comparison,
            "variant": self.variant,
            "seed": self.seed,
            "steps": self.steps,
            "config": self.config,
            "settings": self.settings,
            "environ": self.environ,
            "held_out_tokens": self.held_out_tokens,
        }

    def resolve(self, more: Iterable[str] = ()) -> Config:
        """The config of the run; `more` says where it reads and writes."""
        overrides = [f"{key}={_text(value)}" for key, value in self.settings.items()]
        return load_config(REPOSITORY / self.config, [*overrides, *more])


def read_table(
    path: Path,
    *,
    steps: int | None = None,
    minutes_each: float | None = None,
    changes: Sequence[str] = (),
) -> list[Arm]:
    """All arms of a table, in its order.

    `steps` replaces the steps of every comparison; `minutes_each` asks for as many as its slowest
    arm is thought to do in that time. Either way, all arms of a comparison do equally many.
    `changes` are settings (group.key=value) of all arms.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            raise ValueError(f"schema {table['schema']!r}; this program reads {SCHEMA}")
        extra = dict(_split(change) for change in changes)
        return [
            arm
            for name, content in table["comparisons"].items()
            for arm in _comparison(name, content, table, steps, minutes_each, extra)
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no table of arms ({reason}); see arms.toml") from None


def choose(arms: Sequence[Arm], patterns: str | None) -> list[Arm]:
    """Those that the patterns name, in the order of the table; without any, all but diagnoses."""
    if not patterns:
        return [arm for arm in arms if not arm.is_diagnosis]
    wanted = [part.strip() for part in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(arm.name, pattern) for arm in arms):
            known = ", ".join(arm.name for arm in arms)
            raise ValueError(f"--arms {pattern!r} names no arm; there are {known}")
    return [arm for arm in arms if any(fnmatch.fnmatchcase(arm.name, p) for p in wanted)]


def _comparison(
    name: str,
    content: dict[str, Any],
    table: dict[str, Any],
    steps: int | None,
    minutes_each: float | None,
    extra: dict[str, Any],
) -> list[Arm]:
    count = steps or int(content["steps"])
    if minutes_each is not None:
        count = max(1, int(minutes_each * 60e3 / content["step_ms"]))
    shared = table["settings"] | content["settings"]
    arms = []
    for key in ("arms", "diagnosis"):
        for variant, seeds in content.get(key, {}).items():
            own, environ = _variant(table["variants"][variant])
            if start := content.get("start", {}).get(variant):
                own[INIT] = start
            for seed in seeds:
                settings = shared | own | {"train.seed": seed, "train.steps": count}
                settings |= _rhythm(count, settings, content["eval_tokens"]) | extra
                arms.append(
                    Arm(
                        name=f"{name}-{variant}-s{seed}",
                        comparison=name,
                        variant=variant,
                        seed=seed,
                        steps=count,
                        config=content["config"],
                        settings=settings,
                        environ=environ,
                        held_out_tokens=content["held_out_tokens"],
                        step_ms=content["step_ms"],
                        start_s=content["start_s"],
                        is_diagnosis=key == "diagnosis",
                    )
                )
    return arms


def _variant(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Its settings, and its variables, which are written in capitals."""
    settings = {key: value for key, value in content.items() if not key.isupper()}
    return settings, {key: str(value) for key, value in content.items() if key.isupper()}


def _rhythm(steps: int, settings: dict[str, Any], eval_tokens: int) -> dict[str, Any]:
    """When a run of so many steps warms up, logs, evaluates and saves."""
    rows = settings["train.seq_len"] * settings["train.batch_size"]
    return {
        "train.warmup_steps": max(1, round(WARMUP_SHARE * steps)),
        "train.log_every": max(1, steps // LOG_LINES),
        "train.eval_every": math.ceil(steps / EVALUATIONS),
        "train.eval_batches": math.ceil(eval_tokens / rows),
        "train.save_every": math.ceil(steps / CHECKPOINTS),
    }


def _split(change: str) -> tuple[str, str]:
    key, equals, value = change.partition("=")
    if not equals or "." not in key:
        raise ValueError(f"--set {change!r} is not group.key=value")
    return key, value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
