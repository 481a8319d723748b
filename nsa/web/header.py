"""What the page shows about a run besides its curves: settings, verdict, numbers, ranks, alarms,
samples and the log."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nsa.config.describe import printable
from nsa.operate.handoff.redact import hide_lines
from nsa.operate.limits import HALTING, Limits, limits_for
from nsa.operate.run_files import RunFiles, file_stamp
from nsa.operate.run_folder import Rank, Run, number
from nsa.operate.watch.rules import allowed_silence, judge
from nsa.records.alarms import Alarm
from nsa.records.env import ENV_FILE
from nsa.records.metrics import CONFIG_FILE
from nsa.records.numbers import CHARTS, EVALUATED, NUMBERS, SCALARS, Chart, curves_of
from nsa.records.results import SAMPLE_FILE, SAMPLES_FILE

MOST_KEYS = 2000
MOST_DEPTH = 8
MOST_SETTING_TEXT = 300
Flat = dict[str, str]


# --- settings: config.yaml and env.json as flat tables ---


class Settings:
    """The settings of one run; files are parsed again when they change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: dict[str, str] = {}
        self._known: dict[str, tuple[object, Flat]] = {}

    def config(self) -> Flat:
        """config.yaml as dotted keys; empty if it cannot be read."""
        return self._load(CONFIG_FILE, RunFiles.plain_config)

    def env(self) -> Flat:
        """env.json by field; empty if it cannot be read."""
        return self._load(ENV_FILE, RunFiles.plain_env)

    def _load(self, name: str, parse: Callable[[RunFiles], Any]) -> Flat:
        stamp = file_stamp(self.folder / name)
        if stamp is None:
            return {}
        if name not in self._known or self._known[name][0] != stamp:
            files = RunFiles(self.folder)
            content = parse(files)
            self.problems.pop(name, None)
            if files.problems:
                self.problems[name] = files.problems[0]
                return {}
            self._known[name] = stamp, dict(_flatten(content))
        return self._known[name][1]


def _flatten(content: Any) -> Iterator[tuple[str, str]]:
    """Dotted keys and values; bounded, since YAML aliases can expand a small file without end."""
    left = MOST_KEYS
    # An explicit stack instead of recursion: nesting is limited by MOST_DEPTH, not by Python.
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting and left:
        name, value, depth = waiting.pop()
        if isinstance(value, dict) and depth < MOST_DEPTH:
            items = list(value.items())[:MOST_KEYS]
            waiting += [
                (
                    f"{name}.{key}"[-MOST_SETTING_TEXT:] if name else str(key)[:MOST_SETTING_TEXT],
                    inner,
                    depth + 1,
                )
                for key, inner in reversed(items)
            ]
            if len(waiting) > MOST_KEYS:
                del waiting[: len(waiting) - MOST_KEYS]
        else:
            left -= 1
            yield name, _text(value, depth)


def _text(value: Any, depth: int) -> str:
    if isinstance(value, list) and depth < MOST_DEPTH and all(_is_plain(item) for item in value):
        return " ".join(str(item) for item in value[:100])[:MOST_SETTING_TEXT]
    if isinstance(value, dict | list):
        return f"({len(value)} entries)"
    return "null" if value is None else str(value)[:MOST_SETTING_TEXT]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | None)


def side_by_side(tables: Sequence[Flat]) -> list[dict[str, Any]]:
    """One row per key of any run: the value of each run, and whether they differ."""
    keys: dict[str, None] = {}
    for table in tables:
        keys |= dict.fromkeys(table)
    rows = []
    for key in keys:
        values = [table.get(key) for table in tables]
        known = [table for table in tables if table]  # a run without the file is not a difference
        differs = len({table.get(key) for table in known}) > 1
        rows.append({"key": key, "values": values, "differs": differs})
    return rows


# --- which charts the page has ---


def describe_charts() -> dict[str, Any]:
    """All charts with their curves, and the numbers of the picture by layer.

    The page formats no number itself: charts.js draws what is listed here.
    """
    forms = {name: chart.form for chart in CHARTS for name, _ in curves_of(chart, SCALARS)}
    return {
        "charts": [dataclasses.asdict(chart) | {"series": _series(chart)} for chart in CHARTS],
        "layers": [
            {"key": number.name, "form": forms[number.name], **number.layer._asdict()}
            for number in SCALARS
            if number.layer is not None
        ],
    }


def _series(chart: Chart) -> list[dict[str, Any]]:
    """The curves of a chart; `table` is that of /api/series, empty for the logged steps."""
    tables = {"": SCALARS, "val": EVALUATED}
    return [
        {"key": name, "table": table, **curve._asdict()}
        for table, numbers in tables.items()
        for name, curve in curves_of(chart, numbers)
    ]


# --- the state of a run as one JSON object ---

LEVELS = {"finished": "good", "halted": "warn", "interrupted": "warn"}
"""Statuses of runs that ended well; any other end is bad."""
HEAD_NUMBERS = tuple(number.name for number in NUMBERS if number.in_head)
MOST_TEXT = 600
MOST_PROBLEMS = 30


def describe(run: Run) -> dict[str, Any]:
    """Everything that the page shows about a run, except its curves."""
    limits = limits_for(run.metrics.device if run.metrics else None)
    alarms = judge(run, limits)
    level, verdict = _verdict(run, alarms)
    return {
        "status": run.status,
        "ended": run.over,
        "level": level,
        "verdict": verdict,
        "next": _next(run),
        "now": run.now,
        **_numbers(run),
        "metrics": None if run.metrics is None else _metrics(run),
        "ranks": [_rank(run, rank, limits) for rank in run.ranks],
        "alarms": [_alarm(alarm) for alarm in alarms],
        "alarm_log": [_alarm(alarm) for alarm in reversed(run.alarms)],
        "checkpoints": [checkpoint._asdict() for checkpoint in reversed(run.checkpoints)],
        "halt": None if run.halt is None else _short(run.halt.reason or "touched"),
        "anomaly": None if run.anomaly is None else _short(run.anomaly),
        "free_bytes": run.free_bytes,
        "limits": {
            name: getattr(limits, name)
            for name in ("gate_entropy_low", "gate_entropy", "gate_max", "fetch_s")
        },
    }


def _verdict(run: Run, alarms: list[Alarm]) -> tuple[str, str]:
    if run.status == "absent":
        return "idle", "no files of a run in this folder yet"
    if run.death:
        return "bad", f"died at step {run.last_step}"
    if run.ended:
        anomaly = f": {_short(run.anomaly)}" if run.anomaly else ""
        return LEVELS.get(run.status, "bad"), f"{_short(run.status)}{anomaly}"
    if alarms:
        # Alarms that stop a run come before those that only warn.
        worst = next((a for a in alarms if a.type in HALTING), alarms[0])
        return ("bad" if worst.type in HALTING else "warn"), _short(worst.type).replace("_", " ")
    if run.halt is not None:
        return "warn", "asked to stop"
    if run.metrics is None:
        return "warn", "metrics.json is missing"
    return "good", "healthy"


RESUMABLE = ("died", "halted", "interrupted")


def _next(run: Run) -> dict[str, Any] | None:
    """How to go on with a run that stopped before its last step; None for any other."""
    if run.status not in RESUMABLE or run.metrics is None:
        return None
    launch = RunFiles(run.folder).launch()
    command = launch.command if launch else shlex.join(run.env.argv) if run.env else ""
    command = resume_command(command, 1 if launch else run.metrics.world_size)
    return {
        "why": _short(run.death),
        # Half a command would do something else.
        "command": _short(command) if len(command) < MOST_TEXT else "",
        "checkpoint": run.checkpoints[-1].step if run.checkpoints else None,
        "again": run.last_step - (run.checkpoints[-1].step if run.checkpoints else 0),
    }


def resume_command(command: str, ranks: int) -> str:
    """The command that continues a run, from the arguments that its process had.

    `ranks` above 1: torchrun started the process, and the arguments do not name it.
    """
    try:
        program, *arguments = shlex.split(command)
    except ValueError:  # empty, or cut off within quotes
        return ""
    # --resume none starts over; without it the newest checkpoint is taken.
    text = re.sub(r"(?:^| )--resume[ =]none(?= |$)", "", shlex.join(arguments)).strip()
    path = Path(program)
    if path.name == "__main__.py":
        parts = path.parent.parts
        module = ".".join(parts[parts.index("nsa") :]) if "nsa" in parts else path.parent.name
        start = ["-m", module]
    elif path.name == "nsa":
        start = ["-m", "nsa.cli"] if ranks > 1 else ["nsa"]
    else:
        start = [shlex.quote(program)]
    launcher = [f"torchrun --nproc-per-node={ranks}"] if ranks > 1 else ["python"]
    return " ".join([*([] if start == ["nsa"] else launcher), *start, text]).strip()


def _numbers(run: Run) -> dict[str, Any]:
    """The numbers of the header; None if not measured."""
    last = run.progress[-1] if run.progress else None
    row = run.rows[-1] if run.rows else None
    step = max(
        [run.metrics.step if run.metrics else 0, *(beat.step for beat in run.progress[-1:])]
        + [rank.last.step for rank in run.ranks[:1] if rank.last]
        + [row.step if row else 0]
    )
    losses = [loss for _, loss in run.losses if loss is not None]
    ages = [age for rank in run.ranks if (age := rank.age_s(run.now)) is not None]
    found = {name: number(last, name) if last else None for name in HEAD_NUMBERS}
    if row is not None:
        found["toks_per_s"] = found["toks_per_s"] or row.toks_per_s
        found["lr"] = found["lr"] or row.lr
    return {
        **{name: _finite(value) for name, value in found.items()},
        "step": step,
        "steps": run.metrics.steps if run.metrics else None,
        "loss": losses[-1] if losses else None,
        "val_loss": _finite(run.metrics.val_loss) if run.metrics else None,
        "fallbacks": number(last, "fb_total_fallbacks") if last else None,
        "eta_s": None if run.over else _finite(run.eta_s(step)),
        "beat_age_s": None if not ages else max(ages),
    }


def _metrics(run: Run) -> dict[str, Any]:
    assert run.metrics is not None
    content = dataclasses.asdict(run.metrics)
    # Large, and not shown on the page.
    content.pop("attention_stats")
    return {
        name: _short(value) if isinstance(value, str) else _finite(value)
        for name, value in content.items()
    }


def _rank(run: Run, rank: Rank, limits: Limits) -> dict[str, Any]:
    age_s, last = rank.age_s(run.now), rank.last
    allowed_s, why = allowed_silence(run, rank, limits)
    is_late = not run.over and age_s is not None and (age_s > allowed_s or bool(rank.gone))
    return {
        "rank": rank.rank,
        "step": last.step if last else None,
        "age_s": age_s,
        "pid": last.pid if last else None,
        "gone": rank.gone,
        "late": is_late,
        "allowed_s": allowed_s,
        "why": why,
    }


def _alarm(alarm: Alarm) -> dict[str, Any]:
    return {
        "type": _short(alarm.type),
        "action": _short(alarm.action),
        "ts": alarm.ts,
        "step": alarm.step if isinstance(alarm.step, int) else None,
        "rank": alarm.rank if isinstance(alarm.rank, int) else None,
        "text": _short(alarm.text),
        "advice": _short(str(alarm.advice)),
        "halting": alarm.type in HALTING,
    }


def _short(text: str) -> str:
    return printable(text)[:MOST_TEXT]


def _finite(value: Any) -> Any:
    # The page parses strict JSON, which has no NaN or Infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- texts: generated samples, and the end of the log ---
# Both are foreign text. Control characters are removed here; the page inserts text, never markup.

MOST_SAMPLES = 20
MOST_SAMPLE_TEXT = 20_000
"""Characters of one sample that are sent."""
LOG_LINES = 200
LOG_BYTES = 1 << 18
"""How far back the log is read."""
MOST_LOG_TEXT = 2000
"""Characters of one line that are sent."""
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
"""Terminal escape sequences: CSI (colours, cursor), OSC (titles, links), and two-character ones."""


def samples_stamp(folder: Path) -> str:
    """Changes whenever a sample is written; empty if there is none."""
    stamps = [file_stamp(folder / name) for name in (SAMPLES_FILE, SAMPLE_FILE)]
    return "" if stamps == [None, None] else str(stamps)


def describe_samples(folder: Path) -> dict[str, Any]:
    """The generated texts of a run, oldest first; `step` is None where it was not recorded."""
    files = RunFiles(folder)
    found: list[dict[str, Any]] = [
        {
            "step": sample.step,
            "ts": _finite(float(sample.ts)),
            "prompt": _plain_text(sample.prompt),
            "text": _plain_text(sample.text),
        }
        for sample in files.samples(MOST_SAMPLES)
    ]
    if not found and (text := files.sample_text()) is not None:
        found = [{"step": None, "ts": None, "prompt": "", "text": _plain_text(text)}]
    return {"samples": found, "problems": [_short(problem) for problem in files.problems]}


def describe_log(folder: Path, path: Path | None) -> dict[str, Any]:
    """The last lines of a log as [byte offset, text]; the offset tells which lines are new."""
    stamp = None if path is None else file_stamp(path)
    if path is None or stamp is None:
        tee = f"2>&1 | tee -a {shlex.quote(str(folder / 'train.log'))}"
        hint = f"nsa launch writes one; for a run that nsa train starts: nsa train ... {tee}"
        return {"file": None, "lines": [], "problem": f"There is no log. {_short(hint)}"}
    shown = path.name if path.parent == folder else str(path)
    found = {"file": _short(shown), "id": stamp[0], "size": stamp[1], "written": stamp[2] / 1e9}
    files = RunFiles(folder)
    lines = files.log_tail(path, LOG_LINES, LOG_BYTES)
    if files.problems:
        return found | {"lines": [], "problem": _short(files.problems[0])}
    # Whole words only: a secret that was cut in two would not be recognized.
    texts = [text for text, _ in hide_lines(_plain_line(line.text) for line in lines)]
    rows = [
        [line.byte, text.rstrip("\n")[:MOST_LOG_TEXT]]
        for line, text in zip(lines, texts, strict=True)
    ]
    cut = stamp[1] and not rows
    problem = f"no whole line in the last {LOG_BYTES >> 10} KiB" if cut else ""
    return found | {"lines": rows, "problem": problem}


def _plain_line(text: str) -> str:
    """What a terminal would be left with: no escapes, and only what follows the last return."""
    text = ESCAPES.sub("", text).rstrip("\r").rpartition("\r")[2]
    return printable(text.expandtabs(4))


def _plain_text(text: str) -> str:
    """Text of several lines, without control characters and not longer than is shown."""
    lines = text[:MOST_SAMPLE_TEXT].replace("\r\n", "\n").split("\n")
    return "\n".join(_plain_line(line) for line in lines)
