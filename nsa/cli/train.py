"""`nsa train`, `generate`, `sparsify`, `prove-resume` and `checkpoint`.

scripts/train_showcase.py shares the flags and the call of `train`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nsa.cli.settings import add_config_flags, load
from nsa.config import Config, load_config
from nsa.config.env import check_environment, in_effect, read
from nsa.config.load import DEFAULT, bundled_names

KEYS = {
    "dataset": "data.dataset",
    "precision": "runtime.precision",
    "seq_len": "train.seq_len",
    "batch_size": "train.batch_size",
    "accum_batches": "train.accumulate_grad_batches",
    "out_dir": "train.out_dir",
    "local_path": "data.local_path",
    "init_from": "train.init_from",
    "strategy": "runtime.strategy",
}
"""Flags that set a config key."""


def register(commands: Any) -> None:
    """Add the commands to the `nsa` parser."""
    text = "train a model"
    parser = commands.add_parser("train", help=text, description=text)
    add_train_flags(parser)
    parser.set_defaults(command=lambda args: train(args, "nsa"))
    text = "generate text with a trained model"
    parser = commands.add_parser("generate", help=text, description=text)
    _add_generate_flags(parser)
    parser.set_defaults(command=_generate)
    text = "convert a dense model, pretrained or our own, into a sparse one"
    parser = commands.add_parser("sparsify", help=text, description=text)
    _add_sparsify_flags(parser)
    parser.set_defaults(command=_sparsify)
    text = "train once without a stop and once with a resume, and check that both are bitwise equal"
    parser = commands.add_parser("prove-resume", help=text, description=text)
    add_config_flags(parser)
    parser.add_argument(
        "--out-dir", required=True, metavar="DIR", help="folder for both runs and the proof"
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps in total (8)")
    parser.add_argument(
        "--stop-at",
        type=int,
        metavar="N",
        help="step to stop and resume at; default: half of --steps",
    )
    parser.set_defaults(command=_prove_resume)
    _add_checkpoint_commands(commands)


# --- train ---


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the trainer."""
    add_config_flags(parser)
    add = parser.add_argument
    add(
        "--steps",
        type=_count,
        metavar="N",
        help="stop after N steps; fewer than train.steps keep the LR schedule",
    )
    for flag, key in KEYS.items():
        add(f"--{flag.replace('_', '-')}", help=f"sets {key}")
    add("--no-gc", action="store_true", help="turn gradient checkpointing off")
    add("--save", type=Path, metavar="FILE", help="final weights; default: <out_dir>/model.pt")
    add(
        "--resume",
        default="auto",
        metavar="PATH|latest|none",
        help="default: the newest checkpoint in <out_dir>, if it belongs to the same run; none "
        "starts from scratch and moves the old files to previous/; overrides --init-from",
    )
    ddp = "distributed training: -1 if WORLD_SIZE is above 1, 0 never, 1 always (-1)"
    add("--ddp", type=int, choices=(-1, 0, 1), default=-1, help=ddp)
    timeout = "timeout for the first batch of a stream"
    add("--loader-timeout", type=_seconds, metavar="SECONDS", help=timeout)
    add(
        "--synthetic-on-fail",
        action="store_true",
        help="fall back to random tokens if a stream does not start",
    )
    documents = "log a line every N documents of a stream"
    add("--fwe-report-docs", type=_count, metavar="N", help=documents)
    allow = "allow a long run without checkpoints, or without an explicit config"
    add("--allow-long-run", action="store_true", help=allow)


def train(args: argparse.Namespace, program: str, default: str = DEFAULT) -> int:
    """Train as configured by the flags of `add_train_flags`; returns the exit code.

    `default` is the config of a command that names none.
    """
    check_environment()
    named = args.config or read("CONFIG")
    path = named or default
    config = _resolve(path, args)
    if not named and default == DEFAULT and read("RANK") == 0:
        others = ", ".join(name for name in bundled_names() if name != default)
        print(
            f"[boot] no --config given, training the bundled {default}; others: "
            f"--config NAME ({others}), or a file: --config ./my.yaml"
        )
    for name, value in in_effect().items() if read("RANK") == 0 else ():
        print(f"[boot] environment: {name}={value}")
    # torch is imported only after the config is valid, so that bad input fails at once.
    from nsa.generate import sample_text
    from nsa.train import LoaderOptions, TrainError, run
    from nsa.train.distributed.strategy import speaks_for_all

    given = {"timeout_s": args.loader_timeout, "report_docs": args.fwe_report_docs}
    given = {key: x for key, x in given.items() if x is not None}
    try:
        run(
            config,
            config_path=path,
            config_named=bool(named),
            allow_long_run=args.allow_long_run,
            stop_after=args.steps,
            model_path=args.save,
            sampler=sample_text,
            resume=args.resume,
            loader=LoaderOptions(synthetic_on_fail=args.synthetic_on_fail, **given),
            ddp=args.ddp,
        )
    except TrainError as error:
        # Rank 0 prints an error that all ranks share; any other error is printed by its own rank.
        if speaks_for_all(error):
            print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _resolve(path: str, args: argparse.Namespace) -> Config:
    overrides = [f"{key}={getattr(args, f)}" for f, key in KEYS.items() if getattr(args, f)]
    if args.no_gc:
        overrides += ["runtime.gradient_checkpointing=false", "runtime.gc_layers="]
    overrides += args.overrides
    config = load_config(path, overrides)
    # More steps than configured: lengthen the LR schedule too, instead of running past its end.
    if args.steps and args.steps > config.train.steps:
        print(
            f"[boot] --steps {args.steps} is more than train.steps={config.train.steps}; both "
            f"the run and its LR schedule are now {args.steps} steps long"
        )
        config = load_config(path, [*overrides, f"train.steps={args.steps}"])
    return config


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1; use one")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0; use one")
    return seconds


# --- generate, sparsify and prove-resume ---


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue; - or nothing: read stdin")
    where = "model.pt, a checkpoint, or a run folder"
    add("--model", metavar="PATH", help=f"{where}; default: the newest of {' and '.join(RUNS)}")
    add("--file", metavar="FILE", help="read one prompt from a file; -: stdin")
    add("--prompts", metavar="FILE", help="read one prompt per line; -: stdin")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate (128)")
    add(
        "--max-len", type=int, default=65536, metavar="N", help="limit for prompt plus text (65536)"
    )
    add("--greedy", action="store_true", help="most likely token, same as --temperature 0")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely (0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (1: off)")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="(1: off)")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    add("--stop", action="append", metavar="TEXT", help="stop before this text; can be repeated")
    add("--ignore-eos", action="store_true", help="continue after the end of a document")
    add("--batch-size", type=int, default=32, metavar="N", help="prompts per batch (32)")
    add(
        "--tokenizer",
        metavar="NAME",
        help="byte, gpt2, hf or a tokenizer.json; default: the model's",
    )
    add("--tokenizer-path", metavar="PATH", help="as data.tokenizer_path, with --tokenizer")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    precision = "of weights and cache; default: fp32 on cpu, the config's on cuda"
    add("--precision", choices=["fp32", "bf16", "fp16"], help=precision)
    add("--echo", action="store_true", help="print the prompt too")
    add("--no-stream", action="store_true", help="print the text only when it is complete")
    add(
        "--json", action="store_true", help="one JSON object per line: prompt, text, tokens, finish"
    )


def _generate(args: argparse.Namespace) -> int:
    check_environment()
    args.model = args.model or _newest_model()
    from nsa.generate.command import run

    return run(args)


RUNS = ("artifacts/quickstart", "artifacts/train_showcase")
"""Run folders of the default configs."""


def _newest_model() -> str:
    """The default run with the newest model; the first of RUNS if none has one."""
    models = [path for path in (Path(run) / "model.pt" for run in RUNS) if path.is_file()]
    return str(max(models, key=lambda path: path.stat().st_mtime).parent) if models else RUNS[0]


def _add_sparsify_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "a folder of a Llama, Qwen2 or Qwen3 (config.json, safetensors), or a dense model.pt"
    add("source", type=Path, metavar="SRC", help=source)
    add("target", type=Path, metavar="DST", help="a new or empty folder")
    rules = ("pooled", "msa", "nsa")
    add("--rule", required=True, choices=rules, help="how blocks are chosen; K and V are shared")
    layers = "layers that become sparse, as 2,5:8; the others stay dense; default: all"
    add("--layers", default="", metavar="LIST", help=layers)
    add("--set", action="append", metavar="nsa.key=value", help="set a key of group nsa")


def _sparsify(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.train.sparsify import sparsify

    given = {"rule": args.rule, "layers": args.layers, "overrides": args.set or ()}
    sparsify(args.source, args.target, **given)
    return 0


def _prove_resume(args: argparse.Namespace) -> int:
    path, config = load(args)
    from nsa.train.prove_resume import prove_resume

    folder, steps = Path(args.out_dir), args.steps
    stop_at = steps // 2 if args.stop_at is None else args.stop_at
    holds = prove_resume(config, path, folder, steps, stop_at)
    verdict = "bitwise equal" if holds else "NOT equal"
    print(f"{steps} steps, without a stop and resumed at {stop_at}: {verdict}; proof in {folder}")
    return 0 if holds else 1


# --- checkpoint ---


def _add_checkpoint_commands(commands: Any) -> None:
    text = "verify, show, copy or convert checkpoints"
    parser = commands.add_parser("checkpoint", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in (
        ("verify", "check checkpoints against their manifests; exit code 1 on a mismatch"),
        ("show", "summarize a checkpoint"),
        ("backup", "copy a checkpoint to another folder, and verify the copy"),
        ("export", "write the weights as safetensors"),
        ("convert", "convert between a single file and a folder of shards"),
    ):
        parsed = actions.add_parser(name, help=text, description=text)
        parsed.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a run folder")
        if name == "convert":
            named = "a new checkpoint_step{N}.pt or checkpoint_step{N}"
            parsed.add_argument("to", type=Path, metavar="DST", help=named)
        if name == "backup":
            parsed.add_argument("--to", type=Path, required=True, metavar="PATH")
        if name == "export":
            kind = parsed.add_mutually_exclusive_group(required=True)
            kind.add_argument("--to", type=Path, metavar="PATH", help="a file of the weights")
            named = "a folder for transformers, with config and tokenizer"
            kind.add_argument("--hf", type=Path, metavar="DIR", help=named)
        parsed.set_defaults(command=_checkpoint, action=name)


def _checkpoint(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.train.checkpoint import commands

    if args.action == "export" and args.hf is not None:
        return commands.export_hf(args.path, args.hf)
    paths = [args.path, args.to] if args.action in ("backup", "export", "convert") else [args.path]
    code: int = getattr(commands, args.action)(*paths)
    return code
