"""What a launch will do, resolved once: nodes, trainer command, config, environment, folders."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.config import Config, load_config, to_container
from nsa.config.env import in_effect
from nsa.config.load import REPOSITORY, find_config
from nsa.config.schema import LOCAL_DATASETS, MADE_DATASETS
from nsa.operate.launch.profiles import ALL, ONE_PER_GPU, Phase, Profile
from nsa.operate.process import Machine, trainer
from nsa.records.env import altered_files, git_commit
from nsa.records.launch import RunInfo

ENDPOINT = re.compile(r"[\w.:\[\]-]+:\d{1,5}", re.ASCII)


# --- nodes and the trainer's command line ---


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, and the index of this one."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""
    """HOST:PORT of node 0 for the torchrun rendezvous."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(
                f"--nnodes {self.count} --node-rank {self.rank}: a node rank is a number from 0 to "
                "nnodes - 1; use a different one on every node"
            )
        if self.count > 1 and not ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(
                f"--rdzv-endpoint {self.endpoint!r} is not HOST:PORT; name node 0 and a free port "
                "of it, the same on every node"
            )

    @property
    def on_loopback(self) -> bool:
        """Whether all nodes are this machine, as in a rehearsal."""
        host = self.endpoint.rpartition(":")[0].strip("[]")
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def trainer_command(
    arguments: Sequence[str],
    *,
    ranks: int,
    nodes: Nodes,
    restarts: int = 0,
    job: str = "nsa",
) -> list[str]:
    """python for one process, torchrun for several.

    `job` is the rendezvous id: equal on all nodes, different for each phase.
    """
    if ranks == 1 and nodes.count == 1:
        return [sys.executable, "-u", *trainer(), "--ddp", "0", *arguments]
    command = [sys.executable, "-u", "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    if nodes.count == 1:
        command.append("--standalone")
    else:
        is_host = "true" if nodes.rank == 0 else "false"
        command += [f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}", f"--rdzv-id={job}"]
        # Name the store's host explicitly: otherwise c10d guesses it by comparing host names.
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}"]
        command += [f"--rdzv-conf=is_host={is_host}"]
        command += ["--local-addr=127.0.0.1"] if nodes.on_loopback else []
    return [*command, *trainer(), "--ddp", "1", *arguments]


# --- the plan ---

NO_DOCUMENTS = (
    *("data.local_path=", "data.hub_subset=", "data.hub_revision="),
    "data.respect_documents=false",
)
"""Overrides that clear document settings for a phase on synthetic rows, which has none."""
REQUIREMENT = re.compile(r"([\w.]+)\s*(>=|>|=)\s*(.+)")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A launch before it starts."""

    profile: Profile
    machine: Machine
    nodes: Nodes
    ranks: int
    config: str
    overrides: tuple[str, ...]
    dataset: str
    local_path: str
    out_dir: Path
    artifacts: Path
    records: Path
    environ: Mapping[str, str]
    """Environment of the trainer."""
    max_restarts: int | None = None
    """Replaces the phases' own restart counts."""

    def folder(self, phase: Phase) -> Path:
        """The run folder of a phase."""
        return self.place(phase.folder)

    def place(self, template: str) -> Path:
        """Fill the folders of this launch into a path template of the profile."""
        return Path(
            template.format(out_dir=self.out_dir, records=self.records, artifacts=self.artifacts)
        )

    def logs(self, phase: Phase) -> list[Path]:
        """Log files that receive the output of a phase."""
        return [self.place(template) for template in (phase.log, *self.profile.logs)]

    def resolve(self, phase: Phase) -> Config:
        """The config of a phase, as its trainer will resolve it."""
        return load_config(self.config_of(phase), self.overrides_of(phase), self.environ)

    def config_of(self, phase: Phase) -> str:
        """The config file of a phase."""
        return str(find_config(phase.config)) if phase.config else self.config

    def steps(self, phase: Phase) -> int:
        """Optimizer steps of a phase, at most those of the config."""
        whole = self.resolve(phase).train.steps
        return whole if phase.steps == ALL else min(int(phase.steps), whole)

    def restarts(self, phase: Phase) -> int:
        """Restarts of a phase after a crash."""
        chosen = self.max_restarts if phase.restarts else None
        return phase.restarts if chosen is None else chosen

    def command(self, phase: Phase) -> list[str]:
        """The command that trains a phase on this node."""
        arguments = ["--config", self.config_of(phase)]
        # Without --steps the trainer runs as many steps as its config says.
        arguments += [] if phase.steps == ALL else ["--steps", str(self.steps(phase))]
        return trainer_command(
            [*arguments, *phase.flags, *self.overrides_of(phase)],
            ranks=self.ranks,
            nodes=self.nodes,
            restarts=self.restarts(phase),
            job=f"{self.profile.name}-{phase.name}",
        )

    def launched(self, phase: Phase) -> dict[str, str]:
        """Identity of a phase's run: its GO verdict is reused only if all of this is equal."""
        config = to_container(self.resolve(phase))
        # The folder does not change what is trained: a moved run keeps its verdict.
        config["train"].pop("out_dir")
        return {
            "code": code_of(REPOSITORY),
            "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
            "environment": " ".join(f"{k}={v}" for k, v in in_effect(self.environ).items()),
            "steps": str(self.steps(phase)),
            "world": f"{self.nodes.count} x {self.ranks}",
        }

    def info(self) -> RunInfo:
        """The header of run.info."""
        last = self.profile.phases[-1]
        plain = load_config(self.config_of(last), environ={})
        return RunInfo(
            profile=self.profile.name,
            run_dir=str(self.records),
            out_dir=str(self.out_dir),
            config=self.config,
            gpus=self.machine.describe(),
            ranks=self.ranks,
            nodes=self.nodes.count,
            node_rank=self.nodes.rank,
            dataset=self.dataset,
            hostname=platform.node(),
            commit=git_commit(REPOSITORY) or "",
            altered=altered_files(REPOSITORY),
            changed=config_changes(plain, self.resolve(last)),
            environment=[f"{name}={value}" for name, value in self._recorded().items()],
        )

    def _recorded(self) -> dict[str, str]:
        chosen = {*self.profile.environment, *self.profile.gpu_environment}
        ours = {name: self.environ[name] for name in sorted(chosen) if name in self.environ}
        return in_effect(self.environ) | ours

    def overrides_of(self, phase: Phase) -> list[str]:
        # Later overrides win: profile, command line, then what the phase needs.
        dataset = phase.dataset or self.dataset
        found = [*self.profile.overrides, *self.overrides, f"data.dataset={dataset}"]
        if dataset in MADE_DATASETS:
            found += NO_DOCUMENTS
        elif dataset in LOCAL_DATASETS and self.local_path:
            found.append(f"data.local_path={self.local_path}")
        return [*found, f"train.out_dir={self.folder(phase)}"]


def choose_ranks(profile: Profile, machine: Machine, wanted: str | None) -> int:
    """Number of processes on this node: as given, or as in the profile."""
    if wanted:
        if not wanted.isascii() or not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"NP={wanted!r} is not a number of processes; use 1 or more")
        return int(wanted)
    if profile.ranks == ONE_PER_GPU:
        return max(1, len(machine.gpus))
    return int(profile.ranks)


def check_mesh(plan: Plan) -> None:
    """Raise if the ranks of a phase cannot be divided into groups that share rows."""
    total = plan.ranks * plan.nodes.count
    for phase in plan.profile.phases:
        runtime = plan.resolve(phase).runtime
        if total % runtime.sharing:
            raise ValueError(
                f"NP={plan.ranks} on {plan.nodes.count} node{'s' * (plan.nodes.count > 1)} is "
                f"{total} ranks, but runtime.cp={runtime.cp} x runtime.tp={runtime.tp} in phase "
                f"{phase.name} needs a multiple of {runtime.sharing}; set NP, or other degrees"
            )


def check_requirements(config: Config, requirements: Sequence[str]) -> None:
    """Raise if the config violates a requirement: `key=value`, `key>value`, `key>=value`."""
    values = {
        f"{group}.{key}": value
        for group, keys in to_container(config).items()
        for key, value in keys.items()
    }
    for text in requirements:
        match = REQUIREMENT.fullmatch(text.strip())
        if not match or match[1] not in values:
            raise ValueError(
                f"--require {text!r} is not a requirement; write group.key=value, or > or >= and "
                "a number"
            )
        value = values[match[1]]
        if not _holds(value, match[2], match[3]):
            raise ValueError(
                f"{match[1]}={value!r}, but this launch requires {text}; set CONFIG to the right "
                "config, or change the requirement"
            )


def _holds(value: object, relation: str, limit: str) -> bool:
    if relation == "=":
        return str(value) == limit
    if not isinstance(value, int | float):
        return False
    try:
        number = float(limit)
    except ValueError:
        return False
    return value > number or (relation == ">=" and value == number)


def config_changes(plain: Config, resolved: Config) -> list[str]:
    """Keys whose value differs from the config file."""
    ours, theirs = to_container(resolved), to_container(plain)
    return [
        f"{group}.{key}: {theirs[group][key]!r} -> {value!r}"
        for group, values in ours.items()
        for key, value in values.items()
        if value != theirs[group][key]
    ]


def code_of(folder: Path) -> str:
    """The commit, and a hash of the modified files."""
    digest = hashlib.sha256()
    for line in altered_files(folder):
        # git status format: two status letters and a path; for a rename "old -> new".
        path = folder / line.split(maxsplit=1)[-1].rpartition(" -> ")[2].strip('"')
        digest.update(line.encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return f"{git_commit(folder) or 'no commit'} {digest.hexdigest()[:16]}"
