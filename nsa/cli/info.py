"""`nsa info`: a config, and its parameters, FLOPs, memory traffic and cache sizes, as text."""

from __future__ import annotations

from collections.abc import Callable

from nsa.config import Config, to_container
from nsa.config.describe import text_table, yaml_value
from nsa.model.cost import (
    cache_bytes,
    decode_reads,
    dense_cache_bytes,
    dense_training_flops_per_token,
    forward_bytes,
    forward_flops,
    parameter_counts,
    step_bytes,
    step_flops,
    training_flops_per_token,
    training_memory,
)

DECODE_LENGTHS = (4096, 65536)
"""Lengths, besides the training length, for which the decode cache is shown."""


def describe_config(config: Config, path: str) -> str:
    """The whole report."""
    together = _together(config)
    sections = (
        f"config: {path}\n{_settings(config)}",
        f"parameters\n{_parameters(config)}",
        f"{_step(config)}",
        f"cost by part (token: forward; step: forward and backward, {together})\n{_costs(config)}",
        f"training, per token\n{_beside_dense(config)}",
        f"training memory on one rank (estimate)\n{_shares(training_memory(config), _bytes)}",
        *_mesh(config),
        f"decoding one sequence: tokens read per KV head, and cache\n{_decode(config)}",
    )
    return "\n\n".join(sections)


# --- one function per section of the report ---


def _settings(config: Config) -> str:
    rows = [
        (f"  {group}.{key}", yaml_value(value))
        for group, keys in to_container(config).items()
        for key, value in keys.items()
    ]
    return text_table(rows)


def _parameters(config: Config) -> str:
    return _shares(parameter_counts(config), lambda count: f"{count:,}")


def _step(config: Config) -> str:
    train, whose = config.train, "per rank" if config.runtime.sharing == 1 else _together(config)
    tokens = train.batch_size * train.accumulate_grad_batches * train.seq_len
    return (
        f"tokens per step: {tokens:,} {whose} = batch_size {train.batch_size} "
        f"x accumulate_grad_batches {train.accumulate_grad_batches} x seq_len {train.seq_len}\n"
        f"tokens in {train.steps:,} steps: {tokens * train.steps:,} {whose}"
    )


def _together(config: Config) -> str:
    """Who does the work of a batch."""
    sharing = config.runtime.sharing
    return "one rank" if sharing == 1 else f"of the {sharing} ranks that share rows"


def _mesh(config: Config) -> list[str]:
    """The ranks that share rows, and what each receives from the others; none without them."""
    cp, tp, sharing = config.runtime.cp, config.runtime.tp, config.runtime.sharing
    if sharing == 1:
        return []
    from nsa.parallel.traffic import step_traffic  # needs torch

    received = step_traffic(config, sharing)
    return [
        f"ranks that share rows: {sharing}; cp {cp}: {config.train.seq_len // cp:,} tokens of a "
        f"row each; tp {tp}: {config.model.n_kv_groups // tp} KV heads each\n"
        f"received by a rank in a step, if these are all\n{_shares(received, _bytes)}"
    ]


def _costs(config: Config) -> str:
    seq_len = config.train.seq_len
    columns = (
        _per_token(forward_flops(config), seq_len),
        step_flops(config),
        _per_token(forward_bytes(config), seq_len),
        step_bytes(config),
    )
    rows = [("  part", "FLOPs/token", "FLOPs/step", "bytes/token", "bytes/step")]
    for part in columns[1]:  # a step has all parts, and perhaps the loss of indexers
        rows.append(_cost_row(part, *(column.get(part, 0) for column in columns)))
    rows.append(_cost_row("total", *(sum(column.values()) for column in columns)))
    return text_table(rows, right=(1, 2, 3, 4))


def _beside_dense(config: Config) -> str:
    """FLOPs per token of a training step, compared with dense causal attention."""
    ours = sum(training_flops_per_token(config).values())
    dense = sum(dense_training_flops_per_token(config).values())
    return f"  {_flops(ours)}; with dense causal attention {_flops(dense)} ({ours / dense:.2f}x)"


def _cost_row(part: str, *costs: float) -> tuple[str, str, str, str, str]:
    flops_token, flops_step, bytes_token, bytes_step = costs
    return (
        f"  {part}",
        _flops(flops_token),
        _flops(flops_step),
        _bytes(bytes_token),
        _bytes(bytes_step),
    )


def _per_token(costs: dict[str, int], seq_len: int) -> dict[str, float]:
    return {part: cost / seq_len for part, cost in costs.items()}


def _decode(config: Config) -> str:
    branches = tuple(decode_reads(config, 1))
    header = ("  length", *branches, "reads", "dense reads", "cache", "dense cache")
    rows: list[tuple[str, ...]] = [header]
    # A set: the training length may be one of the others.
    for length in sorted({config.train.seq_len, *DECODE_LENGTHS}):
        reads = decode_reads(config, length)
        rows.append(
            (
                f"  {length}",
                *(str(count) for count in reads.values()),
                str(sum(reads.values())),
                str(length),
                _bytes(sum(cache_bytes(config, length).values())),
                _bytes(dense_cache_bytes(config, length)),
            )
        )
    return text_table(rows, right=range(1, len(header)))


def _shares(parts: dict[str, int], as_text: Callable[[float], str]) -> str:
    total = sum(parts.values())
    rows = [(f"  {part}", as_text(size), f"{size / total:.1%}") for part, size in parts.items()]
    return text_table([*rows, ("  total", as_text(total), "")], right=(1, 2))


# --- numbers with units: FLOPs in powers of 1000, bytes in powers of 1024 ---


def _flops(count: float) -> str:
    return _scaled(count, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _bytes(count: float) -> str:
    return _scaled(count, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(count: float, step: float, units: tuple[str, ...]) -> str:
    """A number with the largest unit that keeps it at 1 or above."""
    for unit in units[:-1]:
        if count < step:
            return f"{count:.4g} {unit}"
        count /= step
    return f"{count:.4g} {units[-1]}"
