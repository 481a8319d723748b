"""The console command `nsa`: settings, sizes, plan, training, text, checkpoints, operation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import nsa
from nsa.cli.flags import (
    add_dashboard_flags,
    add_handoff_flags,
    add_launch_flags,
    add_monitor_flags,
    add_preflight_flags,
    add_report_flags,
    add_triage_flags,
    add_watch_flags,
)
from nsa.config import BAD_INPUT, INTERRUPTED, Config, DataConfig, StrictParser, load_config
from nsa.config.describe import (
    key_markdown,
    key_rows,
    text_table,
    variable_markdown,
    variable_rows,
)
from nsa.config.env import check_environment, in_effect, raw, read, translate_torch_logs
from nsa.files import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2."""
    args = _parser().parse_args(argv)
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    return in_sentences("nsa", lambda: int(args.command(args)))


def in_sentences(program: str, command: Callable[[], int]) -> int:
    """Run a command; what a user or the system can make go wrong is a line, and no traceback."""
    try:
        code = command()
        sys.stdout.flush()
    except ValueError as error:  # bad input, by the convention of this package
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # a run that trains handles it itself
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written, a disk that is full
        print(f"{program}: error: {explain(error)}", file=sys.stderr)
        return BAD_INPUT
    return code


def entry() -> NoReturn:
    """Be the command: run, and end the process with the exit code."""
    translate_torch_logs()
    code = main()
    if "nsa.data" not in sys.modules:  # nothing was read that could hang
        sys.exit(code)
    from nsa.data import end_process

    end_process(code)


def subcommands() -> list[str]:
    """Names of the commands, as in `nsa NAME`."""
    (action,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return list(action.choices)


def _parser() -> StrictParser:
    parser = StrictParser(prog="nsa", description="Native Sparse Attention: train and inspect.")
    parser.add_argument("--version", action="version", version=f"nsa {nsa.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("env", _env, "list the environment variables and their values"),
        ("keys", _keys, "list the config keys and their defaults"),
    ):
        listing = commands.add_parser(name, help=text, description=text)
        listing.add_argument("--markdown", action="store_true", help="as in the documentation")
        listing.set_defaults(command=command)
    for name, command, text in (
        ("info", _info, "print a config and what it costs: parameters, FLOPs, bytes, memory"),
        ("plan", _plan, "print which attention backend would run here, and why"),
        ("train", _train, "train a model"),
    ):
        parsed = commands.add_parser(name, help=text, description=text)
        parsed.add_argument("--config", metavar="FILE", help="default: the variable CONFIG")
        parsed.add_argument("overrides", nargs="*", metavar="group.key=value")
        parsed.set_defaults(command=command)
        if name == "train":
            parsed.add_argument(
                "--allow-long-run",
                action="store_true",
                help="start a long run without checkpoints or with a config that nobody named",
            )
            parsed.add_argument(
                "--resume",
                default="auto",
                metavar="PATH|latest|none",
                help="default: the newest checkpoint in train.out_dir, if it is of the same run; "
                "none starts over, and moves the old files to previous/",
            )
    text = "continue a text with a trained model"
    _add_generate(commands.add_parser("generate", help=text, description=text))
    _add_data_commands(commands.add_parser("data", help="prepare and check token shards"))
    text = "verify, show, copy or convert checkpoints"
    _add_checkpoint_commands(commands.add_parser("checkpoint", help=text, description=text))
    text = "train in one piece and in two, and show that both are equal bit by bit"
    prove = commands.add_parser("prove-resume", help=text, description=text)
    prove.add_argument("--config", metavar="FILE", help="default: the variable CONFIG")
    prove.add_argument("--out-dir", required=True, metavar="DIR", help="for both runs, the proof")
    prove.add_argument("--steps", type=int, default=8, metavar="N", help="of the whole run (8)")
    prove.add_argument("--stop-at", type=int, metavar="N", help="default: half of the steps")
    prove.add_argument("overrides", nargs="*", metavar="group.key=value")
    prove.set_defaults(command=_prove_resume)
    _add_operate_commands(commands)
    return parser


def _add_operate_commands(commands: Any) -> None:
    """What plans, starts, watches, shows, judges and hands over runs."""
    for name, add_flags, command, text in (
        ("launch", add_launch_flags, _launch,
         "launch a run by a profile: phase by phase, each judged before the next"),
        ("watch", _add_watch, _watch,
         "judge a run folder from outside, again and again, and stop a run that must be stopped"),
        ("monitor", add_monitor_flags, _monitor,
         "show a run folder: live in a terminal, as lines in a pipe; it only reads"),
        ("triage", add_triage_flags, _triage,
         "switch one thing at a time, in short real runs, until a fault is gone"),
        ("handoff", add_handoff_flags, _handoff,
         "pack what whoever takes over a run needs into one archive, without secrets"),
        ("preflight", add_preflight_flags, _preflight,
         "check a run before it starts: config, machine, kernels, data, checkpoint, time, cost"),
        ("report", add_report_flags, _report,
         "judge a run from its files: each criterion, its evidence; exit code 0 is GO"),
        ("dashboard", add_dashboard_flags, _dashboard,
         "show run folders in a browser, live and side by side; it only reads"),
    ):  # fmt: skip
        parsed = commands.add_parser(name, help=text, description=text)
        add_flags(parsed)
        parsed.set_defaults(command=command)


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    add_watch_flags(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the text; - or nothing reads stdin")
    where = "model.pt, a checkpoint, or a run folder"
    add("--model", default="artifacts/train_showcase", metavar="PATH", help=where)
    add("--file", metavar="FILE", help="a prompt from a file; - is stdin")
    add("--prompts", metavar="FILE", help="a prompt on every line; - is stdin")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(128)")
    add("--max-len", type=int, default=65536, metavar="N", help="prompt and text, most (65536)")
    add("--greedy", action="store_true", help="always the most likely token, as temperature 0")
    add("--temperature", type=float, default=1.0, metavar="T", help="(1)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most likely (all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the fewest with sum P (1)")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="(1: none)")
    add("--seed", type=int, default=0, metavar="N", help="the same seed, the same text (0)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; can be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end of a document")
    add("--batch-size", type=int, default=32, metavar="N", help="prompts at a time (32)")
    add("--tokenizer", metavar="NAME", help="byte, gpt2, hf or a tokenizer.json (the model's)")
    add("--tokenizer-path", metavar="PATH", help="as data.tokenizer_path, beside --tokenizer")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    precision = "of weights and cache (cpu: fp32; cuda: the config's)"
    add("--precision", choices=["fp32", "bf16", "fp16"], help=precision)
    add("--echo", action="store_true", help="print the prompt, too")
    add("--no-stream", action="store_true", help="print the text when it is complete")
    add("--json", action="store_true", help="an object per line: prompt, text, tokens, finish")
    parser.set_defaults(command=_generate)


def _add_checkpoint_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in (
        ("verify", "hold checkpoints to their manifests; exit code 0 or 1"),
        ("show", "print what a checkpoint holds"),
        ("backup", "copy a checkpoint elsewhere, and verify the copy"),
        ("export", "write the weights as safetensors"),
        ("convert", "write a checkpoint as a single file, or as a folder of parts"),
    ):
        parsed = commands.add_parser(name, help=text, description=text)
        parsed.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a run folder")
        if name == "convert":
            named = "a new checkpoint_step{N}.pt or checkpoint_step{N}"
            parsed.add_argument("to", type=Path, metavar="DST", help=named)
        if name in ("backup", "export"):
            parsed.add_argument("--to", type=Path, required=True, metavar="PATH")
        parsed.set_defaults(command=_checkpoint, action=name)


def _add_data_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "tokenize local documents into shards, for data.dataset=shards"
    prepare = commands.add_parser("prepare", help=text, description=text)
    prepare.add_argument("--input", required=True, metavar="PATH", help="as data.local_path")
    prepare.add_argument("--output", required=True, metavar="DIR", help="a new or empty folder")
    prepare.add_argument("--tokenizer", default="byte", help="as data.tokenizer; default: byte")
    prepare.add_argument("--tokenizer-path", default="", metavar="PATH", help="as in the config")
    prepare.add_argument("--eos", default="", metavar="TOKEN", help="as data.eos")
    prepare.add_argument("--shard-tokens", type=int, metavar="N", help="tokens that end a shard")
    workers = "threads that tokenize; any number gives the same shards (1)"
    prepare.add_argument("--workers", type=int, default=1, metavar="N", help=workers)
    prepare.set_defaults(command=_data_prepare)
    for name, command, text in (
        ("verify", _data_verify, "check the size and the hash of every shard; exit code 0 or 1"),
        ("show", _data_show, "print what a folder of shards holds"),
    ):
        parsed = commands.add_parser(name, help=text, description=text)
        parsed.add_argument("folder", metavar="DIR")
        parsed.set_defaults(command=command)


def _env(args: argparse.Namespace) -> int:
    print(variable_markdown() if args.markdown else text_table(variable_rows()))
    check_environment()  # after the table, which shows what is wrong
    return 0


def _keys(args: argparse.Namespace) -> int:
    print(key_markdown() if args.markdown else text_table(key_rows()))
    return 0


def _info(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.cli.info import describe_config  # torch takes seconds: only where it is needed

    print(describe_config(config, path))
    return 0


def _plan(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.train.runtime import resolve_runtime

    runtime = resolve_runtime(
        config.runtime, (config.model.d_k, config.model.d_v), config.model.attention
    )
    print(f"config: {path}")
    print(f"device: {runtime.describe_device()}, precision: {runtime.precision}")
    print(runtime.plan)
    return 0


def _train(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.generate import sample_text
    from nsa.train import TrainError, run
    from nsa.train.distributed.strategy import speaks_for_all

    try:
        run(
            config,
            config_path=path,
            config_named=bool(args.config or raw("CONFIG")),
            allow_long_run=args.allow_long_run,
            sampler=sample_text,
            resume=args.resume,
        )
    except TrainError as error:
        if speaks_for_all(error):
            print(f"nsa: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _generate(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.cli.generate import run

    return run(args)


def _checkpoint(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.cli import checkpoint

    paths = [args.path, args.to] if args.action in ("backup", "export", "convert") else [args.path]
    code: int = getattr(checkpoint, args.action)(*paths)
    return code


def _prove_resume(args: argparse.Namespace) -> int:
    path, config = _load(args)
    from nsa.cli.prove_resume import prove_resume

    folder, steps = Path(args.out_dir), args.steps
    stop_at = steps // 2 if args.stop_at is None else args.stop_at
    holds = prove_resume(config, path, folder, steps, stop_at)
    verdict = "equal bit by bit" if holds else "NOT equal"
    print(f"{steps} steps in one piece, and stopped at {stop_at}: {verdict}; proof in {folder}")
    return 0 if holds else 1


def _launch(args: argparse.Namespace) -> int:
    from nsa.operate.launch.command import launch

    return launch(args)


def _watch(args: argparse.Namespace) -> int:
    from nsa.operate.watch.watchdog import watch

    return watch(args.folder, args)


def _monitor(args: argparse.Namespace) -> int:
    from nsa.operate.monitor import monitor

    return monitor(args.folder, args)


def _triage(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.operate.triage.command import command

    return command(args)


def _handoff(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.operate.handoff.command import command

    return command(args)


def _preflight(args: argparse.Namespace) -> int:
    path, config = _load(args, quiet=args.json)
    from nsa.operate.preflight.command import preflight

    return preflight(config, path, bool(args.config or raw("CONFIG")), args)


def _report(args: argparse.Namespace) -> int:
    from nsa.operate.report.command import report

    return report(args.folder, args)


def _dashboard(args: argparse.Namespace) -> int:
    from nsa.cli.dashboard import dashboard

    return dashboard(args)


def _data_prepare(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.data import open_tokenizer
    from nsa.data.prepare import SHARD_TOKENS, prepare
    from nsa.data.shards import describe_shards

    config = DataConfig(tokenizer=args.tokenizer, tokenizer_path=args.tokenizer_path, eos=args.eos)
    shard_tokens = SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens
    source, folder = Path(args.input), Path(args.output)
    prepare(
        source,
        folder,
        open_tokenizer(config),
        shard_tokens=shard_tokens,
        workers=args.workers,
        say=print,
    )
    print(describe_shards(folder))
    return 0


def _data_verify(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.data.shards import verify_shards

    problems = verify_shards(Path(args.folder))
    for problem in problems:
        print(f"nsa: {problem}", file=sys.stderr)
    print(
        f"{args.folder}: {f'{len(problems)} wrong' if problems else 'every shard is as prepared'}"
    )
    return 1 if problems else 0


def _data_show(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.data.shards import describe_shards

    print(describe_shards(Path(args.folder)))
    return 0


def _load(args: argparse.Namespace, *, quiet: bool = False) -> tuple[str, Config]:
    """Resolve the config that the command names, and say which variables took part."""
    check_environment()
    path = args.config or read("CONFIG")
    config = load_config(path, args.overrides)
    for name, value in in_effect().items() if read("RANK") == 0 and not quiet else ():
        print(f"environment: {name}={value}")
    return path, config


if __name__ == "__main__":
    entry()
