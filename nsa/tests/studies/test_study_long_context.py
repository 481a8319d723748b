"""The study of long contexts: its documents, its grid, its files, and all of it at a tiny size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa import TinyLM
from nsa.config import DataConfig, ModelConfig
from nsa.data.documents import TRAIN, VAL
from nsa.data.errors import DataError
from nsa.data.open import open_data
from nsa.data.shards import verify_shards
from nsa.data.tokenizers import HFTokenizer
from nsa.evaluate.grid import ANSWERERS
from nsa.evaluate.needles import Document, build, crop, generator_of
from nsa.ops.spec import BlockSpec
from nsa.records import read_config, read_metrics
from studies.long_context import plot, run, shards
from studies.long_context.evaluate import Exam, ask, scale_rope
from studies.long_context.presets import FULL, PRESETS, TINY
from studies.long_context.probe import best_head, probe
from studies.long_context.results import (
    NAME,
    ROPES,
    Grid,
    Probe,
    Results,
    merge_grids,
    read_results,
    write_results,
)
from studies.long_context.shards import RowMaker, write_shards
from studies.long_context.stages import mixture_of
from studies.long_context.task import TASKS, draw_secrets
from studies.long_context.text import TOKENIZER, prepare_text, read_hay
from studies.long_context.train import stage_folder
from studies.long_context.training_rows import Mixture, make_row
from studies.long_context.vocabulary import Words, find_words

pytestmark = pytest.mark.usefixtures("forked_python")

EOS = 0
WORDS = Words(
    keys=np.arange(100, 140),
    values=np.arange(200, 220),
    opening=np.array([1, 2]),
    owner=np.array([3]),
    pass_key=np.array([4, 5]),
    ask=np.array([6, 7]),
    ask_pass=np.array([6, 8]),
    end=np.array([9]),
)
HAY = np.arange(20, 90)
VOCAB = 220
ASKED = {*WORDS.keys.tolist(), int(WORDS.ask_pass[-1])}
"""Tokens that end a question, or a needle."""
TRIAL = Exam(words=WORDS, hay=HAY, depths=[0.0, 0.5, 1.0], trials=2, batch_tokens=128, seed=7)


def quiet(line: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer and of text, from the package's corpus."""
    folder = tmp_path_factory.mktemp("study") / "text"
    sizes: dict[str, Any] = dict(vocab=TINY.vocab, digits=TINY.digits, chars=TINY.text_chars)
    prepare_text(None, folder, **sizes, say=quiet)
    return folder


def places_of(part: Any, ids: list[int]) -> list[int]:
    """Where these ids stand."""
    wanted = list(part)
    return [i for i in range(len(ids)) if ids[i : i + len(wanted)] == wanted]


@pytest.mark.parametrize("task", ["needle", "passkey", "multi"])
def test_every_secret_is_hidden_once_and_asked_for_once(task: str) -> None:
    depths = [0.0, 0.3, 1.0] if task == "multi" else [0.3]
    draw = generator_of("test", task)
    secrets = draw_secrets(task, depths, WORDS, draw.permutation(WORDS.keys), draw)
    document = build(120, secrets, HAY, WORDS.end, draw)
    assert len(document.ids) == 120 and sorted(document.depths) == depths
    ids = document.ids.tolist()
    assert sorted(ids[at] for at in document.answers) == sorted(
        *zip(*(s.value for s in secrets), strict=True)
    )
    for secret in secrets:
        (hidden,) = places_of(secret.needle, ids)
        (asked,) = places_of([*secret.question, *secret.value], ids)
        assert hidden < asked and asked + len(secret.question) in document.answers
    assert ids[-1] == WORDS.end[0] and document.answers[-1] == 120 - 2


def test_depth_is_the_place_of_the_needle_in_the_text() -> None:
    for depth in (0.0, 0.25, 1.0):
        draw = generator_of("depth", depth)
        (secret,) = secrets = draw_secrets("passkey", [depth], WORDS, WORDS.keys, draw)
        ids = build(220, secrets, HAY, WORDS.end, draw).ids.tolist()
        text_len = 220 - len(secret.needle) - len(secret.question) - 2
        assert places_of(secret.needle, ids) == [round(depth * text_len)]


def test_document_without_room_for_its_needles_is_refused() -> None:
    draw = generator_of("room")
    secrets = draw_secrets("needle", [0.5], WORDS, WORDS.keys, draw)
    with pytest.raises(ValueError, match="10 tokens have no room for 1 needles.*give 12 tokens"):
        build(10, secrets, HAY, WORDS.end, draw)


def test_short_text_comes_again() -> None:
    assert len(crop(HAY, 200, generator_of("crop"))) == 200


def test_every_needle_is_asked_for_as_often_as_it_should_be() -> None:
    draw = generator_of("asks")
    secrets = draw_secrets("multi", [0.2, 0.8], WORDS, WORDS.keys, draw)
    document = build(100, secrets, HAY, WORDS.end, draw, asks=3)
    assert len(document.ids) == 100 and sorted(document.depths) == [0.2] * 3 + [0.8] * 3
    assert sorted(document.depths[:2]) == [0.2, 0.8], "all once before one comes again"


def retrieved(row: Document) -> list[int]:
    """Looks up every answer as a reader would: the last value told for the key, or as pass key."""
    ids, found = row.ids.tolist(), []
    for place in row.answers:
        asked = ids[place - 1]
        is_key = asked in WORDS.keys
        owner = [*WORDS.owner, asked] if is_key else WORDS.pass_key.tolist()
        told = [at - 1 for at in places_of(owner, ids[:place]) if ids[at - 1] in WORDS.values]
        found.append(told[-1])
    return found


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_every_answer_of_a_row_can_be_looked_up(progress: float) -> None:
    mixture = Mixture(seq_len=512)
    for index in range(20):
        row = make_row(index, TRAIN, mixture, HAY, WORDS, EOS, 3, progress)
        assert len(row.ids) == 512 and row.ids[-1] == EOS
        assert np.isin(row.ids[row.answers], WORDS.values).all()
        told = retrieved(row)
        assert row.ids[told].tolist() == row.ids[row.answers].tolist()
        away = [answer - place for answer, place in zip(row.answers, told, strict=True)]
        assert row.distances == away


def test_documents_grow_during_training() -> None:
    mixture = Mixture(seq_len=1024, growing=(0.2, 0.8))

    def lengths(progress: float) -> list[int]:
        rows = [make_row(i, TRAIN, mixture, HAY, WORDS, EOS, 3, progress) for i in range(60)]
        return [int((row.ids == EOS).sum()) for row in rows]

    early, middle, late = (lengths(progress) for progress in (0.1, 0.5, 0.9))
    assert min(early) > 1024 // 64 - 1, "none has 64 tokens"
    assert min(early) > min(middle) > min(late) == 1
    assert max(late) > 8, "short ones stay"
    assert late.count(1) >= 60 * mixture.whole / 2


def test_rows_are_drawn_from_seed_side_and_index() -> None:
    rows = {
        (seed, side, index): make_row(index, side, Mixture(seq_len=64), HAY, WORDS, EOS, seed)
        for seed in (3, 4)
        for side in (TRAIN, VAL)
        for index in (0, 1)
    }
    assert len({row.ids.tobytes() for row in rows.values()}) == len(rows)
    again = make_row(0, TRAIN, Mixture(seq_len=64), HAY, WORDS, EOS, 3)
    assert (again.ids == rows[3, TRAIN, 0].ids).all()


def test_tokenizer_has_every_number_and_text_comes_back(text: Path) -> None:
    tokenizer = HFTokenizer(text / TOKENIZER)
    words = find_words(tokenizer, TINY.digits, TINY.num_keys)
    assert tokenizer.vocab == TINY.vocab and len(words.keys) == TINY.num_keys
    needle = [*words.opening, words.values[42], *words.owner, words.keys[0], *words.end]
    written = tokenizer.decode(int(i) for i in needle)
    assert written.startswith(" The number 42 for ")
    assert tokenizer.encode(written).tolist() == [int(i) for i in needle]
    assert min(len(read_hay(text, side, words)) for side in (TRAIN, VAL)) > 1000


def test_vocabulary_without_the_numbers_is_refused(text: Path) -> None:
    with pytest.raises(DataError, match="lacks [0-9]+ of 1000 numbers.*larger vocabulary"):
        find_words(HFTokenizer(text / TOKENIZER), 3, TINY.num_keys)


def test_text_has_no_keys_and_no_values(text: Path) -> None:
    words = find_words(HFTokenizer(text / TOKENIZER), TINY.digits, TINY.num_keys)
    for side in (TRAIN, VAL):
        hay = read_hay(text, side, words)
        assert not np.isin(hay, np.concatenate([words.keys, words.values])).any()


def test_trainer_reads_rows_whole_and_in_their_turn(text: Path, tmp_path: Path) -> None:
    """Through the trainer's own loader: short documents first, no row cut or shifted."""
    folder, seed = tmp_path / "shards", 5
    mixture = Mixture(seq_len=256, growing=(0.0, 1.0), whole=1.0)
    maker = RowMaker(text=text, mixture=mixture, digits=TINY.digits, num_keys=64, seed=seed)
    write_shards(folder, maker, {TRAIN: 40, VAL: 3}, quiet)
    assert verify_shards(folder) == []
    tokenizer = text / TOKENIZER
    config = DataConfig(dataset="shards", local_path=str(folder), tokenizer=str(tokenizer))
    data = open_data(config, 256, seed)
    assert (data.train.num_rows, data.val.num_rows) == (40, 3)
    words = find_words(HFTokenizer(tokenizer), TINY.digits, TINY.num_keys)
    hay, eos = read_hay(text, TRAIN, words), data.tokenizer.eos
    num_documents = []
    for turn in range(40):
        (read,) = data.train.batch(turn, 1).numpy()
        made = make_row(turn, TRAIN, mixture, hay, words, eos, seed, turn / 40)
        assert (read[:-1] == made.ids).all()
        num_documents.append(int((made.ids == eos).sum()))
    assert min(num_documents[:10]) > min(num_documents[-10:])


def test_rows_of_other_processes_are_the_same(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two mixtures, one after the other, by the same processes; in chunks of ten rows."""
    monkeypatch.setattr(shards, "CHUNK_TOKENS", 640)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for num_keys, many in ((32, pool), (64, pool), (32, None), (64, None)):
            folder = tmp_path / f"{num_keys}-{many is None}"
            mixture = Mixture(seq_len=64, shortest=num_keys)
            maker = RowMaker(text=text, mixture=mixture, digits=2, num_keys=num_keys, seed=5)
            write_shards(folder, maker, {TRAIN: 45, VAL: 3}, quiet, many)
    for side in (TRAIN, VAL):
        rows = {path.parent.name: path.read_bytes() for path in tmp_path.glob(f"*/{side}-*.bin")}
        assert rows["32-False"] == rows["32-True"] != rows["64-True"] == rows["64-False"]


def test_exam_asks_as_training_does() -> None:
    """The tokens before an answer are those before the answers of training rows."""
    mixture = Mixture(seq_len=256)
    rows = [make_row(i, VAL, mixture, HAY, WORDS, EOS, seed=3) for i in range(20)]

    def phrases(documents: Iterable[Document]) -> set[tuple[int, ...]]:
        asked = ([*d.ids[at - 2 : at + 2]] for d in documents for at in d.answers)
        classes = {**dict.fromkeys(WORDS.keys, -1), **dict.fromkeys(WORDS.values, -2)}
        return {tuple(int(classes.get(token, token)) for token in tokens) for tokens in asked}

    exams = [document for task in TASKS for document in TRIAL.documents(task, 128)]
    assert phrases(exams) == phrases(rows)


class Oracle(TinyLM):
    """Knows the answers: what stands before the owner that the question names."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 16, 1, 2, 1, 8, 8, attention="dense")

    def hidden(self, ids: torch.Tensor, **_: object) -> torch.Tensor:  # [B, S] -> [B, S, V]
        guess = torch.zeros(*ids.shape, VOCAB)
        for row, line in enumerate(ids.tolist()):
            places = [at + 1 for at, token in enumerate(line) if token in ASKED]
            document = Document(np.array(line), places, [], [])
            for place, told in zip(places, retrieved(document), strict=True):
                guess[row, place - 1, line[told]] = 1.0
        return guess

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("task", TASKS)
def test_grid_is_full_of_the_answers_of_a_model_that_retrieves(task: str) -> None:
    grid = ask(Oracle(), TRIAL, "nsa", task, "none", "forward", 64)
    assert grid.right == grid.asked == [2, 2, 2]


def test_grid_is_empty_where_the_model_does_not_retrieve() -> None:
    class Blind(Oracle):
        def hidden(self, ids: torch.Tensor, **_: object) -> torch.Tensor:
            return torch.zeros(*ids.shape, VOCAB)

    grid = ask(Blind(), TRIAL, "nsa", "needle", "none", "forward", 64)
    assert grid.right == [0, 0, 0] and grid.asked == [2, 2, 2]


def test_probe_counts_answers_by_their_distance() -> None:
    mixture = Mixture(seq_len=128)
    rows = [make_row(i, VAL, mixture, HAY, WORDS, EOS, seed=3) for i in range(6)]
    found = probe(Oracle(), rows, "nsa", batch_tokens=256)
    assert found.right == found.asked and found.accuracy == 1.0
    assert sum(found.asked) == sum(len(row.answers) for row in rows)
    assert found.distances[0] == 16 and found.distances[-1] <= 128
    near = sum(distance <= 16 for row in rows for distance in row.distances)
    assert found.asked[0] == near
    assert f"100.0% of {sum(found.asked)} answers (100% up to 16" in str(found)
    assert found.chosen is None  # no blocks are chosen by dense attention


def test_probe_finds_nothing_where_the_model_guesses() -> None:
    torch.manual_seed(0)
    model = TinyLM(VOCAB, 16, 1, 2, 1, 8, 8, attention="dense")
    rows = [make_row(i, VAL, Mixture(seq_len=128), HAY, WORDS, EOS, seed=3) for i in range(6)]
    assert probe(model, rows, "nsa", batch_tokens=256).accuracy < 0.2


def test_probe_counts_the_needles_whose_blocks_are_read() -> None:
    """Three blocks are the forced ones, whatever the weights; as many as there are miss nothing."""
    rows = [make_row(i, VAL, Mixture(seq_len=128), HAY, WORDS, EOS, seed=3) for i in range(6)]

    def found(n_sel: int) -> Probe:
        torch.manual_seed(0)
        model = TinyLM(VOCAB, 16, 1, 2, 1, 8, 8, l=8, d=4, l_sel=8, n_sel=n_sel, w=16)
        return probe(model.eval(), rows, "nsa", batch_tokens=256)

    def is_forced(place: int, distance: int) -> bool:
        own, block = (place - 1) // 8, (place - distance) // 8
        return block in (0, own - 1, own)

    everything, forced = found(16), found(3)
    assert everything.chosen == everything.asked
    assert str(everything).endswith("chosen by the best head: 100%, 100%, 100%, 100%")
    questions = [q for row in rows for q in zip(row.answers, row.distances, strict=True)]
    far = [is_forced(*question) for question in questions if question[1] > 64]
    assert forced.chosen is not None and forced.chosen[-1] == sum(far) < len(far)
    assert sum(forced.chosen) == sum(is_forced(*question) for question in questions)


def test_probe_follows_one_head_and_not_whoever_was_lucky() -> None:
    """Together two heads have all needles, and the better one two of three."""
    reads = torch.tensor([[False, True], [True, False], [False, True]])
    assert best_head(reads) == [True, False, True]


@pytest.mark.parametrize("name", PRESETS)
def test_rows_of_every_stage_are_more_than_what_is_read(name: str) -> None:
    """And before the last, only the compressed branch sees the rest."""
    stages = PRESETS[name].stages
    assert {stage.settings["nsa.n_sel"] for stage in stages[:-1]} == {BlockSpec().num_forced}
    for stage in stages:
        n_sel, l_sel, w = (
            int(str(stage.settings[f"nsa.{key}"])) for key in ("n_sel", "l_sel", "w")
        )
        assert n_sel * l_sel + w < stage.seq_len


@pytest.mark.parametrize("number", range(len(FULL.stages)))
def test_every_stage_asks_over_every_distance(number: int) -> None:
    """From next to the question to a whole row: what is not asked for is forgotten."""
    mixture = mixture_of(FULL, number)
    words = dataclasses.replace(WORDS, keys=np.arange(1000, 1000 + FULL.stages[number].num_keys))
    rows = [
        make_row(i, VAL, mixture, HAY, words, EOS, 1) for i in range(200_000 // mixture.seq_len)
    ]
    distances = np.array([distance for row in rows for distance in row.distances])
    limits = 2 ** np.arange(4, np.log2(mixture.seq_len) + 1)
    _, counts = np.unique(np.searchsorted(limits, distances), return_counts=True)
    assert len(counts) == len(limits) and counts.min() >= 0.01 * len(distances)


def test_needles_lie_at_both_ends_of_documents_as_often_as_they_should() -> None:
    mixture = Mixture(seq_len=256, ends=0.2)
    rows = [make_row(i, TRAIN, mixture, HAY, WORDS, EOS, seed=6) for i in range(1000)]
    depths = [depth for row in rows for depth in row.depths]
    for end in (0.0, 1.0):
        assert depths.count(end) / len(depths) == pytest.approx(0.2, abs=0.02)
    within = [depth for depth in depths if 0.0 < depth < 1.0]
    assert np.histogram(within, 4, (0, 1))[0] == pytest.approx([len(within) / 4] * 4, rel=0.1)


def test_documents_are_of_each_kind_as_often_as_they_should() -> None:
    """Every row of this mixture is a single document."""
    mixture = Mixture(seq_len=128, shortest=128, whole=1.0, single=0.2, passkey=0.3)
    rows = [make_row(i, TRAIN, mixture, HAY, WORDS, EOS, seed=6) for i in range(2000)]
    told = [np.isin(row.ids, WORDS.keys).sum() - len(row.answers) for row in rows]
    passed = [WORDS.pass_key[-2] in row.ids for row in rows]
    assert np.mean(passed) == pytest.approx(0.3, abs=0.03)
    assert np.mean([num == 1 for num in told]) == pytest.approx(0.2, abs=0.03)
    assert np.mean([num > 1 for num in told]) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_decoded_answers_are_those_of_the_forward_pass(attention: str) -> None:
    """An untrained model is asked for its own answers: both ways must find them right."""
    torch.manual_seed(0)
    blocks: dict[str, Any] = dict(l=8, d=4, l_sel=8, n_sel=4, w=16)
    model = TinyLM(VOCAB, 32, 2, 2, 1, 16, 16, **blocks, attention=attention).eval()
    documents = list(TRIAL.documents("needle", 64))
    ids = torch.from_numpy(np.stack([document.ids for document in documents]))
    place = documents[0].answers[0]
    with torch.no_grad():
        ids[:, place] = model(ids[:, :place])[:, -1].argmax(-1)
        for answer in ANSWERERS.values():
            assert answer(model, ids, documents).all()
        ids[:, place] = (ids[:, place] + 1) % VOCAB
        for answer in ANSWERERS.values():
            assert not answer(model, ids, documents).any()


def test_scaled_positions_turn_the_slowest_pair_alike() -> None:
    model = TinyLM(VOCAB, 16, 2, 2, 1, 8, 8, attention="dense")
    trained = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_groups=1, d_k=8, d_v=8)
    far = torch.tensor([400])
    tables = {}
    for rope in ROPES:
        scale_rope(model, trained, rope, 4.0)
        assert len({block.attn.rope_base for block in model.layers}) == 1
        tables[rope] = model.layers[-1].attn.rope(far, torch.float64)
    slow = {rope: float(torch.atan2(t.sin[0, -1], t.cos[0, -1])) for rope, t in tables.items()}
    assert slow["linear"] == pytest.approx(slow["base"]) == pytest.approx(slow["none"] / 4)
    assert torch.equal(tables["base"].cos[0, 0], tables["none"].cos[0, 0])
    assert not torch.equal(tables["linear"].cos[0, 0], tables["none"].cos[0, 0])


def grid_of(**changes: Any) -> Grid:
    usual: dict[str, Any] = dict(model="nsa", task="needle", rope="none", way="forward", length=64)
    usual |= dict(depths=[0.0, 1.0], right=[1, 2], asked=[2, 2], seconds=0.5)
    return Grid(**(usual | changes))


PROBE = Probe(model="nsa", seq_len=32, distances=[16, 32], right=[2, 1], asked=[2, 3], seconds=0.1)


def test_grids_of_models_that_ran_apart_are_merged(tmp_path: Path) -> None:
    env = {"device": "cpu", "torch": "2", "commit": "test"}
    recipe: dict[str, Any] = {"stages": [{"seq_len": 64}]}
    ours = Results(environment=env, settings=recipe)
    ours.grids = [grid_of(), grid_of(length=128)]
    theirs = Results(environment=env, settings=recipe)
    theirs.grids = [grid_of(model="dense"), grid_of(right=[2, 2])]
    both = merge_grids([ours, theirs])
    assert both.grids == [grid_of(right=[2, 2]), grid_of(length=128), grid_of(model="dense")]
    with pytest.raises(ValueError, match="of other settings"):
        merge_grids([ours, dataclasses.replace(theirs, settings={})])
    folders = []
    for name, part in {"a": ours, "b": theirs}.items():
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        write_results(folders[-1], part)
    assert plot.main([*map(str, folders), "--out", str(tmp_path)]) == 0
    table = (tmp_path / "table.md").read_text()
    assert "| NSA |" in table and "| dense |" in table


def test_grids_of_several_seeds_are_added() -> None:
    parts = []
    for seed, right in ((1, [0, 0]), (2, [2, 2]), (1, [1, 0])):  # the last instead of the first
        part = Results(environment={"commit": f"tree {seed}"}, settings={"vocab": 64, "seed": seed})
        part.grids = [grid_of(right=right)]
        parts.append(part)
    both = merge_grids(parts)
    assert both.grids == [grid_of(right=[3, 2], asked=[4, 4], seconds=1.0)]
    assert both.environment["commit"] == "tree 1, tree 2"
    assert both.settings == {"vocab": 64}


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    results = Results(environment={"commit": "abc"}, settings={"vocab": 64})
    results.probes.append(PROBE)
    results.models["nsa"] = {"steps": 3, "loss": 1.5}
    results.grids += [grid_of(), grid_of(model="dense", right=[0, 0])]
    results.seconds["data"] = 1.25
    write_results(tmp_path, results)
    assert read_results(tmp_path) == results
    assert results.find("nsa", "needle", "none", "forward", 64) == grid_of()
    assert results.find("nsa", "needle", "base", "forward", 64) is None
    assert results.find_probe("nsa", 32) == PROBE and results.find_probe("nsa", 64) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not a result"),
        ('{"version": 9, "grids": []}', "version is 9"),
        ('{"version": 2, "grids": [{"model": "nsa"}]}', "missing"),
    ],
)
def test_other_files_are_refused_as_results(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / NAME).write_text(content)
    with pytest.raises(ValueError, match=reason):
        read_results(tmp_path)


def test_grid_with_more_answers_than_questions_is_refused() -> None:
    with pytest.raises(ValueError, match="more right answers"):
        grid_of(right=[3, 0])


@pytest.mark.parametrize("change", [{"model": "mamba"}, {"rope": "yarn"}, {"way": "guess"}])
def test_grid_of_an_unknown_name_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"a grid of '{next(iter(change.values()))}', where one"):
        grid_of(**change)


def test_plan_asks_every_length_and_scales_positions_beyond_training_alone() -> None:
    planned = list(run.plan(FULL))
    assert len(planned) == len(set(planned))
    for task, rope, way, length in planned:
        if length <= FULL.seq_len:
            assert rope == "none"
        if way == "forward":
            assert length in FULL.lengths and task in run.TASKS_ASKED
    longest = {rope for task, rope, _, length in planned if length == max(FULL.lengths)}
    assert longest == set(ROPES)


def test_study_runs_stops_goes_on_and_is_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--tiny", "--out", str(out), "--commit", "test", "--models", "nsa", "--seed", "3"]
    assert run.main([*arguments, "--budget-seconds", "0"]) == run.UNFINISHED
    assert run.main(arguments) == 0
    results = read_results(out)
    assert results.models["nsa"]["steps"] == sum(stage.steps for stage in TINY.stages)
    assert [probe.seq_len for probe in results.probes] == [s.seq_len for s in TINY.stages]
    first, last = (read_metrics(stage_folder(out, "nsa", TINY, number)) for number in (0, 1))
    assert first.init_from is None and str(last.init_from).endswith("nsa-48/model.pt")
    assert [grid.name[1:] for grid in results.grids] == list(run.plan(TINY))
    assert results.environment["commit"] == "test"
    assert run.main(arguments) == 0, "there is nothing left to do"
    assert read_results(out).grids == results.grids
    cfg = read_config(stage_folder(out, "nsa", TINY, 0))
    data = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed)
    tokenizer = HFTokenizer(out / "text" / TOKENIZER)
    words = find_words(tokenizer, TINY.digits, TINY.stages[0].num_keys)
    hay = read_hay(out / "text", TRAIN, words)
    drawn = make_row(0, TRAIN, mixture_of(TINY, 0), hay, words, tokenizer.eos, 3, 0.0)
    assert (data.train.batch(0, 1).numpy()[0, :-1] == drawn.ids).all(), "rows of another seed"
    for other in (["--set", "train.lr=0.1"], ["--seed", "2"]):
        assert run.main([*arguments, *other]) == 2
        assert "other settings" in capfd.readouterr().err
    assert plot.main([str(out), "--out", str(tmp_path / "pictures")]) == 0
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["multi.png", "needle.png", "passkey.png", "table.md"]
    table = (tmp_path / "pictures" / "table.md").read_text()
    assert "| needle | NSA | larger base | decode |" in table


def test_data_of_a_study_that_was_killed_is_not_taken_for_that_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def killed(*args: object) -> None:
        assert (tmp_path / NAME).is_file(), "a kill in here would leave data of unknown settings"
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "make_data", killed)
    arguments = ["--tiny", "--out", str(tmp_path), "--commit", "test"]
    with pytest.raises(KeyboardInterrupt):
        run.main(arguments)
    assert run.main([*arguments, "--seed", "2"]) == 2
    assert "other settings" in capfd.readouterr().err


def test_model_that_does_not_retrieve_in_short_rows_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    strict = dataclasses.replace(TINY, pass_mark=0.9)
    monkeypatch.setitem(PRESETS, "tiny", strict)
    arguments = ["--tiny", "--out", str(tmp_path), "--commit", "test", "--models", "nsa"]
    assert run.main(arguments) == 1
    assert "right answers in rows of 48 tokens, 90% are needed" in capfd.readouterr().err
    assert not stage_folder(tmp_path, "nsa", TINY, 1).exists()
    assert [probe.seq_len for probe in read_results(tmp_path).probes] == [48]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "mamba"], "no mamba; use nsa and dense"),
        (["--steps", "0"], "--steps 0 is below 1"),
        (["--set", "train.lr"], "--set train.lr has no value"),
        (["--seed", "-1"], "--seed -1 is below 0"),
        (["--set", "train.seed=2"], "--set train.seed: the rows are made for the preset's; give"),
        (["--set", "train.steps=9"], "made for the preset's; leave it"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--tiny", "--out", str(tmp_path), *arguments])
    assert reason in capsys.readouterr().err


def test_presets_are_recorded_whole() -> None:
    recorded = json.loads(json.dumps(dataclasses.asdict(FULL)))
    assert recorded["stages"][-1]["seq_len"] == FULL.seq_len == 8192
