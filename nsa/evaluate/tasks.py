"""Tasks of lm-eval on a model folder: `lm_eval.simple_evaluate` with NSAForCausalLM.

A task is one of lm-eval's own, or a YAML file of `--tasks-dir`. Nothing is fetched for a task whose
data are local files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.data.errors import need
from nsa.model.folder import is_folder


def run_tasks(
    folder: Path,
    names: Sequence[str],
    *,
    tasks_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, dict[str, float | None]]:
    """Metrics by name of the task, or of a group's members."""
    check_tasks(folder, tasks_dir)
    lm_eval = need("lm_eval", "--tasks", "eval")
    from lm_eval.models.huggingface import HFLM

    from nsa.hf import NSAForCausalLM

    manager = _manager(names, tasks_dir)
    model = NSAForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    found = lm_eval.simple_evaluate(
        model=HFLM(model, backend="causal", tokenizer=str(folder), batch_size=batch_size),
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    return {name: _numbers(metrics) for name, metrics in found["results"].items()}


def check_tasks(folder: Path, tasks_dir: Path | None) -> None:
    """Refuse what no task can run on, before a model is loaded."""
    if not is_folder(folder):
        raise ValueError(
            f"--tasks with {folder}, which has no config.json; lm-eval reads a model folder: write "
            f"one with `nsa checkpoint export {folder} --hf DIR`, and name DIR"
        )
    if tasks_dir is not None and not tasks_dir.is_dir():
        raise ValueError(f"--tasks-dir {tasks_dir} is not a folder; name one with YAML files")


def _manager(names: Sequence[str], tasks_dir: Path | None) -> Any:
    """What knows the tasks; lm-eval's own thousands are looked at only if needed: it takes long."""
    from lm_eval.tasks import TaskManager

    if tasks_dir is not None:
        own = TaskManager(include_path=str(tasks_dir), include_defaults=False)
        if all(name in own.all_tasks for name in names):
            return own
    every = TaskManager(include_path=None if tasks_dir is None else str(tasks_dir))
    unknown = [name for name in names if name not in every.all_tasks]
    if unknown:
        where = f" and in {tasks_dir}" if tasks_dir else ""
        raise ValueError(
            f"--tasks {unknown[0]} is not known; lm-eval looks among its own tasks{where}: correct "
            "the name, or name the folder of its YAML file by --tasks-dir"
        )
    return every


def _numbers(metrics: dict[str, Any]) -> dict[str, float | None]:
    """The metrics without lm-eval's texts; null for what is not finite."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    return {key: value if math.isfinite(value) else None for key, value in numbers.items()}
