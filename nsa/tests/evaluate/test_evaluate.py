"""What `nsa eval` measures: losses by position and context, needle grids, and their file."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.data import ByteTokenizer
from nsa.evaluate.grid import count_answers
from nsa.evaluate.needles import END, Document, Haystack
from nsa.evaluate.perplexity import cut_rows, measure
from nsa.evaluate.results import WAYS, Evaluation, read_evaluation, write_evaluation
from nsa.model import TinyLM

SIZES: dict[str, Any] = {
    "vocab": 256, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8,
    "l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 16,
}  # fmt: skip
TEXT = np.random.default_rng(0).integers(1, 256, 1000)
DEPTHS = [0.0, 0.5, 1.0]


class Copier(TinyLM):
    """Says what followed the last tokens where they stood before; bytes themselves are logits."""

    SEEN = 8

    def hidden(self, ids: Tensor, **_: Any) -> Tensor:  # [B, S] -> [B, S, V]
        out = torch.zeros(*ids.shape, 256)
        for row, text in enumerate(ids.tolist()):
            after: dict[tuple[int, ...], int] = {}
            for at in range(self.SEEN, len(text) + 1):
                last = tuple(text[at - self.SEEN : at])
                out[row, at - 1, after.get(last, 0)] = 1.0
                if at < len(text):
                    after[last] = text[at]
        return out

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture(scope="module")
def model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**SIZES).eval()


@pytest.fixture
def haystack() -> Haystack:
    words = b" ".join([b"a few words of plain text"] * 40)
    return Haystack(ByteTokenizer(), np.frombuffer(words, np.uint8).astype(np.int64))


@torch.no_grad()
def direct_losses(model: TinyLM, ids: np.ndarray[Any, Any]) -> Tensor:
    """Of every target of one row, by the log-softmax of all logits."""
    row = torch.from_numpy(ids)
    logits = model(row[None, :-1])[0].double()
    return -F.log_softmax(logits, dim=-1).gather(1, row[1:, None])[:, 0]


# --- perplexity ---


def test_loss_by_position_is_that_of_a_direct_computation(model: TinyLM) -> None:
    found = measure(model, TEXT, [96], num_tokens=3 * 96, bins=5, batch_tokens=200)

    rows = torch.stack([direct_losses(model, TEXT[96 * i : 96 * i + 97]) for i in range(3)])
    parts = rows.mean(0).tensor_split(5)
    assert (found.rows, found.length, found.until) == (3, 96, [20, 39, 58, 77, 96])
    assert found.loss_at == pytest.approx([part.mean().item() for part in parts], abs=1e-4)
    assert found.loss == pytest.approx(rows.mean().item(), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(rows.mean().item()), rel=1e-5)


def test_all_context_lengths_are_judged_on_the_same_targets(model: TinyLM) -> None:
    lengths = [96, 24, 48]
    found = measure(model, TEXT, lengths, num_tokens=2 * 96)

    assert (found.lengths, found.targets) == ([24, 48, 96], 12)
    for length, loss in zip(found.lengths, found.loss_of, strict=True):
        ends = [TEXT[96 * (i + 1) - length : 96 * (i + 1) + 1] for i in range(2)]
        expected = torch.stack([direct_losses(model, end)[-12:] for end in ends])
        assert loss == pytest.approx(expected.mean().item(), abs=1e-5)
    assert len(set(found.loss_of)) == 3


def test_rows_cover_the_text_once_and_no_more_than_is_asked_for() -> None:
    rows = cut_rows(np.arange(100), 20, 10_000)
    assert rows[:, 1:].flatten().tolist() == list(range(1, 81))
    assert len(cut_rows(np.arange(100), 20, 45)) == 2
    with pytest.raises(ValueError, match="a text of 20 tokens has no row of 20.*; use shorter"):
        cut_rows(np.arange(20), 20, 100)


# --- needles ---


def test_a_document_has_its_length_and_its_needle_at_its_depth(haystack: Haystack) -> None:
    found = list(haystack.documents(200, DEPTHS, 2))

    assert [document.depths for document in found] == [[depth] for depth in DEPTHS] * 2
    for document in found:
        text, (place,) = bytes(document.ids.tolist()), document.answers
        answer = text[place : place + document.answer_len]
        needle = text.index(answer)
        assert len(text) == 201 and document.answer_len == len(" 1234")
        assert answer[1:].isdigit() and text.endswith(answer + END.encode())
        assert document.distances == [place - needle]
        near = {0.0: needle < 40, 0.5: 60 < needle < 120, 1.0: place - needle < 60}
        assert near[document.depths[0]]
    assert len({document.ids.tobytes() for document in found}) == 6
    again = haystack.documents(200, DEPTHS, 2)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(found, again, strict=True))
    assert len(list(haystack.documents(haystack.least_length(), DEPTHS, 8))) == 24
    with pytest.raises(ValueError, match="40 tokens have no room for 1 needles.*; give"):
        list(haystack.documents(39, DEPTHS, 1))


def test_a_model_that_copies_finds_every_needle(haystack: Haystack) -> None:
    copier = Copier(**SIZES)
    for length, batch in ((150, 1), (200, 4)):
        found = count_answers(copier, haystack.documents(length, DEPTHS, 3), DEPTHS, batch=batch)
        assert found == ([3, 3, 3], [3, 3, 3])


def test_a_model_that_forgets_finds_only_what_is_near(haystack: Haystack) -> None:
    """The grid says where a model fails: one that reads 100 tokens finds the last needle alone."""

    class Forgets(Copier):
        def hidden(self, ids: Tensor, **_: Any) -> Tensor:
            return F.pad(super().hidden(ids[:, -100:]), (0, 0, ids.shape[1] - 100, 0))

    found = count_answers(Forgets(**SIZES), haystack.documents(200, DEPTHS, 3), DEPTHS)
    assert found == ([0, 0, 3], [3, 3, 3])


def test_every_token_of_an_answer_counts_either_way(model: TinyLM) -> None:
    """Answers that are the model's own greedy text are right; one token changed, they are not."""
    text = torch.from_numpy(TEXT[:60])[None]
    for _ in range(3):
        with torch.no_grad():
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], dim=1)
    ids = np.append(text[0].numpy(), 7)
    for wrong in (None, 60, 61, 62):
        changed = ids.copy()
        if wrong is not None:
            changed[wrong] = (changed[wrong] + 1) % 256
        document = Document(changed, [60], [0.5], [30], answer_len=3)
        for way in WAYS:
            found = count_answers(model, [document], [0.5], way=way)
            assert found == ([int(wrong is None)], [1]), (way, wrong)


# --- eval.json ---


def evaluation(**changed: Any) -> Evaluation:
    grid = {"lengths": [64, 128], "depths": DEPTHS, "way": "forward"}
    counts = {"right": [[1, 0, 2], [0, 0, 1]], "asked": [[2, 2, 2], [2, 2, 2]]}
    whole: dict[str, Any] = {
        "model": "m.pt", "weights": "ab", "settings": {"seed": 0}, "needle": grid | counts,
        "tasks": {"copy": {"acc,none": 0.5}}, "seconds": {"needle": 1.5},
    }  # fmt: skip
    return Evaluation(**whole | changed)


def test_the_file_reads_back_what_was_written(tmp_path: Path, model: TinyLM) -> None:
    found = evaluation(perplexity=asdict(measure(model, TEXT, [24, 48], num_tokens=96)))
    path = write_evaluation(tmp_path, found)
    assert read_evaluation(path) == read_evaluation(tmp_path) == found


def test_files_that_are_no_evaluations_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    cases = {
        "": "is not an evaluation",
        "[]": "is not an evaluation",
        '{"version": 2}': "its version is 2, this program reads 1.*; name an eval.json",
        '{"version": 1, "model": "a"}': "missing",
        '{"version": 1, "model": "a", "weights": null, "settings": {}, "needle": {}}': "needle has",
    }
    for content, message in cases.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_evaluation(path)
    with pytest.raises(ValueError, match="needle.right is not 2 lists of 3 counts"):
        evaluation(needle=evaluation().needle | {"right": [[1, 2, 3]]})  # type: ignore[operator]
