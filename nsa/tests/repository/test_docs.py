"""The documentation site: pages are in the navigation, code on them runs, commands parse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import nsa
from nsa.cli.__main__ import _parser as cli_parser
from nsa.cli.describe import refresh
from nsa.config import load_config
from nsa.tests.repository.test_surface import understands
from nsa.tests.support.surface import REPOSITORY, SCRIPT, simple_commands
from scripts import draw_speed
from scripts.site_hooks import OWN_WORKER, WORKER, links_as_text, on_post_page

DOCS = REPOSITORY / "docs"
SITE = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = [
    DOCS / "index.md",
    *sorted((DOCS / "concepts").glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
    *(DOCS / f"{name}.md" for name in ("configuration", "data", "ranks", "reliability")),
    DOCS / "training.md",
    REPOSITORY / "README.md",
    *(DOCS / f"{name}.md" for name in ("operate", "launch", "preflight", "report", "dashboard")),
    *(DOCS / f"{name}.md" for name in ("generate", "kernels", "torch-path", "architecture")),
]
"""Pages whose code a reader copies."""
ONLY_COMPILED = re.compile(r"# needs a (GPU|trained model|run folder)\n")
"""First line of a block that cannot run here."""
PROGRAMS = {
    *("nsa", "python3", "pip", "touch", "torchrun", ".", "head"),
    *("python", "bash", "pytest", "make", "ssh", "sbatch", "kill", "echo", "tee"),
    *("transformers", "lm_eval"),
}
"""What shell blocks may call; a new one is a decision."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in their order."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def nav_pages(part: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(part, str):
        yield part
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from nav_pages(inner)


def nsa_words(words: list[str]) -> list[str] | None:
    """The arguments of `nsa` in a command, also under torchrun; None if it calls another."""
    if words[0] == "nsa":
        return words[1:]
    if words[0] == "torchrun" and "nsa.cli" in words:
        return words[words.index("nsa.cli") + 1 :]
    return None


def check_other(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of make exist; scripts exist, and their parser takes the flags."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for script in (word for word in words if SCRIPT.fullmatch(word)):
        if "StrictParser(" in (REPOSITORY / script).read_text(encoding="utf-8"):
            assert understands(script, words[words.index(script) + 1 :], monkeypatch), words


# Pages


def test_every_page_is_in_the_navigation_once() -> None:
    named = list(nav_pages(SITE["nav"]))
    there = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(named) == there


def test_the_navigation_has_seven_parts() -> None:
    parts = [next(iter(part)) for part in SITE["nav"]]
    wanted = ["Start", "Concepts", "How-to", "Operate", "Reference", "Results", "Development log"]
    assert parts == wanted


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"repo_url", "site_url", "extra_javascript", "extra_css"} & SITE.keys()
    page = SimpleNamespace(url="how-to/decode.html")
    html = on_post_page(f'<script src="{WORKER}">', page=page)
    assert html == '<script src="../assets/search-from-file.js">'
    assert (DOCS / OWN_WORKER).is_file()


def test_the_page_of_commands_is_up_to_date() -> None:
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert refresh(page) == page, "run: python -m nsa.cli.describe docs/reference/cli.md"


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="begin commands"):
        refresh("# no marks\n")


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: nsa\.(\w+)$", page, re.MULTILINE)) == sorted(nsa.__all__)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[docs](data.md)", "[docs](data.md)"),
        ("[above](#resume)", "[above](#resume)"),
        ("[paper](https://example.org/x)", "[paper](https://example.org/x)"),
        ("[corpus](../studies/corpus/README.md#a)", "`studies/corpus/README.md`"),
        ("[the study](../bench/x.py)", "the study (`bench/x.py`)"),
        ("```\n[x](../y.py)\n```\n", "```\n[x](../y.py)\n```\n"),
    ],
)
def test_links_that_leave_the_site_become_text(text: str, shown: str) -> None:
    assert links_as_text(text, "page.md") == shown


# Code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page, "python"), start=1):
        code = compile(block, f"{page.name}, block {number}", "exec")
        if not ONLY_COMPILED.match(block):
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_of_a_page_is_a_config(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):
        Path("mine.yaml").write_text(block, encoding="utf-8")
        load_config("./mine.yaml", environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags by the real parser; bundled configs with the keys that are set are resolved."""
    for text in blocks(page, "bash"):
        assert [name for name in SCRIPT.findall(text) if not (REPOSITORY / name).is_file()] == []
        for words in simple_commands(text):
            assert words[0] in PROGRAMS, f"{page.name}: {shlex.join(words)}"
            check_other(words, monkeypatch)
            if (arguments := nsa_words(words)) in (None, ["--version"]):
                continue
            args = vars(cli_parser().parse_args(arguments))
            config = args.get("config") or "quickstart"
            if not config.startswith("./"):
                load_config(config, args.get("overrides") or [], environ={})


def test_the_picture_of_the_speed_is_drawn_from_the_table_of_its_page(tmp_path: Path) -> None:
    lines = draw_speed.read_table(draw_speed.PAGE.read_text(encoding="utf-8"))
    assert [line.name for line in lines] == 3 * ["ours", "peer", "dense"]
    assert [line.shape.split("/")[0] for line in lines[::3]] == ["12", "32", "64"]
    ours, peer, dense = (line.times for line in lines[-3:])
    assert list(ours) == list(peer) == list(dense) == [1 << power for power in range(12, 17)]
    assert ours[65536] < peer[65536] < dense[65536]
    draw_speed.draw(lines, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_pages_have_code_to_copy() -> None:
    assert [p.name for p in PAGES if not blocks(p, "bash") and not blocks(p, "python")] == []
    assert len(PAGES) >= 9
