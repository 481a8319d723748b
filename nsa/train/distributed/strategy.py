"""The strategy of a run: how many processes train together, and what they do collectively.

`Strategy` is one process, and the interface of all strategies; `Ddp` (ddp.py) has a replica of the
model on each rank, `Fsdp` (fsdp.py) a shard. The training loop calls the same methods in every
case and never asks how many ranks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

import nsa
from nsa.config import Config, RuntimeConfig, to_container
from nsa.config.env import in_effect, read
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import Content
from nsa.train.checkpoint.identity import Identity
from nsa.train.errors import RunRefused
from nsa.train.runtime import Runtime
from nsa.train.stop import Stop

AUTO, OFF, ON = -1, 0, 1
"""Values of --ddp: decide by the launcher's variables, never, always."""

Given = ParamSpec("Given")
Made = TypeVar("Made")
Self = TypeVar("Self", bound="Strategy")
Fingerprint = dict[str, str]


class Strategy:
    """A single process: no communication. Methods marked collective are called by all ranks."""

    rank = 0
    world_size = 1
    cp = tp = 1
    """Ranks that share each row of tokens, and each matrix (mesh.py)."""
    checkpoint_name = checkpoint_file.NAME
    gathers = False
    """Whether a forward pass is collective: it gathers weights, or tokens of other ranks."""
    saves_together = False
    """Whether writing a checkpoint is collective."""
    seen = 0
    """Result of the last `fetching`."""
    timeout_s: float | None = None
    """Timeout of collectives; None with a single process."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files and prints the messages."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which rows this rank reads; ranks that share rows have the same number."""
        return self.rank // (self.cp * self.tp)

    @property
    def num_data_ranks(self) -> int:
        """Ranks, or groups of them that share rows, with rows of their own."""
        return self.world_size // (self.cp * self.tp)

    @property
    def name(self) -> str:
        """Name for lines that every rank prints; empty with a single process."""
        return ""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the group."""

    def adapt(self, cfg: Config) -> Config:
        """The config with changes that this strategy requires."""
        return cfg

    def assign_device(self, config: RuntimeConfig) -> RuntimeConfig:
        """The runtime config with the device of this rank."""
        return config

    def check_same(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Raise RunRefused if settings, data or code differ between ranks. Collective."""

    def place_model(self, model: TinyLM, runtime: Runtime) -> TinyLM:
        """Move a new model to its device: all of it, or the shard of this rank."""
        return model.to(runtime.device)

    def wrap(self, loss: nn.Module, runtime: Runtime) -> nn.Module:
        """Wrap the loss so that backward leaves the mean gradient on every rank."""
        return loss

    def warm_up(self, backward: Callable[[], None]) -> None:
        """Run a backward pass without effect before the first update, if the strategy needs it."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of forward and backward of a micro-batch; the last one reduces the gradient."""
        return nullcontext()

    def mean_loss(self, loss: Tensor) -> Tensor:  # [] fp32 -> [] fp32
        """The mean loss over the ranks. Collective; no host sync."""
        return loss

    def mean_over_ranks(self, value: Tensor) -> Tensor:  # [] fp32 -> [] fp32
        """The mean of a number over the ranks. Collective; no host sync."""
        return value

    def combine_stats(self, stats: AttentionStats) -> None:
        """Make the statistics of this rank's tokens and heads those of its rows. Collective."""

    def ranks_not_finite(self, late: int) -> str:
        """Text naming the ranks whose loss was not finite, `late` updates ago; may be empty."""
        return ""

    def sum_over_ranks(self, *values: Tensor | int) -> list[float]:
        """The sums over the ranks. Collective; synchronizes the device."""
        return [value.item() if isinstance(value, Tensor) else float(value) for value in values]

    @contextmanager
    def fetching(
        self, stop: Stop | None = None, *, started: bool = False, seen: int = 0
    ) -> Iterator[None]:
        """Context of the wait for data: it succeeds on all ranks or raises on all. Collective.

        Afterwards `self.seen` is the maximum of `seen` over the ranks.
        """
        self.seen = seen
        yield

    def patience_s(self, usual_s: float) -> float:
        """How long this rank may wait for a batch: less than the timeout of collectives."""
        return usual_s

    def stop_request(self, stop: Stop, *, last: bool = False) -> str:
        """The source of a request to stop after this step; the same on every rank."""
        return stop.requested()

    @property
    def saves(self) -> bool:
        """Whether this rank takes part in writing checkpoints."""
        return self.is_first

    def write_checkpoint(self, folder: Path, content: Content) -> Path:
        """Write the state of a trainer; runs in the writer thread, on all ranks that `saves`."""
        return checkpoint_file.write(folder, content)

    def load_checkpoint(self, path: Path, content: Content, like: dict[str, Tensor]) -> Content:
        """Complete the content from find.peek: full tensors, or the shards of this rank.

        `like` has the parameter of every tensor, by the names of map_tensors.
        """
        return find.fill(path, content)

    def broadcast_weights(
        self, weights: dict[str, Tensor], model: TinyLM, skipped: frozenset[str] = frozenset()
    ) -> None:
        """Load weights that rank 0 has read into the model on every rank; those with names in
        `skipped` stay as they are. Collective."""
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) == skipped and not unexpected, "init_from.py has compared the names"

    def weights(self, model: TinyLM) -> dict[str, Tensor]:
        """The full weights on the CPU for rank 0, empty for the others. Collective under FSDP."""
        state = model.state_dict() if self.is_first else {}
        return {name: x.detach().cpu() for name, x in state.items()}

    def gather_model(self, model: TinyLM, cfg: Config) -> TinyLM:
        """The unsharded model on rank 0; other ranks return theirs. Collective under FSDP."""
        return model

    def from_rank_0(self, make: Callable[[], str | None]) -> str:
        """Run `make` on rank 0 and return its result on all ranks; if it raises, all ranks raise.

        None counts as an empty text. Collective.
        """
        return make() or ""

    def on_rank_0(
        self, do: Callable[Given, Made], *args: Given.args, **options: Given.kwargs
    ) -> Made | None:
        """Call `do` on rank 0 only; the others return None at once."""
        return do(*args, **options) if self.is_first else None


def micro_positions(ranks: Strategy, first: int, batch_size: int, num_micro: int) -> list[int]:
    """First rows of this rank's micro-batches, in an update whose rows start at `first`.

    Within a micro-batch, ranks take consecutive rows: k ranks with batch B read the same rows as
    one process with batch k*B. Ranks that share rows read the same ones.
    """
    stride, place = ranks.num_data_ranks, ranks.data_rank
    return [first + (micro * stride + place) * batch_size for micro in range(num_micro)]


def speaks_for_all(error: BaseException) -> bool:
    """Whether this process should print an error; rank 0 prints errors that all ranks share."""
    return read("RANK") == 0 or not getattr(error, "shared", False)


def mark_shared(error: Any) -> None:
    """Mark an error as raised on every rank, so that they may wait for each other at the end."""
    error.shared = True


# --- fingerprint: what must be equal on all ranks ---


def fingerprint_of_rank(
    cfg: Config, identity: Identity, runtime: Runtime, world_size: int
) -> Fingerprint:
    """Settings, data, NSA_* variables, code and torch version of this process, as text by name."""
    groups = to_container(cfg).items()
    found = {f"{group}.{key}": str(value) for group, keys in groups for key, value in keys.items()}
    # Only NSA_*: variables such as RANK differ between ranks by design.
    found |= {name: value for name, value in in_effect().items() if name.startswith("NSA_")}
    found |= {
        "code": source_hash(),
        "torch": torch.__version__,
        "device": runtime.device.type,
        "world size": str(world_size),
    }
    return found | identity


def refuse_difference(rank: int, theirs: Fingerprint, ours: Fingerprint) -> None:
    """Raise RunRefused if another rank differs from rank 0."""
    for key in sorted(ours.keys() | theirs.keys()):
        if theirs.get(key) != ours.get(key):
            raise RunRefused(
                f"rank {rank} has {key}={theirs.get(key, 'nothing')}, but rank 0 has "
                f"{ours.get(key, 'nothing')}; all ranks must agree: start them with one "
                "config, one environment and one version of the code"
            )


def source_hash() -> str:
    """A hash of all modules of the package except tests: the version does not show local edits."""
    root, digest = Path(nsa.__file__).parent, hashlib.sha256(nsa.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] != "tests":
            # Names are hashed too: a renamed module is different code.
            digest.update(f"\n{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
