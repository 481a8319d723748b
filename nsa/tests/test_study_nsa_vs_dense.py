"""The study of NSA against dense attention, whole and at a tiny size: what it leaves behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.selections import read_selection
from nsa import BlockSpec
from nsa.data import ByteTokenizer
from nsa.data.prepare import prepare
from nsa.tests.conftest import REPOSITORY
from studies.nsa_vs_dense import plot, selection_stats
from studies.nsa_vs_dense import run as study
from studies.nsa_vs_dense.arms import choose, read_table
from studies.nsa_vs_dense.results import gap, merge, read_results
from studies.nsa_vs_dense.train_arm import Task

FOLDER = REPOSITORY / "studies" / "nsa_vs_dense"
TABLE = """
schema = 1
[settings]
"model.dim" = 16
"model.n_layers" = 2
"model.n_heads" = 4
"model.n_kv_groups" = 2
"model.d_k" = 4
"model.d_v" = 4
"nsa.l" = 8
"nsa.d" = 4
"nsa.l_sel" = 8
"nsa.n_sel" = 4
"nsa.w" = 8
"train.lr" = 1e-2
"train.batch_size" = 2
"runtime.precision" = "fp32"
"runtime.device" = "cpu"
[variants]
dense = { "model.attention" = "dense" }
nsa = { "model.attention" = "nsa" }
nsa-only-win = { "model.attention" = "nsa", NSA_FORCE_BRANCH = "win" }
[comparisons.tiny]
config = "configs/base.yaml"
steps = 16
step_ms = 1
start_s = 0
held_out_tokens = 512
eval_tokens = 128
arms = { dense = [1], nsa = [1] }
diagnosis = { nsa = [2], nsa-only-win = [1] }
[comparisons.tiny.settings]
"train.seq_len" = 64
[comparisons.broken]
config = "configs/base.yaml"
steps = 16
step_ms = 1
start_s = 0
held_out_tokens = 512
eval_tokens = 128
arms = { dense = [1] }
[comparisons.broken.settings]
"train.seq_len" = 1_000_000
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with shards and a table of arms."""
    folder = tmp_path_factory.mktemp("study")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "again"]
    texts = [" ".join(words[(i * j) % len(words)] for j in range(80)) for i in range(1, 120)]
    lines = [json.dumps({"text": f"{i} {text}"}) for i, text in enumerate(texts)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    prepare(folder / "texts.jsonl", folder / "shards", ByteTokenizer())
    (folder / "arms.toml").write_text(TABLE)
    return folder


def call(place: Path, *arguments: str) -> int:
    """Run the study in the place."""
    where = ["--data", str(place / "shards"), "--out", str(place / "out")]
    return study.main([*where, "--table", str(place / "arms.toml"), *arguments])


@pytest.fixture(scope="module")
def results(place):
    """All arms trained by real processes; one of them cannot be."""
    assert call(place, "--price", "3.6", "--commit", "abc") == 1
    return read_results(place / "out" / "results.json")


def test_an_arm_that_fails_leaves_the_others_alone(results):
    assert [arm["name"] for arm in results["arms"]] == ["tiny-dense-s1", "tiny-nsa-s1"]
    (failed,) = results["failed"]
    assert failed["name"] == "broken-dense-s1"
    assert "exit code 2" in failed["reason"] and "seq_len" in failed["reason"]


def test_arms_of_a_comparison_differ_in_the_attention_alone(results):
    dense, ours = results["arms"]
    different = {k for k in dense["settings"] if dense["settings"][k] != ours["settings"].get(k)}
    assert different == {"model.attention"}
    assert dense["data"] == ours["data"] and dense["steps"] == ours["steps"] == 16


def test_results_hold_curves_losses_speed_and_parameters(results):
    dense, ours = results["arms"]
    for arm in (dense, ours):
        assert arm["training"]["step"] == list(range(1, 17))
        assert arm["val"]["step"][-1] == 16
        assert arm["training"]["loss"][-1] < arm["training"]["loss"][0]
        assert arm["held_out"]["rows"] == len(arm["held_out"]["row_losses"]) == 8
        # The trainer evaluates on the first two of these rows, and computes the loss otherwise.
        first_rows = sum(arm["held_out"]["row_losses"][:2]) / 2
        assert arm["val"]["loss"][-1] == pytest.approx(first_rows, abs=1e-4)
        assert arm["tokens_per_s"] > 0 and arm["seconds"]["process"] > 0
        assert arm["params"]["total"] == arm["params"]["embedding"] + arm["params"]["non_embedding"]
    assert ours["params"]["total"] > dense["params"]["total"]
    assert dense["gates"] is None and dense["selection"] is None and dense["reads"] is None
    assert ours["reads"]["step"][-1] == 16 and ours["reads"]["edges"] == ours["selection"]["edges"]
    assert all(sum(x) == pytest.approx(1, abs=2e-3) for x in ours["reads"]["distances"][-1])
    assert len(ours["gates"]["shares"][0]) == 2
    assert all(sum(s) == pytest.approx(1, abs=2e-4) for s in ours["gates"]["shares"][-1])
    (call_,) = results["calls"]
    assert call_["cost"] == pytest.approx(3.6 * call_["seconds"] / 3600, abs=1e-3)


def test_weights_are_gone_and_the_run_folder_tells_of_the_run(place, results):
    for arm in results["arms"]:
        folder = place / "out" / "runs" / arm["name"]
        assert (folder / "training.csv").is_file()
        assert not [*folder.glob("*.pt"), *folder.glob("checkpoint*")]


def test_finished_arms_are_not_trained_again(place, results, capsys):
    assert call(place, "--arms", "tiny-dense-s1,tiny-nsa-s1") == 0
    assert capsys.readouterr().out.count("finished before") == 2
    again = read_results(place / "out" / "results.json")
    assert again == results


def test_an_arm_with_other_settings_or_data_is_not_finished(place, results):
    parser = study._parser()
    where = ["--data", str(place / "shards"), "--out", str(place / "out")]
    where += ["--table", str(place / "arms.toml"), "--arms", "tiny-nsa-s1"]
    for more, expected in (([], True), (["--steps", "9"], False), (["--set", "nsa.w=4"], False)):
        made = study.Study(parser.parse_args([*where, *more]), [])
        assert made.finished(made.arms[0]) == expected
    made.data = made.data | {"sha256": "other"}
    assert not made.finished(made.arms[0])


def test_no_arm_is_started_that_does_not_fit_the_budget(place, results, capsys):
    arms = ["--arms", "tiny-nsa-s2", "--steps", "100000", "--budget-seconds", "5"]
    before = set((place / "out" / "runs").iterdir())
    assert call(place, *arms) == 0
    assert "not started: tiny-nsa-s2" in capsys.readouterr().out
    assert set((place / "out" / "runs").iterdir()) == before
    assert read_results(place / "out" / "results.json") == results


def test_arms_can_share_a_device_and_have_no_speed_then(place, tmp_path, capsys):
    arms = ["--arms", "tiny-nsa-s1,tiny-dense-s1", "--steps", "6", "--jobs", "2"]
    where = ["--data", str(place / "shards"), "--out", str(tmp_path)]
    assert study.main([*where, "--table", str(place / "arms.toml"), *arms]) == 0
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(said[:2]) == ["tiny-dense-s1", "tiny-nsa-s1"], "both begin"
    assert sorted(said[2:]) == ["tiny-dense-s1:", "tiny-nsa-s1:"], "before one ends"
    for arm in read_results(tmp_path / "results.json")["arms"]:
        assert arm["tokens_per_s"] is None and arm["steps"] == 6


def test_recorded_selection_can_be_benchmarked(place, results):
    ours = results["arms"][1]
    ids, spec = read_selection(place / "out" / ours["selection"]["file"])
    assert ids.shape == (2, 64, 2, 4)  # layers, S, Hkv, n_sel
    assert spec == BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=8)
    assert ours["selection"]["seq_len"] == 64 and ours["selection"]["rows"] > 1


def test_pictures_and_page_show_the_results(place, results, tmp_path):
    assert plot.main([str(place / "out" / "results.json"), "--out", str(tmp_path)]) == 0
    kinds = ["curves-tiny", "positions-tiny", "gates", "distances", "overlap"]
    for kind in kinds:
        content = (tmp_path / f"nsa_vs_dense-{kind}.png").read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    page = (tmp_path / "nsa_vs_dense.md").read_text()
    dense, ours = results["arms"]
    mean, error = gap(ours, dense)
    assert f"| {mean:+.4f} ± {error:.4f} |" in page
    assert mean == pytest.approx(ours["held_out"]["loss"] - dense["held_out"]["loss"], abs=2e-5)
    assert f"{ours['params']['non_embedding']:,}" in page and "broken-dense-s1" in page
    assert all(f"(nsa_vs_dense-{kind}.png)" in page for kind in kinds)
    assert read_results(tmp_path / "nsa_vs_dense.json")["arms"] == results["arms"]


def test_results_of_several_calls_are_merged(results):
    dense, ours = results["arms"]
    parts = [results | {"arms": [dense]}, results | {"arms": [ours], "failed": []}]
    merged = merge(parts)
    assert merged["arms"] == [dense, ours] and len(merged["calls"]) == 2
    assert [entry["name"] for entry in merged["failed"]] == ["broken-dense-s1"]
    parts[1] = results | {"arms": [ours | {"steps": 17}]}
    with pytest.raises(ValueError, match="differ in steps.*16 and 17"):
        merge(parts)


def test_an_arm_that_was_cut_short_goes_on(place, results):
    steps = ["--arms", "tiny-nsa-s2", "--steps", "60"]
    parser = study._parser()
    where = ["--data", str(place / "shards"), "--out", str(place / "cut")]
    made = study.Study(parser.parse_args([*where, "--table", str(place / "arms.toml"), *steps]), [])
    (arm,) = made.arms
    folder = made.work / arm.name
    where = [*made.where, f"train.out_dir={folder}"]
    files = {"result": "x", "selection": "x"}
    task = Task(arm=arm, where=where, data=made.data, **files, keep_weights=False, is_alone=True)
    made.work.mkdir(parents=True)
    (made.work / "task.json").write_text(task.to_json())
    child = subprocess.Popen(
        [sys.executable, str(study.CHILD), str(made.work / "task.json")], stdout=subprocess.DEVNULL
    )
    log = folder / "training.csv"
    while child.poll() is None and not (log.is_file() and log.read_text().count("\n") > 3):
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert made.run() == 0
    (result,) = read_results(made.out / "results.json")["arms"]
    assert 1 < result["resumed_at"] < 60
    assert result["training"]["step"] == list(range(1, 61))


def test_a_branch_alone_is_trained_alone(place, tmp_path):
    where = ["--data", str(place / "shards"), "--out", str(tmp_path)]
    table = ["--table", str(place / "arms.toml"), "--arms", "tiny-nsa-only-win-s1"]
    assert study.main([*where, *table, "--steps", "3"]) == 0
    (arm,) = read_results(tmp_path / "results.json")["arms"]
    assert all(layer == [0, 0, 1] for step in arm["gates"]["shares"] for layer in step)


@pytest.mark.parametrize("name", ["arms.toml", "arms_cpu.toml"])
def test_every_arm_of_the_tables_is_a_config(name):
    arms = read_table(FOLDER / name)
    assert len({arm.name for arm in arms}) == len(arms)
    for arm in arms:
        config = arm.resolve(["data.tokenizer=byte"])
        assert config.train.steps == arm.steps and config.train.seed == arm.seed
        twins = [a for a in arms if a.comparison == arm.comparison]
        assert {a.steps for a in twins} == {arm.steps}
        assert {a.settings["train.seq_len"] for a in twins} == {config.train.seq_len}


def test_minutes_give_all_arms_of_a_comparison_the_same_steps():
    arms = read_table(FOLDER / "arms.toml", minutes_each=1.5)
    steps = {arm.comparison: arm.steps for arm in arms}
    assert steps == {"30m-2048": 2000, "30m-8192": 1800, "125m-2048": 1000}
    assert all(arm.settings["train.steps"] == steps[arm.comparison] for arm in arms)


def test_arms_are_chosen_by_name_and_pattern():
    arms = read_table(FOLDER / "arms.toml")
    assert not any(arm.is_diagnosis for arm in choose(arms, None))
    assert [arm.name for arm in choose(arms, "30m-8192-*-s2,125m-2048-nsa-s1")] == [
        "30m-8192-dense-s2",
        "30m-8192-nsa-s2",
        "125m-2048-nsa-s1",
    ]
    with pytest.raises(ValueError, match="'30m' names no arm; there are 30m-2048-dense-s1"):
        choose(arms, "30m")


SPEC = BlockSpec(l=8, d=4, l_sel=8, n_sel=5, w=8)


def drawn(seq_len: int, rows: int, *, together: int = 1) -> torch.Tensor:
    """A legal selection: forced blocks, and others at random, the same for so many neighbours."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = SPEC.num_blocks(seq_len)
    own = (torch.arange(seq_len) // SPEC.l_sel)[:, None]
    block = torch.arange(num_blocks)
    score = torch.rand(rows, seq_len, 1, num_blocks, generator=generator)
    score = score[:, torch.arange(seq_len) // together * together]
    score = score.masked_fill(selection_stats.forced(seq_len, SPEC)[:, None], 2.0)
    score = score.masked_fill((block > own)[:, None], -1.0)
    best, ids = score.topk(min(SPEC.n_sel, num_blocks), dim=-1)
    ids = ids.masked_fill(best < 0, num_blocks).sort(-1).values
    return ids.masked_fill(ids == num_blocks, -1).int()


def test_random_selections_agree_with_what_is_expected_of_them():
    found = selection_stats.describe_selection([drawn(256, 60)], SPEC)
    assert found["overlap"][0] == pytest.approx(found["random_overlap"], abs=0.01)
    assert found["union"][0] == pytest.approx(found["random_union"], abs=0.02)
    assert found["distances"][0] == pytest.approx(found["random_distances"], abs=0.004)


def test_neighbours_that_read_the_same_blocks_are_seen():
    found = selection_stats.describe_selection([drawn(256, 4, together=8)], SPEC)
    at = dict(zip(found["tiles"], found["union"][0], strict=True))
    assert at[8] == pytest.approx(1.0) and at[16] > 1.3
    lags = dict(zip(found["lags"], found["overlap"][0], strict=True))
    assert lags[1] > 0.85 and lags[8] == pytest.approx(
        dict(zip(found["lags"], found["random_overlap"], strict=True))[8], abs=0.05
    )


def test_a_selection_without_a_choice_has_no_overlap():
    found = selection_stats.describe_selection([drawn(40, 2)], SPEC)
    assert found["lags"] == [] and found["tiles"] == [] and found["overlap"] == [[]]
    assert sum(found["distances"][0]) == pytest.approx(1, abs=1e-3)
