"""The embedded corpus, the tokenizer, the held-out split, the order and the rows."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import numpy as np
import pytest
import torch

from nsa.config import DataConfig
from nsa.data import ArrayRows, ByteTokenizer, DataError, SyntheticRows, open_data
from nsa.data.array_rows import shuffled, to_stream
from nsa.data.documents import PIECE_CHARS, cut_pieces, is_held_out, read_works, split_works

CORPUS_SHA256 = "a2d5b2fec399db4e168aa3b3e895a2aac91da072f2ae7912c568ea6d1dbe8b1d"
BOILERPLATE = r"\b(gutenberg|e-?text|e-?book|copyright|trademark|public domain|donations?)\b"


def test_corpus_is_the_text_that_was_shipped() -> None:
    works = read_works()
    content = "".join(works.values()).encode("utf-8")
    assert len(works) == 41
    assert 1_000_000 <= len(content) <= 5_000_000
    assert hashlib.sha256(content).hexdigest() == CORPUS_SHA256
    assert 0 not in content


def test_corpus_holds_the_author_alone() -> None:
    for name, text in read_works().items():
        found = [line for line in text.splitlines() if re.search(BOILERPLATE, line, re.IGNORECASE)]
        # "It was wise Nature's end in the donation": Shakespeare's own word.
        assert [line for line in found if "donation" not in line.lower()] == [], name


def test_corpus_names_its_source_and_licence() -> None:
    note = (files("nsa.data") / "corpus" / "README.md").read_text(encoding="utf-8")
    assert "Source" in note and "Licence" in note and "public domain" in note


def test_byte_tokenizer_returns_the_text_it_was_given() -> None:
    tokenizer, text = ByteTokenizer(), "Füße & ☕\n"
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(ids.tolist()) == text
    assert (tokenizer.vocab, tokenizer.eos) == (256, 0)


def test_byte_tokenizer_refuses_the_end_mark_in_a_text() -> None:
    with pytest.raises(DataError, match="NUL at byte 2"):
        ByteTokenizer().encode("ab\0c")


def test_byte_tokenizer_decodes_any_byte() -> None:
    assert len(ByteTokenizer().decode(range(256))) > 0


def test_pieces_are_whole_paragraphs_and_sum_to_the_text() -> None:
    for text in read_works().values():
        pieces = list(cut_pieces(text))
        assert "".join(pieces) == text
        assert all(piece.endswith("\n\n") for piece in pieces[:-1])
        assert all(len(piece) < 2 * PIECE_CHARS for piece in pieces)


@pytest.mark.parametrize("text", ["", "x", "no empty line " * 5000])
def test_pieces_of_texts_without_paragraphs_lose_nothing(text: str) -> None:
    assert "".join(cut_pieces(text)) == text


def test_split_puts_every_piece_on_exactly_one_side() -> None:
    works = list(read_works().values())
    split = split_works(works)
    pieces = [piece for work in works for piece in cut_pieces(work)]
    held_out = [piece for piece in pieces if is_held_out(piece)]
    assert "".join(split.val) == "".join(held_out)
    assert "".join(split.train) == "".join(p for p in pieces if not is_held_out(p))
    assert 0.03 < len(held_out) / len(pieces) < 0.08


def test_held_out_text_is_not_in_the_training_text() -> None:
    split = split_works(read_works().values())
    training = "\0".join(split.train)
    for document in split.val:
        for piece in cut_pieces(document):
            assert piece not in training
            assert piece[1000:1200] not in training


def test_split_of_a_work_does_not_depend_on_the_others() -> None:
    works = list(read_works().values())
    alone = split_works(works[:1])
    assert split_works(works).val[: len(alone.val)] == alone.val


def test_documents_never_join_text_that_does_not_stand_together() -> None:
    works = list(read_works().values())
    split = split_works(works)
    for document in [*split.train, *split.val]:
        assert any(document in work for work in works)


def test_stream_ends_every_document_with_the_end_mark() -> None:
    assert to_stream(["ab", "c"], ByteTokenizer()).tolist() == [97, 98, 0, 99, 0]
    assert to_stream([], ByteTokenizer()).tolist() == []


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_shuffle_is_a_permutation_that_seed_and_epoch_change(size: int) -> None:
    first = [shuffled(i, size, seed=1, epoch=0) for i in range(size)]
    assert sorted(first) == list(range(size))
    if size >= 16:
        assert first != list(range(size))
        assert first != [shuffled(i, size, seed=2, epoch=0) for i in range(size)]
        assert first != [shuffled(i, size, seed=1, epoch=1) for i in range(size)]


def test_shuffle_spreads_neighbours() -> None:
    places = [shuffled(i, 10_000, seed=7, epoch=0) for i in range(10_000)]
    jumps = np.abs(np.diff(places))
    assert 3000 < jumps.mean() < 3700  # a third of the range for a random order


def test_shuffle_keeps_its_order_between_versions() -> None:
    assert [shuffled(i, 10, seed=1337, epoch=0) for i in range(10)] == [
        3, 4, 5, 8, 9, 1, 7, 2, 0, 6
    ]  # fmt: skip


def test_rows_overlap_by_one_and_cover_the_stream() -> None:
    stream = (np.arange(103) % 251).astype(np.uint8)
    rows = ArrayRows(stream, seq_len=10, seed=3, side="training")
    assert rows.num_rows == 10
    batch = rows.batch(0, 10)
    assert batch.shape == (10, 11) and batch.dtype == torch.int64
    in_order = batch[batch[:, 0].argsort()]
    assert torch.equal(in_order[1:, 0], in_order[:-1, -1])
    assert in_order[:, :-1].flatten().tolist() == stream[:100].tolist()


def test_rows_depend_on_seed_and_position_only() -> None:
    stream = np.random.default_rng(0).integers(1, 256, 5000, dtype=np.uint8)
    one = ArrayRows(stream, seq_len=16, seed=5, side="training")
    two = ArrayRows(stream, seq_len=16, seed=5, side="training")
    two.batch(11, 3)  # what was read before must not matter
    assert torch.equal(one.batch(100, 8), torch.cat([two.batch(100, 3), two.batch(103, 5)]))
    other = ArrayRows(stream, seq_len=16, seed=6, side="training")
    assert not torch.equal(one.batch(100, 8), other.batch(100, 8))


def test_every_epoch_visits_each_row_once_in_another_order() -> None:
    stream = np.arange(101, dtype=np.uint8)
    rows = ArrayRows(stream, seq_len=4, seed=0, side="training")
    epochs = [rows.batch(epoch * 25, 25)[:, 0].tolist() for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 100, 4))
    assert epochs[0] != epochs[1]


def test_a_row_longer_than_the_text_is_refused() -> None:
    with pytest.raises(DataError, match="seq_len=10 needs 11 tokens, the held-out text has 10"):
        ArrayRows(np.ones(10, dtype=np.uint8), seq_len=10, seed=0, side="held-out")


def test_synthetic_rows_are_uniform_fresh_and_repeatable() -> None:
    rows = SyntheticRows(256, seq_len=64, seed=1, side="train")
    batch = rows.batch(0, 200)
    assert batch.shape == (200, 65)
    assert len({tuple(row) for row in batch.tolist()}) == 200
    counts = torch.bincount(batch.flatten(), minlength=256).double()
    expected = batch.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 350  # chi-squared: 255 +- 23
    again = SyntheticRows(256, seq_len=64, seed=1, side="train")
    assert torch.equal(again.batch(150, 2), batch[150:152])
    val = SyntheticRows(256, seq_len=64, seed=1, side="val")
    assert not torch.equal(val.batch(0, 1), batch[:1])


def test_open_data_serves_both_sides_of_the_corpus() -> None:
    data = open_data(DataConfig(dataset="shakespeare"), seq_len=128, seed=1)
    other_seed = open_data(DataConfig(dataset="shakespeare"), seq_len=128, seed=2)
    assert data.train.num_rows and data.train.num_rows > 30_000
    assert data.val.num_rows and data.val.num_rows > 1_500
    assert not torch.equal(data.train.batch(0, 4), other_seed.train.batch(0, 4))
    assert torch.equal(data.val.batch(0, 4), other_seed.val.batch(0, 4))


def test_open_data_serves_random_tokens() -> None:
    data = open_data(DataConfig(dataset="synthetic"), seq_len=16, seed=1)
    assert data.train.num_rows is None
    assert not torch.equal(data.train.batch(0, 1), data.val.batch(0, 1))
