"""What is imported when: packages for other purposes never, torch and its compiler where needed."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import pytest

import nsa
from bench import bench_startup
from bench.bench_startup import COMMANDS, FILES, OPERATOR, Start
from nsa.cli import __main__ as console
from nsa.data import DataError
from nsa.data.errors import need
from nsa.tests.conftest import REPOSITORY

FORBIDDEN = ("datasets", "pydantic", "fastapi")
BLOCKED = f"""
import importlib, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN}:
            raise ImportError(f"{{name}} must not be needed")

sys.meta_path.insert(0, Finder())
"""
GROUPS = {
    "trainer": [
        "scripts.train_showcase",
        "nsa.train.prove_resume",
        "nsa.train.checkpoint.commands",
    ],
    "benches": [f"bench.{file.stem}" for file in sorted((REPOSITORY / "bench").glob("*.py"))],
    "gpu-tests": [
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        for file in sorted((REPOSITORY / "nsa" / "tests").rglob("test_*.py"))
        if re.search(r"mark\.gpu\b|nsa\.tests\.support\.gpu\b", file.read_text(encoding="utf-8"))
    ],
}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", BLOCKED + code]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_all_is_imported_without_packages_for_other_purposes() -> None:
    assert all(GROUPS.values()), "a group without modules"
    names = [name for group in GROUPS.values() for name in group]

    found = run_python("\n".join(f"importlib.import_module({name!r})" for name in names))

    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_block_would_notice(package: str) -> None:
    found = run_python(f"import {package}")
    assert found.returncode == 1 and f"{package} must not be needed" in found.stderr


def test_a_folder_of_that_name_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scripts/datasets is one, and scripts/ is on the path of what is started from there."""
    (tmp_path / "nowhere_else").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"a stream needs the package nowhere_else .*\[stream\]"):
        need("nowhere_else", "a stream", extra="stream")


HEAVY = ("numpy", "torch", "sympy", "torch._dynamo")
NEEDS_NUMPY = ("nsa data prepare", "python -c 'import nsa.cli.dashboard'")
RUN_ALL = """
import json, os, runpy, sys

results = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

def start(arguments):
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    if arguments[0] == "-c":
        exec(arguments[1], {})
    elif arguments[0] == "-m":
        from nsa.cli.__main__ import main
        return main(arguments[2:])
    else:
        runpy.run_path(arguments[0], run_name="__main__")
    return 0

for line, arguments in json.load(sys.stdin):
    try:
        code = start(arguments)
    except SystemExit as end:
        code = end.code or 0
    loaded = [name for name in HEAVY if name in sys.modules]
    print(json.dumps([line, code, loaded]), file=results, flush=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny run, shards and an archive, for commands to read."""

    def run_here(start: Start, tree: Path, names: dict[str, str]) -> None:
        assert console.main(bench_startup.argv_of(start, names)[2:]) == start.code, start.line

    return bench_startup.prepare(tmp_path_factory.mktemp("start") / "made", do=run_here)


def modules_after(starts: list[Start], made: dict[str, str]) -> dict[str, list[str]]:
    """Run commands one after the other in one process: which of HEAVY are loaded after each."""
    given = json.dumps([(start.line, bench_startup.argv_of(start, made)) for start in starts])
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY}\n{RUN_ALL}"],
        cwd=REPOSITORY,
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(starts), done.stderr
    assert [code for _, code, _ in found] == [start.code for start in starts], found
    return {line: loaded for line, _, loaded in found}


def test_commands_that_only_read_files_never_load_torch(made: dict[str, str]) -> None:
    starts = [start for start in COMMANDS if start.needs == FILES]
    starts.sort(key=lambda start: start.line.startswith(NEEDS_NUMPY))  # they come last

    loaded = modules_after(starts, made)

    for start in starts:
        allowed = ["numpy"] if start.line.startswith(NEEDS_NUMPY) else []
        assert loaded[start.line] in ([], allowed), start.line


def test_commands_that_compute_load_torch_without_its_compiler(made: dict[str, str]) -> None:
    loaded = modules_after([start for start in COMMANDS if start.needs == OPERATOR], made)

    assert set(map(tuple, loaded.values())) == {("numpy", "torch")}, loaded


def test_an_update_loads_no_compiler_but_a_compiled_model_does() -> None:
    code = """
import sys, torch, nsa
from nsa.config import TrainConfig
from nsa.train.optimizer import build_optimizer, load_optimizer
model = nsa.TinyLM(vocab=8, dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8)
ids = torch.zeros(1, 40, dtype=torch.long)
model(ids).sum().backward()
for name in ("adamw", "muon"):
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, lr=0.1))
    optimizer.step()
    load_optimizer(optimizer, optimizer.state_dict())
optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules and "nsa.ops.traced" not in sys.modules
graph = torch.compile(model, backend="eager", fullgraph=True)
assert torch.equal(graph(ids), model(ids))
assert "nsa.ops.traced" in sys.modules
"""
    found = run_python(code)
    assert found.returncode == 0, found.stderr


def test_every_command_stands_in_the_table_of_starts() -> None:
    lines = [start.line for start in COMMANDS]
    own = {"preflight": "nsa.operate.preflight.command", "dashboard": "nsa.cli.dashboard"}
    for name in console.subcommands():
        known = own.get(name, f"nsa {name}")
        assert any(known in line for line in lines), f"{name}: give it a line in bench_startup"
    for group in ("data", "checkpoint"):
        for name in _subcommands_of(group):
            if (group, name) != ("checkpoint", "convert"):  # torch's own checkpoints: TRAINS
                assert any(line.startswith(f"nsa {group} {name}") for line in lines), name


def _subcommands_of(group: str) -> list[str]:
    parser: argparse.ArgumentParser = console._parser()
    for name in ("", group):
        (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        if not name:
            parser = action.choices[group]
    return list(action.choices)


@pytest.mark.parametrize("package", ["nsa", "nsa.data", "nsa.train"])
def test_names_that_come_on_first_use_are_those_that_type_checkers_see(package: str) -> None:
    folder = Path(nsa.__file__).parent / package.replace("nsa", "", 1).lstrip(".")
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    held = {name for names in _first_use(tree).values() for name in names}
    assert held == seen
    module = importlib.import_module(package)
    for name in held:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
    modules = {file.stem for file in folder.iterdir()}
    assert not held & modules, "the import of such a module would take the place of the name"


def _first_use(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """The table that a package gives to on_first_use."""
    (call,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    table: dict[str, tuple[str, ...]] = ast.literal_eval(call.args[1])
    return table


# --- the import graph ---


def import_graph() -> dict[str, set[str]]:
    """The modules of nsa that each one imports, anywhere in it; TYPE_CHECKING counts, too."""
    sources: dict[str, str] = {}
    for path in (REPOSITORY / "nsa").rglob("*.py"):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if "tests" not in parts:
            name = ".".join(part for part in parts if part != "__init__")
            sources[name] = path.read_text(encoding="utf-8")
    return {name: imported_by(source, sources) - {name} for name, source in sources.items()}


def imported_by(source: str, modules: Container[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else node.module)
    return {name for name in found if name in modules}


def cycles_of(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {name: set(direct) for name, direct in graph.items()}
    for through in graph:
        for name in graph:
            if through in reached[name]:
                reached[name] |= reached[through]
    return {
        tuple(sorted(other for other in graph if other in reached[name] and name in reached[other]))
        for name in graph
        if name in reached[name]
    }


def test_no_modules_import_each_other() -> None:
    graph = import_graph()
    assert "nsa.train.step" in graph["nsa.train.trainer"], "the graph does not see an import"
    assert cycles_of(graph) == set()


def test_the_search_for_cycles_sees_one_of_three() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles_of(graph) == {("a", "b", "c")}


def test_run_folders_are_opened_by_one_reader() -> None:
    """watch, monitor, report and dashboard take what run_files.py and followed_run.py give them."""
    package = Path(nsa.__file__).parent
    readers = re.compile(r"(read|last|tail|sample)_(metrics|env|config|beats?|rows|halt|alarms)")
    folders = ("operate/watch", "operate/report", "web")
    files = [package / "operate" / "monitor.py", package / "operate" / "run_folder.py"]
    files += [path for folder in folders for path in (package / folder).glob("*.py")]
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nsa"):
                names = {alias.name for alias in node.names}
                found += [f"{path.name}: {name}" for name in names if readers.fullmatch(name)]
                if node.module == "nsa.tail" or "open_binary" in names:
                    found.append(f"{path.name}: {node.module}")
    assert len(files) > 15 and found == []
