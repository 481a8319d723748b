"""Sources: local documents and their mistakes, the held-out side, copies, borders, fingerprints."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa.config import ConfigError, DataConfig
from nsa.data import CopyRows, Data, DataError, cu_seqlens, document_starts, open_data
from nsa.data.documents import find_files, is_held_out, read_documents

TEXTS = [f"document {i}: " + "lorem ipsum dolor " * (1 + i % 7) for i in range(120)]


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines, encoding="utf-8")
    return path


def write_parquet(path: Path, texts: Iterable[str | None], column: str = "text") -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({column: list(texts), "id": [0] * len(list(texts))}), path)
    return path


def open_local(path: Path, seq_len: int = 16, seed: int = 1) -> Data:
    config = DataConfig(dataset="fineweb_edu_local", local_path=str(path))
    return open_data(config, seq_len, seed)


def read_side(data: Data, side: str) -> bytes:
    """Return the tokens of a side in the order of the documents."""
    stream = getattr(data, side)._stream
    tokens = np.empty(len(stream), dtype=np.int64)
    stream.copy_to(tokens, 0)
    return bytes(tokens.astype(np.uint8))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "texts"])
def test_every_type_of_file_gives_the_same_documents(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "texts":
        path.mkdir()
        for i, text in enumerate(TEXTS):
            (path / f"{i:04d}.txt").write_bytes(text.encode())
    elif name == "a.parquet":
        write_parquet(path, TEXTS)
    else:
        write_jsonl(path, TEXTS)

    data = open_local(path)

    train = [t for t in TEXTS if not is_held_out(t)]
    val = [t for t in TEXTS if is_held_out(t)]
    assert train and val
    assert read_side(data, "train") == b"".join(t.encode() + b"\0" for t in train)
    assert read_side(data, "val") == b"".join(t.encode() + b"\0" for t in val)
    assert data.counts is not None
    assert (data.counts.documents, data.counts.held_out) == (len(TEXTS), len(val))


def test_rows_lose_nothing_but_a_tail_shorter_than_a_row(tmp_path: Path) -> None:
    data = open_local(write_jsonl(tmp_path / "a.jsonl", TEXTS), seq_len=16)
    stream = read_side(data, "train")
    assert data.train.num_rows is not None

    rows = data.train.batch(0, data.train.num_rows).tolist()

    cut = [list(stream[i : i + 17]) for i in range(0, len(stream) - 16, 16)]
    assert sorted(rows) == sorted(cut)
    assert len(stream) - 1 - 16 * len(cut) < 16


def test_a_folder_is_read_in_the_order_of_its_names_and_below(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["third"])
    write_jsonl(tmp_path / "a" / "z.jsonl.gz", ["first"])
    (tmp_path / "a.txt").write_bytes(b"second\r\n")
    (tmp_path / "README.md").write_text("not a document")
    (tmp_path / ".hidden.txt").write_text("not a document")

    found = [document.text for document in read_documents(tmp_path)]

    assert sorted(f.name for f in find_files(tmp_path)) == ["a.txt", "b.jsonl", "z.jsonl.gz"]
    assert found == ["second\r\n", "first", "third"]  # "a.txt" < "a/z" < "b", as text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut of', "not JSON"),
        (b"", "not JSON"),
        (b'{"text": "\xff"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"body": "x"}', "no string 'text'"),
        (b'{"text": 5}', "no string 'text'"),
        (b'["text"]', "no string 'text'"),
        (b'{"text": "\\ud800"}', "invalid Unicode"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_broken_line_names_its_place_and_what_came_before(
    line: bytes, reason: str, zipped: bool, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:5])
    content = b'{"text": "one"}\n{"text": ""}\n' + line + b'\n{"text": "four"}\n'
    name = "b.jsonl.gz" if zipped else "b.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(content) if zipped else content)

    with pytest.raises(DataError) as caught:
        open_local(tmp_path)

    assert f"{tmp_path / name} line 3: {reason}" in str(caught.value)
    assert "7 documents before it are valid" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.jsonl", b'{"text": "a\\u0000b"}\n', "line 1: the text has a NUL at byte 1"),
        ("a.csv", b"text\n", "unknown file type; it must be one of .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        open_local(tmp_path / name)


@pytest.mark.parametrize(
    ("texts", "column", "message"),
    [
        (["a", None, "c"], "text", "row 2: no string 'text'.*1 documents before it are valid"),
        (["a"], "body", "has no column 'text', only body, id"),
    ],
)
def test_a_broken_parquet_file_is_refused(
    texts: list[str | None], column: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        open_local(write_parquet(tmp_path / "a.parquet", texts, column))


def test_a_torn_parquet_file_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet"):
        open_local(path)


def test_a_path_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        open_local(tmp_path / "nowhere")
    with pytest.raises(DataError, match="contains no file of type .jsonl"):
        open_local(tmp_path)


def test_local_data_needs_a_path_and_others_refuse_one() -> None:
    with pytest.raises(ConfigError, match="data.local_path=''.*a file or folder"):
        DataConfig(dataset="fineweb_edu_local")
    with pytest.raises(ConfigError, match="data.local_path='x'.*empty for shakespeare"):
        DataConfig(dataset="shakespeare", local_path="x")


def test_empty_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    full = open_local(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    gaps = open_local(write_jsonl(tmp_path / "b.jsonl", ["", *TEXTS, " \n\t", ""]))

    assert gaps.counts is not None and full.counts is not None
    assert (gaps.counts.empty, full.counts.empty) == (3, 0)
    assert gaps.counts.documents == len(TEXTS)
    assert read_side(gaps, "train") == read_side(full, "train")
    assert gaps.train.fingerprint() == full.train.fingerprint()


def test_the_side_of_a_document_does_not_depend_on_its_place(tmp_path: Path) -> None:
    one = open_local(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    two = open_local(write_jsonl(tmp_path / "b.jsonl", ["new", *reversed(TEXTS)]))

    held_out = set(read_side(one, "val").split(b"\0"))
    assert held_out <= set(read_side(two, "val").split(b"\0"))
    assert not (held_out - {b""}) & set(read_side(two, "train").split(b"\0"))


def test_too_few_documents_for_a_held_out_side_are_refused(tmp_path: Path) -> None:
    training = [text for text in TEXTS if not is_held_out(text)]
    path = write_jsonl(tmp_path / "a.jsonl", training)
    with pytest.raises(DataError, match="the held-out text has 0.*give more documents"):
        open_local(path)


def test_a_copy_repeats_an_earlier_segment_at_every_distance() -> None:
    rows = CopyRows(256, seq_len=63, seed=1, side="train")
    batch = rows.batch(0, 400)
    distances = set()
    for position, row in enumerate(batch):
        source, target, length = rows.segment(position)
        assert length == 16 and 0 <= source <= target - length and target + length <= 64
        assert torch.equal(row[target : target + length], row[source : source + length])
        distances.add(target - source)
    assert distances == set(range(16, 49))


def test_only_the_copy_of_a_row_can_be_predicted() -> None:
    rows = CopyRows(256, seq_len=255, seed=3, side="train")
    outside = []
    for position, row in enumerate(rows.batch(0, 200)):
        _, target, length = rows.segment(position)
        outside.append(torch.cat([row[:target], row[target + length :]]))
    counts = torch.bincount(torch.cat(outside), minlength=256).double()
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 350  # chi-squared: 255 +- 23


def test_copies_depend_on_seed_side_and_position_only() -> None:
    config = DataConfig(dataset="synthetic_copy")
    one, again, other = (open_data(config, 32, seed) for seed in (1, 1, 2))
    batch = one.train.batch(5, 8)
    assert torch.equal(batch, torch.cat([again.train.batch(5, 3), again.train.batch(8, 5)]))
    assert not torch.equal(batch, other.train.batch(5, 8))
    assert not torch.equal(batch, one.val.batch(5, 8))
    assert one.train.num_rows is None


@pytest.mark.parametrize("seq_len", [4, 5, 6, 7, 8])
def test_the_shortest_rows_have_a_copy_too(seq_len: int) -> None:
    assert CopyRows(8, seq_len, 0, "train").batch(0, 50).shape == (50, seq_len + 1)
    with pytest.raises(DataError, match="no room for a copy"):
        CopyRows(8, 3, 0, "train")


@pytest.mark.parametrize(
    ("row", "starts"),
    [
        ([5, 6, 7], []),
        ([5, 0, 7], [2]),
        ([0, 6, 7], [1]),  # the row begins with the end of a document
        ([5, 6, 0], []),  # its successor begins in the next row
        ([0, 0, 0], [1, 2]),
        ([5], []),
    ],
)
def test_documents_start_after_an_end_mark(row: list[int], starts: list[int]) -> None:
    tokens = torch.tensor(row)
    assert document_starts(tokens, eos=0).tolist() == starts
    packed = cu_seqlens(tokens, eos=0)
    assert packed.tolist() == [0, *starts, len(row)] and packed.dtype == torch.int32


def test_documents_of_a_row_are_the_documents_of_the_file(tmp_path: Path) -> None:
    data = open_local(write_jsonl(tmp_path / "a.jsonl", TEXTS), seq_len=256)
    training = {t for t in TEXTS if not is_held_out(t)}
    for row in data.train.batch(0, 8):
        starts = document_starts(row, data.tokenizer.eos).tolist()
        for start, end in pairwise(starts):
            assert data.tokenizer.decode(row[start : end - 1].tolist()) in training


Change = Callable[[Path], Data]
CHANGES: dict[str, Change] = {
    "another text": lambda p: open_local(write_jsonl(p / "b.jsonl", [TEXTS[0] + "!", *TEXTS[1:]])),
    "another order": lambda p: open_local(write_jsonl(p / "b.jsonl", reversed(TEXTS))),
    "another seed": lambda p: open_local(p / "a.jsonl", seed=2),
    "another length": lambda p: open_local(p / "a.jsonl", seq_len=32),
    "another source": lambda p: open_data(DataConfig(dataset="shakespeare"), 16, 1),
    "random tokens": lambda p: open_data(DataConfig(dataset="synthetic"), 16, 1),
    "copies": lambda p: open_data(DataConfig(dataset="synthetic_copy"), 16, 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_fingerprint_changes_with_the_data(change: Change, tmp_path: Path) -> None:
    one = open_local(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    same = open_local(write_jsonl(tmp_path / "moved" / "elsewhere.jsonl", TEXTS))
    other = change(tmp_path)

    assert one.train.fingerprint() == same.train.fingerprint()
    assert one.val.fingerprint() == same.val.fingerprint()
    assert one.train.fingerprint() != one.val.fingerprint()
    assert other.train.fingerprint() not in (one.train.fingerprint(), other.val.fingerprint())
