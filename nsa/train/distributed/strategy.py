"""How many processes train together, and what they do together: the strategy of a run.

`Strategy` is one process, and the interface of all strategies; `Ddp` (ddp.py) is many with a copy
of the model each, `Fsdp` (fsdp.py) many that share one out. The loop calls the methods at the same
places in every case, so nothing in it asks how many ranks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

import nsa
from nsa.config import Config, RuntimeConfig, to_container
from nsa.config.env import in_effect, read
from nsa.model import TinyLM
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import Content
from nsa.train.checkpoint.identity import Identity
from nsa.train.errors import RunRefused
from nsa.train.runtime import Runtime

if TYPE_CHECKING:
    from nsa.train.runtime import Runtime
    from nsa.train.stop import Stop


AUTO, OFF, ON = -1, 0, 1
"""The values of --ddp: as the launcher says, never, always."""

Given = ParamSpec("Given")
Made = TypeVar("Made")
Self = TypeVar("Self", bound="Strategy")
Fingerprint = dict[str, str]


class Strategy:
    """One process: everything is decided here, and nobody has to be asked."""

    rank = 0
    world_size = 1
    checkpoint_name = checkpoint_file.NAME
    gathers = False
    """Whether a forward pass waits for other ranks, whose parts of the weights it needs."""
    seen = 0
    timeout_s: float | None = None
    """After this, waiting for another rank is an error; None where nobody is waited for."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and talks to the user."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """For lines that every rank prints; empty where there is only one."""
        return ""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the others."""

    def adapt(self, cfg: Config) -> Config:
        """The config as these ranks can train it."""
        return cfg

    def place(self, config: RuntimeConfig) -> RuntimeConfig:
        """The same with the device of this rank."""
        return config

    def check_same(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Raise RunRefused where the ranks are about to train different things."""

    def bring(self, model: TinyLM, runtime: Runtime) -> TinyLM:
        """A new model on its device: all of it, or the part of this rank."""
        return model.to(runtime.device)

    def wrap(self, loss: nn.Module, runtime: Runtime) -> nn.Module:
        """Let the backward pass of a loss give every rank the mean gradient."""
        return loss

    def warm_up(self, backward: Callable[[], None]) -> None:
        """Run a backward pass for nothing before the first update, where ranks need one."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; the last one exchanges the gradient."""
        return nullcontext()

    def share(self, loss: Tensor) -> Tensor:  # [] fp32 -> [] fp32
        """The mean of the ranks' losses; nobody waits for the device."""
        return loss

    def culprits(self, late: int) -> str:
        """Whose loss was not finite, `late` updates ago; empty where that is no question."""
        return ""

    def total(self, *values: Tensor | int) -> list[float]:
        """The sums over the ranks; waits for the device."""
        return [value.item() if isinstance(value, Tensor) else float(value) for value in values]

    @contextmanager
    def fetching(
        self, stop: Stop | None = None, *, started: bool = False, seen: int = 0
    ) -> Iterator[None]:
        """Around the wait for data: on all ranks it succeeds, or on none.

        Then `self.seen` is the highest `seen` of all ranks: what one has to tell the others.
        """
        self.seen = seen
        yield

    def patience_s(self, usual_s: float) -> float:
        """How long this rank may wait for a batch."""
        return usual_s

    def asked(self, stop: Stop, *, last: bool = False) -> str:
        """Who wants the run to stop after this step, maybe the last; the same on every rank."""
        return stop.requested()

    @property
    def saves(self) -> bool:
        """Whether this rank takes part in the writing of a checkpoint."""
        return self.is_first

    def write_checkpoint(self, folder: Path, content: Content) -> Path:
        """Write a captured state; in a thread of its own, on all ranks that take part."""
        return checkpoint_file.write(folder, content)

    def load_checkpoint(self, path: Path, content: Content) -> Content:
        """What shelf.peek has found, with its tensors as this rank trains them."""
        return find.fill(path, content)

    def spread(self, weights: dict[str, Tensor], model: TinyLM) -> None:
        """Give the model on every rank the weights that the first one has read."""
        model.load_state_dict(weights, strict=True)

    def weights(self, model: TinyLM) -> dict[str, Tensor]:
        """The whole weights on the host for the first rank; nothing for the others."""
        state = model.state_dict() if self.is_first else {}
        return {name: x.detach().cpu() for name, x in state.items()}

    def whole(self, model: TinyLM, cfg: Config) -> TinyLM:
        """The model of the config as one process has it; others than the first keep theirs."""
        return model

    def from_first(self, make: Callable[[], str | None]) -> str:
        """What the first rank makes, empty for nothing; where that fails, no rank goes on."""
        return make() or ""

    def on_first(
        self, do: Callable[Given, Made], *args: Given.args, **options: Given.kwargs
    ) -> Made | None:
        """Do it on the first rank alone; the others get None, and do not wait."""
        return do(*args, **options) if self.is_first else None


def micro_positions(ranks: Strategy, first: int, batch_size: int, num_micro: int) -> list[int]:
    """Where the micro-batches of this rank begin, in an update whose rows begin at `first`.

    Micro-batch after micro-batch, rank after rank: so k ranks with B rows read what one process
    with k*B rows reads.
    """
    return [
        first + (micro * ranks.world_size + ranks.rank) * batch_size for micro in range(num_micro)
    ]


def speaks_for_all(error: BaseException) -> bool:
    """Whether this process should print an error: the first does for all that ended alike."""
    return read("RANK") == 0 or not getattr(error, "shared", False)


def mark_shared(error: Any) -> None:
    """Note that every rank ends here, so that they can wait for each other."""
    error.shared = True


# What all ranks of a run must have in common, as text by name.


def fingerprint_of_rank(
    cfg: Config, identity: Identity, runtime: Runtime, world_size: int
) -> Fingerprint:
    """The settings, the data, the variables, the code and its libraries of this process."""
    groups = to_container(cfg).items()
    found = {f"{group}.{key}": str(value) for group, keys in groups for key, value in keys.items()}
    found |= {name: value for name, value in in_effect().items() if name.startswith("NSA_")}
    found |= {
        "code": source_hash(),
        "torch": torch.__version__,
        "device": runtime.device.type,
        "world size": str(world_size),
    }
    return found | identity


def refuse_difference(rank: int, theirs: Fingerprint, ours: Fingerprint) -> None:
    """Raise RunRefused where another rank is not like the first."""
    for key in sorted(ours.keys() | theirs.keys()):
        if theirs.get(key) != ours.get(key):
            raise RunRefused(
                f"rank {rank} has {key}={theirs.get(key, 'nothing')}, and rank 0 has "
                f"{ours.get(key, 'nothing')}; all ranks must train the same: start them with one "
                "config, one environment and one version of the code"
            )


def source_hash() -> str:
    """A hash of every module of the package, tests aside; the version alone says too little."""
    root, digest = Path(nsa.__file__).parent, hashlib.sha256(nsa.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] != "tests":
            digest.update(f"\n{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
