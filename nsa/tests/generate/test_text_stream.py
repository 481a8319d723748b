"""Text as it is generated: whole characters, and nothing of a stop string."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nsa.config import DataConfig
from nsa.data import ByteTokenizer, open_tokenizer
from nsa.generate import StopStrings, TextStream
from nsa.tests.data.test_tokenizers import train_hf

TEXT = "Füße, ☕ und 👩‍🚀: naïve\n"


def test_bytes_become_text_at_the_end_of_each_character() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(token) for token in TEXT.encode()]
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert stream.finish() == ""


def test_any_bytes_give_the_text_of_the_whole() -> None:
    """Also broken ones, which an untrained model writes: piece by piece nothing differs."""
    random.seed(0)
    tokenizer = ByteTokenizer()
    for _ in range(300):
        kinds = (random.choices(range(0x70, 256), k=30), [*TEXT.encode()][random.randrange(20) :])
        ids = [*random.choice(kinds), *random.choice(kinds)][: random.randrange(40)]
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(token) for token in "a☕".encode()[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_a_tokenizer_json_streams_whole_characters(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = train_hf(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = open_tokenizer(DataConfig(tokenizer=str(file)))
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(token)) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) + stream.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_tokenizer_json_does_not_hold_broken_text_forever(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = train_hf(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = open_tokenizer(DataConfig(tokenizer=str(file)))
    half = int(tokenizer.encode("☕")[0])  # the first of three bytes
    stream = TextStream(tokenizer)
    pieces = [stream.push(half) for _ in range(100)]
    assert any(pieces[:20]) and any(pieces[-20:])


def fed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    scanner, out = StopStrings(stops), []
    for piece in pieces:
        out.append(scanner.push(piece))
        if scanner.found:
            return out, True
    return [*out, scanner.finish()], False


def test_text_ends_before_the_stop_string_and_shows_nothing_of_it() -> None:
    assert fed(["END"], ["ab", "cE", "N", "D", "x"]) == (["ab", "c", "", ""], True)


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    assert fed(["END"], ["aE", "N", "x"]) == (["a", "", "ENx", ""], False)
    assert fed(["END"], ["aEN"]) == (["a", "EN"], False)


def test_the_first_stop_string_counts() -> None:
    assert fed(["yy", "xx"], ["axxbyy"]) == (["a"], True)
    assert fed(["abcdef", "cd"], ["ab", "cd"]) == (["", "ab"], True)


@pytest.mark.parametrize("seed", range(30))
def test_stopping_equals_a_search_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=40))
    stops = ["".join(rng.choices("ab", k=rng.randrange(3, 9))) for _ in range(3)]
    out, found = fed(stops, list(text))  # a character at a time: the first to be complete ends it
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert found == bool(ends)
    if ends:
        starts = [min(ends) - len(s) for s in stops if text[: min(ends)].endswith(s)]
        assert "".join(out) == text[: min(starts)]
    else:
        assert "".join(out) == text


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string is empty.*leave it out"):
        StopStrings(["a", ""])
