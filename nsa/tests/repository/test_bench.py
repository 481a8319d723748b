"""The benchmarks run as their documentation calls them, here at tiny sizes."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nsa
from bench import (
    bench_overhead,
    bench_prefill,
    bench_sparse,
    bench_startup,
    bench_switches,
    bench_torch,
    bench_train,
    results,
)
from bench.attention import flops, measure, peers, plot, report, selections
from bench.attention.cases import PRESETS, Case, Shape, parse_shape
from bench.training import cell as train_cell
from bench.training import report as train_report
from bench.training.cases import GOALS, NAMES, Cell, Variant, config_of
from nsa.model.cost import training_flops_per_token
from nsa.ops import reference
from nsa.ops.eager import attention
from nsa.tests.cli.test_profiler_comparison import run_here
from nsa.tests.conftest import REPOSITORY

pytestmark = pytest.mark.usefixtures("forked_python")

SPEC = nsa.BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
TINY = Case(Shape(4, 2, 8, 16), batch=2, length=75, repeats=1)
G16 = Shape(64, 4, 128, 128)


def run_bench(*arguments: str) -> dict[str, Any]:
    """Run a benchmark from the repository root; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_prefill(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run the prefill benchmark in this process on two small lengths of a small shape."""
    small = ["--shape", "2,1,8,8", "--lengths", "40", "70", "--repeats", "1", "--device", "cpu"]
    assert bench_prefill.main([*small, *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the prefill benchmark says when it refuses its arguments."""
    with pytest.raises(SystemExit, match="2"):
        bench_prefill.main([*arguments, "--device", "cpu"])
    return capsys.readouterr().err


def test_torch_bench_measures_time_and_memory(capsys):
    assert bench_torch.main(["--lengths", "256", "--repeats", "1", "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = result["rows"]
    assert row["nsa_ms"] > 0 and row["dense_ms"] > 0
    assert row["ratio"] == row["nsa_ms"] / row["dense_ms"]
    assert row["nsa_mib"] > 0


def test_prefill_bench_starts_from_the_shell_and_takes_heads_and_blocks_from_a_config():
    config = ["--config", "configs/train_showcase.yaml", "--device", "cpu"]
    result = run_bench("bench/bench_prefill.py", *config, "--lengths", "96", "--repeats", "1")
    assert set(result) > {"device", "torch", "triton", "commit", "spec", "rows"}
    ours, dense, fla = result["rows"]
    assert [row["name"] for row in result["rows"]] == ["nsa", "math", "fla"]
    assert (ours["Hq"], ours["Hkv"], ours["Dk"], ours["Dv"]) == (8, 2, 16, 16)
    assert ours["both_ms"] > 0 and ours["fwd_ms"] > 0 and dense["both_ms"] > 0
    assert "CUDA device" in fla["reason"] and "fwd_ms" not in fla


@pytest.mark.parametrize("kind", ["random", "clustered", "file"])
def test_prefill_bench_runs_with_every_kind_of_selection(kind, tmp_path, capsys):
    if kind == "file":
        kind = str(tmp_path / "recorded.npz")
        case = Case(Shape(2, 1, 8, 8), batch=1, length=100, repeats=1)
        selections.write_selection(kind, selections.clustered(case, SPEC), SPEC)
    result = run_prefill(capsys, "--selection", kind)
    assert result["selection"] == kind
    assert [(row["name"], row["S"]) for row in result["rows"] if "both_ms" in row] == [
        ("nsa", 40),
        ("math", 40),
        ("nsa", 70),
        ("math", 70),
    ]
    if kind.endswith(".npz"):
        assert nsa.BlockSpec(**result["spec"]) == SPEC


def test_prefill_bench_takes_several_shapes(capsys):
    more = ["--shape", "2,2,8,8", "4,1,8,16", "--batch", "2", "--peers"]
    rows = run_prefill(capsys, *more)["rows"]
    assert [(row["Hq"], row["Hkv"], row["Dv"], row["B"]) for row in rows[::2]] == [
        (2, 1, 8, 2),
        (2, 2, 8, 2),
        (4, 1, 16, 2),
    ]


def test_prefill_bench_writes_json_and_a_picture(tmp_path, capsys):
    picture, again, written = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "r.json"
    result = run_prefill(capsys, "--json", str(written), "--plot", str(picture))
    assert report.read_result(written) == result
    assert plot.main([str(written), str(again)]) == 0
    for path in (picture, again):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png", "r.json"}


def test_picture_has_every_peer_and_leaves_out_what_has_no_time(tmp_path):
    where = dict(Hq=64, Hkv=4, Dk=128, Dv=128, B=1)
    rows = [dict(where, name=name, S=4096, fwd_ms=1.0, both_ms=3.0) for name in ("nsa", "cudnn")]
    rows += [dict(where, name=name, S=8192, reason="no") for name in ("flash", "fla")]
    rows[0] |= dict(fwd_graph_ms=0.5, both_graph_ms="graph: not captured")
    plot.plot_rows(rows, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").stat().st_size > 0
    curves = plot._curves(rows, (64, 4, 128, 128, 1), "both")
    assert curves == {"nsa": [(4096, 3.0)], "cudnn": [(4096, 3.0)]}
    assert "nsa graph" in plot._curves(rows, (64, 4, 128, 128, 1), "fwd")


@pytest.mark.parametrize("length", [1, 7, 8, 64, 75])
@pytest.mark.parametrize("spec", [SPEC, nsa.BlockSpec(l=8, d=8, l_sel=16, n_sel=3, w=100)])
def test_pairs_are_those_of_the_reference_masks(length, spec):
    q, k = torch.randn(1, length, 2, 8), torch.randn(1, length, 1, 8)
    k_cmp = reference.compress(k, spec, doc_lens=[length])
    chosen = reference.select_blocks(q, k_cmp, spec, scale=1.0, doc_lens=[length])[0, :, 0]
    t, token = torch.arange(length)[:, None], torch.arange(length)[None, :]
    in_chosen = (token[..., None] // spec.l_sel == chosen[:, None, :]).any(dim=-1)
    visible = reference._cmp_visible(t, k_cmp.shape[1], spec)
    assert flops.count_pairs(length, spec) == (
        visible.sum(),
        (in_chosen & (token <= t)).sum(),
        ((token <= t) & (token > t - spec.w)).sum(),
    )


def test_work_counts_the_products_of_every_pair():
    case = Case(Shape(4, 2, 8, 16), batch=3, length=40, repeats=1)
    pairs = flops.count_pairs(40, SPEC)
    work = flops.nsa_work(case, SPEC, scored=True, itemsize=2)
    per_pair = 2 * (8 + 16)
    assert work.fwd_flops == 3 * 4 * (per_pair * sum(pairs) + 2 * 8 * pairs.cmp)
    assert work.bwd_flops == 3 * 4 * 2 * (3 * 8 + 2 * 16) * sum(pairs)
    given = flops.nsa_work(case, SPEC, scored=False, itemsize=2)
    assert work.fwd_flops - given.fwd_flops == 3 * 4 * 2 * 8 * pairs.cmp
    dense = flops.dense_work(case, itemsize=2)
    assert dense.fwd_flops == 3 * 4 * per_pair * torch.ones(40, 40).tril().sum()


def test_least_traffic_reads_inputs_and_writes_results_once():
    inputs = measure.make_inputs(TINY, torch.bfloat16, "cpu")
    read = sum(x.numel() * x.itemsize for x in inputs)
    out = peers.call_nsa(inputs, SPEC)
    written = out.numel() * out.itemsize
    work = flops.nsa_work(TINY, SPEC, scored=True, itemsize=2)
    assert (work.fwd_bytes, work.bwd_bytes) == (read + written, 2 * read + written)


def test_floor_is_the_larger_of_products_and_traffic():
    products = flops.Work(flops.FLOPS_PER_S, 2 * flops.FLOPS_PER_S, 1.0, 1.0)
    assert (products.floor_ms(backward=False), products.floor_ms(backward=True)) == (1e3, 3e3)
    traffic = flops.Work(1.0, 1.0, flops.BYTES_PER_S, flops.BYTES_PER_S)
    assert (traffic.floor_ms(backward=False), traffic.floor_ms(backward=True)) == (1e3, 2e3)


@pytest.mark.parametrize("spec", [SPEC, nsa.BlockSpec(), nsa.BlockSpec(l=24, d=24, l_sel=48)])
@pytest.mark.parametrize("length", [1, 75, 300])
def test_clustered_selection_is_legal_and_shared_by_neighbours(spec, length):
    case = TINY._replace(length=length)
    chosen = selections.clustered(case, spec)
    assert chosen.shape == (2, length, 2, spec.n_sel) and chosen.dtype == torch.int32
    selections.check_selection(chosen.numpy(), spec, "clustered")
    steps = torch.arange(1, length)
    same = (steps % selections.TILE != 0) & (steps % spec.l_sel != 0)
    assert torch.equal(chosen[:, 1:][:, same], chosen[:, :-1][:, same])


def test_clustered_selection_differs_from_tile_to_tile():
    spec = nsa.BlockSpec(l_sel=16)
    chosen = selections.clustered(TINY._replace(length=64 * 16), spec)
    before, after = (set(chosen[0, t, 0].tolist()) for t in (64 * 14 - 1, 64 * 15 - 1))
    assert len(before & after) < spec.n_sel - 2


def test_the_selection_that_comes_with_the_benchmarks_can_be_read():
    path = REPOSITORY / "bench" / "recorded" / "selection-30m-8192-nsa-s1.npz"
    found, spec = selections.read_selection(path)
    assert spec == nsa.BlockSpec() and found.shape == (10, 8192, 2, 16)


def test_recorded_selection_is_read_as_written(tmp_path):
    inputs = [x.detach() for x in measure.make_inputs(TINY, torch.float32, "cpu")]
    q, k, *_ = inputs
    chosen = nsa.select_blocks(q, nsa.compress(k, SPEC), SPEC)
    selections.write_selection(tmp_path / "a.npz", chosen, SPEC)
    read, spec = selections.read_selection(tmp_path / "a.npz")
    assert torch.equal(read, chosen) and spec == SPEC
    part = selections.recorded(read, TINY._replace(batch=1, length=20))
    assert torch.equal(part, chosen[:1, :20])
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_prefill_bench_starts_at_the_layer_that_is_asked_for(tmp_path, capsys):
    path = str(tmp_path / "model.npz")
    layers = selections.clustered(TINY._replace(shape=Shape(2, 1, 8, 8)), SPEC)
    selections.write_selection(path, layers, SPEC)
    seen = []
    select = selections.recorded

    def watch(recorded, case):
        seen.append(recorded)
        return select(recorded, case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selections, "recorded", watch)
        result = run_prefill(capsys, "--selection", path, "--selection-layer", "1")
    assert result["selection"] == f"{path} from layer 1"
    assert seen and all(torch.equal(part, layers[1:]) for part in seen)
    wrong = ["--shape", "2,1,8,8", "--selection", path, "--selection-layer", "2"]
    assert "has the layers 0 to 1" in refusal(capsys, *wrong)
    assert "only a FILE has layers" in refusal(capsys, "--selection-layer", "1")


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        ("a future block", [0, 1, 2, 7]),
        ("no first block", [1, 2, 3, 5]),
        ("no previous block", [0, 1, 2, 6]),
        ("no own block", [0, 1, 4, 5]),
        ("not ascending", [0, 4, 3, 6]),
        ("twice the same", [0, 5, 5, 6]),
        ("too few", [0, 5, 6, -1]),
        ("too small", [0, -2, 5, 6]),
    ],
)
def test_illegal_rows_of_a_selection_are_refused(fault, row, tmp_path):
    chosen = selections.clustered(TINY, SPEC)
    chosen[1, 50, 1] = torch.tensor(row)  # its own block is 6
    with pytest.raises(ValueError, match=r"\(1, 50, 1\).*4 blocks of 0\.\.6.*record"):
        selections.write_selection(tmp_path / "a.npz", chosen, SPEC)
    assert not list(tmp_path.iterdir())


def test_padding_other_than_minus_one_is_refused():
    chosen = selections.clustered(TINY, SPEC)
    chosen[0, 3, 0, 1] = 1
    with pytest.raises(ValueError, match=r"\(0, 3, 0\).*1 blocks of 0\.\.0"):
        selections.check_selection(chosen.numpy(), SPEC, "selection")


LEGAL = selections.clustered(TINY, SPEC).numpy()
SIZES = np.array([8, 4, 8, 4, 12])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (dict(spec=SIZES, selection=LEGAL), "but not.*version.*write_selection"),
        (dict(version=2, spec=SIZES, selection=LEGAL), "version 2.*knows 1"),
        (dict(version=1, spec=SIZES[:4], selection=LEGAL), "the integers l, d"),
        (dict(version=1, spec=SIZES / 1, selection=LEGAL), "the integers l, d"),
        (dict(version=1, spec=SIZES * 0, selection=LEGAL), "not a positive integer"),
        (dict(version=1, spec=SIZES, selection=LEGAL.astype(np.int64)), "int64.*int32 is needed"),
        (dict(version=1, spec=SIZES, selection=LEGAL[0]), r"\[75, 2, 4\].*is needed"),
        (dict(version=1, spec=SIZES, selection=LEGAL[..., :3]), r"\[2, 75, 2, 3\].*is needed"),
        (dict(version=1, spec=SIZES, selection=LEGAL + 1), "has.*at .b, t, group.*allowed"),
        (dict(version=1, spec=SIZES, selection=np.array([{}])), "cannot be read"),
    ],
)
def test_bad_selection_files_are_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message.replace("int32 is", r"int32 \[.*\] is")):
        selections.read_selection(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 torn", b"npy", None])
def test_files_that_are_no_archive_are_refused(content, tmp_path):
    path = tmp_path / "a.npz"
    if content == b"npy":
        np.save(tmp_path / "a.npy", LEGAL)
        path = tmp_path / "a.npy"
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as a \.npz file.*write_selection"):
        selections.read_selection(path)


@pytest.mark.parametrize("other", [dict(batch=3), dict(length=76), dict(shape=Shape(4, 4, 8, 8))])
def test_a_recorded_selection_that_does_not_cover_the_case_is_refused(other):
    with pytest.raises(ValueError, match="B=2, S=75, Hkv=2.*change --batch, --lengths or --shape"):
        selections.recorded(torch.from_numpy(LEGAL), TINY._replace(**other))


def test_speed_preset_has_the_published_shapes():
    cases = PRESETS["speed"]()
    found = {}
    for case in cases:
        found.setdefault((*case.shape, case.batch), []).append(case.length)
    lengths = [4096, 8192, 16384, 32768, 65536]
    assert found == {
        (64, 4, 128, 128, 1): lengths,
        (12, 2, 64, 64, 1): lengths,
        (32, 8, 128, 128, 1): lengths,
        (64, 4, 192, 128, 1): lengths[1:],
        (12, 2, 64, 64, 16): [2048],
    }
    assert {case.length: case.repeats for case in cases}[65536] < cases[0].repeats
    assert {case.repeats for case in PRESETS["speed"](2)} == {2}


@pytest.mark.parametrize(
    ("case", "spec", "device", "reason"),
    [
        (Case(G16, 1, 64, 1), nsa.BlockSpec(), "cpu", "needs a CUDA device"),
        (Case(Shape(12, 2, 64, 64), 1, 64, 1), nsa.BlockSpec(), "cuda", "G=6"),
        (Case(Shape(32, 8, 64, 64), 1, 64, 1), nsa.BlockSpec(), "cuda", "G=4"),
        (Case(Shape(24, 1, 64, 64), 1, 64, 1), nsa.BlockSpec(), "cuda", "power of two.*G=24"),
        (Case(G16, 1, 64, 1), nsa.BlockSpec(l_sel=32), "cuda", "l_sel=32"),
        (Case(G16, 1, 64, 1), nsa.BlockSpec(n_sel=12), "cuda", "n_sel=12"),
        (Case(Shape(16, 1, 320, 64), 1, 64, 1), nsa.BlockSpec(), "cuda", "up to 256.*320"),
        (Case(G16, 1, 64, 1), nsa.BlockSpec(), "cuda", "^$"),
    ],
)
def test_fla_says_why_it_cannot_take_a_case(case, spec, device, reason):
    assert re.search(reason, peers.fla_obstacle(case, spec, device))


def test_a_missing_fla_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(peers.CannotRun, match=r"imported.*flash-linear-attention 0.6.0"):
        peers.load_fla()


def cpu_setup(**options: Any) -> measure.Setup:
    """A setup that runs here."""
    settings: dict[str, Any] = dict(
        device="cpu",
        dtype=torch.float32,
        backend="auto",
        spec=SPEC,
        peer_names=(),
        dense_long=False,
        select=lambda case: None,
    )
    return measure.Setup(**(settings | options))


def test_what_is_left_out_has_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(peers, "DENSE_MAX_LENGTH", 74)
    case = TINY._replace(left_out=(("fla", "too slow"),))
    _, math, fla = measure.measure_case(case, cpu_setup(peer_names=("math", "fla")))
    assert "skipped above S=74; add --dense-long" in math.reason and math.both_ms is None
    assert fla.reason == "too slow"
    _, math = measure.measure_case(case, cpu_setup(peer_names=("math",), dense_long=True))
    assert math.reason == "" and math.both_ms is not None


def test_an_implementation_that_fails_has_a_row_with_the_error(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no kernel\nlong explanation")

    monkeypatch.setattr(peers, "call_dense", fail)
    ours, math = measure.measure_case(TINY, cpu_setup(peer_names=("math",)))
    assert math.reason == "RuntimeError: no kernel" and ours.reason == ""


def test_bench_reports_failure_when_ours_fails(monkeypatch, capsys):
    def fail(*arguments, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(peers, "call_nsa", fail)
    tiny = ["--shape", "2,1,8,8", "--lengths", "20", "--repeats", "1", "--device", "cpu"]
    assert bench_prefill.main(tiny) == 1
    assert "nsa: RuntimeError: broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "12,2,64"], "not four whole numbers"),
        (["--shape", "12,5,64,64"], "multiple of Hkv"),
        (["--preset", "speed"], "needs a CUDA device"),
        (["--preset", "speed", "--batch", "2"], "drop --lengths and --batch"),
        (["--lengths", "0"], "whole numbers >= 1"),
        (["--json", "no/such/folder/r.json"], "does not exist; create it"),
        (["--selection", "no-such-file.npz"], "no-such-file.npz cannot be read"),
        (["--backend", "fast"], "'fast' is not known"),
    ],
)
def test_prefill_bench_refuses_before_it_measures(arguments, message, capsys):
    assert message in refusal(capsys, *arguments)


def test_a_selection_of_other_blocks_than_the_config_is_refused(tmp_path, capsys):
    path = str(tmp_path / "a.npz")
    selections.write_selection(path, torch.from_numpy(LEGAL), SPEC)
    config = str(REPOSITORY / "configs" / "base.yaml")
    assert "both must be equal" in refusal(capsys, "--config", config, "--selection", path)


def test_shape_is_read_from_text():
    assert parse_shape("64,4,192,128") == Shape(64, 4, 192, 128)


def test_table_stays_aligned_and_prints_reasons_below():
    row = measure.Row(name="nsa", Hq=64, Hkv=4, Dk=192, Dv=128, B=16, S=65536, repeats=1)
    row.fwd_ms, row.both_ms, row.fwd_graph_ms = 0.0123, 12345.6, "graph: not permitted"
    line, graph = report.table_line(row).splitlines()
    assert len(line) == len(report.table_head())
    assert "0.012" in line and "12346" in line
    assert graph.strip() == "nsa: graph: not permitted"


def test_kernels_are_listed_with_their_share():
    kernels = [{"name": "band_forward", "ms": 3.0}, {"name": "block_backward", "ms": 1.0}]
    where = dict(Hq=12, Hkv=2, Dk=64, Dv=64, B=1, S=4096)
    text = report.kernel_lines(dict(where, total_ms=4.0, num_names=2, kernels=kernels))
    assert "75.0%  band_forward" in text and "12,2,64,64 B=1 S=4096" in text


def test_commit_is_unknown_without_git(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results.commit() == "unknown"


def run_train(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Rehearse the training benchmark: its exit code, and what it printed."""
    small = ["--device", "cpu", "--tiny", "--steps", "2", "--warmup", "1"]
    code = bench_train.main([*small, *arguments])
    return code, capsys.readouterr().out


def test_train_bench_measures_both_models_and_says_why_a_variant_failed(tmp_path, capsys):
    path = tmp_path / "r.json"
    settings = ["--cells", "64x2", "--variants", "nsa,nsa-graph,dense", "--json", str(path)]
    code, printed = run_train(capsys, *settings, "--commit", "abc")
    assert code == 1  # a variant of ours failed
    result = train_report.read_result(path)
    assert result["environment"]["commit"] == "abc"
    assert result["environment"]["torch"] == torch.__version__
    assert "--cells 64x2" in result["environment"]["command"]
    (cell,) = result["cells"]
    ours, captured, dense = cell["rows"]
    assert ours["timed_steps"] == dense["timed_steps"] == 2
    assert ours["tokens_per_s"] == pytest.approx(1e3 * 128 / ours["step_ms"])
    assert cell["ratio"] == ours["ratio"] == ours["tokens_per_s"] / dense["tokens_per_s"]
    assert abs(ours["loss"] - np.log(256)) < 0.2 and ours["loss"] != dense["loss"]
    assert "needs a CUDA device" in captured["reason"] and "tokens_per_s" not in captured
    lines = printed.splitlines()[-3:]
    assert [line.split()[1] for line in lines] == ["nsa", "nsa-graph", "dense"]
    assert "failed: ConfigError" in lines[1]


def test_train_bench_goes_on_without_the_variant_that_ended_its_process(monkeypatch, capsys):
    asked = []

    def process(task: train_cell.Task, timeout_s: float):
        asked.append(task.variants)
        begins = [{"kind": "begin", "variant": name} for name in task.variants[:2]]
        if "nsa-graph" in task.variants:
            return "the process ended with code -11", begins
        row = dict(step_ms=2.0, tokens_per_s=64e3, mfu=None, peak_mib=None, first_s=1.0, loss=1.0)
        return "", [{"kind": "row", "variant": name, **row} for name in task.variants]

    monkeypatch.setattr(bench_train, "run_process", process)
    code, printed = run_train(capsys, "--cells", "128x1", "--variants", "nsa,nsa-graph,dense")
    assert code == 1 and asked == [["nsa", "nsa-graph", "dense"], ["nsa", "dense"]]
    last = printed.splitlines()[-3:]
    assert "64,000" in last[0] and "failed: the process ended with code -11" in last[1]
    assert "64,000" in last[2]


def test_train_bench_stops_a_process_that_hangs():
    task = train_cell.Task(
        length=64, batch=1, variants=["nsa"], steps=10**6, warmup=1, device="cpu", tiny=True
    )
    ending, _ = bench_train.run_process(task, 0.01)
    assert "more than 0.01 s (--cell-timeout)" in ending


@pytest.mark.parametrize("cell", GOALS, ids=str)
def test_train_bench_holds_ours_to_the_goal_of_a_cell(cell):
    goal = GOALS[cell]
    dense = goal.tokens_per_s or 100.0
    for ours, met in ((1.001, True), (0.999, False)):
        speed = dense * ours * (goal.ratio or 1.0)
        rows = [dict(variant="nsa-graph", tokens_per_s=speed), dict(variant="nsa", reason="no")]
        rows += [dict(variant="dense", tokens_per_s=1.0), dict(variant="dense-x", reason="no")]
        rows += [dict(variant="dense-compiled", tokens_per_s=dense)]
        found = train_report.summarize(cell, rows, tiny=False)
        assert (found["goal_met"], found["best_dense"]) == (met, "dense-compiled")
        result = {"cells": [found | {"rows": []}]}
        assert ("ok" if met else "miss") in train_report.table(result)
    alone = [dict(variant="nsa", tokens_per_s=1.0)]
    assert train_report.summarize(cell, alone, tiny=False)["goal_met"] in (None, False)


def test_train_bench_has_the_production_model_with_the_gpt2_vocabulary():
    ours, dense = (
        config_of(Cell(8192, 4), Variant(name), "cpu", tiny=False) for name in ("nsa", "dense")
    )
    assert (ours.model.dim, ours.model.n_layers, ours.data.vocab) == (768, 12, 50257)
    assert (ours.train.seq_len, ours.train.batch_size) == (8192, 4)
    assert ours.runtime.precision == "bf16" and dense.model.attention == "dense"
    # 3 * 2 FLOPs for each weight of a matrix and token, and the attention of half the length
    matrices = 12 * (768 * (12 * 64 + 2 * 128) + 768 * 768 + 8 * 768**2) + 768 * 50257
    attention = 12 * 12 * 2 * 128 * 8193 / 2
    expected = 3 * (2 * matrices + attention)
    assert sum(training_flops_per_token(dense).values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "2048"], "'2048' is not a cell; use length x batch"),
        (["--cells", "64x0"], "'64x0' is not a cell"),
        (["--variants", "nsa,sparse"], f"'sparse' is not known; choose from {', '.join(NAMES)}"),
        (["--steps", "0"], "--steps 0 is below 1"),
        (["--json", "nowhere/r.json"], "create it first"),
    ],
)
def test_train_bench_refuses_before_it_measures(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_train.main(["--device", "cpu", "--tiny", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_train_bench_refuses_the_production_model_on_a_cpu(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_train.main(["--device", "cpu"])
    assert "add --tiny" in capsys.readouterr().err


def test_train_bench_needs_no_optional_package():
    """It runs on machines without the packages that draw, or read other data."""
    code = (
        "import sys\n"
        "for name in ('tensorboard', 'matplotlib', 'tiktoken', 'tokenizers', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import bench.bench_train, bench.training.cell\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# --- bench_overhead.py ---


def test_overhead_is_telemetry_and_the_share_of_a_checkpoint():
    seconds = {"bare": [0.100, 0.102, 0.098], "telemetry": [0.101] * 3, "checkpoint": [0.106] * 3}
    found = bench_overhead.summarize(seconds, steps=101)
    assert found["save_s"] == pytest.approx(0.005 * 100)
    assert found["shares"]["telemetry"] == pytest.approx(0.01)
    assert found["shares"]["checkpoint"] == pytest.approx(0.5 / (500 * 0.1))
    assert found["share"] == pytest.approx(0.02)
    assert "ok" in bench_overhead.describe(found | dict.fromkeys(OVERHEAD_FACTS, 1))
    assert "miss" in bench_overhead.describe(found | dict.fromkeys(OVERHEAD_FACTS, 1) | {"goal": 0})


OVERHEAD_FACTS = ("num_params", "tokens_per_step", "device", "torch", "commit")


def test_overhead_is_measured_by_real_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_overhead, "run_variant", run_here)
    config = tmp_path / "tiny.yaml"
    config.write_text(
        "model: {dim: 32, n_layers: 1, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8}\n"
        "nsa: {l: 8, d: 4, l_sel: 8, n_sel: 3, w: 16}\n"
        "train: {steps: 8, seq_len: 32, batch_size: 1}\n"
        "runtime: {precision: fp32, device: cpu}\n",
        encoding="utf-8",
    )
    bench_overhead.main(["--config", str(config), "--steps", "8", "--rounds", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["step_ms"]) == {"bare", "telemetry", "checkpoint"}
    assert all(value > 0 for value in found["step_ms"].values())


def test_overhead_refuses_too_few_steps(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_overhead.main(["--steps", "3"])
    assert "use at least 4 steps and 1 round" in capsys.readouterr().err


@pytest.mark.dist
def test_bench_ranks_measures_ours_and_plain_ddp_in_turns() -> None:
    small = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.d_k=8", "model.d_v=8"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "bench/bench_ranks.py", "--pairs", "2", "train.seq_len=32", *small],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    result = json.loads(line)
    assert (result["ranks"], result["pairs"]) == (2, 2)
    assert result["ours_ms"] > 0 and result["plain_ms"] > 0
    assert done.returncode == (0 if result["cost"] <= 0.03 else 1), done.stderr


# --- bench_startup.py ---


def test_a_start_is_held_to_the_goal_of_its_kind():
    lines = {
        bench_startup.PYTHON: 0.04,
        bench_startup.TORCH: 2.0,
        bench_startup.OPTIMIZER: 4.0,
    }
    times = {("", line): [bench_startup.Times(cpu_s, 9.0)] * 3 for line, cpu_s in lines.items()}
    cases = [("files", 0.5, True), ("files", 0.51, False), ("operator", 2.3, True)]
    cases += [("operator", 2.31, False), ("trains", 5.0, True)]
    starts = []
    for needs, cpu_s, _ in cases:
        starts.append(bench_startup.Start(f"nsa {needs} {cpu_s}", needs))
        found = [bench_startup.Times(t, 9.0) for t in (cpu_s, 0.0, 9.0)]  # the median counts
        times |= {("here", starts[-1].line): found, ("against", starts[-1].line): found}

    result = bench_startup.summarize(starts, times, ["here", "against"])

    assert [row["met"] for row in result["commands"]] == [met for _, _, met in cases]
    assert result["commands"][0]["per_python"] == 12.5
    assert result["commands"][2]["per_torch"] == pytest.approx(1.15)
    assert bench_startup.describe(result).count("MISSED") == 2


def test_a_start_that_ends_otherwise_is_no_measurement():
    with pytest.raises(RuntimeError, match="exit code 2, not 0"):
        bench_startup.run(bench_startup.Start("nsa env --nonsense", "files"), REPOSITORY, {})


# --- bench_sparse.py ---


def test_a_row_is_timed_beside_dense_attention_and_compared_with_the_torch_path():
    row = bench_sparse.Row.parse("4/2/16:16:3:200")
    assert row == ((4, 2, 16, 16), 16, 3, 200)
    found = bench_sparse.measure(row, "torch", "cpu", repeats=1)
    assert min(found[name] for name in ("forward_ms", "both_ms", "dense_ms")) > 0
    assert found["error"] < 1e-5


# --- bench_switches.py ---


def test_constants_are_changed_for_their_rows_alone(tmp_path, capsys, monkeypatch):
    sizes = ["--shape", "2,1,8,8", "--lengths", "70", "--repeats", "1", "--device", "cpu"]
    variant = "eager.attention.CHUNK_LOGITS=64 eager.attention.MIN_CHUNK=1"
    path = tmp_path / "switches.json"
    before = attention.CHUNK_LOGITS, attention.MIN_CHUNK
    assert bench_switches.main([*sizes, "--variant", variant, "--json", str(path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results.read_json(path, bench_switches.VERSION, "bench_switches.py") == result
    plain, other = result["rows"]
    assert (plain["variant"], other["variant"]) == ("as it is", variant)
    assert (plain["ratio"], plain["error"]) == (1.0, 0.0)
    # Shorter chunks: sums of another order.
    assert 0 < other["error"] < 1e-5
    assert before == (attention.CHUNK_LOGITS, attention.MIN_CHUNK)
    monkeypatch.setattr(bench_switches, "COMPARED", 2)
    assert bench_switches.main([*sizes, "--variant", variant, "--launches", "4"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["launches"], row["others"], row["spread"]) for row in rows] == 2 * [(4, 0, 0.0)]


def test_results_that_change_from_launch_to_launch_are_counted():
    numbers = itertools.count()
    found = bench_switches.repeat(lambda: (torch.tensor([4.0, next(numbers) // 150.0]),), 301)
    assert found == {"launches": 301, "others": 2, "spread": 0.5}


@pytest.mark.parametrize(
    "text", ["eager.attention.NOTHING=1", "nowhere.X=1", "eager.rows.X", "a=("]
)
def test_a_constant_that_cannot_be_set_is_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_switches.main(["--variant", text])
    assert "use MODULE.NAME=LITERAL" in capsys.readouterr().err
