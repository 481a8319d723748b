"""The study of the rules: recall, rows, arms, the diagnosis of far questions, and a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import BlockSpec, TinyLM
from nsa.data.documents import read_works
from nsa.evaluate.needles import Document
from nsa.model.cost import parameter_counts
from nsa.tests.conftest import REPOSITORY
from nsa.tests.studies.test_study_long_context import HAY, WORDS
from studies.long_context.diagnose import CAUSES, diagnose, selected_mass, summarize
from studies.long_context.interventions import (
    change_of,
    changed,
    intervene,
    trials_of,
    with_blocks,
)
from studies.long_context.training_rows import Mixture, make_row
from studies.nsa_vs_dense.arms import INIT, read_table
from studies.nsa_vs_dense.results import read_results
from studies.nsa_vs_dense.selection_stats import chance
from studies.recorder import Look
from studies.rules import plot, run
from studies.rules.measure import read_measures
from studies.rules.page import is_converted, reference
from studies.rules.recall import block_mass, chance_recall, share_of
from studies.rules.rows import read_recipes

pytestmark = pytest.mark.usefixtures("forked_python")

FOLDER = REPOSITORY / "studies" / "rules"
SPEC = BlockSpec(l=8, d=4, l_sel=16, n_sel=4, w=8)  # one block is free
SIZES: dict[str, Any] = dict(vocab=220, dim=16, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
BLOCKS: dict[str, Any] = dict(l=8, d=4, l_sel=16, n_sel=4, w=8)
RULES: dict[str, dict[str, Any]] = {
    "nsa": {},
    "infllm": {"rule": "pooled"},
    "moba": {"rule": "pooled", "pool": "moba", "pool_block": 32},
    "msa": {"rule": "msa", "d_index": 4},
}
TABLE = """
schema = 1
[rows]
vocab = 600
digits = 2
[settings]
"model.dim" = 16
"model.n_layers" = 2
"model.n_heads" = 4
"model.n_kv_groups" = 2
"model.d_k" = 8
"model.d_v" = 8
"nsa.l" = 8
"nsa.d" = 4
"nsa.l_sel" = 16
"nsa.n_sel" = 4
"nsa.w" = 8
"nsa.pool_block" = 32
"train.lr" = 1e-2
"train.batch_size" = 2
"runtime.precision" = "fp32"
"runtime.device" = "cpu"
[variants]
dense = { "model.attention" = "dense" }
dense-wide = { "model.attention" = "dense", "model.mlp_dim" = 80 }
pools = { "model.rule" = "pooled" }
[comparisons.short]
stage = true
config = "configs/base.yaml"
steps = 2
step_ms = 1
start_s = 0
held_out_tokens = 128
eval_tokens = 128
arms = { pools = [1] }
rows = { plain = 0.0, num_keys = 32, growing = [0.0, 0.3] }
timed = []
[comparisons.short.settings]
"train.seq_len" = 64
[comparisons.long-192]
config = "configs/base.yaml"
steps = 2
step_ms = 1
start_s = 0
held_out_tokens = 256
eval_tokens = 256
arms = { dense = [1], dense-wide = [1], pools = [1] }
rows = { plain = 0.5, num_keys = 32, growing = [0.0, 0.3] }
timed = []
[comparisons.long-192.settings]
"train.seq_len" = 192
[comparisons.long-192.start]
pools = "short-pools-s1"
[comparisons.on-192-on]
config = "configs/base.yaml"
steps = 1
step_ms = 1
start_s = 0
held_out_tokens = 256
eval_tokens = 256
arms = { dense = [1], pools = [1] }
rows = { plain = 0.5, num_keys = 32, growing = [0.0, 0.0] }
timed = []
[comparisons.on-192-on.settings]
"train.seq_len" = 192
[comparisons.on-192-on.start]
dense = "long-192-dense-s1"
pools = "long-192-dense-s1"
"""


def choice(free: int, seq_len: int) -> Tensor:  # [1, S, 1, 4] int32
    """Every query reads the forced blocks and this one."""
    own = torch.arange(seq_len) // SPEC.l_sel
    ids = torch.stack([torch.zeros_like(own), torch.full_like(own, free), own - 1, own], dim=-1)
    return ids.to(torch.int32)[None, :, None]


def attention_to(block: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Queries [1, S, 2, 4] and keys [1, S, 1, 4] that agree in one block."""
    k = torch.zeros(1, seq_len, 1, 4)
    k[:, block * SPEC.l_sel : (block + 1) * SPEC.l_sel, :, 0] = 40.0
    return torch.ones(1, seq_len, 2, 4), k


def test_recall_is_whether_the_block_that_dense_attention_looks_at_is_read() -> None:
    q, k = attention_to(2, 128)
    found, missed = (share_of(q, k, choice(free, 128), SPEC) for free in (2, 1))
    assert found.recall == 1.0 and found.read_mass == pytest.approx(1.0, abs=1e-3)
    # Forced blocks hide the miss from a few queries: block 2 is their last but one.
    assert missed.recall < 0.4 and missed.read_mass < 0.4
    assert found.best_mass == missed.best_mass == pytest.approx(1.0, abs=1e-3)


def test_mass_of_blocks_is_that_of_dense_causal_attention() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8)
    places = torch.tensor([3, 25, 39])
    mass = block_mass(q, k, places, 16)
    for at, place in enumerate(places.tolist()):
        for head in range(4):
            logits = k[0, : place + 1, head // 2] @ q[0, place, head] / 8**0.5
            parts = logits.softmax(0).split(16)
            expected = torch.stack([part.sum() for part in parts])
            torch.testing.assert_close(mass[0, at, head, : len(parts)], expected)
            assert mass[0, at, head, len(parts) :].sum() == 0


def test_recall_by_chance_is_that_of_blocks_that_are_drawn() -> None:
    seq_len, first = 256, SPEC.n_sel * SPEC.l_sel
    shares = [1 / (place // SPEC.l_sel + 1 - 3) for place in range(first, seq_len)]
    assert chance_recall(seq_len, SPEC) == pytest.approx(np.mean(shares))
    assert chance(seq_len, SPEC)[-1].sum().item() == pytest.approx(SPEC.n_sel)


def test_rows_with_nothing_to_choose_are_refused() -> None:
    q, k = attention_to(0, 64)
    with pytest.raises(ValueError, match="nothing to choose"):
        share_of(q, k, choice(1, 64), SPEC)


@pytest.mark.parametrize("name", RULES)
def test_a_look_at_a_layer_shows_what_its_attention_has_seen(name: str) -> None:
    torch.manual_seed(1)
    model = TinyLM(**SIZES, **BLOCKS, **RULES[name]).eval()
    ids = torch.randint(0, 220, (1, 128))
    look = Look(model, ids)
    torch.testing.assert_close(look.hidden, model.hidden(ids))
    for block, view in zip(model.layers, look.views(), strict=True):
        if name == "nsa":
            assert view.gates is not None and view.gates.shape == (1, 128, 4, 3)
            torch.testing.assert_close(view.gates.sum(-1), torch.ones(1, 128, 4))
        else:
            assert view.gates is None and view.selection is not None
            assert torch.equal(block.attn.rule.index(view.q, view.k, view.x), view.selection)


def test_keys_of_nsa_are_those_of_its_selected_branch() -> None:
    model = TinyLM(**SIZES, **BLOCKS).eval()
    for block in model.layers:  # the columns are q, then the keys of the selected branch
        with torch.no_grad():
            block.attn.qkv.weight[4 * 8 : 4 * 8 + 2 * 8] = 0
    for view in Look(model, torch.randint(0, 220, (1, 64))).views():
        assert not view.k.any() and view.q.any()


def test_a_share_of_rows_is_text_alone_and_the_others_are_as_they_were() -> None:
    usual = [make_row(i, "train", Mixture(seq_len=96), HAY, WORDS, 0, 1) for i in range(40)]
    mixed = Mixture(seq_len=96, plain=0.5)
    rows = [make_row(i, "train", mixed, HAY, WORDS, 0, 1) for i in range(200)]
    plain = [row for row in rows if not row.answers]
    assert 70 < len(plain) < 130 and all(len(row.ids) == 96 for row in rows)
    assert not np.isin(np.stack([row.ids for row in plain]), [0, *WORDS.keys, *WORDS.values]).any()
    assert all(row.answers for row in usual)


@pytest.mark.parametrize("name", ["arms.toml", "arms_cpu.toml"])
def test_arms_of_the_tables_can_start_and_the_twin_has_the_parameters_of_nsa(name: str) -> None:
    arms = {arm.name: arm for arm in read_table(FOLDER / name)}
    configs = {key: arm.resolve(["data.tokenizer=byte"]) for key, arm in arms.items()}
    stages = [recipe.comparison for recipe in read_recipes(FOLDER / name) if recipe.is_stage]
    for key, arm in arms.items():
        if INIT not in arm.settings:
            assert arm.comparison == stages[0]
            continue
        ours, start = configs[key].model, configs[arm.settings[INIT]].model
        shape = ("dim", "n_layers", "mlp_dim", "n_heads")
        assert [getattr(ours, k) for k in shape] == [getattr(start, k) for k in shape]
        # NSA has K and V of its own in each branch; what has one K and V starts as dense attention.
        assert all(ours.branched) == all(start.branched)
    for comparison in {arm.comparison for arm in arms.values()} - set(stages):
        members = [arm for arm in arms.values() if arm.comparison == comparison]
        if is_converted({"settings": members[0].settings}):
            continue
        twin, nsa = (
            sum(parameter_counts(configs[f"{comparison}-{variant}-s1"]).values())
            for variant in ("dense-wide", "nsa")
        )
        assert twin == pytest.approx(nsa, rel=0.02)
        rates = {a.settings["train.lr"] for a in members if a.variant.startswith("dense-wide")}
        assert len(rates) == 3 and len({arm.steps for arm in members}) == 1


def test_converted_arms_start_from_one_dense_model_and_train_a_tenth_of_its_updates() -> None:
    arms = {arm.name: arm for arm in read_table(FOLDER / "arms.toml")}
    converted = [arm for arm in arms.values() if is_converted({"settings": arm.settings})]
    assert {"dense", "infllm", "moba", "nsa-shared"} < {arm.variant for arm in converted}
    (start,) = {arm.settings[INIT] for arm in converted}
    assert arms[start].variant == "dense" and not is_converted({"settings": arms[start].settings})
    updates, name = 0, start
    while name:
        updates += arms[name].steps
        name = arms[name].settings.get(INIT)
    assert updates == 1000 + 600 + 600 + 500
    for arm in converted:
        cfg = arm.resolve(["data.tokenizer=byte"])
        assert arm.steps * 10 <= updates and not any(cfg.model.branched)
        assert cfg.model.dim == arms[start].resolve(["data.tokenizer=byte"]).model.dim


def test_wider_mlp_is_counted_as_it_is_built() -> None:
    cfg = read_table(FOLDER / "arms_cpu.toml")[1].resolve(["data.tokenizer=byte"])
    assert cfg.model.mlp_dim == 320
    built = TinyLM.from_config(cfg, vocab=256)
    assert built.layers[0].mlp.fc1.out_features == 320
    assert sum(p.numel() for p in built.parameters()) == sum(parameter_counts(cfg).values())


@pytest.mark.parametrize("name", RULES)
def test_every_far_question_is_recorded(name: str) -> None:
    torch.manual_seed(2)
    model = TinyLM(**SIZES, **BLOCKS, **RULES[name]).eval()
    rows = [make_row(i, "val", Mixture(seq_len=128), HAY, WORDS, 0, 3) for i in range(8)]
    questions = diagnose(model, rows, WORDS, 16, far=40)
    distances = [d for row in rows for d in row.distances if d > 40]
    assert [question["distance"] for question in questions] == distances and distances
    heads = {"nsa": 2, "infllm": 2, "moba": 4, "msa": 2}[name]
    for question in questions:
        assert np.shape(question["reads"]) == (2, heads)
        assert np.shape(question["needle"]) == np.shape(question["value"]) == (2, 4)
        for read, block, needle, value in zip(
            *(question[key] for key in ("reads", "block", "needle", "value")), strict=True
        ):
            # A block that is not read has no mass; the value is part of the needle.
            assert all(m > 0 for m in np.array(block)[np.repeat(read, 4 // heads)])
            assert all(m == 0 for m in np.array(block)[~np.repeat(read, 4 // heads)])
            assert all(v <= n + 1e-3 for v, n in zip(value, needle, strict=True))
        assert (question["gates"][0] is None) == (name != "nsa")
    assert summarize(questions)["questions"] == len(questions)


def test_mass_of_the_selected_branch_is_attention_to_the_blocks_that_are_read() -> None:
    torch.manual_seed(3)
    model = TinyLM(**SIZES, **BLOCKS, **RULES["infllm"]).eval()
    view = next(Look(model, torch.randint(0, 220, (1, 128))).views())
    query = torch.tensor([100, 127])
    assert view.selection is not None
    mass = selected_mass(view, query, view.selection[0, query], 16)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 4))
    read = {int(i) for i in view.selection[0, 100, 1]}
    outside = [place for place in range(128) if place // 16 not in read or place > 100]
    assert mass[0, 2:, outside].sum() == 0


def question(right: bool, read: list[bool], needle: float, gate: float) -> dict[str, Any]:
    """As recorded, of one layer with two KV heads and two query heads; head 0 is the reader."""
    return {
        "right": right, "reads": [read], "needle": [[needle, 0.0]], "rivals": 3, "needles": 9,
        "from_rival": not right, "gates": [[[0.1, gate, 0.1]] * 2],
    }  # fmt: skip


def test_causes_of_wrong_answers_are_told_apart() -> None:
    both = [True, True]
    questions = [question(True, both, 0.8, 0.6) for _ in range(5)]
    wrong = [
        ([False, False], 0.0, 0.6),
        ([False, True], 0.0, 0.6),
        (both, 0.1, 0.6),
        (both, 0.8, 0.1),
        (both, 0.8, 0.6),
    ]
    summary = summarize([*questions, *(question(False, *values) for values in wrong)])
    assert summary["causes"] == dict.fromkeys(CAUSES, 1)
    assert summary["right"] == summary["from_rival"] == 5
    assert summary["reader"] == {"layer": 0, "head": 0}
    assert summary["wrong_answers"]["read_by_reader"] == 0.6
    assert summary["by_needles"] == {"up to 16": [10, 5]}


def test_blocks_that_are_given_take_the_place_of_free_ones() -> None:
    spec = BlockSpec(l=8, d=4, l_sel=16, n_sel=6, w=8)  # first, last two and three free blocks
    read = torch.tensor([[[0, 2, 3, 4, 8, 9]], [[0, 1, 2, 3, -1, -1]]], dtype=torch.int32)
    query = torch.tensor([150, 60])
    cases = [
        ([[5, 6], [1, 1]], False, [[0, 2, 5, 6, 8, 9], [0, 1, 2, 3, -1, -1]]),
        ([[5, 5], [2, 3]], False, [[0, 2, 3, 5, 8, 9], [0, 1, 2, 3, -1, -1]]),
        ([[4, 9], [0, 1]], True, [[0, 4, 8, 9, -1, -1], [0, 1, 2, 3, -1, -1]]),
        ([[5, 6], [0, 3]], True, [[0, 5, 6, 8, 9, -1], [0, 2, 3, -1, -1, -1]]),
    ]
    for wanted, alone, expected in cases:
        found = with_blocks(read, query, torch.tensor(wanted), spec, alone)
        assert found[:, 0].tolist() == expected, (wanted, alone)


def test_an_intervention_changes_the_attention_of_some_tokens_alone() -> None:
    torch.manual_seed(4)
    model, ids = TinyLM(**SIZES, **BLOCKS).eval(), torch.randint(0, 220, (1, 128))
    query, plain = torch.tensor([115, 127]), model.hidden(ids)
    seen: list[tuple[Tensor, Tensor]] = []

    def look(_: int, gates: Tensor, selection: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((gates, selection))
        return gates, selection

    with changed(look):
        torch.testing.assert_close(model.hidden(ids), plain, rtol=0, atol=0)
    # Blocks 1 to 5 are free here; two layers of two heads read at most four of them.
    read = [{int(b) for _, x in seen for b in x[0, place].flatten()} for place in query]
    unread = torch.tensor([min(set(range(1, 6)) - blocks) for blocks in read])
    for trial in trials_of(reader=1)[1:]:
        change = change_of(trial, query, unread[:, None].expand(-1, 2), SPEC)
        for layer, (gates, selection) in enumerate(seen):
            is_meant = trial.layer in (None, layer)
            new_gates, chosen = change(layer, gates, selection)
            given = (chosen[0, query] == unread[:, None, None]).any(-1)
            assert given.all() == given.any() == (is_meant and trial.given)
            assert torch.equal(new_gates, gates) != (is_meant and trial.gated)
        with changed(change):
            found = model.hidden(ids)
        torch.testing.assert_close(found[:, :115], plain[:, :115], rtol=0, atol=0)
        assert not torch.equal(found[0, 115], plain[0, 115])
    assert torch.equal(model.hidden(ids), plain)


def test_without_a_change_the_answers_are_those_of_the_diagnosis() -> None:
    torch.manual_seed(4)
    model = TinyLM(**SIZES, **BLOCKS).eval()
    rows = [make_row(i, "val", Mixture(seq_len=128), HAY, WORDS, 0, 3) for i in range(20)]
    counted = intervene(model, rows, WORDS, SPEC, 40, reader=1)
    asked = [question["right"] for question in diagnose(model, rows, WORDS, 16, far=40)]
    assert counted["as it is"] == {
        "questions": len(asked), "right": sum(asked), "repaired": 0, "broken": 0,
    }  # fmt: skip


def test_dense_attention_has_nothing_to_diagnose() -> None:
    row = Document(np.arange(20, 84), [60], [0.0], [50])
    with pytest.raises(ValueError, match="selects no blocks"):
        diagnose(TinyLM(**SIZES, attention="dense"), [row], WORDS, 16, far=40)


def test_study_trains_measures_goes_on_and_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.toml").write_text(TABLE)
    text = "\n".join(read_works().values())[:600_000]
    pieces = [text[start : start + 3000] for start in range(0, len(text), 3000)]
    lines = "\n".join(json.dumps({"text": piece}) for piece in pieces)
    (tmp_path / "text.jsonl").write_text(lines + "\n")
    out, table = tmp_path / "out", str(tmp_path / "table.toml")
    given = ["--table", table, "--out", str(out), "--data", str(tmp_path / "text.jsonl")]
    assert run.main([*given, "--arms", "long-192-pools-*"]) == 3  # its first weights are not there
    assert "not trained; left out" in capsys.readouterr().out
    assert run.main(given) == 0
    assert "long-192-pools-s1: recall own" in capsys.readouterr().out
    assert run.main(given) == 0
    assert capsys.readouterr().out.count("finished before") == 6
    results, measures = read_results(out / "results.json"), read_measures(out / "rules.json")
    trained = {arm["name"]: arm for arm in results["arms"]}
    assert trained["long-192-pools-s1"]["settings"][INIT] == "short-pools-s1"
    assert set(measures["arms"]) == set(trained) - {"short-pools-s1"} and len(trained) == 6
    assert set(measures["arms"]["long-192-dense-s1"]["recall"]) == {"nsa", "infllm", "moba"}
    assert plot.main([str(out), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "rules.md").read_text()
    loss = trained["long-192-pools-s1"]["held_out"]["loss"]
    assert page.count("| 192 | ") == 3 and f"| {loss:.4f} |" in page
    other = (tmp_path / "page" / "convert.md").read_text()
    assert other.count("| 192 | ") == 3 and other.count(", from long-192-dense-s1 |") == 2
    for text, name in ((page, "rules"), (other, "convert")):
        for picture in (f"{name}-loss.png", f"{name}-needles.png"):
            assert picture in text
            assert (tmp_path / "page" / picture).read_bytes()[:4] == b"\x89PNG"


def test_the_best_rate_of_the_twin_counts() -> None:
    arms = [
        {"variant": variant, "held_out": {"loss": loss}}
        for variant, loss in (("dense", 1.0), ("dense-wide", 3.0), ("dense-wide-low", 2.0))
    ]
    assert reference(arms) is arms[2]
    assert reference(arms[:1]) is arms[0], "without a twin, plain dense attention"
    assert reference([]) is None
