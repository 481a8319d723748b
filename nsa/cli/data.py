"""`nsa data prepare|verify|show`: token shards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nsa.config import DataConfig
from nsa.config.env import check_environment


def register(commands: Any) -> None:
    """Add the commands to the `nsa` parser."""
    parser = commands.add_parser("data", help="prepare and check token shards")
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "tokenize local documents into shards, for data.dataset=shards"
    prepare = actions.add_parser("prepare", help=text, description=text)
    prepare.add_argument(
        "--input", required=True, metavar="PATH", help="file or folder, as for data.local_path"
    )
    prepare.add_argument("--output", required=True, metavar="DIR", help="a new or empty folder")
    prepare.add_argument("--tokenizer", default="byte", help="as data.tokenizer (byte)")
    prepare.add_argument(
        "--tokenizer-path", default="", metavar="PATH", help="as data.tokenizer_path"
    )
    prepare.add_argument("--eos", default="", metavar="TOKEN", help="as data.eos")
    prepare.add_argument("--shard-tokens", type=int, metavar="N", help="minimum tokens per shard")
    workers = "tokenizer threads; the shards do not depend on it (1)"
    prepare.add_argument("--workers", type=int, default=1, metavar="N", help=workers)
    prepare.set_defaults(command=_prepare)
    for name, command, text in (
        ("verify", _verify, "check the size and sha256 of every shard; exit code 1 on a mismatch"),
        ("show", _show, "summarize a folder of shards"),
    ):
        parsed = actions.add_parser(name, help=text, description=text)
        parsed.add_argument("folder", metavar="DIR", help="output of `nsa data prepare`")
        parsed.set_defaults(command=command)


# Each command imports only what it needs: `verify` and `show` run without numpy and torch.
def _prepare(args: argparse.Namespace) -> int:
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


def _verify(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.data.shards import verify_shards

    problems = verify_shards(Path(args.folder))
    for problem in problems:
        print(f"nsa: {problem}", file=sys.stderr)
    found = f"problems: {len(problems)}" if problems else "all shards match the manifest"
    print(f"{args.folder}: {found}")
    return 1 if problems else 0


def _show(args: argparse.Namespace) -> int:
    check_environment()
    from nsa.data.shards import describe_shards

    print(describe_shards(Path(args.folder)))
    return 0
