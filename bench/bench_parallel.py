"""Context parallelism: bytes that ranks send, counted, and the computation of each rank, timed.

`python bench/bench_parallel.py [--bytes-ranks 4] [--length 262144] [--ranks 8] [--json FILE]`

Bytes: real gloo ranks on CPUs, every rule, both ways to send the selected keys, against the formula
(ranks/received.py). Times: the ranks of a virtual split one after another on one GPU, forward and
backward, without collectives (ranks/parts.py): the slowest rank against the whole row divided by
the number of ranks, and against the mean of the ranks. On a CPU nothing is timed: each rank is only
compared with the rows of the whole. `--seconds` ends the measurement early, with the ranks it has.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch

import nsa
from bench.attention.cases import Case, parse_shape
from bench.ranks.parts import Done, Rank, Whole, compare, relative_rms
from bench.ranks.received import count_bytes
from bench.results import describe_command, describe_machine, write_json
from bench.timing import kernel_ms, median_ms
from nsa.config import StrictParser
from nsa.config.describe import text_table
from nsa.parallel import PARTS, Split

VERSION = 1
"""Of the JSON: `environment`, `bytes` (rows of parallel_bytes.count_bytes), `case`, `whole` (ms,
peak_mib), `splits`: parts, ranks (rank, ms, peak_mib, errors; `reason` where it was not measured),
dk_error, and on a GPU mean_ms, slowest_ms, of_share, of_mean, goal_met; `kernels` by --profile."""
OF_SHARE = 1.15
"""Goal: the slowest rank takes at most this many times the whole divided by the ranks."""
OF_MEAN = 1.1
"""Goal: the slowest rank takes at most this many times the mean of the ranks."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative errors up to here are rounding."""
TINY = ["--shape", "4,2,16,16", "--length", "512", "--ranks", "4"]
TINY_SPEC = nsa.BlockSpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
TOP_KERNELS = 10


def main(argv: list[str] | None = None) -> int:
    """Count, measure, print tables and a JSON line; 1 if a goal is missed or a result is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        case = _check(args)
    except ValueError as error:
        parser.error(str(error))
    start = time.perf_counter()
    if args.no_cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    result: dict[str, Any] = {"version": VERSION, "environment": _environment(args, argv)}
    result["bytes"] = count_bytes(args.bytes_ranks) if args.bytes_ranks else []
    if result["bytes"]:
        print(bytes_table(result["bytes"]), flush=True)
    _measure(case, args, start + args.seconds, result)
    print(f"{time.perf_counter() - start:.0f} s in all")
    if result["splits"]:
        print(times_table(result))
    if args.json:
        write_json(args.json, result)
    print(json.dumps(result))
    return 0 if _is_good(result) else 1


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="bench_parallel", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--bytes-ranks", type=int, default=4, help="gloo ranks to count bytes with; 0: none (4)")
    add("--shape", default="64,4,128,128", metavar="Hq,Hkv,Dk,Dv", help="heads (64,4,128,128)")
    add("--length", type=int, default=262144, help="tokens of the row (262144)")
    add("--ranks", type=int, default=8, help="ranks of the virtual split; 0: none (8)")
    add("--repeats", type=int, default=3, help="timed calls (3)")
    add("--seconds", type=float, default=600, help="start no more measurements after this (600)")
    add("--profile", action="store_true", help="list the kernels of the whole and of one rank")
    add("--one-call", action="store_true", help="all branches of a part together, not as ranks do")
    add("--no-cudnn", action="store_true", help="the compressed branch on our own kernels")
    add("--tiny", action="store_true", help="a small shape, for a CPU")
    add("--backend", default="auto", help="backend of compress and nsa_attention")
    add("--json", metavar="FILE", help="also write the JSON to this file")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cuda", "cpu"], default=default)
    return parser


def _check(args: argparse.Namespace) -> Case:
    """The case; refuses what cannot be measured before anything is."""
    if args.tiny:
        small = _parser().parse_args(TINY)
        args.shape, args.length, args.ranks = small.shape, small.length, small.ranks
    elif args.device == "cpu" and args.ranks:
        raise ValueError(f"--length {args.length} needs a GPU; on a CPU add --tiny, or --ranks 0")
    for name in ("bytes_ranks", "ranks", "repeats"):
        least = 1 if name == "repeats" else 0
        if getattr(args, name) < least or (name != "repeats" and getattr(args, name) == 1):
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise ValueError(f"{flag} is too small; use {least or '0, or 2 and more'}")
    if args.ranks:
        for parts in PARTS:
            Split(args.length, args.ranks, parts)
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json} is in a folder that does not exist; create it first")
    return Case(parse_shape(args.shape), 1, args.length, args.repeats)


def _environment(args: argparse.Namespace, argv: list[str] | None) -> dict[str, Any]:
    command = ["bench/bench_parallel.py", *(sys.argv[1:] if argv is None else argv)]
    return describe_command(command) | describe_machine(args.device)


# --- The ranks of a virtual split ---


def _measure(case: Case, args: argparse.Namespace, deadline: float, result: dict[str, Any]) -> None:
    """The whole row, then the ranks of each way to split it."""
    spec = TINY_SPEC if args.tiny else nsa.BlockSpec()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    sizes = {**case.shape._asdict(), "S": case.length, "ranks": args.ranks}
    result |= {"case": {**sizes, "dtype": str(dtype).removeprefix("torch.")}, "splits": []}
    if not args.ranks:
        return
    whole = Whole(case, spec, dtype, args.device)
    result["whole"], wanted = _timed(whole, args)
    print(f"whole row: {_ms(result['whole'].get('ms'))} ms", flush=True)
    for parts in PARTS:
        split = Split(case.length, args.ranks, parts)
        found = measure_split(whole, wanted, split, args, deadline)
        result["splits"].append(found | summarize(found, result["whole"], dtype))
    if args.profile and args.device == "cuda":
        # Last: the profiler may slow down launches that come later.
        rank = Rank(whole, Split(case.length, args.ranks), 0, one_call=args.one_call)
        result["kernels"] = {"whole": _kernels(whole), "rank 0": _kernels(rank)}
        print(json.dumps(result["kernels"], indent=1))


def measure_split(
    whole: Whole, wanted: Done, split: Split, args: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """Each rank: its time, its memory, and how far it is from the rows of the whole."""
    rows: list[dict[str, Any]] = []
    dk_sum = torch.zeros_like(wanted.dk_sel, dtype=torch.float32)
    for number in range(split.num_ranks):
        if time.perf_counter() > deadline:
            rows.append({"rank": number, "reason": f"not measured after {args.seconds:g} s"})
            continue
        rank = Rank(whole, split, number, one_call=args.one_call)
        times, done = _timed(rank, args)
        dk_sum += done.dk_sel
        rows.append({"rank": number, **times, **compare(rank, done, wanted)})
        print(f"{split.parts}, rank {number}: {_ms(times.get('ms'))} ms", flush=True)
        del rank, done
    complete = all("reason" not in row for row in rows)
    dk_error = relative_rms(dk_sum, wanted.dk_sel.float()) if complete else None
    return {"parts": split.parts, "ranks": rows, "dk_error": dk_error}


def summarize(split: dict[str, Any], whole: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What follows from the ranks of a split: balance, goals, and whether results are right."""
    rows = split["ranks"]
    errors = [row[name] for row in rows for name in ("out_error", "dq_error") if name in row]
    errors.append(split["dk_error"] or 0.0)
    # A NaN is not at most anything.
    found: dict[str, Any] = {"close": all(error <= CLOSE[dtype] for error in errors)}
    times = [row["ms"] for row in rows if "ms" in row]
    if len(times) < len(rows):
        return found | {"goal_met": None}
    mean, slowest = sum(times) / len(times), max(times)
    found |= {"mean_ms": mean, "slowest_ms": slowest}
    found |= {"of_share": slowest / (whole["ms"] / len(times)), "of_mean": slowest / mean}
    return found | {"goal_met": found["of_share"] <= OF_SHARE and found["of_mean"] <= OF_MEAN}


def _timed(what: Whole | Rank, args: argparse.Namespace) -> tuple[dict[str, Any], Done]:
    """Milliseconds and peak memory on a GPU, and the results of a call."""
    if args.device == "cpu":
        return {}, what.run(args.backend)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ms = median_ms(lambda: what.run(args.backend), args.repeats, args.device)
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {"ms": round(ms, 3), "peak_mib": round(peak)}, what.run(args.backend)


def _kernels(what: Whole | Rank) -> dict[str, float]:
    """Milliseconds of the largest kernels of a call."""
    found = kernel_ms(what.run)
    top = {name[:60]: round(ms, 2) for name, ms in list(found.items())[:TOP_KERNELS]}
    return top | {"all": round(sum(found.values()), 2)}


# --- Tables ---


def bytes_table(rows: list[dict[str, Any]]) -> str:
    """Most bytes that a rank receives and sends in the forward pass of a layer."""
    head = ("rule", "selected keys", "parts", "received", "sent", "backward", "formula")
    lines = [
        (
            *(row["rule"], row["selected"], row["parts"]),
            *(f"{max(row[name]):,}" for name in ("received", "sent", "backward")),
            "equal" if row["equal"] else f"NOT EQUAL: {row['formula']}",
        )
        for row in rows
    ]
    return text_table([head, *lines], right=range(3, 6))


def times_table(result: dict[str, Any]) -> str:
    """The ranks of both ways to split, and the goals."""
    head = ("parts", "rank", "ms", "of whole / P", "peak GiB", "error", "dq error", "same blocks")
    lines, whole, said = [head], result["whole"], []
    for split in result["splits"]:
        for row in split["ranks"]:
            if "reason" in row:
                cells = [row["reason"], *[""] * 5]
            else:
                share = whole["ms"] / len(split["ranks"]) if "ms" in whole else None
                cells = [
                    _ms(row.get("ms")),
                    f"{row['ms'] / share:.3f}" if share else "-",
                    f"{row['peak_mib'] / 1024:.1f}" if "peak_mib" in row else "-",
                    *(f"{row[name]:.1e}" for name in ("out_error", "dq_error")),
                    f"{row['same_blocks']:.4f}",
                ]
            lines.append((split["parts"], str(row["rank"]), *cells))
        said.append(_describe(split))
    first = f"whole row: {_ms(whole.get('ms'))} ms, {whole.get('peak_mib', 0) / 1024:.1f} GiB"
    return "\n".join([text_table(lines, right=range(1, len(head))), first, *said])


def _describe(split: dict[str, Any]) -> str:
    """Balance of a split in a sentence."""
    right = "results are those of the whole" if split["close"] else "RESULTS DIFFER"
    if "mean_ms" not in split:
        return f"{split['parts']}: not timed; {right}"
    goal = "goals met" if split["goal_met"] else "goals missed"
    return (
        f"{split['parts']}: mean {split['mean_ms']:.1f} ms, slowest {split['slowest_ms']:.1f} ms: "
        f"{split['of_share']:.3f} x whole / P (goal {OF_SHARE}), {split['of_mean']:.3f} x mean "
        f"(goal {OF_MEAN}), {goal}; {right}"
    )


def _is_good(result: dict[str, Any]) -> bool:
    """Formula and results are right, and the default way to split meets its goals, if timed."""
    if not all(row["equal"] for row in result["bytes"]):
        return False
    splits = result["splits"]
    return all(split["close"] for split in splits) and not (
        splits and splits[0]["goal_met"] is False
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
