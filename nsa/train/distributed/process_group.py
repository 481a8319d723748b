"""Open the process group from torchrun's variables, or run in a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nsa.config import Config, ConfigError, RuntimeConfig
from nsa.config.env import raw, read, set_default
from nsa.data import SourceLost, within
from nsa.train.distributed.ddp import Ddp, Group
from nsa.train.distributed.mesh import agree_on_mesh, check_degrees
from nsa.train.distributed.strategy import AUTO, OFF, Strategy
from nsa.train.errors import RunRefused


@contextlib.contextmanager
def open_ranks(ddp: int, cfg: Config, say: Callable[[str], None]) -> Iterator[Strategy]:
    """Yield the strategy of a run, and close it at the end; `ddp` is a value of --ddp."""
    world_size, strategy = read("WORLD_SIZE"), cfg.runtime.strategy
    launched = raw("RANK") is not None and raw("MASTER_ADDR") is not None
    # Refuse contradictory settings before any rank waits for another.
    if strategy != "auto" and (ddp == OFF or not launched):
        why = "--ddp 0" if ddp == OFF else "RANK or MASTER_ADDR not set"
        raise ConfigError(
            f"runtime.strategy={strategy} in one process ({why}): it needs several ranks; use "
            "torchrun "
            "--nproc_per_node=N, or runtime.strategy=auto, which trains in one process here",
            key="runtime.strategy",
        )
    if cfg.runtime.sharing > 1:
        check_degrees(cfg.runtime, 1 if ddp == OFF or not launched else world_size)
    if ddp == OFF and world_size > 1:
        raise RunRefused(
            f"--ddp 0 with WORLD_SIZE={world_size}: {world_size} runs would write into one folder; "
            "start it without torchrun, or with --ddp -1 or 1"
        )
    # A single rank under torchrun needs no group, unless --ddp 1 or the config asks for one.
    if ddp == OFF or (ddp == AUTO and strategy == "auto" and world_size <= 1):
        with Strategy() as alone:
            yield alone
        return
    if not launched:
        raise RunRefused(
            f"--ddp {ddp} with WORLD_SIZE={world_size}, but RANK or MASTER_ADDR is not set: "
            "several "
            "ranks need a launcher; use torchrun --nproc_per_node=N, or --ddp 0 for one process"
        )
    with _open_group(cfg, say) as ranks:
        yield ranks


@contextlib.contextmanager
def _open_group(cfg: Config, say: Callable[[str], None]) -> Iterator[Group]:
    translate_old_names()
    rank, world_size, minutes = read("RANK"), read("WORLD_SIZE"), read("NSA_PG_TIMEOUT_MIN")
    if minutes <= 0:
        raise RunRefused("NSA_PG_TIMEOUT_MIN=0: no rank could wait for another; use minutes > 0")
    if read("NSA_START_TIMEOUT_MIN") <= 0:
        raise RunRefused("NSA_START_TIMEOUT_MIN=0: no rank could wait at start; use minutes > 0")
    say_first = say if rank == 0 else _silent
    cuda = cfg.runtime.device.startswith("cuda") or (
        cfg.runtime.device == "auto" and torch.cuda.is_available()
    )
    backend = _backend(cuda)
    timeout = timedelta(minutes=minutes)
    store = _open_store()
    # torchrun keeps one store across restarts: without a prefix, new ranks would read stale keys.
    store = PrefixStore(f"attempt{read('TORCHELASTIC_RESTART_COUNT')}", store)
    _wait_for_all(store, rank, world_size)
    store.set_timeout(timeout)
    agree_on_mesh(store, rank, world_size, cfg.runtime)
    if cuda:
        torch.cuda.set_device(_local_gpu(backend))
    _lower_debug_level(backend, say_first)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        say_first(
            f"[ddp] process group ready | backend={backend} world_size={world_size} "
            f"timeout_min={minutes:g}"
        )
        # Decisions are exchanged on the CPU, so that they never wait for the GPU.
        control = dist.new_group(backend="gloo", timeout=timeout) if backend != "gloo" else None
        gpu = f"cuda:{torch.cuda.current_device()}" if cuda else None
        kind = _strategy_class(cfg.runtime)
        given = (rank, world_size, store, control, gpu, 60.0 * minutes, say_first)
        with kind(*given, cfg.runtime.cp, cfg.runtime.tp) as ranks:
            yield ranks
    finally:
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


_left: list[dist.ProcessGroup | None] = []
"""Groups that were left, kept until the process ends. DDP's reducer also holds the group, and often
lives longer, in the traceback of an error. If its reference is the last one, it destroys the group
without releasing the GIL, waits there for a thread of gloo, and that thread waits for the GIL: the
rank never exits."""


def _strategy_class(runtime: RuntimeConfig) -> type[Group]:
    if runtime.strategy != "fsdp" and runtime.tp == 1:
        return Ddp
    from nsa.train.distributed.fsdp import Fsdp  # takes a second to import

    return Fsdp


def _open_store() -> Store:
    """Connect to the store of rank 0 or of the launcher.

    Has its own timeout: torch hangs if another program listens on that port.
    """
    timeout = _start_timeout()
    where, patience_s = f"{raw('MASTER_ADDR')}:{raw('MASTER_PORT')}", timeout.total_seconds() + 5.0
    try:
        return within(
            patience_s, lambda: next(rendezvous("env://", timeout=timeout))[0], "the meeting"
        )
    except (dist.DistNetworkError, dist.DistStoreError, SourceLost) as error:
        late = f"no rank answered within {patience_s:.0f} s"
        reason = late if isinstance(error, SourceLost) else str(error).splitlines()[0]
        raise RunRefused(
            f"rank {read('RANK')} of {read('WORLD_SIZE')} did not meet the others at {where}: "
            f"{reason}; if that port is in use, choose another (torchrun --master_port, or "
            "--standalone for a free one); if ranks are missing, check why they did not start"
        ) from None


def _start_timeout() -> timedelta:
    return timedelta(minutes=read("NSA_START_TIMEOUT_MIN"))


def _wait_for_all(store: Store, rank: int, world_size: int) -> None:
    """Wait until every rank has started.

    The timeout of the group begins after that. It may be short, and the imports of a rank on a slow
    disk may take longer.
    """
    store.set(f"started/{rank}", "")
    timeout = _start_timeout()
    try:
        store.wait([f"started/{other}" for other in range(world_size)], timeout)
    except dist.DistStoreError:
        missing = [n for n in range(world_size) if not store.check([f"started/{n}"])]
        raise RunRefused(
            f"rank {rank} of {world_size} waited {timeout.total_seconds():.0f} s for rank"
            f"{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}, which did not start; look "
            "at the messages of that process, or set NSA_START_TIMEOUT_MIN to more minutes if it "
            "is only slow"
        ) from None


def translate_old_names() -> None:
    """Copy old variable names to the names that torch and NCCL read now; a set new name wins."""
    for new, value in (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", raw("NCCL_ASYNC_ERROR_HANDLING")),
        ("TORCH_NCCL_BLOCKING_WAIT", raw("NCCL_BLOCKING_WAIT")),
        ("NCCL_IB_DISABLE", raw("IB_DISABLE")),
    ):
        if value is not None:
            set_default(new, value)


def _lower_debug_level(backend: str, say: Callable[[str], None]) -> None:
    """Work around a crash of DDP over gloo with debug level DETAIL (torch 2.13).

    Its logger mistakes the wrapped group. Remove this when plain DDP over gloo starts with
    TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    if backend == "gloo" and get_debug_level() == DebugLevel.DETAIL:
        set_debug_level(DebugLevel.INFO)
        say("[ddp] TORCH_DISTRIBUTED_DEBUG=DETAIL would crash torch over gloo; using INFO instead")


def _backend(cuda: bool) -> str:
    wanted: str = read("TORCH_BACKEND") or ("nccl" if cuda else "gloo")
    if wanted == "nccl" and not cuda:
        raise RunRefused(
            "TORCH_BACKEND=nccl on a CPU: NCCL moves tensors between GPUs; unset it, or use gloo"
        )
    return wanted


def _local_gpu(backend: str) -> int:
    """The device index of this rank, by LOCAL_RANK; over gloo, ranks may share a device."""
    local_rank, count = read("LOCAL_RANK"), torch.cuda.device_count()
    if count == 0 or (local_rank >= count and backend == "nccl"):
        raise RunRefused(
            f"LOCAL_RANK={local_rank} on a machine with {count} CUDA devices: NCCL needs one for "
            f"each rank; start {max(count, 1)} ranks here, or share devices with TORCH_BACKEND=gloo"
        )
    return int(local_rank % count)


def _silent(text: str) -> None:
    """Print nothing: rank 0 prints it."""
