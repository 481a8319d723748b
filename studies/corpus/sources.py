"""sources.toml: which packages are fetched, which files are read, and how they become text.

  version                 1
  [package.ID]            client (apt | pip | npm), name, version, sha256 of the file it delivers;
                          notice: the member that holds the licence (apt: the copyright file)
  [[source]]              name, kind (prose | code), package (an ID), title, licence;
                          include, exclude: patterns of member names, in which * also matches /;
                          inside: an archive within the package; form: a name of forms.FORMS;
                          skip: classes and ids of HTML elements to leave out;
                          remove: regular expressions whose matches are taken out of the text
  [tokenizer]             package, title, licence; [tokenizer.files]: name = {member, sha256}
The order of the sources is the order of the documents, and the first of two equal ones stays.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from studies.corpus.text import FORMS, CorpusError

VERSION = 1
LIST = Path(__file__).with_name("sources.toml")
PROSE, CODE = "prose", "code"
CLIENTS = ("apt", "pip", "npm")
SHA256 = re.compile(r"[0-9a-f]{64}")
PACKAGE_NAME = re.compile(r"(@[a-z0-9][a-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9.+_-]*")
"""Nothing that a client could take for a flag, a path or an address."""
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9.]*")
PACKAGE_VERSION = re.compile(r"[0-9][A-Za-z0-9.+:~_-]*")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One file of a package client, of one version, with one hash."""

    client: str
    name: str
    version: str
    sha256: str
    notice: str = ""

    @property
    def notice_member(self) -> str:
        """Where its licence is: every package of Debian has it in the same place."""
        return self.notice or f"usr/share/doc/{self.name}/copyright" * (self.client == "apt")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of a package that become documents."""

    name: str
    kind: str
    package: str
    title: str
    licence: str
    include: list[str]
    form: str
    exclude: list[str]
    inside: str
    skip: list[str]
    remove: list[str]

    def wants(self, member: str) -> bool:
        """Say whether this member of the package is one of the files."""
        return _matches(member, self.include) and not _matches(member, self.exclude)


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A file of GPT-2's vocabulary, and where it lies in its package."""

    name: str
    member: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """GPT-2's vocabulary: the files that data.tokenizer_path looks for."""

    package: str
    title: str
    licence: str
    files: list[TokenizerFile]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The whole list."""

    packages: dict[str, Package]
    sources: list[Source]
    tokenizer: Tokenizer
    sha256: str
    """Of the list itself."""


def read_sources(path: Path = LIST) -> Sources:
    """Read the list, and refuse what is unknown, missing or names something that is not there."""
    try:
        content = path.read_bytes()
        tables = tomllib.loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read as TOML ({error}); correct it") from None
    try:
        return _parse(tables, hashlib.sha256(content).hexdigest())
    except (KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path}: lacks or misplaces {error}; see sources.py") from None
    except CorpusError as error:
        raise CorpusError(f"{path}: {error}") from None


def _parse(tables: dict[str, Any], sha256: str) -> Sources:
    if tables["version"] != VERSION:
        raise CorpusError(f"version={tables['version']!r} is not {VERSION}; use its own script")
    packages = {name: _package(name, table) for name, table in tables["package"].items()}
    sources = [_source(table, packages) for table in tables["source"]]
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise CorpusError(f"two sources have the same name among {names}; rename one")
    return Sources(
        packages=packages,
        sources=sources,
        tokenizer=_tokenizer(tables["tokenizer"], packages),
        sha256=sha256,
    )


def _package(name: str, table: dict[str, Any]) -> Package:
    package = Package(**_checked(Package, f"package.{name}", table))
    _known(package.client, CLIENTS, f"package.{name}: client")
    _fits(PACKAGE_NAME, package.name, f"package.{name}: name")
    _fits(PACKAGE_VERSION, package.version, f"package.{name}: version")
    _fits(SHA256, package.sha256, f"package.{name}: sha256")
    return package


def _source(table: dict[str, Any], packages: dict[str, Package]) -> Source:
    where = f"source {table.get('name')!r}"
    optional: dict[str, Any] = {"exclude": [], "inside": "", "skip": [], "remove": []}
    source = Source(**_checked(Source, where, optional | table))
    _known(source.kind, (PROSE, CODE), f"{where}: kind")
    _known(source.package, packages, f"{where}: package")
    _known(source.form, FORMS, f"{where}: form")
    for pattern in source.remove:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CorpusError(f"{where}: remove={pattern!r} is no pattern ({error})") from None
    return source


def _tokenizer(table: dict[str, Any], packages: dict[str, Package]) -> Tokenizer:
    _known(table["package"], packages, "tokenizer: package")
    files = []
    for name, entry in table["files"].items():
        where = f"tokenizer.files.{name}"
        file = TokenizerFile(name=name, **_checked(TokenizerFile, where, entry, "name"))
        _fits(SHA256, file.sha256, f"{where}: sha256")
        _fits(FILE_NAME, name, f"{where}: name")
        files.append(file)
    named = {key: value for key, value in table.items() if key != "files"}
    return Tokenizer(files=files, **_checked(Tokenizer, "tokenizer", named, "files"))


def _checked(kind: type, where: str, table: dict[str, Any], *given: str) -> dict[str, Any]:
    """Return the table if it has the keys of the dataclass, with values of their types."""
    types = {field.name: str(field.type) for field in fields(kind) if field.name not in given}
    needed = {field.name for field in fields(kind) if field.default is MISSING} - set(given)
    if set(table) - set(types) or needed - set(table):
        odd = sorted(set(table) - set(types)), sorted(needed - set(table))
        raise CorpusError(f"{where}: unknown keys {odd[0]}, missing keys {odd[1]}; see sources.py")
    for key, value in table.items():
        texts = value if types[key] == "list[str]" and isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise CorpusError(f"{where}: {key}={value!r} is not of the type {types[key]}")
        if isinstance(value, list) != (types[key] == "list[str]"):
            raise CorpusError(f"{where}: {key}={value!r} is not of the type {types[key]}")
    return table


def _known(value: str, allowed: Any, where: str) -> None:
    if value not in allowed:
        raise CorpusError(f"{where}={value!r} is not one of {', '.join(sorted(allowed))}")


def _fits(pattern: re.Pattern[str], value: str, where: str) -> None:
    if not pattern.fullmatch(value):
        raise CorpusError(f"{where} {value!r} does not look like one ({pattern.pattern})")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
