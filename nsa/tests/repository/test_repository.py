"""The repository itself: pins, install lines, entry points, and files that must stay true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
GPU_FILE = "requirements-gpu-cu121-torch24.txt"
INSTALL = re.compile(r"\b(?:pip3?|uv pip)\s+install\b.*")


def pins(name: str) -> dict[str, str]:
    """Read a file of `package==version` lines; any other line than a comment is an error."""
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert match, f"{name}: {line!r} is not a pin"
            assert canonicalize_name(match[1]) not in found, f"{name}: {match[1]} is there twice"
            found[canonicalize_name(match[1])] = match[2]
    return found


def files_that_may_install() -> Iterator[Path]:
    """Everything that a person or a machine would run or copy an install line from."""
    yield ROOT / "Makefile"
    yield from (ROOT / ".ci").iterdir()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "scripts/**/*",
        "nsa/**/*.py",
        "examples/**/*",
        "studies/**/*.md",
    ):
        yield from (p for p in ROOT.glob(pattern) if p.is_file() and _counts(p))


def _counts(path: Path) -> bool:
    return path.suffix != ".pyc" and path != Path(__file__)  # this file shows what is forbidden


def install_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    return [match[0] for match in INSTALL.finditer(text)]


ELSEWHERE = ("README.md", "nsa/config/describe.py", "nsa/tests/repository/test_wheel.py")
"""Files with lines for other environments than that of the clone, whose torch is the user's choice;
the last one names constraints.txt by its whole path."""


def test_every_install_line_names_the_pins() -> None:
    """pip must never choose a torch by itself."""
    lines = {path: install_lines(path) for path in files_that_may_install()}
    assert lines[ROOT / "Makefile"], "the search does not see the install line of the Makefile"
    for path, found in lines.items():
        for line in found if str(path.relative_to(ROOT)) not in ELSEWHERE else ():
            assert "-c constraints.txt" in line, f"{path.relative_to(ROOT)}: {line}"


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("pip install torch", True),
        ("uv pip install torch", True),
        ("python -m pip  install x", True),
        ("pip download x", False),
    ],
)
def test_search_for_install_lines_sees_them(tmp_path: Path, line: str, is_seen: bool) -> None:
    (tmp_path / "x.sh").write_text(f"set -e\n{line}\n")
    assert bool(install_lines(tmp_path / "x.sh")) == is_seen


def test_pins_are_the_tested_pair_of_torch_and_triton() -> None:
    for name in ("constraints.txt", GPU_FILE):
        assert pins(name)["torch"] == "2.13.0"
        assert pins(name)["triton"] == "3.7.1"


NOT_IN_DEV = ("wandb", "trackio", "playwright", "mkdocs-material", "mkdocstrings-python")


def test_every_dependency_and_what_it_needs_is_pinned() -> None:
    """Walks the installed packages, so a missing transitive pin is found.

    The trackers, the browser's driver and the site's packages are not part of the development
    install: what they need is only walked where they are there.
    """
    lists = [PROJECT["project"]["dependencies"]]
    lists += PROJECT["project"]["optional-dependencies"].values()
    waiting = {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}
    waiting.discard(canonicalize_name("nsa"))
    pinned, seen = pins("constraints.txt"), set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        assert name in pinned, f"{name} is not in constraints.txt"
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            assert name in NOT_IN_DEV, f"{name} is not installed"
            continue
        for text in needs:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting |= {canonicalize_name(need.name)} - seen
    assert len(seen) > 40


def test_gpu_file_agrees_with_the_constraints() -> None:
    ours, gpu = pins("constraints.txt"), pins(GPU_FILE)
    for name in ours.keys() & gpu.keys():
        assert gpu[name] == ours[name], name
    only_gpu = {name for name in gpu if name not in ours}
    assert all(name.startswith(("nvidia-", "cuda-")) for name in only_gpu)
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-toolkit"} <= only_gpu


def test_gpu_file_lists_what_its_packages_need() -> None:
    """`uv pip sync` installs no dependencies of dependencies."""
    gpu = pins(GPU_FILE)
    for name in gpu.keys() & pins("constraints.txt").keys():
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert canonicalize_name(need.name) in gpu, f"{name} needs {need.name}"


def test_core_dependencies_are_small_and_cover_the_imports() -> None:
    names = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "numpy", "omegaconf", "pyyaml", "rich", "safetensors"}
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_uv_uses_the_environment_that_exists() -> None:
    assert PROJECT["tool"]["uv"]["managed"] is False


def test_console_command_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["nsa"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_pre_commit_hooks_are_local() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}


def test_ci_stops_at_the_first_failure_and_runs_everything() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    lines = re.findall(r"^make (?:-j 2 -O )?([\w ]+)$", text, re.MULTILINE)
    assert [line.split() for line in lines] == [
        ["types", "lint", "layers", "docs", "dist"],
        ["test"],
        ["rehearse", "chaos", "browser"],
    ]
    assert "|| true" not in text and (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"make (\w+)", shown) == phony.split()


def test_licence_is_the_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_changelog_knows_the_version() -> None:
    version = PROJECT["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_python_snippets_of_the_readme_run_as_they_are() -> None:
    """Each by itself, pasted into a new interpreter."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) >= 2
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})


def test_python_in_the_parent_of_a_clone_named_nsa_finds_the_package(tmp_path: Path) -> None:
    """There the clone looks like a namespace package; what an editable install adds must win."""
    clone, wheels, site = tmp_path / "nsa", tmp_path / "wheels", tmp_path / "site"
    shutil.copytree(ROOT / "nsa", clone / "nsa", ignore=shutil.ignore_patterns("tests", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    wheels.mkdir()
    build = "import hatchling.build as b, sys; print(b.build_editable(sys.argv[1]))"
    made = _python(build, str(wheels), cwd=clone)
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(next(wheels.iterdir())) as wheel:
        wheel.extractall(site)
    use = "import site, sys; site.addsitedir(sys.argv[1]); import nsa; print(nsa.BlockSpec, nsa)"
    used = _python(use, str(site), cwd=tmp_path)
    assert used.returncode == 0, used.stderr
    assert str(clone / "nsa" / "__init__.py") in used.stdout, used.stdout


def _python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without PYTHONPATH, and without what the environment of the tests has in editable mode."""
    hidden = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]; "
    hidden += "sys.path = [p for p in sys.path if not p or '-packages' in p or 'lib' in p]; "
    command = [sys.executable, "-c", hidden + code, *arguments]
    return subprocess.run(command, cwd=cwd, env={}, capture_output=True, text=True, timeout=120)
