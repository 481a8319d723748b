"""`python -m studies.corpus build | unpack`: make the corpus, pack it, restore it elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa.config import BAD_INPUT, StrictParser
from studies.corpus.build import build
from studies.corpus.pack import DEFAULT_MB, pack, unpack
from studies.corpus.sources import LIST, read_sources

FOLDER = Path("artifacts/corpus")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what cannot be done is one line on stderr and exit code 2."""
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except ValueError as error:  # bad input, by the convention of this project
        print(f"studies.corpus: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _parser() -> StrictParser:
    parser = StrictParser(prog="studies.corpus", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "fetch the packages, write prose.jsonl, code.jsonl, gpt2/, LICENCES.md and corpus.json"
    made = commands.add_parser("build", help=text, description=text)
    made.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help=f"({FOLDER})")
    made.add_argument("--cache", type=Path, metavar="DIR", help="downloads (cache in --out)")
    made.add_argument("--sources", type=Path, default=LIST, metavar="FILE", help="(sources.toml)")
    made.add_argument("--pack", type=Path, metavar="DIR", help="also pack it into this folder")
    _add_pack_flags(made)
    made.set_defaults(command=_build)
    text = "pack a corpus that was built: prose, a part of the code, the tokenizer"
    packed = commands.add_parser("pack", help=text, description=text)
    packed.add_argument("folder", type=Path, metavar="CORPUS")
    packed.add_argument("--pack", type=Path, required=True, metavar="DIR", help="a new folder")
    _add_pack_flags(packed)
    packed.set_defaults(command=_pack)
    text = "restore the files of a pack, each checked against its hash"
    restored = commands.add_parser("unpack", help=text, description=text)
    restored.add_argument("folder", type=Path, metavar="PACK")
    restored.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help=f"({FOLDER})")
    restored.add_argument("--jobs", type=int, default=0, metavar="N", help="threads (all cores)")
    restored.set_defaults(command=_unpack)
    return parser


def _add_pack_flags(parser: argparse.ArgumentParser) -> None:
    size = f"MiB that the pack may have ({DEFAULT_MB}); code fills what prose leaves"
    parser.add_argument("--pack-mb", type=float, default=DEFAULT_MB, metavar="MIB", help=size)
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="threads (all cores)")


def _build(args: argparse.Namespace) -> None:
    sources = read_sources(args.sources)
    record = build(sources, args.out, args.cache or args.out / "cache", say=_say)
    for kind, entry in record.kinds.items():
        _say(f"{kind}: {entry.documents:,} documents, {entry.bytes:,} bytes in {entry.file}")
    if args.pack:
        args.folder = args.out
        _pack(args)


def _pack(args: argparse.Namespace) -> None:
    pack(args.folder, args.pack, max_mb=args.pack_mb, jobs=args.jobs, say=_say)


def _unpack(args: argparse.Namespace) -> None:
    unpack(args.folder, args.out, jobs=args.jobs, say=_say)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
