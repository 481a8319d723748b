"""Trains one arm by the product's trainer, measures the model, and writes result.json; or does some
of its updates alone for the speed in a result that is there.

`python studies/nsa_vs_dense/train_arm.py TASK.json`; run.py writes the task and starts this, a
process for each arm. SIGTERM makes it save a checkpoint and leave; the same task then goes on.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

from torch import nn

from bench.attention.selections import write_selection
from nsa.config import Config, to_container
from nsa.data import end_process, open_data
from nsa.model import TinyLM
from nsa.records import MODEL, read_env, read_metrics
from nsa.train import TrainError, run
from nsa.train.checkpoint.find import paths_of, remove
from nsa.train.checkpoint.model_file import load_model
from nsa.train.runtime import resolve_runtime
from studies.nsa_vs_dense.arms import Arm
from studies.nsa_vs_dense.gather import gather_curves, steps_per_s
from studies.nsa_vs_dense.measure import measure_loss, record_selection
from studies.nsa_vs_dense.results import write_arm
from studies.nsa_vs_dense.speed import record_speed


@dataclass(frozen=True, kw_only=True)
class Task:
    """An arm, and where it reads and writes."""

    arm: Arm
    where: list[str]
    """Settings of the data and of the run folder."""
    data: dict[str, Any]
    """What the data is: it becomes part of the result."""
    result: str
    selection: str
    """Files to write."""
    keep_weights: bool
    is_alone: bool
    """Whether no other arm shares the device: its speed says something only then."""
    commit: str | None = None
    """What to record where git is not there."""
    speed_steps: int | None = None
    """Do no more than so many updates, for the speed of an arm that has its result already."""

    def to_json(self) -> str:
        """As run.py hands it over."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Task:
        content = json.loads(text)
        return cls(**(content | {"arm": Arm(**content["arm"])}))


def main(arguments: list[str]) -> int:
    """Do the task of the file; 0 also where the run was asked to stop."""
    task = Task.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    cfg = task.arm.resolve(task.where)
    start = time.perf_counter()
    try:
        if task.speed_steps is not None:
            record_speed(Path(task.result), cfg, task.arm.config, task.speed_steps)
            return 0
        model = _trained(cfg) or _train(cfg, task.arm.config)
    except ValueError as error:  # bad input, by the convention of this package
        print(f"train_arm: error: {error}", file=sys.stderr)
        return 2
    except TrainError as error:
        print(f"train_arm: {error}", file=sys.stderr)
        return error.exit_code
    write_arm(Path(task.result), _result(task, cfg, model, start))
    if not task.keep_weights:
        delete_weights(Path(cfg.train.out_dir))
    return 0


def delete_weights(folder: Path) -> None:
    """Remove the model and the checkpoints of a run folder; what tells of the run stays."""
    (folder / MODEL).unlink(missing_ok=True)
    for path in paths_of(folder):
        remove(path)


def _trained(cfg: Config) -> TinyLM | None:
    """The model of a run that had finished, but was not measured any more."""
    path = Path(cfg.train.out_dir) / MODEL
    if not path.is_file() or read_metrics(path.parent).status != "finished":
        return None
    model, found = load_model(path)
    return model if to_container(found) == to_container(cfg) else None


def _train(cfg: Config, config_path: str) -> TinyLM:
    return run(cfg, config_path=config_path).model


def _result(task: Task, cfg: Config, model: TinyLM, start: float) -> dict[str, Any]:
    folder = Path(cfg.train.out_dir)
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v), cfg.model.attention_kind)
    model = model.to(runtime.device)
    data = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed)
    metrics, env = read_metrics(folder), read_env(folder)
    trained_s = time.perf_counter() - start
    held_out = measure_loss(model, data, cfg, runtime, task.arm.held_out_tokens)
    selection = None
    if cfg.model.attention_kind == "nsa":  # a recorded selection is one of NSA with its branches
        selection, recorded, spec = record_selection(model, data, cfg, runtime)
        write_selection(task.selection, recorded, spec)
        selection["file"] = Path(task.selection).name
    rate = steps_per_s(folder) if task.is_alone else None
    return {
        **task.arm.identity(),
        "data": task.data,
        "params": count_parameters(model),
        "machine": {
            "device": runtime.device_name,
            "torch": env.torch,
            "triton": env.triton,
            "python": env.python,
            "driver": env.driver,
            "commit": task.commit or env.git_commit,
            "attention": metrics.attention,
        },
        "tokens_per_step": metrics.tokens_per_step,
        "tokens_per_s": None if rate is None else round(rate * metrics.tokens_per_step, 1),
        "speed_steps": None,
        "peak_mem_mib": metrics.peak_mem_mib,
        "resumed_at": metrics.resumed_at,
        "seconds": {
            "steps": round(metrics.train_s, 2),
            "evaluate_and_save": round(metrics.eval_and_save_s, 2),
            "measure": round(time.perf_counter() - start - trained_s, 2),
            "process": round(time.perf_counter() - start, 2),
        },
        **gather_curves(folder),
        "held_out": held_out,
        "selection": selection,
    }


def count_parameters(model: nn.Module) -> dict[str, int]:
    """All of them, and those of the embedding (and of the head, where it has its own)."""
    total = sum(p.numel() for p in model.parameters())
    tables = {"embed.weight", "lm_head.weight"}
    embedding = sum(p.numel() for name, p in model.named_parameters() if name in tables)
    return {"total": total, "embedding": embedding, "non_embedding": total - embedding}


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
