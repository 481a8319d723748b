"""What a run must show before it starts: long runs are expensive, so they are checked harder."""

from __future__ import annotations

from pathlib import Path

from nsa.config import Config
from nsa.files import free_bytes, size
from nsa.telemetry.sentinels import ANOMALY, HALT, read_anomaly, read_halt
from nsa.train.errors import NonFiniteLoss, RunRefused

CHECKPOINT_COPIES = 2
"""Of the weights, at least, in a checkpoint: themselves, and the moments of the optimizer."""
LONG_STEPS = 5000
"""From here on a run needs checkpoints and a config that was chosen on purpose."""


def refuse_waste(cfg: Config, steps: int, *, config_path: str, config_named: bool) -> None:
    """Raise RunRefused when a long run could be lost, or is likely not the one that was meant."""
    if steps < LONG_STEPS:
        return
    if cfg.train.save_every == 0:
        raise RunRefused(
            f"{steps} steps with train.save_every=0: a run of {LONG_STEPS} steps or more without "
            "checkpoints is lost when it stops; set train.save_every, or pass --allow-long-run"
        )
    if not config_named:
        raise RunRefused(
            f"{steps} steps with {config_path}, which nobody named: a run of {LONG_STEPS} steps or "
            "more needs a config that was chosen; name it with --config or CONFIG, or pass "
            "--allow-long-run"
        )


def refuse_full_disk(folder: Path, need_bytes: int) -> None:
    """Raise where not even one checkpoint fits: the run would have nothing to go on from."""
    free = free_bytes(folder)
    if free is not None and free < need_bytes:
        raise RunRefused(
            f"disk full: need {size(need_bytes)} for a checkpoint, have {size(free)} in {folder}; "
            "make room, or name another train.out_dir"
        )


def refuse_halted(folder: Path) -> None:
    """Raise where a .HALT from before is still there: it would end the run after its first step."""
    halt = read_halt(folder)
    if halt is None:
        return
    anomaly = read_anomaly(folder)
    clear = f"look at the cause, then remove {folder / HALT}"
    if anomaly == "nan_loss":
        raise NonFiniteLoss(
            f"{folder} holds a run that ended with {anomaly}; {clear} and {folder / ANOMALY}"
        )
    reason = f" ({anomaly})" if anomaly else ""
    raise RunRefused(f"{folder} holds a .HALT from before{reason}; {clear} to start")
