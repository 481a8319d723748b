"""Mutation test: plant known bugs in a copy of the package, and check that the tests catch each.

`python scripts/mutants.py [NAME ...]`: exit code 0 when the untouched copy passes and every
mutant fails at least one test. The oracle is never touched: a bug there would prove nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = (
    "test_equiv_small",
    "test_masks",
    "test_block_math",
    "test_group_consistency",
    "test_selection_v2_equiv",
    "test_rope_dtype",
    "test_paths",
    "test_decode_step",
    "test_decode_counters",
    "test_causality",
    "test_nan",
    "test_gradients",
    "test_dense",
)
NUM_PARALLEL = 2


class Mutant(NamedTuple):
    """A bug: in one file, each old text, which occurs once, becomes the new one."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...] = TESTS
    """Files under nsa/tests, or single tests of them as FILE.py::NAME."""
    interpreted: bool = False
    """The tests run kernels, in Triton's interpreter."""


ROWS, EAGER = (f"ops/eager/{name}.py" for name in ("rows", "attention"))
CACHE, ATTENTION, DENSE = (f"model/{name}.py" for name in ("cache", "attention", "dense"))

TORCH_PATH = (
    Mutant("visibility-early", ROWS, (("+ spec.l - 1 <= t", "+ spec.l - 2 <= t"),)),
    Mutant("window-one-more", ROWS, (("(token > t - spec.w)", "(token >= t - spec.w)"),)),
    Mutant(
        "forced-block-wrong",
        ROWS,
        (("block > current - spec.num_local", "block >= current - spec.num_local"),),
    ),
    Mutant(
        "tie-to-higher-block",
        ROWS,
        (
            (
                "rank.sort(dim=-1, descending=True, stable=True).indices",
                "(num_blocks - 1 - rank.flip(-1).sort("
                "dim=-1, descending=True, stable=True).indices)",
            ),
        ),
    ),
    Mutant("scale-squared", ROWS, (("_rows(q) * scale,", "_rows(q) * scale * scale,"),)),
    Mutant(
        "gates-swapped",
        EAGER,
        (
            ("outs[0] * gates[..., 0, None]", "outs[0] * gates[..., 1, None]"),
            ("outs[1] * gates[..., 1, None]", "outs[1] * gates[..., 0, None]"),
        ),
    ),
    Mutant("no-group-sum", ROWS, (("in per_head[1:]", "in per_head[:0]"),)),
    Mutant(
        "current-block-dropped",
        ROWS,
        (
            (
                "| (block > current - spec.num_local)",
                "| ((block > current - spec.num_local) & (block < current))",
            ),
            ("masked_fill(block > current, -math.inf)", "masked_fill(block >= current, -math.inf)"),
            ("torch.where(best <= current, best", "torch.where(best < current, best"),
        ),
    ),
    Mutant(
        "p-cmp-unmasked",
        ROWS,
        (("i * spec.d + spec.l - 1 <= t", "(i * spec.d + spec.l - 1 <= t) | (i >= 0)"),),
    ),
    Mutant("gate-gradient-lost", ROWS, (("    probs.mul_(gate[..., None])\n", ""),)),
)

ROTATION = (
    Mutant(
        "rope-misses-a-query-head",
        ATTENTION,
        (
            (
                "rotated = apply_rope(heads[:, :, : self._num_rotated], rope)",
                "rotated = torch.cat([heads[:, :, :1], "
                "apply_rope(heads[:, :, 1 : self._num_rotated], rope)], dim=2)",
            ),
        ),
    ),
    Mutant(
        "rope-misses-a-query-head-of-mlp",
        ATTENTION,
        (
            (
                "torch.cat([rotated, heads[:, :, self._num_rotated :]], dim=2)",
                "torch.cat([heads[:, :, :1], rotated[:, :, 1:], heads[:, :, self._num_rotated :]], "
                "dim=2)",
            ),
        ),
    ),
    Mutant(
        "rope-misses-a-window-key-of-mlp",
        ATTENTION,
        (
            (
                "torch.cat([rotated, heads[:, :, self._num_rotated :]], dim=2)",
                "torch.cat([rotated[:, :, :-1], heads[:, :, self._num_rotated - 1 :]], dim=2)",
            ),
        ),
    ),
    Mutant(
        "rope-misses-compressed-keys",
        ATTENTION,
        (('(2 if self.phi == "mlp" else 3)', "2"),),
    ),
    Mutant(
        "rope-misses-compressed-keys-of-mlp",
        ATTENTION,
        (
            (
                "return apply_rope(self.phi_k(k, doc_lens), rope), self",
                "return self.phi_k(k, doc_lens), self",
            ),
        ),
    ),
    Mutant(
        "rope-misses-a-dense-key",
        DENSE,
        (
            (
                "rotated = apply_rope(heads, rope)",
                "rotated = torch.cat([apply_rope(heads[:, :, :-1], rope), "
                "heads[:, :, -1:]], dim=2)",
            ),
        ),
    ),
)

DECODE = (
    Mutant(
        "decode-visibility-late",
        ROWS,
        (("spec.num_cmp(first + num_queries)", "spec.num_cmp(first + num_queries - 1)"),),
    ),
    Mutant(
        "decode-window-misses-oldest",
        CACHE,
        (
            (
                "win = KeyValues(self.win.k[:, :, :num_win], self.win.v[:, :, :num_win])",
                "num_win = max(num_win - 1, 1)\n"
                "        win = KeyValues(self.win.k[:, :, :num_win], self.win.v[:, :, :num_win])",
            ),
        ),
    ),
    Mutant("decode-drops-own-token", ROWS, (("& (token <= t)\n", "& (token < t)\n"),)),
    Mutant(
        "decode-scale",
        ATTENTION,
        (("scale = 1 / math.sqrt(self.d_k)\n", "scale = 1 / self.d_k\n"),),
    ),
    Mutant(
        "decode-position-off-by-one",
        ATTENTION,
        (
            (
                "self.rope_of_each(cache.lengths, x.dtype)",
                "self.rope_of_each(cache.lengths + 1, x.dtype)",
            ),
        ),
    ),
    Mutant(
        "decode-gates-reversed",
        EAGER,
        (
            (
                "None, flags)\n            gate = split_heads(gates[:, rows], num_groups, dtype)",
                "None, flags)\n"
                "            gate = split_heads(gates[:, rows].flip(-1), num_groups, dtype)",
            ),
        ),
    ),
    Mutant(
        "decode-compression-skips",
        CACHE,
        (
            (
                "old = ring_slots(self.raw, start * self.spec.d, ",
                "old = ring_slots(self.raw, start, ",
            ),
        ),
    ),
    Mutant(
        "decode-ring-overwrites",
        CACHE,
        (
            (
                "start, stop, device=ring.k.device) %",
                "start, stop, device=ring.k.device) // 2 %",
            ),
        ),
    ),
    Mutant(
        "decode-counts-too-few",
        EAGER,
        (
            (
                "visible.sum().expand(batch, num_groups)",
                "(visible.sum() - 1).expand(batch, num_groups)",
            ),
        ),
    ),
    Mutant(
        "decode-reads-beyond-selection",
        ROWS,
        (("torch.where(used, token, t), used", "token.clamp(min=0), used"),),
    ),
)

KERNELS = (
    Mutant(
        "decode-scores-a-token-late",
        "ops/triton/decode/score.py",
        (('cache_modifier=".cg") + 1\n', 'cache_modifier=".cg")\n'),),
        ("test_triton_decode.py::test_a_token_that_ends_here_is_scored_in_the_same_step",),
        interpreted=True,
    ),
)

GLUON = ("test_gluon_on_cpu.py::test_outputs_and_gradients_equal_float64",)
BATCHED = ("test_gluon_on_cpu.py::test_a_nan_stays_in_its_batch_element_in_one_pass",)
BY_SEGMENT = ("test_gluon_on_cpu.py::test_a_decode_step_by_segment_is_that_of_several_launches",)

HOPPER = (
    Mutant(
        "buffers-that-change-their-reader",
        "ops/triton/hopper/decode.py",
        (("SLOTS = 4\n", "SLOTS = 3\n"), ("SLOTS % 2 == 0", "SLOTS > 0")),
        BY_SEGMENT,
        interpreted=True,
    ),
    Mutant(
        "values-after-the-end-kept",
        "ops/triton/hopper/decode_attend.py",
        (("gl.where((o_r < num)[:, None], b, 0)", "b"),),
        BY_SEGMENT,
        interpreted=True,
    ),
    Mutant(
        "scores-of-padding",
        "ops/triton/hopper/decode_lead.py",
        (("(o_h < G)[None, :]\n    at", "(o_h >= 0)[None, :]\n    at"),),
        BY_SEGMENT,
        interpreted=True,
    ),
    Mutant(
        "carried-from-the-first-block",
        "ops/triton/hopper/decode_attend.py",
        (("(o_c == BLOCKS - 1)", "(o_c == 0)"),),
        BY_SEGMENT,
        interpreted=True,
    ),
    Mutant(
        "keys-given-back-before-they-are-read",
        "ops/triton/hopper/forward.py",
        (
            (
                "    o, p = warpgroup_mma_wait(0, deps=(o, p))\n"
                "    mbarrier.arrive(empty.index(before))\n",
                "    mbarrier.arrive(empty.index(before))\n"
                "    o, p = warpgroup_mma_wait(0, deps=(o, p))\n",
            ),
        ),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "dq-overwritten-while-it-is-copied",
        "ops/triton/hopper/queries.py",
        (("        tma.store_wait(0)  # the item before has left the buffer\n", ""),),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "tile-waited-for-in-the-wrong-phase",
        "ops/triton/hopper/keys.py",
        (
            (
                "mbarrier.wait(full.index(stage), phase_of(begin + i, STAGES))\n"
                "        dk, dv = _start_sums(",
                "mbarrier.wait(full.index(stage), phase_of(begin + i, STAGES) ^ 1)\n"
                "        dk, dv = _start_sums(",
            ),
        ),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "mask-of-the-next-block",
        "ops/triton/hopper/forward.py",
        (
            (
                "        for j in range(1, masked):\n"
                "            bit = word >> (j * TILE_ROWS // L_SEL)\n",
                "        for j in range(1, masked):\n"
                "            bit = word >> (j * TILE_ROWS // L_SEL + 1)\n",
            ),
        ),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "rows-loaded-before-their-buffer-is-free",
        "ops/triton/hopper/selected.py",
        (("(turn // HALF & 1) ^ 1", "1"),),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "slot-given-back-before-it-is-multiplied",
        "ops/triton/hopper/dq_sums.py",
        (
            (
                "    b_dq = warpgroup_mma_wait(0, deps=(b_dq,))\n"
                "    sync_warps()\n"
                "    mbarrier.arrive(sums.empty.index(slot))\n",
                "    mbarrier.arrive(sums.empty.index(slot))\n"
                "    b_dq = warpgroup_mma_wait(0, deps=(b_dq,))\n",
            ),
        ),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "slot-written-before-it-is-free",
        "ops/triton/hopper/dq_sums.py",
        (("    mbarrier.wait(sums.empty.index(slot), phase_of(n, SLOTS) ^ 1)\n", ""),),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "one-pass-for-the-first-batch-element",
        "ops/triton/hopper/dq_sums.py",
        (("i_b.to(gl.int64) * S * (Hkv * G)", "i_b.to(gl.int64) * (Hkv * G)"),),
        BATCHED,
        interpreted=True,
    ),
    Mutant(
        "nan-for-the-next-batch-element",
        "ops/triton/hopper/dq_sums.py",
        (("if t0 + TILE_ROWS > S:", "if t0 > S:"),),
        BATCHED,
        interpreted=True,
    ),
    Mutant(
        "second-consumer-without-its-first-tile",
        "ops/triton/hopper/dq_sums.py",
        (("if (i >= first) &", "if (i > first) &"),),
        GLUON,
        interpreted=True,
    ),
    Mutant(
        "rows-of-a-neighbour",
        "ops/triton/hopper/selected_rows.py",
        (("o_r - nth * G\n", "o_r - nth * (G - 1)\n"),),
        GLUON,
        interpreted=True,
    ),
)

LOOP = "train/trainer.py"
STORED, SHELF = "train/checkpoint/file.py", "train/checkpoint/find.py"
RANKS, GROUP = "train/distributed/strategy.py", "train/distributed/ddp.py"
WATCH = LADDER = "operate/watch/watchdog.py"
VERDICT = "operate/report/verdict.py"

OPERATION = (
    Mutant(
        "rollback-reads-the-spike-again",
        LOOP,
        (("(step - 1 + self.spikes.jumped) * rows", "(step - 1) * rows"),),
        ("test_spikes.py::test_rollback_returns_to_the_checkpoint_and_jumps_over_the_data",),
    ),
    Mutant(
        "checkpoint-a-step-late",
        LOOP,
        (("(step % every_save == 0 or self.held", "(step % every_save == 1 or self.held"),),
        ("test_resume.py::test_only_the_newest_checkpoints_are_kept",),
    ),
    Mutant(
        "checkpoint-hash-ignored",
        STORED,
        (("if file_sha256(path) != manifest.sha256:", "if not manifest.sha256:"),),
        ("test_resume.py::test_a_damaged_latest_checkpoint_is_skipped_with_a_warning",),
    ),
    Mutant(
        "damaged-checkpoint-counts-as-kept",
        SHELF,
        (("        if not is_complete(path):\n            continue\n", ""),),
        ("test_resume.py::test_what_does_not_match_its_manifest_is_neither_counted_nor_deleted",),
    ),
    Mutant(
        "ranks-read-the-same-rows",
        RANKS,
        (("(micro * stride + place)", "(micro * stride)"),),
        (
            "test_ddp_settings.py"
            "::test_ranks_read_every_row_of_an_update_once_and_those_of_one_process",
        ),
    ),
    Mutant(
        "ranks-of-a-row-read-other-rows",
        RANKS,
        (("return self.rank // (self.cp * self.tp)", "return self.rank // self.cp"),),
        (
            "test_ddp_settings.py"
            "::test_ranks_read_every_row_of_an_update_once_and_those_of_one_process",
        ),
    ),
    Mutant(
        "last-request-to-stop-lost",
        GROUP,
        (("        if last:\n", "        if not last:\n"),),
        ("test_ddp_settings.py::test_a_request_during_the_last_update_is_obeyed",),
    ),
    Mutant(
        "watch-forgets-alarms",
        WATCH,
        (("rang |= bool(", "rang = bool("),),
        ("test_watch.py::test_an_alarm_that_rang_before_the_end_is_in_the_exit_code",),
    ),
    Mutant(
        "watch-never-halts",
        LADDER,
        (("while self._step < self._top and", "while self._step < self._top - 1 and"),),
        ("test_watch.py::test_the_exit_code_says_whether_an_alarm_rings",),
    ),
    Mutant(
        "report-go-without-evidence",
        VERDICT,
        (("return UNKNOWN if missing or not self.rows else GO", "return GO"),),
        ("test_report.py::test_an_empty_folder_cannot_be_judged_and_a_missing_one_is_bad_input",),
    ),
    Mutant(
        "report-forgives-one-failure",
        VERDICT,
        (
            (
                "if any(row.verdict == FAIL for row in self.rows):",
                "if sum(row.verdict == FAIL for row in self.rows) > 1:",
            ),
        ),
        ("test_report.py::test_each_criterion_fails_when_it_must",),
    ),
)
"""Bugs that would lose a run, or mislead its operator."""

MUTANTS = TORCH_PATH + ROTATION + DECODE + KERNELS + HOPPER + OPERATION


UNTOUCHED = "(none)"


class Result(NamedTuple):
    """What the tests said about a mutant."""

    name: str
    caught_by: str
    """The first test that failed; empty when all passed."""
    seconds: float


def main(names: list[str]) -> int:
    """Run the untouched copy and the mutants, print a table, return the exit code."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    for name in names:
        if name not in known:
            print(f"mutants: no mutant {name!r}; the known ones are {', '.join(known)}")
            return 2
    planned = [known[name] for name in names or known]
    untouched = [_untouched(planned, interpreted) for interpreted in (False, True)]
    mutants = [*(mutant for mutant in untouched if mutant.tests), *planned]
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        results = list(pool.map(_run, mutants))
    for result in results:
        verdict = f"caught by {result.caught_by}" if result.caught_by else "all tests pass"
        print(f"{result.name:36s} {verdict}  ({result.seconds:.0f} s)")
    broken = [result for result in results if result.name == UNTOUCHED and result.caught_by]
    num_caught = sum(bool(result.caught_by) for result in results if result.name != UNTOUCHED)
    print(f"{num_caught} of {len(planned)} mutants caught")
    return 0 if not broken and num_caught == len(planned) else 1


def _untouched(planned: list[Mutant], interpreted: bool) -> Mutant:
    """The unmodified copy: every test of these mutants must pass on it."""
    tests = (name for one in planned if one.interpreted == interpreted for name in one.tests)
    return Mutant(UNTOUCHED, "", (), tuple(dict.fromkeys(tests)), interpreted)


def _run(mutant: Mutant) -> Result:
    """Test a copy of the package with the mutant's edits in it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as folder:
        copy = Path(folder)
        shutil.copytree(REPOSITORY / "nsa", copy / "nsa", ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copytree(REPOSITORY / "configs", copy / "configs")
        shutil.copy(REPOSITORY / "pyproject.toml", copy)
        _plant(mutant, copy / "nsa")
        tests = [_find(name, copy) for name in mutant.tests]
        # The copy is imported, not the installed package: `-m pytest` puts its folder first.
        interpreter = ["TRITON_INTERPRET=1"] if mutant.interpreted else []
        command = ["env", "OMP_NUM_THREADS=1", *interpreter, sys.executable, "-m", "pytest"]
        command += ["-x", "-q", *tests, "-m", "gpu" if mutant.interpreted else "not gpu"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
        # Division by zero in numpy is how the interpreter computes log2(0) = -inf.
        command += ["-W", "ignore::RuntimeWarning"] if mutant.interpreted else []
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    return Result(mutant.name, _verdict(mutant, done), time.monotonic() - start)


def _find(test: str, copy: Path) -> str:
    """The path of a test file by its name, `test_x` or `test_x.py::test_y`."""
    name, colons, case = test.partition("::")
    (path,) = (copy / "nsa/tests").rglob(f"{name.removesuffix('.py')}.py")
    return f"{path.relative_to(copy)}{colons}{case}"


def _plant(mutant: Mutant, package: Path) -> None:
    for old, new in mutant.edits:
        path = package / mutant.file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(
                f"mutant {mutant.name}: {old!r} occurs {text.count(old)} times in nsa/"
                f"{mutant.file}; it must occur once: bring scripts/mutants.py up to date"
            )
        path.write_text(text.replace(old, new), encoding="utf-8")


def _verdict(mutant: Mutant, done: subprocess.CompletedProcess[str]) -> str:
    """The failing test; anything but passed or failed tests is an error of this script."""
    if done.returncode == 0:
        return ""
    failed = re.search(r"^FAILED (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise SystemExit(f"mutant {mutant.name}: pytest broke\n{done.stdout}\n{done.stderr}")
    return failed[1].rpartition("/")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
