"""The study of NSA against dense attention, whole and at a tiny size: what it leaves behind."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from bench.attention.selections import read_selection
from nsa import BlockSpec
from nsa.config.env import changed
from nsa.data import ByteTokenizer
from nsa.data.prepare import prepare
from nsa.tests.conftest import REPOSITORY
from studies.nsa_vs_dense import plot, selection_stats
from studies.nsa_vs_dense import run as study
from studies.nsa_vs_dense.arms import choose, read_table
from studies.nsa_vs_dense.page import write_page
from studies.nsa_vs_dense.processes import CHILD
from studies.nsa_vs_dense.results import gap, merge, read_arm, read_results, write_results
from studies.nsa_vs_dense.train_arm import Task

pytestmark = pytest.mark.usefixtures("forked_python")

FOLDER = REPOSITORY / "studies" / "nsa_vs_dense"
BESIDE = "tiny-dense-s1,tiny-nsa-s1,tiny-nsa-s2"
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
        assert arm["speed_steps"] is None, "the speed is that of the whole run"
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
    assert call(place, "--arms", "tiny-dense-s1,tiny-nsa-s1", "--speed", "10") == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("finished before" in line for line in said), "nor timed again"
    again = read_results(place / "out" / "results.json")
    assert again == results


def test_arms_of_an_earlier_study_are_known_on_another_machine(place, results, tmp_path, capsys):
    known = ["--known", str(place / "out" / "results.json"), "--arms", "tiny-dense-s1,tiny-nsa-s1"]
    where = ["--data", str(place / "shards"), "--table", str(place / "arms.toml")]
    assert study.main([*where, "--out", str(tmp_path / "new"), *known]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("finished before" in line for line in said)
    more = ["--set", "nsa.w=4", "--arms", "tiny-nsa-s1", "--budget-seconds", "0.001"]
    assert study.main([*where, "--out", str(tmp_path / "other"), *known, *more]) == 0
    assert "not started: tiny-nsa-s1" in capsys.readouterr().out, "that is another arm"


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


@pytest.fixture(scope="module")
def beside(place):
    """The folder of three arms that were trained two at a time, and what was said."""
    with redirect_stdout(StringIO()) as said:
        assert call_beside(place, "beside") == 0
    return place / "beside", said.getvalue().splitlines()


@pytest.fixture(scope="module")
def timed(place, beside):
    """A copy of it in which the arms were then timed, and what was said."""
    shutil.copytree(beside[0], place / "timed")
    with redirect_stdout(StringIO()) as said:
        assert call_beside(place, "timed", "--speed", "10") == 0
    return place / "timed", said.getvalue().splitlines()


def call_beside(place: Path, out: str | Path, *more: str, arms: str = BESIDE) -> int:
    """Run the study with arms that share a device."""
    where = ["--data", str(place / "shards"), "--out", str(place / out)]
    where += ["--table", str(place / "arms.toml"), "--arms", arms, "--steps", "12"]
    return study.main([*where, "--jobs", "2", *more])


def test_arms_can_share_a_device_and_have_no_speed_then(beside):
    folder, lines = beside
    said = [line.split()[1] for line in lines]
    assert said[:2] == ["tiny-dense-s1", "tiny-nsa-s1"], "two begin before one ends"
    arms = read_results(folder / "results.json")["arms"]
    assert [arm["name"] for arm in arms] == ["tiny-dense-s1", "tiny-nsa-s1", "tiny-nsa-s2"]
    for arm in arms:
        assert arm["tokens_per_s"] is None and arm["speed_steps"] is None and arm["steps"] == 12


def test_the_first_seed_of_each_variant_is_timed_alone(beside, timed):
    folder, lines = timed
    said = [line.split()[1] for line in lines if "alone" in line]
    assert said == ["tiny-dense-s1:"] * 2 + ["tiny-nsa-s1:"] * 2, "one begins when one has ended"
    before, after = (read_results(place / "results.json")["arms"] for place, _ in (beside, timed))
    speeds = [arm["tokens_per_s"] for arm in after]
    assert speeds[0] > 0 and speeds[1] > 0 and speeds[2] is None
    assert [arm["speed_steps"] for arm in after] == [10, 10, None]
    for old, new in zip(before, after, strict=True):
        speed = {key: new[key] for key in ("tokens_per_s", "speed_steps")}
        assert new == old | speed, "losses and all else stay as they were"
        assert new == read_arm(folder / "runs" / f"{new['name']}.result.json")
    file = "selection-tiny-nsa-s1.npz"
    assert (folder / file).read_bytes() == (beside[0] / file).read_bytes()
    assert not list((folder / "runs").glob("*.speed")), "the scratch folders are gone"


def test_an_arm_is_timed_once(place, timed, capsys):
    before = read_results(timed[0] / "results.json")
    assert call_beside(place, "timed", "--speed", "10") == 0
    assert "alone" not in capsys.readouterr().out
    assert read_results(timed[0] / "results.json") == before


def test_the_updates_that_are_timed_are_those_of_the_arm(timed):
    """A schedule over fewer steps would have other losses; evaluations would take time."""
    folder, _ = timed
    for arm in read_results(folder / "results.json")["arms"][:2]:
        log = (folder / "runs" / f"{arm['name']}.speed.log").read_text()
        assert arm["training"]["step"][9] == 10
        assert f" -> {arm['training']['loss'][9]:.4f} nats" in log
        assert "[done] 10 steps" in log
        assert "held-out loss" not in log and "checkpoint_step" not in log


def test_no_arm_is_timed_that_does_not_fit_the_budget(place, beside, capsys):
    before = read_results(beside[0] / "results.json")
    assert call_beside(place, "beside", "--speed", "100000", "--budget-seconds", "5") == 0
    assert "not timed: tiny-dense-s1, tiny-nsa-s1; the same command" in capsys.readouterr().out
    assert read_results(beside[0] / "results.json") == before


def test_a_timing_that_fails_is_named_and_leaves_the_result(place, beside, tmp_path):
    shutil.copytree(beside[0], tmp_path / "out")
    path = tmp_path / "out" / "runs" / "tiny-nsa-s2.result.json"
    content = json.loads(path.read_text())
    content["machine"]["device"] = "another card"
    path.write_text(json.dumps(content))
    arms = "tiny-nsa-s2"
    assert call_beside(place, tmp_path / "out", "--speed", "10", arms=arms) == 1
    assert json.loads(path.read_text()) == content
    (failed,) = read_results(tmp_path / "out" / "results.json")["failed"]
    assert failed["name"] == "tiny-nsa-s2.speed" and "exit code 2" in failed["reason"]
    assert "was trained on another card, and this is" in failed["reason"]
    assert call_beside(place, tmp_path / "out", arms=arms) == 0, "the arm itself is finished"


def test_too_few_updates_have_no_speed(place, capsys):
    with pytest.raises(SystemExit):
        call_beside(place, "beside", "--speed", "9")
    assert "--speed 9 is less than 10" in capsys.readouterr().err


def test_page_says_where_a_speed_comes_from(results):
    assert "done alone" not in write_page(results, {}, None)
    dense, ours = (arm | {"tokens_per_s": 1000.0, "speed_steps": 50} for arm in results["arms"])
    other = ours | {"seed": 2, "tokens_per_s": None, "speed_steps": None}
    page = write_page(results | {"arms": [dense, ours | {"tokens_per_s": 2500.0}, other]}, {}, None)
    assert "beside others is from 50 updates done alone afterwards, for one seed" in page
    assert "| 1,000 |  |" in page and "| 2,500 | 2.50 |" in page
    assert [line for line in page.splitlines() if "| nsa | 2 |" in line and "|  |  |" in line]


def test_results_from_before_there_were_timings_can_be_read(place, results, tmp_path):
    content = json.loads((place / "out" / "results.json").read_text())
    for arm in content["arms"]:
        del arm["speed_steps"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert read_results(tmp_path / "results.json") == results


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


def test_diagnoses_have_pictures_of_their_own(results, tmp_path):
    dense, ours = results["arms"]
    alone = ours | {"name": "tiny-nsa-only-win-s1", "variant": "nsa-only-win"}
    parts = plot.split_diagnoses([dense, ours, alone])
    assert parts == {"": [dense, ours], "-diagnosis": [dense, ours, alone]}
    assert plot.split_diagnoses([dense, ours]) == {"": [dense, ours]}
    write_results(tmp_path / "more.json", merge([results | {"arms": [dense, ours, alone]}]))
    assert plot.main([str(tmp_path / "more.json"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "nsa_vs_dense.md").read_text()
    assert "(nsa_vs_dense-curves-tiny.png)" in page
    assert "(nsa_vs_dense-curves-tiny-diagnosis.png)" in page


def test_results_of_several_calls_are_merged(results):
    dense, ours = results["arms"]
    parts = [results | {"arms": [dense]}, results | {"arms": [ours], "failed": []}]
    merged = merge(parts)
    assert merged["arms"] == [dense, ours] and len(merged["calls"]) == 2
    assert [entry["name"] for entry in merged["failed"]] == ["broken-dense-s1"]
    parts[1] = results | {"arms": [ours | {"steps": 17}]}
    with pytest.raises(ValueError, match="differ in steps.*16 and 17"):
        merge(parts)


def test_an_arm_that_was_cut_short_goes_on_and_a_branch_alone_is_trained_alone(place):
    steps = ["--arms", "tiny-nsa-only-win-s1", "--steps", "60"]
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
        [sys.executable, str(CHILD), str(made.work / "task.json")],
        env=changed(arm.environ),
        stdout=subprocess.DEVNULL,
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
    assert all(layer == [0, 0, 1] for step in result["gates"]["shares"] for layer in step)


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
