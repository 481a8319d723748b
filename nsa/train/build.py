"""Build the model and its update from a config; compile; advice when memory runs out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nsa.config import Config, ConfigError
from nsa.model import TinyLM
from nsa.model.block import Block
from nsa.model.cost import training_memory
from nsa.train.distributed.strategy import Strategy
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import build_optimizer, new_scaler
from nsa.train.runtime import Runtime
from nsa.train.spikes import Spikes
from nsa.train.step import EagerStep, GraphStep


def build_model(cfg: Config, vocab: int, runtime: Runtime, ranks: Strategy | None = None) -> TinyLM:
    """The model with its initial weights on its device, compiled if runtime.compile is set."""
    torch.manual_seed(cfg.train.seed)  # all ranks draw the same initial weights
    model = (ranks or Strategy()).place_model(TinyLM.from_config(cfg, vocab), runtime)
    if cfg.runtime.compile:
        compile_blocks(model, runtime.device)
    return model


def build_step(
    cfg: Config,
    model: TinyLM,
    runtime: Runtime,
    *,
    ranks: Strategy | None = None,
    share: GraphStep | None = None,
) -> EagerStep:
    """The update of the config, as a CUDA graph if runtime.cuda_graph is set.

    `share`: a GraphStep whose memory pool is reused.
    """
    graph = cfg.runtime.cuda_graph
    if graph and runtime.device.type != "cuda":
        raise ConfigError(
            f"runtime.cuda_graph=true on {runtime.device}; a CUDA graph needs a CUDA device: set "
            "it to false, or choose runtime.device=cuda",
            key="runtime.cuda_graph",
        )
    optimizer = build_optimizer(model, cfg.train, capturable=graph)
    parts = (model, optimizer, runtime, cfg.train.grad_clip, new_scaler(runtime))
    spikes = Spikes(cfg.train, runtime.device)
    if graph:
        return GraphStep(*parts, spikes, share=share)
    return EagerStep(*parts, spikes, ranks, index_weight=cfg.train.index_loss)


# --- torch.compile, block by block ---
# Not the whole model: all layers then share one small graph, gradient checkpointing can wrap it,
# and parameter names stay the same. Only training runs compiled; evaluation and statistics run
# eagerly.

BACKEND = "inductor"


def compile_blocks(model: TinyLM, device: torch.device) -> None:
    """Compile at the first training step; raise ConfigError now if there is no compiler."""
    if device.type == "cpu":
        _require_compiler()
        for block in model.layers:
            # Inductor of torch 2.13 writes C++ that does not compile for NSA's masks at an offset.
            if (context := getattr(block.attn, "context", None)) is not None:
                context.is_traced = False
    model.compiled = [_compiled(block) for block in model.layers]


def _compiled(block: Block) -> Callable[..., Any]:
    """One graph; of a block with a rule, or one that sends chosen blocks to other ranks, all but
    `attend` of its attention: what precedes and what follows are graphs of their own."""
    whole = block.attn.is_one_graph
    return torch.compile(block, fullgraph=whole, dynamic=False, backend=BACKEND)


def _require_compiler() -> None:
    from torch._inductor import config  # torch.compile takes the compiler name from here

    wanted = config.cpp.cxx
    names = [name for name in (wanted if isinstance(wanted, tuple) else (wanted,)) if name]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"runtime.compile=true needs a C++ compiler on a CPU, but {' or '.join(names)} is not "
            "installed; install one (or set CXX), or set runtime.compile=false",
            key="runtime.compile",
        )


# --- kernels, ahead of a run ---


def compile_kernels(cfg: Config, runtime: Runtime) -> int:
    """Compile the Triton kernels of training and generation on threads; returns their number.

    One layer of each rule goes through an update, an evaluation, a prefill and two decode steps on
    the GPU. No Triton kernel is launched, so all numbers are arbitrary; everything else runs.
    """
    from nsa.ops.triton.launcher import compiling_ahead  # needs Triton

    model_cfg, train = replace(cfg.model, n_layers=len(cfg.model.rules)), cfg.train
    run_cfg = replace(cfg.runtime, gradient_checkpointing=False, compile=False, gc_layers="")
    model = build_model(replace(cfg, model=model_cfg, runtime=run_cfg), cfg.data.vocab, runtime)
    rows = torch.zeros(train.batch_size, train.seq_len + 1, dtype=torch.int64)
    num_tokens = train.batch_size * train.seq_len
    packed = cfg.data.respect_documents
    bounds = torch.tensor([0, num_tokens // 2, num_tokens], dtype=torch.int32) if packed else None
    # One thread: `compiling_ahead` would not reach autograd's own.
    with compiling_ahead() as ahead, torch.autograd.set_multithreading_enabled(False):
        on_device = rows.to(runtime.device)
        next_token_loss(model, on_device, runtime, bounds=bounds).backward()
        model.eval()
        with torch.no_grad():
            next_token_loss(model, on_device, runtime, bounds=bounds)
            _generate(model, train.seq_len, runtime)
    return ahead.wait()


def _generate(model: TinyLM, max_len: int, runtime: Runtime) -> None:
    """Prefill half of the length, and decode two tokens."""
    ids = torch.zeros(1, max(max_len // 2, 1), dtype=torch.int64, device=runtime.device)
    with runtime.compute():
        cache = model.new_cache(1, max_len=ids.shape[1] + 2)
        model.prefill_last(ids, cache)
        for _ in range(2):
            model.step(ids[:, 0], cache)


# --- out of memory ---

GIB = 2**30


def explain_memory(cfg: Config, runtime: Runtime, error: str) -> str:
    """Error text: estimated memory by part, memory of the device, and what to try, best first."""
    parts = training_memory(cfg)
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    has = ""
    if runtime.device.type == "cuda":
        total = torch.cuda.get_device_properties(runtime.device).total_memory
        has = f"; {runtime.device} has {total / GIB:.1f} GiB"
    return (
        f"out of memory ({error.strip().splitlines()[0]}); the estimate for this config is "
        f"{sum(parts.values()) / GIB:.1f} GiB ({named}){has}; try: {'; '.join(_advice(cfg))}"
    )


def _advice(cfg: Config) -> list[str]:
    train, tried = cfg.train, []
    if train.batch_size > 1:
        size, accumulate = train.batch_size, train.accumulate_grad_batches
        tried.append(
            f"train.batch_size={-(-size // 2)} train.accumulate_grad_batches={accumulate * 2}, "
            "which keeps the global batch"
        )
    if not cfg.runtime.gradient_checkpointing:
        tried.append("runtime.gradient_checkpointing=true, which recomputes activations")
    elif cfg.runtime.gc_layers:
        tried.append("runtime.gc_layers= (empty), which checkpoints all layers")
    if cfg.runtime.precision == "fp32":
        tried.append("runtime.precision=bf16")
    tried.append(f"train.seq_len={max(train.seq_len // 2, 1)}, a shorter context")
    tried.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragmentation")
    return tried[:3]
