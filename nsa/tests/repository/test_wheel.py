"""The wheel works where there is no clone: a new environment, an empty folder (`make dist`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from nsa.tests.conftest import REPOSITORY

pytestmark = pytest.mark.wheel
DIST = REPOSITORY / "dist"
BUNDLED = sorted(path.name for path in (REPOSITORY / "configs").glob("*.yaml"))


class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    def __init__(self, root: Path) -> None:
        self.python, self.folder = root / "env" / "bin" / "python", root / "empty"
        self.folder.mkdir()
        venv.create(root / "env", with_pip=True)

    def run(self, *words: str, code: int = 0) -> str:
        """Run a program of the environment in the folder; what it printed."""
        done = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environ(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def command(self, *words: str) -> list[str]:
        """The words with the path of the program."""
        return [str(self.python.with_name(words[0])), *words[1:]]

    def environ(self) -> dict[str, str]:
        """Nothing of the clone, and one thread."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return kept | {"PATH": f"{self.python.parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of dist/, which `make dist` has just built, installed with the tested versions."""
    (wheel,) = DIST.glob("*.whl")
    made = Installed(tmp_path_factory.mktemp("wheel"))
    constraints = str(REPOSITORY / "constraints.txt")
    # Bytecode for all of torch would take longer than all tests here.
    quietly = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    quietly += ["-c", constraints]
    # torch first: pip must not choose one by itself.
    subprocess.run([made.python, *quietly, "torch"], check=True)
    subprocess.run([made.python, *quietly, str(wheel)], check=True)
    return made


def test_the_wheel_holds_the_package_and_its_configs_and_nothing_else() -> None:
    (wheel,) = DIST.glob("*.whl")  # `build` makes it from the sdist, which is thereby tested
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root.split("-")[0] for root in roots} == {"nsa"}
    assert sorted(Path(n).name for n in names if n.startswith("nsa/configs/")) == BUNDLED
    for name in ("limits.toml", "profiles.toml", "py.typed", "index.html", "hamlet.txt"):
        assert any(Path(file).name == name for file in names), name
    assert not [name for name in names if "/tests/" in name or "test_" in name]


def test_train_without_a_config_says_what_it_trains_and_generate_finds_it(
    installed: Installed,
) -> None:
    said = installed.run("nsa", "train", "--steps", "20", "train.eval_batches=2")
    assert "training the bundled quickstart" in said and "step 0020" in said
    assert (installed.folder / "artifacts" / "quickstart" / "model.pt").is_file()
    assert installed.run("nsa", "generate", "To be", "--max-new-tokens", "4")


def test_bundled_configs_are_found_by_name_and_as_the_runbooks_write_them(
    installed: Installed,
) -> None:
    by_name = installed.run("nsa", "info", "--config", "m7c_125m_2xa100_production")
    by_path = installed.run("nsa", "info", "--config", "configs/m7c_125m_2xa100_production.yaml")
    assert by_name.splitlines()[1:] == by_path.splitlines()[1:]
    (installed.folder / "mine.yaml").write_text("inherits: quickstart.yaml\ntrain: {seed: 77}\n")
    mine = installed.run("nsa", "info", "--config", "./mine.yaml")
    assert any(line.split() == ["train.seed", "77"] for line in mine.splitlines()), mine
    wrong = installed.run("nsa", "info", "--config", "quickstrat", code=2)
    assert all(name.removesuffix(".yaml") in wrong for name in BUNDLED), wrong


def test_a_launch_starts_the_trainer_as_a_module(installed: Installed) -> None:
    words = ("--profile", "rehearsal", "--where", "foreground", "--phases", "0")
    said = installed.run("nsa", "launch", *words)
    assert "phase 0: GO" in said and "-m nsa.cli train" in said, said


def test_a_missing_extra_is_named_with_its_install_line(installed: Installed) -> None:
    config = ("--config", "quickstart", "train.out_dir=tracked", "train.tracker=wandb")
    said = installed.run("nsa", "train", *config, code=2)
    assert "pip install 'wandb>=0.19'" in said, said


def test_the_dashboard_serves_its_page(installed: Installed) -> None:
    with subprocess.Popen(
        installed.command("nsa", "dashboard", "artifacts", "--port", "0"),
        cwd=installed.folder,
        env=installed.environ() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = ""
        until = time.monotonic() + 30
        while "http://" not in said and time.monotonic() < until:
            said += process.stdout.readline()
        address = next(word for word in said.split() if word.startswith("http://"))
        page = urllib.request.urlopen(address, timeout=10).read().decode()
        process.terminate()  # not SIGINT, which what a script started with `&` ignores
    assert "<title>" in page and "app.js" in page


def test_nothing_of_the_clone_is_needed(installed: Installed) -> None:
    where = installed.run("python", "-c", "import nsa; print(nsa.__file__)")
    assert str(REPOSITORY) not in where
    assert shutil.which("nsa", path=str(installed.python.parent))
