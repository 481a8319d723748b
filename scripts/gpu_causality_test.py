"""Check that no output depends on a later token: in forward, chunked prefill and decode.

`bash scripts/run_gpu_causality_test.sh [--full]` calls it with NSA_STRICT_ASSERTS=1. It prints
`Causality test: 3/3 passed` only if everything about causality passed; then come the tests of the
operator that belong to it. The last line is `[OK] All requested tests completed on ...`, with exit
code 0, only if those passed, too.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
from torch import Tensor

import nsa
from nsa.config import BAD_INPUT, StrictParser
from nsa.config.env import check_environment, in_effect
from nsa.ops import plan_attention

REPOSITORY = Path(__file__).resolve().parents[1]
CORE = (
    *("causality_asserts", "masks", "block_math", "group_consistency", "equiv_small"),
    "decode_counters",
)
EXTENDED = (
    *("selection_packed", "decode_step", "masked_tiny", "rope_dtype", "long_context_smoke"),
    "routes",
)
"""Test files in nsa/tests; the second ones with --full: packed selections, decode, masks,
positions, a long context, and the FlashAttention routes.
"""
Run = Callable[[Tensor], Tensor]
"""A way to run attention over a whole sequence: [B, S, dim] -> [B, S, dim]."""
MAX_SHARE_OTHER = 0.01
"""Rows in which two paths may differ: where scores nearly tie, rounding chooses the block."""
SAME = 1e-4
"""Tolerance in float32: two paths may differ by this fraction of the largest output."""


@dataclass(frozen=True)
class Sizes:
    """One test: length, decoded tokens, and sizes of the blocks that leave some unselected."""

    length: int
    num_decoded: int = 64
    spec: nsa.BlockSpec = field(default_factory=nsa.BlockSpec)
    heads: dict[str, Any] = field(
        default_factory=lambda: dict(dim=256, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)
    )


FULL = Sizes(8192)
QUICK = Sizes(1024, spec=nsa.BlockSpec(n_sel=8, w=256))
ON_CPU = Sizes(
    160,
    num_decoded=40,
    spec=nsa.BlockSpec(l=8, d=4, l_sel=16, n_sel=4, w=24),
    heads=dict(dim=32, n_heads=6, n_kv_groups=2, d_k=16, d_v=8),
)


def main(arguments: list[str] | None = None) -> int:
    """Test on the GPU, or small on the CPU where there is none; return the exit code."""
    parser = StrictParser(prog="run_gpu_causality_test", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--full", action="store_true", help="8192 tokens instead of 1024, and more tests"
    )
    parser.add_argument(
        "--no-tests", action="store_true", help="check causality only, without pytest"
    )
    flags = parser.parse_args(arguments)
    sizes = FULL if flags.full else QUICK
    try:
        check_environment()
    except ValueError as error:  # bad input, by the convention of this package
        print(f"run_gpu_causality_test: error: {error}", file=sys.stderr)
        return BAD_INPUT
    for name, value in in_effect().items():
        print(f"environment: {name}={value}")
    if torch.cuda.is_available():
        print(f"device: {torch.cuda.get_device_name()}, {sizes.length} tokens, bf16")
        attention, x = make_attention(sizes, "cuda", torch.bfloat16)
    else:
        print(
            f"no CUDA device: the torch path on the CPU, {ON_CPU.length} tokens instead of "
            f"{sizes.length}; this says nothing about the GPU kernels"
        )
        sizes = ON_CPU
        attention, x = make_attention(sizes, "cpu", torch.float32)
    print(plan_attention(x.device, x.dtype, head_dims=(attention.d_k, attention.d_v)))
    code = run_checks(attention, x, sizes.num_decoded)
    if code or flags.no_tests:
        return code
    return run_tests(CORE + EXTENDED * flags.full, x.device)


def find_test(name: str) -> Path:
    """The one file test_NAME.py below nsa/tests."""
    (path,) = (REPOSITORY / "nsa" / "tests").rglob(f"test_{name}.py")
    return path


def run_tests(names: tuple[str, ...], device: torch.device) -> int:
    """Run test files of the repository in a process of their own; its exit code."""
    files = [str(find_test(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    code = subprocess.run(command, cwd=REPOSITORY).returncode
    where = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    ended = "[OK] All requested tests completed" if code == 0 else "[FAILED] Tests failed"
    print(f"{ended} on {where}: {', '.join(names)}", flush=True)
    return code


def make_attention(
    sizes: Sizes, device: str, dtype: torch.dtype
) -> tuple[nsa.NSAAttention, Tensor]:
    """A module whose gates differ by token, and its input [1, S, dim]."""
    torch.manual_seed(0)
    attention = nsa.NSAAttention(**sizes.heads, **vars(sizes.spec)).eval()
    torch.nn.init.normal_(attention.gate.weight, std=0.1)
    x = torch.randn(1, sizes.length, sizes.heads["dim"])
    return attention.to(device, dtype), x.to(device, dtype)


@torch.no_grad()
def run_checks(attention: nsa.NSAAttention, x: Tensor, num_decoded: int) -> int:
    """Print a line per check and the summary; 0 when all passed."""
    length, l_sel = x.shape[1], attention.spec.l_sel
    prompt = length - num_decoded
    paths: dict[str, tuple[Run, list[int]]] = {
        "forward": (attention, [0, l_sel - 1, l_sel, length // 2 + 3, length - 2]),
        "chunked prefill": (chunked_prefill(attention), [l_sel + 1, length // 2 + 3, length - 2]),
        "decode": (decode(attention, prompt), [prompt - 2, prompt + l_sel // 2, length - 2]),
    }
    problems = {
        name: _attempt(check_causality, path, x, cuts) for name, (path, cuts) in paths.items()
    }
    num_passed = sum(not problem for problem in problems.values())
    wide = copy.deepcopy(attention).float()
    problems["agreement"] = _attempt(check_agreement, wide, x.float(), prompt)
    problems["planted selection"] = check_planted_selection(x, attention.spec)
    for name, problem in problems.items():
        print(f"{name}: {'FAILED: ' + problem if problem else PROMISES[name]}")
    others = [name for name, problem in problems.items() if problem and name not in paths]
    failed = f", but FAILED: {', '.join(others)}" if others and num_passed == len(paths) else ""
    print(f"Causality test: {num_passed}/{len(paths)} passed{failed}")
    return int(any(problems.values()))


PROMISES = dict.fromkeys(
    ("forward", "chunked prefill", "decode"),
    "ok, later tokens change every later row and no bit of an earlier one",
)
PROMISES["agreement"] = "ok, chunked prefill and decode give the rows of forward"
PROMISES["planted selection"] = "ok, a block of the future raises under NSA_STRICT_ASSERTS=1"


def check_causality(path: Run, x: Tensor, cuts: list[int]) -> str:
    """Change all tokens after each cut: what is wrong with the rows, or an empty text."""
    before = path(x)
    if not before.isfinite().all():
        return f"row {_first(~before.isfinite())} is not finite: it read what was never written"
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    for t in cuts:
        after = path(torch.cat([x[:, : t + 1], other[:, t + 1 :]], dim=1))
        changed = before != after
        if changed[:, : t + 1].any():
            return f"tokens after {t} changed row {_first(changed)}"
        same = ~changed[:, t + 1 :].any(dim=-1, keepdim=True)
        if same.any():
            return f"tokens after {t} left row {t + 1 + _first(same)} as it was"
    return ""


def check_agreement(attention: nsa.NSAAttention, x: Tensor, prompt: int) -> str:
    """Decode knows no future; where forward gives the same rows, neither does forward."""
    expected = attention(x)
    for name, path in (
        ("chunked prefill", chunked_prefill(attention)),
        ("decode", decode(attention, prompt)),
    ):
        error = (path(x) - expected).abs().amax(dim=-1) / expected.abs().max()  # [B, S]
        share = (~(error <= SAME)).float().mean().item()
        if share > MAX_SHARE_OTHER:
            return f"{share:.1%} of the rows of {name} are not those of forward"
    return ""


def check_planted_selection(x: Tensor, spec: nsa.BlockSpec) -> str:
    """Give attention a selection with one block of the future; it has to refuse."""
    length = min(x.shape[1], 4 * spec.l_sel)
    q = x[:, :length, None, :16].contiguous()  # one head of 16
    kv_cmp = nsa.compress(q, spec)
    gates = q[..., :3].softmax(dim=-1)
    selection = nsa.select_blocks(q, kv_cmp, spec)
    tensors = (q, kv_cmp, kv_cmp, q, q, q, q, gates)
    nsa.nsa_attention(*tensors, spec, selection=selection)
    selection[0, spec.l_sel - 1, 0, -1] = 1  # row l_sel - 1 ends block 0
    try:
        nsa.nsa_attention(*tensors, spec, selection=selection)
    except AssertionError:
        return ""
    return "a block of the future was accepted; is NSA_STRICT_ASSERTS=1 set?"


def chunked_prefill(attention: nsa.NSAAttention) -> Run:
    """Prefill in chunks of unequal size, one of a single token among them."""

    def path(x: Tensor) -> Tensor:
        cache, length = poisoned_cache(attention, x), x.shape[1]
        sizes = [length // 3 + 5, 1, length // 5]
        chunks = x.split([*sizes, length - sum(sizes)], dim=1)
        return torch.cat([attention.prefill(chunk, cache) for chunk in chunks], dim=1)

    return path


def decode(attention: nsa.NSAAttention, prompt: int) -> Run:
    """Prefill of `prompt` tokens, the rest token by token."""

    def path(x: Tensor) -> Tensor:
        cache = poisoned_cache(attention, x)
        outs = [attention.prefill(x[:, :prompt], cache)]
        outs += [attention.step(token, cache) for token in x[:, prompt:].split(1, dim=1)]
        return torch.cat(outs, dim=1)

    return path


def poisoned_cache(attention: nsa.NSAAttention, x: Tensor) -> nsa.NSACache:
    """An empty cache full of NaN: who reads a token before it is written shows it."""
    cache = attention.new_cache(x.shape[0], x.shape[1])
    for kv in (cache.sel, cache.cmp, cache.win, cache.raw):
        kv.k.fill_(torch.nan)
        kv.v.fill_(torch.nan)
    return cache


def _attempt(check: Callable[..., str], *arguments: object) -> str:
    """What a check finds; a strict assert that fires on the way is a finding, too."""
    try:
        return check(*arguments)
    except AssertionError as error:
        return f"{error}"


def _first(rows: Tensor) -> int:
    """The first token [B, S, ...] at which something is true."""
    return int(rows.flatten(2).any(dim=-1).any(dim=0).nonzero()[0])


if __name__ == "__main__":
    sys.exit(main())
