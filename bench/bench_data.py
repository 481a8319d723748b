"""Read throughput of prepared shards: batches of shuffled rows from mapped files, on one core.

`python bench/bench_data.py [--tokens 50000000] [--seq-len 2048] [--batch-size 16] [--seconds 3]`;
the last line is JSON. The files are fresh, so they are read from the page cache, not from a disk.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import numpy as np
import torch

from nsa.config import DataConfig
from nsa.config.load import StrictParser
from nsa.data import ByteTokenizer, Rows, open_data
from nsa.data.prepare import prepare

DOCUMENT_CHARS = 4000
NUM_SHARDS = 8


def main() -> int:
    """Make a corpus, prepare it, read batches for a while, and print the throughput."""
    args = _parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        source, shards = Path(name) / "corpus.jsonl", Path(name) / "shards"
        _write_corpus(source, args.tokens)
        start = time.perf_counter()
        prepare(source, shards, ByteTokenizer(), shard_tokens=args.tokens // NUM_SHARDS)
        prepare_s = time.perf_counter() - start
        start = time.perf_counter()
        data = open_data(DataConfig(dataset="shards", local_path=str(shards)), args.seq_len, 0)
        open_s = time.perf_counter() - start
        num_batches, read_s = _read(data.train, args.batch_size, args.seconds)
    result = {
        "seq_len": args.seq_len,
        "batch_size": args.batch_size,
        "num_rows": data.train.num_rows,
        "open_s": open_s,
        "prepare_tokens_per_s": args.tokens / prepare_s,
        "batch_s": read_s / num_batches,
        "tokens_per_s": num_batches * args.batch_size * args.seq_len / read_s,
    }
    for key, value in result.items():
        print(f"{key:>22} {value:,.6g}")
    print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    return parser


def _write_corpus(path: Path, num_tokens: int) -> None:
    """Random letters and spaces; the content does not affect the time."""
    rng, letters = np.random.default_rng(0), np.frombuffer(b"etaoinshrdlu    ", dtype=np.uint8)
    with path.open("w", encoding="ascii") as file:
        for _ in range(-(-num_tokens // DOCUMENT_CHARS)):
            text = letters[rng.integers(len(letters), size=DOCUMENT_CHARS)].tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")


def _read(rows: Rows, batch_size: int, seconds: float) -> tuple[int, float]:
    """Read batches one after the other; the first ones, which touch new pages, count as well."""
    num_batches, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or not num_batches:
        rows.batch(num_batches * batch_size, batch_size)
        num_batches += 1
    return num_batches, spent


if __name__ == "__main__":
    sys.exit(main())
