"""docs/surface.toml, read: the commands, and the words in them that can be checked or run."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
FILE = REPOSITORY / "docs" / "surface.toml"
VERSION = 1
SCRIPT = re.compile(r"\b(?:scripts|bench)/[\w/.-]+\.(?:py|sh)\b")
ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
ON_CPU = {"'cuda:0'": "'cpu'", "'cuda'": "'cpu'", "torch.bfloat16": "torch.float32"}
"""What a snippet for a GPU becomes without one."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the list; docs/surface.toml says what the fields mean."""

    id: str
    run: str
    exempt: str = ""
    rehearse: str = ""
    because: str = ""
    sizes: dict[str, str] = field(default_factory=dict)
    flags: str = ""
    env: dict[str, str] = field(default_factory=dict)
    exit: int = 0
    prints: list[str] = field(default_factory=list)
    artifact: str = ""
    until_s: float = 0.0
    device: bool = False
    lane: int = 0
    limit_s: float = 400.0

    @property
    def rehearsed(self) -> str:
        """What a rehearsal runs."""
        text = (self.rehearse or self.run).strip()
        for old, new in {**self.sizes, **(ON_CPU if self.device else {})}.items():
            if old not in text:
                raise ValueError(f"{FILE.name}, {self.id}: {old!r} is not in the command")
            text = text.replace(old, new)
        return re.sub(r"(scripts/\w+\.sh)", rf"\1 {self.flags}", text) if self.flags else text


@cache
def load() -> dict[str, Any]:
    """The whole list, as it is written."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    if content.get("version") != VERSION:
        raise ValueError(f"{FILE} has version {content.get('version')!r}; this reads {VERSION}")
    return content


def commands() -> list[Command]:
    """Every command, in the order of the file."""
    known = {item.name for item in dataclasses.fields(Command)}
    rows: list[Command] = []
    for row in load()["command"]:
        if unknown := row.keys() - known:
            raise ValueError(f"{FILE.name}, {row.get('id')}: no such field: {sorted(unknown)}")
        rows.append(Command(**row))
    return rows


def parts_of(text: str) -> Iterator[str]:
    """The parts of this repository that a command needs: scripts, and commands of `nsa`."""
    yield from SCRIPT.findall(text)
    for words in simple_commands(text):
        if words[0] == "nsa" and len(words) > 1:
            yield f"nsa {words[1]}"


def simple_commands(text: str) -> Iterator[list[str]]:
    """Every command of a text as its words, without the variables that are set before it."""
    for words in _all_words(text):
        rest = words
        while rest and ASSIGNMENT.match(rest[0]):
            rest = rest[1:]
        if rest:
            yield rest


def variables_of(text: str) -> Iterator[str]:
    """The names of the variables that a text sets."""
    for words in _all_words(text):
        names = words[1:] if words[:1] == ["export"] else words
        for word in names:
            if not (match := ASSIGNMENT.match(word)):
                break
            yield match[0][:-1]


def _all_words(text: str) -> Iterator[list[str]]:
    without_documents = re.sub(r"<<'(\w+)'\n.*?\n\1(?=\n|$)", "", text, flags=re.DOTALL)
    joined = without_documents.replace("\\\n", " ")
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        tokens = iter([*lexer, ";"])
        for word in tokens:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif set(word) <= set("<>&"):  # a redirection: its file, and the number before it
                next(tokens)
                words = words[:-1] if words and words[-1].isdigit() else words
            else:
                words.append(word)
