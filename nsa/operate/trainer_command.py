"""The command line of the trainer: python for one process, torchrun for several, on any node."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nsa.config.load import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "train_showcase.py"
ENDPOINT = re.compile(r"[\w.:\[\]-]+:\d{1,5}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines that train together, and which of them this is."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""
    """HOST:PORT of node 0, where all of them meet."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(
                f"--nnodes {self.count} --node-rank {self.rank}: a node rank is a number from 0 to "
                "nnodes - 1; give every node another one"
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
    """The whole command; `job` must be the same on all nodes, and another one for every phase."""
    if ranks == 1 and nodes.count == 1:
        return [sys.executable, "-u", str(SCRIPT), "--ddp", "0", *arguments]
    command = [sys.executable, "-u", "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    if nodes.count == 1:
        command.append("--standalone")
    else:
        is_host = "true" if nodes.rank == 0 else "false"
        command += [f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}", f"--rdzv-id={job}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}"]
        command += [f"--rdzv-conf=is_host={is_host}"]
        command += ["--local-addr=127.0.0.1"] if nodes.on_loopback else []
    return [*command, str(SCRIPT), "--ddp", "1", *arguments]
