"""`nsa eval`: its flags. What runs is nsa/evaluate/command.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nsa.config.env import check_environment

OUT = "artifacts/eval"


def register(commands: Any) -> None:
    """Add the command to the `nsa` parser."""
    text = "perplexity by position and context, needle grid and lm-eval tasks of a model"
    parser = commands.add_parser("eval", help=text, description=text)
    add = parser.add_argument
    add("model", metavar="MODEL", help="model.pt, a checkpoint, a run folder or a model folder")
    add("--out", default=OUT, metavar="DIR", help=f"of eval.json and the pictures ({OUT})")
    text = "a file or folder of text; default: what training holds out of the package's own corpus"
    add("--text", type=Path, metavar="PATH", help=text)
    text = "contexts in tokens, as 512,1024; default: training rows and a half and a quarter"
    add("--lengths", type=_lengths, metavar="N,N", help=text)
    _add_sizes(parser)
    add("--no-perplexity", action="store_true", help="measure no perplexity")
    add("--no-needle", action="store_true", help="ask for no needles")
    text = "lm-eval tasks, as A,B; can be repeated; MODEL is a model folder"
    add("--tasks", action="append", metavar="NAME", help=text)
    add("--tasks-dir", type=Path, metavar="DIR", help="YAML files of further tasks")
    add("--limit", type=_count, metavar="N", help="examples of each task; default: all")
    text = "byte, gpt2, hf or a tokenizer.json; default: the model's"
    add("--tokenizer", metavar="NAME", help=text)
    add("--tokenizer-path", metavar="PATH", help="as data.tokenizer_path, with --tokenizer")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    text = "of the products; default: fp32 on cpu, the config's on cuda"
    add("--precision", choices=["fp32", "bf16", "fp16"], help=text)
    parser.set_defaults(command=_eval)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=_count, default=65536, metavar="N", help="of the perplexity (65536)")
    add("--bins", type=_count, default=16, metavar="N", help="parts of a row, by position (16)")
    add("--depths", type=_count, default=11, metavar="N", help="depths of a needle (11)")
    add("--trials", type=_count, default=4, metavar="N", help="needles at each depth (4)")
    text = "forward: one pass over a context; decode: prefill and steps on the cache (forward)"
    add("--way", choices=["forward", "decode"], default="forward", help=text)
    text = "tokens that go through the model at once, at least a row (16384)"
    add("--batch-tokens", type=_count, default=16384, metavar="N", help=text)
    add("--seed", type=int, default=0, metavar="N", help="same seed, same needles (0)")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1; use one")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _eval(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.evaluate.command import run

    return run(args)
