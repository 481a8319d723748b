"""The planned run, which all preflight checks read; checks of its config and environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa.config import Config
from nsa.config.env import in_effect
from nsa.files import size
from nsa.model.cost import parameter_counts
from nsa.operate.limits import Limits
from nsa.operate.report.evidence import Question
from nsa.operate.report.verdict import Row
from nsa.train.errors import LONG_STEPS
from nsa.train.runtime import Runtime

CHECKPOINT_BYTES = 12
"""Upper bound per parameter, all fp32: the weight and AdamW's two moments."""


# --- the planned run ---


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run before its first step."""

    config: Config
    config_path: str
    config_named: bool
    """Whether the user named the config, instead of getting the default."""
    ranks: int
    runtime: Runtime
    limits: Limits
    scratch: Path
    """Temporary folder on the disk of the run; empty at first, removed at the end."""
    price_per_h: float | None = None
    """For all devices together, in any currency."""
    max_cost: float | None = None

    @property
    def folder(self) -> Path:
        """The run folder; preflight writes nothing there."""
        return Path(self.config.train.out_dir)

    @property
    def num_params(self) -> int:
        return sum(parameter_counts(self.config).values())

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate size of a checkpoint on disk."""
        return CHECKPOINT_BYTES * self.num_params

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        rows = train.batch_size * train.accumulate_grad_batches
        return self.ranks // self.config.runtime.sharing * rows * train.seq_len


Check = Callable[[PlannedRun], Row | None]
"""Checks one thing; None if it does not apply."""


# --- config and environment: checks that compute nothing ---

LARGEST_LR = 0.1
"""No optimizer here learns anything at a higher rate."""
HARMFUL = {
    "NSA_PREFILL_BATCHED": "training with it is refused",
    "NSA_SEL_RANGES_V2": "it uses the slow reference to select blocks",
    "NSA_FORCE_BRANCH": "it switches two branches off",
    "NSA_DDP_SAFE_MODE": "it is slow, and meant for triage",
    "NSA_SDPA_FLASH_ONLY": "it turns a fallback into an error",
}
"""Variables for tests and triage that should not be set in a real run."""


def config_named(plan: PlannedRun) -> Row:
    """The user named the config."""
    asked = Question("config", "named by --config or CONFIG")
    return asked.judged(
        plan.config_named,
        f"{plan.config_path}: {plan.num_params / 1e6:.1f}M parameters, {plan.config.train.steps} "
        f"steps of {plan.tokens_per_step} tokens",
        evidence="--config" if plan.config_named else "a default, not named explicitly",
        advice="pass --config FILE, or export CONFIG",
    )


def config_sane(plan: PlannedRun) -> Row:
    """No setting makes the run pointless."""
    asked = Question("settings", "none that makes the run pointless")
    config, found = plan.config, []
    train, nsa = config.train, config.nsa
    # A new rule must also change the count of rules in the evidence below.
    if config.model.attention == "nsa" and train.seq_len < nsa.l:
        found.append(f"train.seq_len={train.seq_len} < nsa.l={nsa.l}: nothing is compressed")
    if train.lr > LARGEST_LR:
        found.append(f"train.lr={train.lr:g} > {LARGEST_LR:g}")
    if train.steps > 1 and train.warmup_steps >= train.steps:
        found.append(f"train.warmup_steps={train.warmup_steps} is as long as the run")
    if train.steps >= LONG_STEPS and train.log_every > train.steps // 10:
        found.append(f"train.log_every={train.log_every} logs next to nothing")
    if train.steps >= LONG_STEPS and config.data.dataset.startswith("synthetic"):
        found.append(f"data.dataset={config.data.dataset} in a long run: nothing to learn")
    return asked.judged(
        not found,
        found[0] if found else "nothing unusual",
        evidence=f"{len(found)} of 5 rules: {'; '.join(found)}" if found else "5 rules",
        advice="change it in the config file or on the command line",
    )


def mesh(plan: PlannedRun) -> Row | None:
    """The ranks can be divided into groups that share rows."""
    runtime = plan.config.runtime
    if runtime.sharing == 1:
        return None
    from nsa.parallel.traffic import step_traffic  # with a mesh alone

    asked = Question("mesh", f"ranks in groups of {runtime.sharing}: cp x tp")
    fits = plan.ranks % runtime.sharing == 0
    received = sum(step_traffic(plan.config, plan.ranks).values()) if fits else 0
    degrees = f"dp {plan.ranks // runtime.sharing} x cp {runtime.cp} x tp {runtime.tp}"
    return asked.judged(
        fits,
        f"{degrees}; a rank receives {size(received)} in a step" if fits else f"{plan.ranks} ranks",
        evidence="by formula: keys of other tokens, sums of activations, weights and gradients",
        advice=f"start a multiple of {runtime.sharing} ranks, or change runtime.cp and runtime.tp",
    )


def precision(plan: PlannedRun) -> Row:
    """A GPU run uses bf16, and the GPU supports it."""
    asked = Question("precision", "bf16 on a GPU that supports it")
    wanted, is_gpu = plan.config.runtime.precision, plan.runtime.device.type == "cuda"
    is_bf16 = wanted == "bf16"
    # Emulated bf16 runs, but at a fraction of the speed.
    lacks_it = is_gpu and is_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False)
    return asked.judged(
        not is_gpu or (is_bf16 and not lacks_it),
        f"{wanted} on {plan.runtime.device}",
        evidence="the GPU has no bf16" if lacks_it else "runtime.precision",
        advice="set runtime.precision=bf16, or use another GPU",
    )


def checkpoints(plan: PlannedRun) -> Row:
    """A long run saves checkpoints."""
    train = plan.config.train
    is_long = train.steps >= LONG_STEPS
    asked = Question("save_every", f"> 0 from {LONG_STEPS} steps on; the run has {train.steps}")
    return asked.judged(
        not is_long or 0 < train.save_every <= train.steps,
        f"{train.save_every}",
        evidence="train.save_every",
        advice="set train.save_every, to 5000 or less",
    )


def switches(plan: PlannedRun) -> Row:
    """No variable for tests or triage is still set."""
    asked = Question("environment", "no variable for tests or triage")
    found = [f"{k}={v}: {HARMFUL[k]}" for k, v in in_effect().items() if k in HARMFUL]
    return asked.judged(
        not found,
        "; ".join(found) or ", ".join(f"{k}={v}" for k, v in in_effect().items()) or "all default",
        evidence="the environment of this process",
        advice="unset it",
    )
