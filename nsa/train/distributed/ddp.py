"""Collective operations of several ranks (`Group`), and data parallel training (`Ddp`) with its
NSA_DDP_* settings and 16-bit gradient compression.

All ranks run the same collectives in the same order, because every decision that ends or changes a
run uses values that all ranks have: the mean loss, the reduced gradient, and one small all-reduce
on the CPU before each update. In it a rank reports a request to stop, missing data, or a removed
run folder.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from nsa.config import BAD_INPUT, Config, ConfigError, RuntimeConfig
from nsa.config.env import read
from nsa.data import DamagedShard, DataError, SourceLost, WaitEnded
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.records.spans import here, span
from nsa.train.distributed.strategy import Fingerprint, Strategy, mark_shared, refuse_difference
from nsa.train.errors import BAD_DATA, NO_DATA, LoaderFailed, RankFailed, RankLost, TrainError
from nsa.train.runtime import Runtime
from nsa.train.stop import REASONS, Stop
from nsa.train.tensors import local_shard, shard_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# --- settings from NSA_DDP_* ---

SAFE_BUCKET_MB = 2.0
AUTO, OFF = "auto", "off"


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """Arguments of DistributedDataParallel."""

    bucket_mb: float | None
    """Bucket size of the gradient all-reduce; None is torch's default."""
    compress: str
    """dtype of gradients in the all-reduce: bf16, fp16, or off."""
    static_graph: bool
    find_unused: bool
    bucket_view: bool
    """Gradients are views into the buckets, which saves a copy."""


def read_settings(precision: str) -> DdpSettings:
    """Settings from the environment; NSA_DDP_SAFE_MODE overrides the rest.

    With `auto`, gradients are compressed only in bf16 runs: they have bf16 accuracy already. A run
    in fp32 must not lose accuracy by default.
    """
    if read("NSA_DDP_SAFE_MODE"):
        return DdpSettings(
            bucket_mb=SAFE_BUCKET_MB,
            compress=OFF,
            static_graph=False,
            find_unused=read("NSA_DDP_FIND_UNUSED"),
            bucket_view=False,
        )
    compress = read("NSA_DDP_COMPRESS")
    if compress == AUTO:
        compress = "bf16" if precision == "bf16" else OFF
    return DdpSettings(
        bucket_mb=read("NSA_DDP_BUCKET_MB") or None,
        compress=compress,
        static_graph=read("NSA_DDP_STATIC_GRAPH"),
        find_unused=read("NSA_DDP_FIND_UNUSED"),
        bucket_view=True,
    )


def adapt_config(cfg: Config, say: Callable[[str], None]) -> Config:
    """The config with changes for DDP; every change is logged."""
    if cfg.runtime.cuda_graph:
        raise ConfigError(
            "runtime.cuda_graph=true under DDP: the gradient all-reduce is not in the graph; "
            "set it to false, or train in one process",
            key="runtime.cuda_graph",
        )
    runtime, layers = cfg.runtime, read("NSA_DDP_SAFE_GC_LAYERS")
    if layers:
        runtime = dataclasses.replace(runtime, gradient_checkpointing=True, gc_layers=layers)
        say(f"[ddp-safe] Progressive GC enabled under DDP for layers [{layers})")
    elif runtime.gradient_checkpointing and read("NSA_DDP_DISABLE_GC"):
        runtime = dataclasses.replace(runtime, gradient_checkpointing=False, gc_layers="")
        say("[ddp-safe] Disabled gradient checkpointing under DDP")
    if read("NSA_DDP_SAFE_MODE"):
        runtime = dataclasses.replace(runtime, use_flash=False)
        say(
            f"[ddp-safe] Safe mode: buckets of {SAFE_BUCKET_MB:g} MB that gradients are copied "
            "into, no compression, no static graph, no flash kernels"
        )
    return dataclasses.replace(cfg, runtime=runtime)


# --- gradient compression: all-reduce in 16 bits ---
# torch's bf16 hook requires NCCL; this one also runs on gloo. The sum over ranks is in 16 bits;
# gradients before and after it are fp32.

WIRE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compress_gradients(model: DistributedDataParallel, wire: str) -> None:
    """All-reduce the gradients of the model as `wire`, a key of WIRE_TYPES."""
    # A lambda: torch checks the hook's annotations, which are strings in this file.
    model.register_comm_hook(WIRE_TYPES[wire], lambda kind, bucket: _all_reduce(kind, bucket))


def _all_reduce(wire: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average one bucket in 16 bits."""
    gradient = bucket.buffer()
    # Divide before the sum: in fp16 the sum could overflow.
    short = (gradient / dist.get_world_size()).to(wire)
    work: Any = dist.all_reduce(short, async_op=True)

    def widen(done: torch.futures.Future[Any]) -> Tensor:
        gradient.copy_(done.value()[0])
        return gradient

    return work.get_future().then(widen)


# --- Group: what ranks do collectively, under DDP and FSDP ---

KEPT_LOSSES = 4
"""Updates whose per-rank losses are kept, because losses are checked one step late."""
NUM_LOOKS, LOOK_S = 10, 0.1
"""Looks for a rank that is lost, and seconds between them."""
PATIENCE = 0.8
"""Limit of a rank's wait for data, as a share of the group's timeout: it must still be able to
report the failure to the others."""


class Group(Strategy):
    """One of several ranks; process_group.py opens and closes the process group."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        control: dist.ProcessGroup | None,
        gpu: str | None,
        timeout_s: float,
        say: Callable[[str], None],
        cp: int = 1,
        tp: int = 1,
    ) -> None:
        """`control` is the gloo group for CPU tensors; None if the default group is gloo."""
        self.timeout_s = self._timeout_s = timeout_s
        self.rank, self.world_size, self.cp, self.tp = rank, world_size, cp, tp
        self.gathers = self.gathers or cp * tp > 1
        self._opened: DeviceMesh | None = None
        self._store, self._control, self._gpu, self._say = store, control, gpu, say
        self._losses = deque[Tensor](maxlen=KEPT_LOSSES)  # [world_size] fp32 each
        self._agreed = ""
        self._num_told = 0

    @property
    def name(self) -> str:
        place = (
            f" (dp {self.data_rank}, cp {self.rank // self.tp % self.cp}, tp {self.rank % self.tp})"
        )
        return f"rank {self.rank} of {self.world_size}" + place * (self.cp * self.tp > 1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """If all ranks end alike, wait for each other: rank 0 may still be writing files.

        torchrun kills the other ranks as soon as one exits with an error. Waiting, and ignoring its
        SIGTERM, lets each rank exit with its own code.
        """
        if error is not None and not getattr(error, "shared", False):
            if _is_loss_of_rank(error):
                raise RankLost(
                    f"{self.name} lost {self._who_left()}, in {here.broken}: "
                    f"{str(error).splitlines()[0]}; see the messages of that rank; a restart by "
                    "the launcher resumes from the last checkpoint, as does the same command"
                ) from error
            return
        try:
            dist.barrier(group=self._control)
            if error is not None:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except RuntimeError as lost:
            if error is None:
                raise RankLost(
                    f"{self.name} had finished, but another rank failed at the end of the run; see "
                    "the messages of that rank"
                ) from lost
            print(f"[ddp] {self.name}: another rank exited early: {lost}", file=sys.stderr)

    def _who_left(self) -> str:
        """The ranks of this machine whose process is gone; `another rank` if none is found."""
        from nsa.train.distributed.hang import gone_ranks

        for _ in range(NUM_LOOKS):  # a process that has closed its connections may not be over yet
            gone = gone_ranks(here.folder, self.world_size)
            noticed = self._noticed(gone)
            if lost := [rank for rank in gone if rank not in noticed]:
                return f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            time.sleep(LOOK_S)
        return "another rank"

    def _noticed(self, gone: list[int]) -> set[int]:
        """Those that left because they lost somebody, as this rank does."""
        if 0 in gone:  # the store may have been in its process
            return set()
        try:
            self._store.set(f"noticed/{self.rank}", "")
            return {rank for rank in gone if self._store.check([f"noticed/{rank}"])}
        except dist.DistError:  # just now
            return set()

    def assign_device(self, config: RuntimeConfig) -> RuntimeConfig:
        return config if self._gpu is None else dataclasses.replace(config, device=self._gpu)

    def check_same(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Rank 0 compares the fingerprints of all ranks and shares the result."""
        name, ours = f"fingerprint{self._num_told}/", fingerprint()
        self._store.set(f"{name}{self.rank}", json.dumps(ours))

        def compare() -> None:
            for rank in range(1, self.world_size):
                refuse_difference(rank, json.loads(self._store.get(f"{name}{rank}")), ours)

        self.from_rank_0(compare)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks as dp x cp x tp; the first call is collective."""
        if self._opened is None:
            from nsa.train.distributed.mesh import open_mesh

            timeout = timedelta(seconds=self._timeout_s)
            self._opened = open_mesh(device_type, self.world_size, self.cp, self.tp, timeout)
        return self._opened

    def split(self, model: TinyLM, runtime: Runtime) -> TinyLM:
        """The model on this rank's tokens, with its share of the matrices. Collective."""
        if self.cp * self.tp == 1:
            return model
        from nsa.train.distributed.mesh import split_model

        degrees = f"dp {self.num_data_ranks} x cp {self.cp} x tp {self.tp}"
        self._say(f"[mesh] {self.world_size} ranks: {degrees}")
        with span("the mesh", waits=True):
            return split_model(model, self.mesh(runtime.device.type))

    def combine_stats(self, stats: AttentionStats) -> None:
        if self._opened is None:
            return
        from nsa.train.distributed.mesh import gather_over

        with span("all-gather of statistics", waits=True):
            stats.combine(partial(gather_over, self._opened))

    def mean_loss(self, loss: Tensor) -> Tensor:
        # All-reduce a vector, not the mean: `ranks_not_finite` needs the loss of each rank.
        losses = torch.zeros(self.world_size, device=loss.device)
        losses[self.rank] = loss
        with span("all-reduce of the loss", waits=True):
            dist.all_reduce(losses)
        self._losses.append(losses)
        return losses.mean()

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        total = value.clone()
        with span("all-reduce of the index loss", waits=True):
            dist.all_reduce(total)
        return total / self.world_size

    def ranks_not_finite(self, late: int) -> str:
        losses = self._losses[-1 - late]
        ranks = [str(rank) for rank in range(self.world_size) if not losses[rank].isfinite()]
        return f" (the loss of rank {', '.join(ranks)})" if ranks else ""

    def sum_over_ranks(self, *values: Tensor | int) -> list[float]:
        device = self._gpu or "cpu"
        sums = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in values])
        with span("all-reduce of sums", waits=True):
            dist.all_reduce(sums)
        return cast("list[float]", sums.tolist())

    @contextmanager
    def fetching(
        self, stop: Stop | None = None, *, started: bool = False, seen: int = 0
    ) -> Iterator[None]:
        problem: Exception | None = None
        try:
            yield
        except (SourceLost, DataError, LoaderFailed, WaitEnded) as error:
            problem = error
        damaged = isinstance(problem, DamagedShard)
        asked, ended, code, lost, damage, self.seen = self._highest(
            REASONS.index(stop.requested()) if stop else 0,
            int(isinstance(problem, WaitEnded)),
            _exit_code(problem),
            self.rank + 1 if _exit_code(problem) else 0,
            self.rank + 1 if damaged else 0,
            seen,
        )
        told = isinstance(problem, WaitEnded) or getattr(problem, "shared", False)
        if problem is not None and not told and not self.is_first:
            # The shared error is printed by rank 0 only, which does not know this one.
            print(f"[data] {self.name}: {problem}", file=sys.stderr)
        self._agreed = REASONS[asked]
        if stop is not None and asked:
            stop.request(self._agreed)
        if code:
            code = BAD_DATA if damage else code
            failure = _same_failure(problem, code, lost - 1, started, damage - 1)
            mark_shared(failure)
            raise failure
        if ended:
            raise problem or WaitEnded("another rank got a stop request while it waited for data")

    def patience_s(self, usual_s: float) -> float:
        return min(usual_s, PATIENCE * self._timeout_s)

    def stop_request(self, stop: Stop, *, last: bool = False) -> str:
        """The request agreed on before the update; later requests count for the next update.

        After the last update there is no next one, so the ranks agree once more.
        """
        if last:
            self._agreed = REASONS[self._highest(REASONS.index(stop.requested()))[0]]
        return self._agreed

    @torch.no_grad()
    def broadcast_weights(
        self, weights: dict[str, Tensor], model: TinyLM, skipped: frozenset[str] = frozenset()
    ) -> None:
        """Broadcast tensor by tensor; each rank keeps its shard."""
        for name, held in model.state_dict().items():
            if name in skipped:
                continue
            mine = local_shard(held)
            sent = torch.empty(held.shape, dtype=held.dtype, device=mine.device)
            if self.is_first:
                sent.copy_(weights[name])
            with span("broadcast of the first weights", waits=True):
                dist.broadcast(sent, src=0)
            mine.copy_(shard_like(sent, held))

    def from_rank_0(self, make: Callable[[], str | None]) -> str:
        # Through the store, not a collective: the text may have any length and needs no device.
        key, self._num_told = f"told/{self._num_told}", self._num_told + 1
        if self.is_first:
            try:
                made = make() or ""
            except Exception as error:  # re-raised; the other ranks must not wait for an answer
                code = getattr(
                    error, "exit_code", BAD_INPUT if isinstance(error, ValueError) else 1
                )
                mark_shared(error)
                self._store.set(key, json.dumps({"failed": str(error), "exit_code": code}))
                raise
            self._store.set(key, json.dumps({"made": made}))
            return made
        with span("the word of rank 0", waits=True):
            told = json.loads(self._store.get(key))
        if "failed" in told:
            raise RankFailed(f"rank 0: {told['failed']}", exit_code=told["exit_code"])
        return str(told["made"])

    def _highest(self, *numbers: int) -> list[int]:
        """The maxima over the ranks, by an all-reduce on the CPU: no device sync."""
        values = torch.tensor(numbers)
        with span("agreement", waits=True):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return cast("list[int]", values.tolist())


# --- Ddp: a replica of the model on each rank ---


class Ddp(Group):
    """Data parallel: every rank has a replica, and gradients are averaged."""

    _wrapped: DistributedDataParallel | None = None
    _is_warm = False

    def adapt(self, cfg: Config) -> Config:
        return adapt_config(cfg, self._say)

    def place_model(self, model: TinyLM, runtime: Runtime) -> TinyLM:
        return self.split(super().place_model(model, runtime), runtime)

    def wrap(self, loss: nn.Module, runtime: Runtime) -> nn.Module:
        settings = read_settings(runtime.precision)
        wrapped = DistributedDataParallel(
            loss,
            # No device_ids: DDP would move the document bounds, which must stay on the CPU.
            bucket_cap_mb=settings.bucket_mb,
            find_unused_parameters=settings.find_unused,
            static_graph=settings.static_graph,
            gradient_as_bucket_view=settings.bucket_view,
        )
        if settings.compress != OFF:
            compress_gradients(wrapped, settings.compress)
            self._say(f"[ddp] gradient compression enabled: {settings.compress}")
        else:
            self._say("[ddp] gradient compression off: gradients are summed in fp32")
        self._wrapped, self._is_warm = wrapped, False
        return wrapped

    def warm_up(self, backward: Callable[[], None]) -> None:
        """Run one backward pass, after which DDP reorders its buckets.

        The order of the buckets affects the sums, so without this the first update after a resume
        would differ from an uninterrupted run. A static graph also needs one synchronized backward
        before the first `no_sync`.
        """
        if self._is_warm:
            return
        assert self._wrapped is not None, "wrap() comes first"
        self._is_warm = True
        backward()
        self._wrapped.zero_grad(set_to_none=True)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        assert self._wrapped is not None, "wrap() comes first"
        return cast(
            "AbstractContextManager[None]", nullcontext() if last else self._wrapped.no_sync()
        )


def _is_loss_of_rank(error: BaseException) -> bool:
    """Whether a collective failed. Forward and backward contain collectives but may also fail for
    other reasons, so there the message must name the backend."""
    if isinstance(error, TrainError) or not isinstance(error, RuntimeError) or not here.broken:
        return False
    in_a_pass = any(word in here.broken for word in ("forward", "backward"))
    return not in_a_pass or any(word in str(error) for word in ("gloo", "NCCL"))


def _exit_code(problem: Exception | None) -> int:
    """Exit code for a data failure; 0 if there is none, or the wait was ended by a stop request."""
    if problem is None or isinstance(problem, WaitEnded):
        return 0
    if isinstance(problem, LoaderFailed):
        return problem.exit_code
    return NO_DATA if isinstance(problem, SourceLost) else BAD_DATA


def _same_failure(
    problem: Exception | None, code: int, rank: int, started: bool, damaged: int
) -> Exception:
    """What this rank raises: its own failure, or one of the same kind as the failing rank's.

    `rank` is the rank without data; `damaged` is the rank with a damaged shard, or -1.
    """
    is_own = problem is not None and not isinstance(problem, WaitEnded)
    if problem is not None and is_own and (damaged < 0 or isinstance(problem, DamagedShard)):
        return problem
    text = f"rank {rank} got no data, so all ranks stop"
    if damaged >= 0:
        text = f"rank {damaged} has a damaged shard (see its message above), so all ranks stop"
    return LoaderFailed(text, started=started, exit_code=code, damaged=damaged >= 0)
