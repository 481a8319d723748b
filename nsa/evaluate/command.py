"""`nsa eval`: measure a model, print what was found, write eval.json and its pictures."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nsa.config import DataConfig, RuntimeConfig
from nsa.config.describe import install_line
from nsa.data import Tokenizer, open_tokenizer
from nsa.data.documents import read_documents, read_works, split_works
from nsa.evaluate.grid import count_answers
from nsa.evaluate.needles import Haystack, Ids
from nsa.evaluate.perplexity import measure
from nsa.evaluate.results import Evaluation, write_evaluation
from nsa.evaluate.tasks import check_tasks, run_tasks
from nsa.model import TinyLM
from nsa.model.folder import is_folder
from nsa.train import load_model
from nsa.train.checkpoint.model_file import find_model, weights_sha256
from nsa.train.runtime import Runtime, resolve_runtime

LENGTHS: tuple[int, ...] = (512, 1024, 2048)
"""Of a model folder, which does not say how long its training rows were."""
SHORTER = (4, 2, 1)
"""Lengths of another model: that of its training rows, divided by these."""


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated."""

    model: TinyLM
    tokenizer: Tokenizer
    runtime: Runtime
    lengths: tuple[int, ...]
    """Where the caller names none."""


def run(args: argparse.Namespace) -> int:
    """Measure what was asked for; bad arguments are reported before the model is loaded."""
    path, out = Path(args.model), Path(args.out)
    names = [name for given in args.tasks or () for name in given.split(",") if name]
    if names:
        check_tasks(path, args.tasks_dir)
    elif args.tasks_dir is not None:
        raise ValueError("--tasks-dir without --tasks names no task; add --tasks NAME")
    if args.no_perplexity and args.no_needle and not names:
        raise ValueError("nothing is left to measure; drop --no-perplexity or --no-needle")
    out.mkdir(parents=True, exist_ok=True)
    found = Evaluation(model=str(path), weights=None, settings={"seed": args.seed})
    if not (args.no_perplexity and args.no_needle):
        _measure_model(args, path, found)
        write_evaluation(out, found)  # a task that fails does not lose it
    if names:
        found.settings["limit"] = args.limit
        with _timed(found, "tasks"):
            found.tasks = run_tasks(
                path, names, tasks_dir=args.tasks_dir, limit=args.limit, seed=args.seed,
                device=_device(args), dtype=DTYPES[args.precision or "fp32"],
            )  # fmt: skip
    written = [write_evaluation(out, found), *_pictures(out, found)]
    print(describe(found))
    for file in written:
        print(f"wrote {file}")
    return 0


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _measure_model(args: argparse.Namespace, path: Path, found: Evaluation) -> None:
    subject = load(args, path)
    lengths = sorted(set(args.lengths or subject.lengths))
    ids = read_text(args.text, subject.tokenizer)
    found.weights = weights_sha256(subject.model.state_dict())
    found.settings |= {"text": str(args.text or "held-out works of the package"), "way": args.way}
    found.settings |= {"tokens": args.tokens, "trials": args.trials, "precision": args.precision}
    runtime = subject.runtime
    subject.model.to(runtime.device)
    if not args.no_perplexity:
        with _timed(found, "perplexity"):
            perplexity = measure(
                subject.model, ids, lengths, num_tokens=args.tokens, bins=args.bins,
                batch_tokens=args.batch_tokens, compute=runtime.compute,
            )  # fmt: skip
        found.perplexity = asdict(perplexity)
    if not args.no_needle:
        with _timed(found, "needle"), runtime.compute():
            found.needle = _ask(args, subject, ids, lengths)


def _ask(
    args: argparse.Namespace, subject: Subject, ids: Ids, lengths: list[int]
) -> dict[str, Any]:
    hay = Haystack(subject.tokenizer, ids, args.seed)
    if not args.lengths:  # by default no context that is too short for a needle
        lengths = [n for n in lengths if n >= hay.least_length()] or lengths[-1:]
    depths = np.linspace(0, 1, args.depths).round(4).tolist()
    counts = [
        count_answers(
            subject.model, hay.documents(length, depths, args.trials), depths,
            way=args.way, batch=max(1, args.batch_tokens // length),
        )
        for length in lengths
    ]  # fmt: skip
    return {
        "lengths": lengths,
        "depths": depths,
        "way": args.way,
        "right": [count.right for count in counts],
        "asked": [count.asked for count in counts],
    }


def load(args: argparse.Namespace, path: Path) -> Subject:
    """The model of a folder, a model.pt, a checkpoint or a run folder, with its tokenizer."""
    model, config = load_model(find_model(path))
    heads, kind = (config.model.d_k, config.model.d_v), config.model.attention_kind
    rows = tuple(max(1, config.train.seq_len // part) for part in SHORTER)
    chosen = config.runtime
    precision = args.precision or ("fp32" if _device(args) == "cpu" else chosen.precision)
    wanted = RuntimeConfig(
        device=args.device, precision=precision, backend=chosen.backend, use_flash=chosen.use_flash
    )
    tokenizer, vocab = _tokenizer(args, config.data), model.embed.weight.shape[0]
    # A file may have fewer ids than the model has rows, which are often a round number.
    guessed = args.tokenizer is None and tokenizer.name != "hf" and tokenizer.vocab != vocab
    if tokenizer.vocab > vocab or guessed:
        raise ValueError(
            f"the tokenizer ({tokenizer.name}) has {tokenizer.vocab} ids and the model {vocab}; "
            "they must be of one vocabulary: name the model's own by --tokenizer"
        )
    lengths = LENGTHS if is_folder(path) else rows
    return Subject(model, tokenizer, resolve_runtime(wanted, heads, kind), lengths)


def _device(args: argparse.Namespace) -> str:
    if args.device != "auto":
        return str(args.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _tokenizer(args: argparse.Namespace, data: DataConfig) -> Tokenizer:
    """The model's own, or what the flags name."""
    if args.tokenizer is None and args.tokenizer_path is None:
        return open_tokenizer(data)
    name = args.tokenizer or data.tokenizer
    return open_tokenizer(DataConfig(tokenizer=name, tokenizer_path=args.tokenizer_path or ""))


def read_text(source: Path | None, tokenizer: Tokenizer) -> Ids:  # [tokens]
    """The tokens of all documents; without a source, of the works that training holds out."""
    if source is None:
        texts = split_works(read_works().values()).val
    else:
        texts = [document.text for document in read_documents(source)]
    parts = [tokenizer.encode(text).astype(np.int64) for text in texts]
    if not sum(map(len, parts)):
        raise ValueError(f"{source} has no text; some is needed: name another file or folder")
    return np.concatenate(parts)


@contextmanager
def _timed(found: Evaluation, part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    found.seconds[part] = round(time.perf_counter() - start, 3)


def _pictures(out: Path, found: Evaluation) -> list[Path]:
    if found.needle is None and found.perplexity is None:
        return []
    if find_spec("matplotlib") is None:
        print(f"no picture: matplotlib is not installed; `{install_line('plot')}` adds it")
        return []
    from nsa.evaluate.pictures import draw

    return draw(out, found)


def describe(found: Evaluation) -> str:
    """What was found, for people."""
    lines = [f"model {found.model}"]
    if found.perplexity is not None:
        part = found.perplexity
        lines.append(
            f"perplexity {np.exp(part['loss']):.3f} on {part['rows'] * part['length']} tokens, "
            f"rows of {part['length']}"
        )
        ends = zip([0, *part["until"]], part["until"], part["loss_at"], strict=False)
        lines += [f"  tokens {a} to {b}: {np.exp(loss):.3f}" for a, b, loss in ends]
        lines.append(f"the last {part['targets']} tokens of each row, by context")
        by = zip(part["lengths"], part["loss_of"], strict=True)
        lines += [f"  {length} tokens: {np.exp(loss):.3f}" for length, loss in by]
    if found.needle is not None:
        part = found.needle
        lines.append(f"needles found, {part['way']}, by context")
        rows = zip(part["lengths"], part["right"], part["asked"], strict=True)
        lines += [f"  {n} tokens: {sum(r)} of {sum(a)}" for n, r, a in rows]
    for name, metrics in found.tasks.items():
        values = ", ".join(f"{key} {value}" for key, value in metrics.items())
        lines.append(f"{name}: {values}")
    return "\n".join(lines)
