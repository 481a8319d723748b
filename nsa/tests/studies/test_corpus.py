"""The corpus of the studies: what is read, dropped, refused and written, on tiny packages."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nsa.cli.__main__ import main as nsa_main
from nsa.data.documents import read_documents
from nsa.tests.support.corpora import (
    ENTRIES,
    PACKAGES,
    REPEATED,
    deb,
    served,
    sha256,
    tar,
    tiny_list,
    tiny_sources,
    wheel,
    words,
)
from studies.corpus import __main__ as command
from studies.corpus import fetch as fetching
from studies.corpus.build import build
from studies.corpus.fetch import MAX_MEMBER_BYTES, read_members
from studies.corpus.record import read_record
from studies.corpus.sources import LIST, Package, read_sources
from studies.corpus.text import CorpusError, Seen, cut_long, decode, documents_of, html_text, tidy


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The corpus of the tiny packages."""
    build(tiny_sources(tmp_path), tmp_path / "out", tmp_path / "cache", download=served)
    return tmp_path / "out"


def texts(corpus: Path, kind: str = "prose") -> list[dict[str, str]]:
    lines = (corpus / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_source(corpus: Path, name: str, kind: str = "prose") -> list[str]:
    return [entry["text"] for entry in texts(corpus, kind) if entry["source"] == name]


def test_every_form_becomes_text(corpus: Path) -> None:
    first, second = by_source(corpus, "books")
    assert first == f"{words(4)}\n\n{words(5)}\n"  # without header, licence, spaces, empty lines
    assert second == f"{REPEATED}\n\n{words(6)}\n"
    (page,) = by_source(corpus, "pages")
    assert page == f"{words(2)}\n\na  b\n  c\n\n- {words(3)}\n"
    entries = "\n\n".join(by_source(corpus, "dictionary"))
    assert entries.split() == ENTRIES.replace("1. ", "").split()
    assert not any(line.startswith(" ") for line in entries.splitlines())
    code = by_source(corpus, "code", "code")
    assert len(code) == 19 and "\treturn 3;\n" in code[3]


def test_what_is_dropped_is_counted(corpus: Path) -> None:
    record = read_record(corpus)
    books, pages, dictionary, code = record["sources"]

    assert books["dropped"] == {"binary": 1, "short": 1, "exact": 1, "near": 1}
    assert (books["files"], books["documents"], books["paragraphs_cut"]) == (6, 2, 0)
    assert pages["paragraphs_cut"] == 1  # REPEATED, which a book had before
    assert dictionary["files"] == 1 and dictionary["documents"] > 1
    assert code["dropped"] == dict.fromkeys(("binary", "short", "exact", "near"), 0)
    assert record["schema"] == 1
    for kind in ("prose", "code"):
        content = (corpus / f"{kind}.jsonl").read_bytes()
        entries = [entry["text"] for entry in texts(corpus, kind)]
        assert record["kinds"][kind] == {
            "file": f"{kind}.jsonl",
            "documents": len(entries),
            "bytes": sum(len(text.encode()) for text in entries),
            "file_bytes": len(content),
            "sha256": sha256(content),
        }
        of_kind = [source for source in record["sources"] if source["kind"] == kind]
        assert sum(source["bytes"] for source in of_kind) == record["kinds"][kind]["bytes"]
        assert Counter(entry["source"] for entry in texts(corpus, kind)) == {
            source["name"]: source["documents"] for source in of_kind
        }


def test_page_in_the_docs_names_every_field(corpus: Path) -> None:
    page = (LIST.parents[2] / "docs/schemas/corpus_json.md").read_text(encoding="utf-8")
    record = read_record(corpus)
    names = {*record, *record["kinds"]["prose"], *record["sources"][0]}
    for name in names | set(record["sources"][0]["dropped"]):
        assert f"`{name}`" in page, name


def test_same_packages_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    build(tiny_sources(tmp_path), tmp_path / "again", tmp_path / "cache")  # from the cache alone

    files = sorted(path.relative_to(corpus) for path in corpus.rglob("*") if path.is_file())
    assert [str(file) for file in files] == [
        "LICENCES.md", "code.jsonl", "corpus.json", "gpt2/encoder.json", "gpt2/vocab.bpe",
        "prose.jsonl",
    ]  # fmt: skip
    for file in files:
        assert (corpus / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_licences_are_listed_with_what_the_packages_say(corpus: Path) -> None:
    text = (corpus / "LICENCES.md").read_text(encoding="utf-8")

    assert "| dictionary | A dictionary | GPL-2.0-or-later | apt: manual 1:1-1 |" in text
    assert "| gpt2 | A vocabulary | MIT | pip: bpe 2 |" in text
    assert "    © somebody" in text and "    do what you like" in text
    assert "## bpe 2\n\nNo notice of its own." in text


def test_documents_can_be_prepared_as_they_are(corpus: Path, tmp_path: Path) -> None:
    shards = str(tmp_path / "shards")
    assert nsa_main(["data", "prepare", "--input", str(corpus), "--output", shards]) == 0
    found = [document.text for document in read_documents(corpus)]
    assert found == [entry["text"] for kind in ("code", "prose") for entry in texts(corpus, kind)]


@pytest.mark.parametrize("package", ["books", "manual", "bpe"])
def test_package_with_another_hash_is_refused_and_not_kept(tmp_path: Path, package: str) -> None:
    sources = tiny_sources(tmp_path, **{package: "0" * 64})

    with pytest.raises(CorpusError, match=f"{package} .* has the sha256 [0-9a-f]+, .* not used"):
        build(sources, tmp_path / "out", tmp_path / "cache", download=served)
    kept = [path.name for path in (tmp_path / "cache").iterdir()]
    assert not any(name.startswith((package, ".")) for name in kept)
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_cached_package_that_was_changed_is_refused(corpus: Path, tmp_path: Path) -> None:
    (path,) = (tmp_path / "cache").glob("books-*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    with pytest.raises(CorpusError, match="remove .*books-.* and repeat"):
        build(tiny_sources(tmp_path), tmp_path / "again", tmp_path / "cache", download=served)


def test_file_of_the_tokenizer_with_another_hash_is_refused(tmp_path: Path) -> None:
    path = tiny_list(tmp_path)
    path.write_text(path.read_text().replace(sha256(b"#version"), "0" * 64))

    with pytest.raises(CorpusError, match="data/vocab.bpe .* has not the sha256"):
        build(read_sources(path), tmp_path / "out", tmp_path / "cache", download=served)


def test_build_that_fails_leaves_no_half_file(tmp_path: Path) -> None:
    path = tiny_list(tmp_path)
    path.write_text(path.read_text().replace('"code/*.[ch]"', '"nowhere/*"'))

    with pytest.raises(CorpusError, match=r"source 'code': no member .*nowhere"):
        build(read_sources(path), tmp_path / "out", tmp_path / "cache", download=served)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"prose.jsonl"}


def test_record_goes_before_the_files_that_it_speaks_of_change(
    corpus: Path, tmp_path: Path
) -> None:
    path = tiny_list(tmp_path)
    path.write_text(path.read_text().replace('"code/*.[ch]"', '"nowhere/*"'))

    with pytest.raises(CorpusError, match="no member"):
        build(read_sources(path), corpus, tmp_path / "cache")
    with pytest.raises(CorpusError, match="the folder holds no complete corpus"):
        read_record(corpus)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"])
@pytest.mark.parametrize("make", [tar, wheel], ids=["tar", "wheel"])
def test_member_that_leads_out_is_refused(tmp_path: Path, make: Any, name: str) -> None:
    path = tmp_path / ("x.whl" if make is wheel else "x.tgz")
    path.write_bytes(make({"good": b"1", name: b"2"}))

    with pytest.raises(CorpusError, match="leads out of the archive"):
        list(read_members(path, lambda member: True))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_links_are_passed_over(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / "x.tgz").write_bytes(out.getvalue())

    assert list(read_members(tmp_path / "x.tgz", lambda member: True)) == []


def test_member_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_MEMBER_BYTES > 1 << 20
    monkeypatch.setattr("studies.corpus.fetch.MAX_MEMBER_BYTES", 10)
    (tmp_path / "x.tgz").write_bytes(tar({"a": b"x" * 11}))

    with pytest.raises(CorpusError, match="a is larger than 10 bytes"):
        list(read_members(tmp_path / "x.tgz", lambda member: True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.deb", b"no archive"),
        ("x.deb", deb({"a": b"1"})[:100]),
        ("x.deb", deb({"a": words(1, 4000).encode()})[:9000]),
        ("x.tgz", tar({"a": b"1" * 5000})[:-20]),
        ("x.whl", b"PK no zip"),
    ],
    ids=["no-ar", "no-data", "cut-deb", "cut-tgz", "no-zip"],
)
def test_broken_package_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match="x.* (cannot be read|is not|has no|broken)"):
        list(read_members(tmp_path / name, lambda member: True))


def test_archive_inside_that_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.deb").write_bytes(PACKAGES["manual"][1])
    with pytest.raises(CorpusError, match="holds no usr/src/other.tar.xz"):
        list(read_members(tmp_path / "x.deb", lambda member: False, "usr/src/other.tar.xz"))


def test_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for client, program in (("apt", "apt-get"), ("npm", "npm")):
        package = Package(client=client, name="x", version="1", sha256="0" * 64)
        with pytest.raises(CorpusError, match=f"{program} is not on this machine"):
            fetching.fetch("x", package, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_client_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fetching, "_command", lambda package, folder: ["sh", "-c", "echo no such >&2; exit 7"]
    )
    package = Package(client="apt", name="x", version="1", sha256="0" * 64)
    with pytest.raises(CorpusError, match=r"ended with 7 \(no such\); .*apt-cache policy x"):
        fetching.fetch("x", package, tmp_path / "cache")


def test_client_that_delivers_nothing_is_an_error(tmp_path: Path) -> None:
    package = Package(client="npm", name="x", version="1", sha256="0" * 64)
    with pytest.raises(CorpusError, match=r"delivered \[\] for x 1"):
        fetching.fetch("x", package, tmp_path / "cache", download=lambda package, folder: None)


def test_pip_knows_the_hash_before_it_runs_anything(tmp_path: Path) -> None:
    package = Package(client="pip", name="x", version="1", sha256="a" * 64)
    line = fetching._command(package, tmp_path)
    assert "--require-hashes" in line and "--no-deps" in line
    assert (tmp_path / "wanted.txt").read_text() == f"x==1 --hash=sha256:{'a' * 64}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1\n", "version = 2\n", "version=2 is not 1"),
        ('client = "npm"', 'client = "ftp"', "client='ftp' is not one of apt, npm, pip"),
        ('name = "manual"', 'name = "--evil"', "name '--evil' does not look like one"),
        ('name = "books"\nversion', 'name = "../x"\nversion', "name '../x' does not look like"),
        ('version = "1:1-1"', 'version = "$(x)"', "version .* does not look like one"),
        ('form = "html"', 'form = "pdf"', "form='pdf' is not one of"),
        ('kind = "code"', 'kind = "music"', "kind='music' is not one of code, prose"),
        ('package = "manual"', 'package = "other"', "package='other' is not one of"),
        ('include = ["*.html"]', 'include = "*.html"', "include='.*' is not of the type list"),
        ('skip = ["nav"]', 'skips = ["nav"]', r"unknown keys \['skips'\]"),
        ('licence = "public domain"\n', "", r"missing keys \['licence'\]"),
        ('remove = ["1', 'remove = ["(1', "is no pattern"),
        ('name = "pages"', 'name = "books"', "two sources have the same name"),
        ("[tokenizer.files]", "[tokenizer.list]", "lacks or misplaces 'files'"),
        ('"vocab.bpe"', '"../x"', "name '../x' does not look like one"),
        ("[[source]]", "[[source", "cannot be read as TOML"),
    ],
)
def test_list_that_is_wrong_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tiny_list(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CorpusError, match=message):
        read_sources(path)


def test_list_of_the_repository_is_sound() -> None:
    sources = read_sources()

    assert sum(source.kind == "prose" for source in sources.sources) >= 20
    used = {source.package for source in sources.sources} | {sources.tokenizer.package}
    assert used == set(sources.packages)
    names = {file.name for file in sources.tokenizer.files}
    assert names == {"encoder.json", "vocab.bpe"}
    text = LIST.read_text(encoding="utf-8")
    assert hashlib.sha256(text.encode()).hexdigest() == sources.sha256


def test_equal_and_near_documents_are_told_apart() -> None:
    seen, text = Seen(), words(1, 400)

    assert seen.why_not(text) == ""
    assert seen.why_not(text.upper().replace(" ", ",\n")) == "exact"
    assert seen.why_not(f"{text} {words(2, 40)}") == "near"
    assert seen.why_not(" ".join(text.split()[100:])) == "near"  # a part of it
    assert seen.why_not(f"{text} {words(3, 400)}") == ""  # half of it is new
    assert seen.why_not(words(4, 400)) == ""


def test_short_documents_are_never_called_near() -> None:
    seen = Seen()
    assert seen.why_not("one two three four five six") == ""
    assert seen.why_not("one two three four five seven") == ""


def test_paragraphs_of_the_same_document_stay() -> None:
    seen, long = Seen(), words(1, 60)

    assert seen.without_repeats(f"{long}\n\nx\n\n{long}\n") == (f"{long}\n\nx\n\n{long}\n", 0)
    assert seen.without_repeats(f"a\n\n{long}\n\nb\n") == ("a\n\nb\n", 1)
    assert seen.without_repeats("a\n\nb\n") == ("a\n\nb\n", 0)  # too short to count


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a <b>b</b>\n c</p><p>d</p>", "a b c\n\nd"),
        ("a<script>x</script><style>y</style>b", "ab"),
        ("<div class='x nav'>n<div>o</div>p</div>q", "q"),
        ("<div id=nav>n<br>o</div>q", "q"),
        ("<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>", "a  b\nc"),
        ("<ul><li>a<li><p>b</ul>", "- a\n- b"),
        ("x &lt; y &amp;&nbsp;z", "x < y & z"),
        ("<pre>a\n  b</pre>c", "a\n  b\n\nc"),
        ("<nav>never closed", ""),
    ],
)
def test_html_becomes_text(page: str, text: str) -> None:
    assert tidy(html_text(page, ["nav"])).rstrip("\n") == text


def test_wordnet_lines_become_glosses() -> None:
    data = (
        "  1 licence | of WordNet\n"
        '00039297 04 n 02 eye_contact 2 brush(p) 0 001 @ 00039021 n 0000 | close; "daily"  \n'
    )
    found = documents_of(data.encode(), "data.noun", "wordnet", skip=[], remove=[])
    assert list(found) == ['eye contact, brush: close; "daily"\n']


def test_long_documents_are_cut_at_empty_lines_without_loss() -> None:
    text = "\n\n".join(words(n, 30) for n in range(40)) + "\n"
    parts = list(cut_long(text, 2000))

    assert "\n\n".join(part.rstrip("\n") for part in parts) + "\n" == text
    lengths = [len(part) for part in parts]
    assert max(lengths) <= 2000 and min(lengths[:-1]) >= 900
    assert next(cut_long("x" * 5000, 2000)) == "x" * 1667 + "\n"  # nowhere to cut
    assert list(cut_long(text)) == [text]


def test_bytes_that_are_not_text_are_seen() -> None:
    assert decode("é\r\nü\r".encode()) == "é\nü\n"
    assert decode("é".encode("latin-1")) == "é"
    assert decode(b"a\x0c" + b"b" * 2000) == "a" + "b" * 2000
    assert decode(b"ab\0cd") is None and decode(bytes(range(256)) * 9) is None


def test_command_builds_from_a_filled_cache(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", "--out", str(tmp_path / "again"), "--cache", str(tmp_path / "cache")]
    assert command.main([*arguments, "--sources", str(tmp_path / "sources.toml")]) == 0
    assert "prose: 5 documents" in capsys.readouterr().out
    assert (tmp_path / "again" / "corpus.json").read_bytes() == (
        corpus / "corpus.json"
    ).read_bytes()


def test_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", "--out", str(tmp_path), "--sources", str(tmp_path / "no.toml")]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("studies.corpus: error: ") and error.count("\n") == 1
