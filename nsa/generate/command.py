"""`nsa generate`: read prompts, load a model, print the texts; under torchrun on all ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch

from nsa.config import Config, DataConfig, RuntimeConfig
from nsa.config.env import read
from nsa.data import Tokenizer, open_tokenizer
from nsa.generate.complete import Completion, Completions, Limits
from nsa.generate.decode import Sampling
from nsa.model import TinyLM
from nsa.train import load_model
from nsa.train.checkpoint.model_file import find_model
from nsa.train.runtime import Runtime, resolve_runtime

STDIN = "-"
NO_MEMORY = "can't allocate memory"
"""Part of torch's CPU out-of-memory message, which has no exception type of its own."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""


def run(args: argparse.Namespace) -> int:
    """Continue the given prompts; bad arguments are reported before the model is loaded."""
    sampling = Sampling(
        temperature=0.0 if args.greedy else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    limits = Limits(
        max_new_tokens=args.max_new_tokens,
        max_len=args.max_len,
        stops=tuple(args.stop or ()),
        ignore_eos=args.ignore_eos,
        batch_size=args.batch_size,
    )
    if read("WORLD_SIZE") > 1:
        return _run_on_ranks(args, sampling, limits)
    prompts = read_prompts(args, limits)
    return _answer(args, prompts, limits, lambda: _load(args, sampling, limits))


def _run_on_ranks(args: argparse.Namespace, sampling: Sampling, limits: Limits) -> int:
    """Under torchrun: all ranks read parts of the prompts, rank 0 decodes and prints."""
    # Imported here: a single process starts a second earlier without them.
    from torch.distributed.device_mesh import init_device_mesh

    from nsa.generate.ranks import RankPrefill
    from nsa.train.distributed.process_group import open_ranks
    from nsa.train.distributed.strategy import AUTO, mark_shared

    loaded = load_model(find_model(Path(args.model)))
    config = replace(loaded[1], runtime=_runtime(args, loaded[1].runtime))
    with open_ranks(AUTO, config, lambda text: print(text, file=sys.stderr)) as ranks:
        device = ranks.assign_device(config.runtime).device
        completions, runtime = _load(args, sampling, limits, loaded, device)
        mesh = init_device_mesh(runtime.device.type, (ranks.world_size,), mesh_dim_names=("cp",))
        prefill = completions.prefill = RankPrefill(completions.model, mesh["cp"])
        if not ranks.is_first:
            with runtime.sdpa_kernels():
                prefill.follow()
            return 0
        try:
            # Read by one rank: all have the same stdin.
            prompts = read_prompts(args, limits)
            return _answer(args, prompts, limits, lambda: (completions, runtime))
        except ValueError as error:
            mark_shared(error)  # the others end, too, and wait for this rank
            raise
        finally:
            prefill.dismiss()


def _answer(
    args: argparse.Namespace,
    prompts: list[str],
    limits: Limits,
    load: Callable[[], tuple[Completions, Runtime]],
) -> int:
    """Complete the prompts and print the texts; the exit code."""
    try:
        completions, runtime = load()
        with runtime.sdpa_kernels():
            _complete(args, prompts, completions)
    except KeyboardInterrupt:  # Ctrl-C is how a user stops a long text
        _write("\n")
        return INTERRUPTED
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error):
            raise ValueError(_no_room(prompts, limits)) from None
        raise
    return 0


def _complete(args: argparse.Namespace, prompts: list[str], completions: Completions) -> None:
    if args.json:
        for completion in completions.complete(prompts):
            _write(json.dumps(completion.as_json(), ensure_ascii=False) + "\n")
    elif args.prompts or args.no_stream:
        _write_all(completions.complete(prompts), args.echo)
    else:
        _write(prompts[0] if args.echo else "")
        completions.complete(prompts, show=_write)
        _write("\n")


def _no_room(prompts: list[str], limits: Limits) -> str:
    return (
        f"out of memory for the model and the caches of {len(prompts)} prompts, "
        f"--batch-size {limits.batch_size} at a time, with {limits.max_new_tokens} new tokens; use "
        "a smaller --batch-size or --max-new-tokens, a shorter prompt, or --precision bf16"
    )


def read_prompts(args: argparse.Namespace, limits: Limits) -> list[str]:
    """The prompt from the command line, a file or stdin; or one prompt per line of a file."""
    given = [source for source in (args.prompt, args.file, args.prompts) if source is not None]
    if len(given) > 1:
        raise ValueError(
            f"{len(given)} prompt sources given; use one of PROMPT, --file and --prompts"
        )
    if args.prompts is not None:
        return _read_lines(args.prompts, limits.max_prompt_bytes)
    if args.prompt is not None and args.prompt != STDIN:
        return [args.prompt]
    return [_read(args.file or STDIN, limits.max_prompt_bytes)]


def _read(source: str, limit: int) -> str:
    """Read one prompt of at most `limit` bytes."""
    with _opened(source) as (file, name):
        return _decode(file.read(limit + 1), limit, name)


def _read_lines(source: str, limit: int) -> list[str]:
    """Read one prompt per line, each of at most `limit` bytes."""
    prompts: list[str] = []
    with _opened(source) as (file, name):
        # Only "\n" separates prompts: splitlines would also split at U+2028 and form feeds.
        for line in iter(lambda: file.readline(limit + len("\r\n") + 1), b""):
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            prompts.append(_decode(content, limit, f"{name}, line {len(prompts) + 1}"))
    return prompts or [""]


def _decode(content: bytes, limit: int, name: str) -> str:
    if len(content) > limit:
        raise ValueError(
            f"{name} has more than {limit:,} bytes, which cannot fit the cache; shorten it, or "
            "set a larger --max-len"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte {content[error.start]:#04x} at {error.start}; prompts "
            "must be UTF-8; convert it"
        ) from None


@contextmanager
def _opened(source: str) -> Iterator[tuple[BinaryIO, str]]:
    """The file and its name in messages."""
    name = "stdin" if source == STDIN else source
    try:
        if source == STDIN:
            yield sys.stdin.buffer, name
            return
        with Path(source).open("rb") as file:
            yield file, name
    except OSError as error:
        raise ValueError(
            f"{name} cannot be read ({error.strerror}); use a readable text file"
        ) from None


def _load(
    args: argparse.Namespace,
    sampling: Sampling,
    limits: Limits,
    loaded: tuple[TinyLM, Config] | None = None,
    device: str = "",
) -> tuple[Completions, Runtime]:
    """The model, from its file unless it is loaded, on the device of the flags unless named."""
    model, config = loaded or load_model(find_model(Path(args.model)))
    heads = (config.model.d_k, config.model.d_v)
    wanted = _runtime(args, config.runtime)
    wanted = replace(wanted, device=device or wanted.device)
    runtime = resolve_runtime(wanted, heads, config.model.attention_kind)
    # bf16 on a CPU is slow and less exact, so the config's choice for a GPU does not apply.
    precision = args.precision or ("fp32" if runtime.device.type == "cpu" else runtime.precision)
    runtime = replace(runtime, precision=precision)
    model = model.to(device=runtime.device, dtype=runtime.dtype)
    return Completions(model, _tokenizer(args, config), sampling, limits), runtime


def _runtime(args: argparse.Namespace, config: RuntimeConfig) -> RuntimeConfig:
    """The config's runtime on the requested device, without training-only settings."""
    return RuntimeConfig(
        device=args.device,
        precision=args.precision or config.precision,
        backend=config.backend,
        use_flash=config.use_flash,
    )


def _tokenizer(args: argparse.Namespace, config: Config) -> Tokenizer:
    """The model's tokenizer; flags can name another one or the new path of its files."""
    data = config.data
    name = args.tokenizer or data.tokenizer
    same = name == data.tokenizer
    path = args.tokenizer_path or (data.tokenizer_path if same else "")
    eos = data.eos if same or name == "hf" or name.endswith(".json") else ""
    return open_tokenizer(DataConfig(tokenizer=name, tokenizer_path=path, eos=eos))


def _write_all(completions: list[Completion], echo: bool) -> None:
    for completion in completions:
        _write(f"{completion.prompt if echo else ''}{completion.text}\n")


def _write(text: str) -> None:
    """Write UTF-8 whatever the locale says, and flush."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
    sys.stdout.buffer.flush()
