"""The variables NSA_DDP_*: how ranks exchange gradients, and what else changes under DDP."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from nsa.config import BAD_INPUT, Config, ConfigError, RuntimeConfig
from nsa.config.env import read
from nsa.data import DamagedShard, DataError, SourceLost, WaitEnded
from nsa.model import TinyLM
from nsa.records.spans import here, span
from nsa.train.distributed.strategy import Fingerprint, Strategy, mark_shared, refuse_difference
from nsa.train.errors import BAD_DATA, NO_DATA, LoaderFailed, RankFailed, RankLost, TrainError
from nsa.train.runtime import Runtime
from nsa.train.stop import REASONS, Stop
from nsa.train.tensors import cut, part

SAFE_BUCKET_MB = 2.0
AUTO, OFF = "auto", "off"


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """How DistributedDataParallel is built."""

    bucket_mb: float | None
    """Gradients are exchanged in pieces of this size; None is torch's own."""
    compress: str
    """Type of the gradients on the wire: bf16, fp16, or off."""
    static_graph: bool
    find_unused: bool
    bucket_view: bool
    """Gradients live in the pieces that are exchanged, which saves a copy of them."""


def read_settings(precision: str) -> DdpSettings:
    """As the environment says, for a run of that precision; NSA_DDP_SAFE_MODE wins over the rest.

    Gradients of bf16 products have lost their lower bits already, so bf16 on the wire costs little;
    those of fp32 have not, and a run in fp32 should not lose them to a default.
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
    """The config as it is trained under DDP; every change is said."""
    if cfg.runtime.cuda_graph:
        raise ConfigError(
            "runtime.cuda_graph=true under DDP: the exchange of gradients is not in the graph; "
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


# Gradients in 16 bits on the wire: half the bytes, on any backend.
#
# torch's own hook for bf16 wants NCCL; this one runs on gloo, too. The sum over the ranks is in 16
# bits, the gradients before and after it are fp32.

WIRE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compress_gradients(model: DistributedDataParallel, wire: str) -> None:
    """Exchange the gradients of the model as `wire`, a name of WIRE_TYPES."""
    # A lambda, because torch compares annotations, which are text in this file, with its types.
    model.register_comm_hook(WIRE_TYPES[wire], lambda kind, bucket: _exchange(kind, bucket))


def _exchange(wire: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """Divided before the sum, which in fp16 could overflow otherwise."""
    gradient = bucket.buffer()
    short = (gradient / dist.get_world_size()).to(wire)
    work: Any = dist.all_reduce(short, async_op=True)

    def widen(done: torch.futures.Future[Any]) -> Tensor:
        gradient.copy_(done.value()[0])
        return gradient

    return work.get_future().then(widen)


# Many ranks that train together, and the simpler way to do it: a copy of the model each, DDP.
#
# `Group` is what ranks do together however the model lies on them; `Ddp` averages the gradients of
# whole copies, `Fsdp` (fsdp.py) shares one model out.
#
# Every rank runs the same collectives in the same order, because whatever ends or changes a run is
# decided from values that all of them have: the mean loss, the gradient after its exchange, and one
# small exchange on the host before each update, in which a rank says that it was asked to stop, or
# that its data did not come, or that the run folder was removed.

KEPT_LOSSES = 4
"""Updates whose losses are kept by rank: they are looked at one step late."""
PATIENCE = 0.8
"""Share of the group's timeout that a rank waits for data: then it can still tell the others."""


class Group(Strategy):
    """One of several ranks; process_group.py opens and closes their group."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        control: dist.ProcessGroup | None,
        gpu: str | None,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`control` is the group for tensors on the host; None is the default group."""
        self.timeout_s = self._timeout_s = timeout_s
        self.rank, self.world_size = rank, world_size
        self._store, self._control, self._gpu, self._say = store, control, gpu, say
        self._losses = deque[Tensor](maxlen=KEPT_LOSSES)  # [world_size] fp32 each
        self._agreed = ""
        self._num_told = 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all where all end alike: the first may still be writing its files.

        The launcher ends the other ranks as soon as one has failed; their own exit codes say more.
        """
        if error is not None and not getattr(error, "shared", False):
            if _is_loss_of_rank(error):
                raise RankLost(
                    f"{self.name} lost another rank, in {here.broken}: {str(error).splitlines()[0]}"
                    "; look at the messages of that rank; a launcher that restarts goes on from "
                    "the last checkpoint, and so does the same command"
                ) from error
            return
        try:
            dist.barrier(group=self._control)
            if error is not None:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except RuntimeError as lost:
            if error is None:
                raise RankLost(
                    f"{self.name} was done, and another rank failed at the end of the run; look at "
                    "the messages of that rank"
                ) from lost
            print(f"[ddp] {self.name}: another rank has left before: {lost}", file=sys.stderr)

    def place(self, config: RuntimeConfig) -> RuntimeConfig:
        return config if self._gpu is None else dataclasses.replace(config, device=self._gpu)

    def check_same(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """The first rank compares what all say of themselves, and tells the verdict."""
        name, ours = f"fingerprint{self._num_told}/", fingerprint()
        self._store.set(f"{name}{self.rank}", json.dumps(ours))

        def compare() -> None:
            for rank in range(1, self.world_size):
                refuse_difference(rank, json.loads(self._store.get(f"{name}{rank}")), ours)

        self.from_first(compare)

    def share(self, loss: Tensor) -> Tensor:
        losses = torch.zeros(self.world_size, device=loss.device)
        losses[self.rank] = loss
        with span("all-reduce of the loss", waits=True):
            dist.all_reduce(losses)
        self._losses.append(losses)
        return losses.mean()

    def culprits(self, late: int) -> str:
        losses = self._losses[-1 - late]
        ranks = [str(rank) for rank in range(self.world_size) if not losses[rank].isfinite()]
        return f" (the loss of rank {', '.join(ranks)})" if ranks else ""

    def total(self, *values: Tensor | int) -> list[float]:
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
        if damaged and not self.is_first:
            print(f"[data] {self.name}: {problem}", file=sys.stderr)  # the first speaks for all
        self._agreed = REASONS[asked]
        if stop is not None and asked:
            stop.ask(self._agreed)
        if code:
            code = BAD_DATA if damage else code
            raise _same_failure(problem, code, lost - 1, started, damage - 1)
        if ended:
            raise problem or WaitEnded("another rank was asked to stop while it waited for data")

    def patience_s(self, usual_s: float) -> float:
        return min(usual_s, PATIENCE * self._timeout_s)

    def asked(self, stop: Stop, *, last: bool = False) -> str:
        """What was agreed on before the update; a later request counts for the next, if any."""
        if last:
            self._agreed = REASONS[self._highest(REASONS.index(stop.requested()))[0]]
        return self._agreed

    @torch.no_grad()
    def spread(self, weights: dict[str, Tensor], model: TinyLM) -> None:
        """Tensor by tensor: only the first rank needs the file, and each keeps its part."""
        for name, held in model.state_dict().items():
            mine = part(held)
            sent = torch.empty(held.shape, dtype=held.dtype, device=mine.device)
            if self.is_first:
                sent.copy_(weights[name])
            with span("broadcast of the first weights", waits=True):
                dist.broadcast(sent, src=0)
            mine.copy_(cut(sent, held))

    def from_first(self, make: Callable[[], str | None]) -> str:
        key, self._num_told = f"told/{self._num_told}", self._num_told + 1
        if self.is_first:
            try:
                made = make() or ""
            except Exception as error:
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
        """The maxima over the ranks, exchanged on the host: the device is not waited for."""
        values = torch.tensor(numbers)
        with span("agreement", waits=True):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return cast("list[int]", values.tolist())


class Ddp(Group):
    """Every rank has a copy of the model, and the gradients are averaged."""

    _wrapped: DistributedDataParallel | None = None
    _is_warm = False

    def adapt(self, cfg: Config) -> Config:
        return adapt_config(cfg, self._say)

    def wrap(self, loss: nn.Module, runtime: Runtime) -> nn.Module:
        settings = read_settings(runtime.precision)
        wrapped = DistributedDataParallel(
            loss,
            # Without device_ids: inputs stay where they are, and borders of documents on the host.
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
        """DDP orders its buckets by the first backward pass, and sums in another order after it.

        With this pass out of the way, the first update after a resume sums as any other does. A
        static graph needs an exchange, too, before one can be left out.
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
    """Whether an exchange failed; a pass of the model, which holds one, can fail by itself, too."""
    if isinstance(error, TrainError) or not isinstance(error, RuntimeError) or not here.broken:
        return False
    in_a_pass = any(word in here.broken for word in ("forward", "backward"))
    return not in_a_pass or any(word in str(error) for word in ("gloo", "NCCL"))


def _exit_code(problem: Exception | None) -> int:
    """0 where the data came, or the wait for it was ended."""
    if problem is None or isinstance(problem, WaitEnded):
        return 0
    if isinstance(problem, LoaderFailed):
        return problem.exit_code
    return NO_DATA if isinstance(problem, SourceLost) else BAD_DATA


def _same_failure(
    problem: Exception | None, code: int, rank: int, started: bool, damaged: int
) -> Exception:
    """What this rank raises: its own failure, or one of the same kind.

    `rank` has no data, `damaged` has damaged data, or is -1: then that is why all end.
    """
    is_own = problem is not None and not isinstance(problem, WaitEnded)
    if problem is not None and is_own and (damaged < 0 or isinstance(problem, DamagedShard)):
        return problem
    text = f"rank {rank} got no data, and no rank goes on without it"
    if damaged >= 0:
        text = f"rank {damaged} has a damaged shard, and says above which; no rank goes on"
    return LoaderFailed(text, started=started, exit_code=code, damaged=damaged >= 0)
