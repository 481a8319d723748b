"""docs/surface.toml and the runbooks name nothing that does not exist, or does not parse."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsa.cli.__main__ import _parser as cli_parser
from nsa.cli.__main__ import subcommands
from nsa.config import Config, StrictParser, known_keys, load_config, to_container
from nsa.config.env import TABLE
from nsa.records import Metrics, read_heartbeat
from nsa.tests.support.surface import (
    REPOSITORY,
    SCRIPT,
    Command,
    commands,
    load,
    parts_of,
    simple_commands,
    variables_of,
)
from nsa.train import run

SURFACE = load()
COMMANDS = commands()
RUNBOOKS = sorted((REPOSITORY / "docs" / "runbooks").glob("*.md"))
OTHERS = {
    *(
        "tail",
        "ls",
        "cat",
        "rm",
        "grep",
        "echo",
        "touch",
        "wait",
        "kill",
        "nohup",
        "export",
        "true",
    ),
    *("python", "pytest", "torchrun", "tensorboard", "bash", "nsa", ".", "has", "ended"),
}
"""Programs that commands may call; a new one is a decision."""


class Parsed(Exception):
    """Thrown when a parser has understood its arguments, so that nothing is run."""


def fenced(path: Path) -> Iterator[str]:
    """The blocks of shell in a Markdown file."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
        if kind in ("", "bash", "sh"):
            yield block


def shell_texts() -> Iterator[tuple[str, str]]:
    """Every piece of shell that is checked, with the place that it is from."""
    for command in COMMANDS:
        if not command.exempt:
            yield command.id, command.rehearsed
    for path in RUNBOOKS:
        for number, block in enumerate(fenced(path)):
            yield f"{path.name}-{number}", block


TEXTS = dict(shell_texts())


# Commands


def test_every_command_of_the_runbooks_is_listed_once() -> None:
    ids = [command.id for command in COMMANDS]
    assert len(ids) == len(set(ids))
    assert {f"C{number}" for number in range(1, 55)} <= {*ids}
    assert all(re.fullmatch(r"[CN]\d+", name) for name in ids)


def test_every_command_is_exempt_or_rehearsed_and_says_why() -> None:
    for command in COMMANDS:
        assert bool(command.exempt) != (command.lane in (1, 2)), command.id
        assert bool(command.rehearse) <= bool(command.because), command.id
        assert command.rehearsed if not command.exempt else command.run, command.id
    exempt = {command.id for command in COMMANDS if command.exempt}
    assert exempt == {f"C{n}" for n in (4, 20, 22, 23, 28, 37, 43, 44, 54)}


def test_a_rehearsal_changes_numbers_and_nothing_else() -> None:
    for command in COMMANDS:
        for old, new in command.sizes.items():
            assert re.sub(r"\d+", "0", old) == re.sub(r"\d+", "0", new), command.id


def test_a_size_that_is_not_in_the_command_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not in the command"):
        _ = Command(id="C0", run="x --steps 3", sizes={"--steps 4": "--steps 1"}).rehearsed


@pytest.mark.parametrize("place", TEXTS)
def test_parts_of_a_command_exist(place: str) -> None:
    known = {f"nsa {name}" for name in subcommands()}
    missing = [
        p for p in parts_of(TEXTS[place]) if p not in known and not (REPOSITORY / p).is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("place", TEXTS)
def test_variables_of_a_command_are_known(place: str) -> None:
    assert {*variables_of(TEXTS[place])} - TABLE.keys() == set()


@pytest.mark.parametrize("place", TEXTS)
def test_programs_of_a_command_are_known_ones(place: str) -> None:
    programs = {words[0] for words in simple_commands(TEXTS[place])}
    assert {p for p in programs if not re.match(r"\w+\(\)|pid", p)} - OTHERS == set()


@pytest.mark.parametrize("place", TEXTS)
def test_arguments_of_a_command_parse(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in simple_commands(TEXTS[place]):
        if words[0] == "nsa":
            cli_parser().parse_args(words[1:])
        elif words[0] == "pytest" or words[:3] == ["python", "-m", "pytest"]:
            assert selects_tests(words)
        elif script := next((word for word in words if SCRIPT.fullmatch(word)), None):
            arguments = words[words.index(script) + 1 :]
            if script.endswith(".py"):
                assert understands(script, arguments, monkeypatch), words
    for path in re.findall(r"\bconfigs/[\w.]+\.yaml", TEXTS[place]):
        load_config(REPOSITORY / path, environ={})


def understands(script: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the parser of a script takes the arguments."""
    real = StrictParser.parse_args

    def parse(self: StrictParser, *given: Any) -> None:
        real(self, *given)
        raise Parsed

    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(StrictParser, "parse_args", parse)
        module.main([re.sub(r"[{<]N[}>]", "3", word) for word in arguments])
    return True


def selects_tests(words: Sequence[str]) -> bool:
    """Whether the files exist, and some test or file has the word of -k in its name."""
    files = [REPOSITORY / word for word in words if word.endswith(".py")]
    wanted = words[words.index("-k") + 1] if "-k" in words else ""
    searched = files or sorted((REPOSITORY / "nsa" / "tests").glob("test_*.py"))
    assert all(path.is_file() for path in searched)
    names = [
        name for p in searched for name in (p.name, *re.findall(r"def (test_\w+)", p.read_text()))
    ]
    return any(wanted in name for name in names)


def test_a_wrong_flag_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        understands("scripts/train_showcase.py", ["--stepz", "3"], monkeypatch)
    assert not selects_tests(shlex.split("pytest -k no_such_test_anywhere"))
    assert [*variables_of("A=1 B='x y' python C=3\nexport D=4")] == ["A", "B", "D"]
    assert [*simple_commands("A=1 ls -l; cat x > f 2>&1 | grep y && echo z")] == [
        *(["ls", "-l"], ["cat", "x"], ["grep", "y"], ["echo", "z"])
    ]


# Scripts, flags, configs


def test_scripts_exist_and_begin_as_they_should() -> None:
    for script in {*SURFACE["scripts"]["bash"]}:
        text = (REPOSITORY / script).read_text()
        assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text, script
    for script in {*SURFACE["scripts"]["python"]}:
        importlib.import_module(script.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize("script", SURFACE["flags"])
def test_flags_are_those_of_the_parser(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with pytest.raises(SystemExit):
        module.main(["--help"])
    shown = capsys.readouterr().out
    assert [f for f in SURFACE["flags"][script] if not re.search(rf"{f}\b", shown)] == []


@pytest.mark.parametrize("path", SURFACE["configs"])
def test_configs_have_the_values_of_the_surface(path: str) -> None:
    found = to_container(load_config(REPOSITORY / path, environ={}))
    for text in SURFACE["configs"][path]:
        key, _, value = text.partition("=")
        group, _, name = key.partition(".")
        assert key in known_keys()
        assert found[group][name] == yaml.safe_load(value), text


def test_keys_of_the_rehearsal_exist() -> None:
    keys = SURFACE["rehearsal"]["keys"]
    assert {f"{group}.{key}" for group, values in keys.items() for key in values} <= {*known_keys()}


def test_constants_of_the_rehearsal_are_smaller_than_those_of_the_code() -> None:
    for path, numbers in SURFACE["rehearsal"]["constants"].items():
        for name, value in numbers.items():
            (found,) = re.findall(rf"(?m)^{name} = (\d+)$", (REPOSITORY / path).read_text())
            assert value < int(found), name


# Files, lines, fields, variables


@pytest.mark.parametrize("name", SURFACE["files"])
def test_a_file_is_known_to_its_writer(name: str) -> None:
    assert f'"{name}' in (REPOSITORY / SURFACE["files"][name]).read_text()


@pytest.mark.parametrize("line", SURFACE["log"])
def test_a_line_is_printed_by_its_module(line: str) -> None:
    assert line in (REPOSITORY / SURFACE["log"][line]).read_text()


def test_variables_are_in_the_table() -> None:
    names = SURFACE["environment"]["names"]
    assert [name for name in names if name not in TABLE] == []
    assert len(names) == len(set(names))


def test_a_run_leaves_the_fields_and_files_of_the_surface(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    folder = run(tiny_config("train.save_every=3"), config_path="tiny.yaml").folder
    beats = read_heartbeat(folder / "heartbeat_rank0.jsonl")
    text = (folder / "heartbeat_rank0.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]

    assert all({*SURFACE["heartbeat"]["every_line"]} <= line.keys() for line in lines)
    assert {*SURFACE["heartbeat"]["messages"]} <= {beat.msg for beat in beats}
    progress = next(line for line in lines if line["msg"] == "progress")
    assert {*SURFACE["heartbeat"]["progress"]} - progress.keys() == set()
    assert {*SURFACE["metrics"]["fields"]} <= vars(Metrics).keys() | Metrics.__annotations__.keys()
    assert (folder / "training.csv").read_text().startswith("step,loss,lr,toks_per_s\n")
    assert (folder / "val.csv").read_text().startswith("step,loss,ppl")
    for name in ("tb", "metrics.json", "env.json", "checkpoint_step3.pt", "model.pt"):
        assert (folder / name).exists(), name


@pytest.mark.parametrize("path", SURFACE["tests"])
def test_tests_that_runbooks_call_exist(path: str) -> None:
    names = re.findall(r"def (test_\w+)", (REPOSITORY / path).read_text())
    wanted = SURFACE["tests"][path]
    assert any(wanted in name for name in [*names, Path(path).name])


# Runbooks


def test_there_are_runbooks_for_everybody() -> None:
    names = {path.name for path in RUNBOOKS}
    assert {"README.md", "operator.md", "handoff.md", "pilot.md", "triage.md"} <= names
    index = (REPOSITORY / "docs" / "runbooks" / "README.md").read_text()
    assert all(f"({name})" in index for name in names - {"README.md"})


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.name)
def test_what_runbooks_name_exists(path: Path) -> None:
    """Variables, config keys, files of the repository and links, wherever in the text they are."""
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"\bNSA_[A-Z0-9_]+\b", text)} <= TABLE.keys()
    dotted = {*re.findall(r"`((?:model|nsa|train|data|runtime)\.[a-z_]+)(?:[ =][^`]*)?`", text)}
    assert dotted - {"model.pt", "train.log"} <= {*known_keys()}
    for name in re.findall(r"\b(?:configs|scripts|bench)/[\w/.-]+\.\w+", text):
        assert (REPOSITORY / name).is_file(), name
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
