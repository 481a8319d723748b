"""The runbooks' scripts, run for real at tiny sizes: from any folder, with every variable given."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nsa.records import read_metrics
from nsa.records.launch import read_run_info
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.launching import (
    LOOSE,
    environment,
    finish,
    start_script,
    wait_until,
    write_tiny,
)
from nsa.tests.support.nursery import Nursery, free_port

SCRIPTS = REPOSITORY / "scripts"
OURS = (
    "run_2xa100_production.sh",
    "run_m7c_2xa100_production.sh",
    "production_50k_launch.sh",
    "train_m7c_prime.sh",
    "prime_bootstrap.sh",
    "run_tensorboard.sh",
    "slurm_launch.sbatch",
)
TINY = {"CONFIG": "tiny.yaml", "DATASET": "shakespeare", "NP": "1"}


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Start:
    """Start a script in the folder of the test, with the Python of the nursery."""
    return partial(start_script, cwd=tmp_path, python=nursery.python)


def launched(folder: Path) -> Path:
    """The records of the only launch."""
    (found,) = (folder / "artifacts" / "train_runs").iterdir()
    return found


def verdicts(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"^\[launch\] phase (\w+): (GO|NO-GO|stopped)", printed, re.MULTILINE)


@pytest.mark.parametrize("name", OURS)
def test_scripts_stop_at_errors_and_leave_git_and_yaml_alone(name: str) -> None:
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    code = [line for line in text.splitlines() if not line.startswith("#")]
    assert "set -euo pipefail" in code
    assert (SCRIPTS / name).stat().st_mode & 0o100
    for word in ("git", "sed", "pkill", "eval"):
        assert not re.search(rf"\b{word}\b", "\n".join(code)), word
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)


@pytest.mark.dist
def test_production_on_two_ranks_from_another_folder(start: Start, tmp_path: Path) -> None:
    """With the debug level that the launcher sets, which crashes torch over gloo."""
    write_tiny(tmp_path)
    process = start(
        "run_2xa100_production.sh",
        *(*LOOSE, "--phases", "1,3", "--phase-steps", ",8,,"),
        **(TINY | {"NP": "2", "OUT_DIR": "mine", "NSA_DDP_COMPRESS": "off"}),
    )
    code, printed = finish(process)
    assert code == 0, printed
    assert verdicts(printed) == [("1", "GO"), ("3", "GO")]
    assert "\nConfig: tiny.yaml\nDataset: shakespeare\nNP: 2\n" in printed
    assert "backend=gloo world_size=2" in printed and "gradient compression off" in printed
    assert read_metrics(tmp_path / "mine").world_size == 2
    assert (tmp_path / "mine" / "production.log").exists()
    assert (tmp_path / "artifacts" / "production_50k_FINAL.log").exists()
    changed = read_run_info(launched(tmp_path)).changed
    assert "train.out_dir: 'run' -> 'mine'" in changed


def test_the_whole_launch_checks_first(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    given = TINY | {"MIN_GPUS": "0", "STEPS": "12", "PRECISION": "fp32"}
    given["CAUSALITY_FLAGS"] = "--no-tests"  # those of the operator: test_causality_script.py
    arguments = (*LOOSE, "--limit=write_mib_per_s=0", "--phases", "3")
    code, printed = finish(start("production_50k_launch.sh", *arguments, **given))
    assert code == 0, printed
    order = ["Causality test: 3/3 passed", "[launch] preflight: GO", "[launch] phase 3: GO"]
    places = [printed.index(text) for text in order]
    assert places == sorted(places)
    assert (launched(tmp_path) / "preflight.json").exists()

    wrong = given | {"STEPS": "50000"}
    code, printed = finish(start("production_50k_launch.sh", **wrong))
    assert code == 2 and "train.steps=12, but this launch requires train.steps=50000" in printed


def test_validation_of_synthetic_and_real_data(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    process = start("run_m7c_2xa100_production.sh", *LOOSE, NSA_PHASE_STEPS="1,8,8", **TINY)
    code, printed = finish(process)
    assert code == 0, printed
    assert verdicts(printed) == [("0", "GO"), ("1", "GO"), ("2", "GO")]
    for number in (1, 2):
        log = (tmp_path / "run" / f"training_phase{number}.log").read_text(encoding="utf-8")
        assert "step 0008 | loss" in log
    combined = (tmp_path / "run" / "training_combined.log").read_text(encoding="utf-8")
    assert combined.count("step 0008 | loss") == 2
    assert "data: synthetic" in combined and "data: shakespeare" in combined


def test_the_pilot_smokes_then_trains_then_goes_on(start: Start, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    given = TINY | {"NSA_PHASE_STEPS": "8,8"}
    code, printed = finish(start("train_m7c_prime.sh", *LOOSE, **given))
    assert code == 0, printed
    assert verdicts(printed) == [("smoke", "GO"), ("train", "GO")]
    folder = launched(tmp_path)
    assert re.fullmatch(r"m7c_\d{8}-\d{6}", folder.name)
    text = (folder / "run.info").read_text(encoding="utf-8")
    for line in ("run_dir: ", "config: tiny.yaml", "gpus: 0 (max_mem=0MB)", "[done] "):
        assert f"\n{line}" in text
    assert "dim=128" in (folder / "smoke.log").read_text(encoding="utf-8")
    assert "step 0008 | loss" in (folder / "train.log").read_text(encoding="utf-8")

    given["NSA_PHASE_STEPS"] = "8,12"
    arguments = (*LOOSE, "--phases", "train")
    code, printed = finish(start("train_m7c_prime.sh", *arguments, **given))
    assert code == 0 and "[resume] from run/checkpoint_step8.pt: 8 of 12" in printed, printed


@pytest.mark.dist
def test_slurm_starts_a_launcher_on_every_node(start: Start, tmp_path: Path) -> None:
    """With a scontrol and an srun of this test: two nodes, both of them this machine."""
    write_tiny(tmp_path)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scontrol").write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
    (bin_folder / "srun").write_text(
        '#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\n'
        'SLURM_NODEID=0 "$@" & first=$!\nSLURM_NODEID=1 "$@" || exit 1\nwait $first\n'
    )
    for path in bin_folder.iterdir():
        path.chmod(0o755)
    (tmp_path / "scripts").symlink_to(SCRIPTS)  # where sbatch was called
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]"}
    given |= {"SLURM_NNODES": "2", "RDZV_PORT": str(free_port()), "PYTHONPATH": str(REPOSITORY)}
    process = start(
        *("slurm_launch.sbatch", *LOOSE, "--phases", "1", "--phase-steps", ",8,,"),
        cwd=Path("/"),
        PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        **(TINY | given),
    )
    code, printed = finish(process)
    assert code == 0, printed
    assert verdicts(printed) == [("1", "GO"), ("1", "GO")]
    assert read_metrics(tmp_path / "run" / "phase1").world_size == 2


def test_bootstrap_makes_an_environment_and_shows_the_gpus(tmp_path: Path) -> None:
    """Nothing is downloaded: no package is asked for, and torch is that of this test."""
    nothing = tmp_path / "nothing.txt"
    nothing.write_text("# no package\n")
    process = start_script(
        "prime_bootstrap.sh",
        cwd=tmp_path,
        VENV=str(tmp_path / "venv"),
        REQUIREMENTS=str(nothing),
        EXTRAS="",
        PYTHONPATH=sysconfig.get_paths()["purelib"],
    )
    code, printed = finish(process)
    assert code == 0, printed
    assert (tmp_path / "venv" / "bin" / "python").exists()
    assert re.search(r"^(GPU 0: .* GB|no GPU: )", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("[done] ")


def test_bootstrap_installs_what_the_pilot_needs() -> None:
    text = (SCRIPTS / "prime_bootstrap.sh").read_text(encoding="utf-8")
    assert "requirements-gpu-cu121-torch24.txt" in text and "stream,tensorboard" in text
    assert (REPOSITORY / "requirements-gpu-cu121-torch24.txt").is_file()


def test_tensorboard_serves_the_events_of_a_run_on_this_machine_alone(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as events:
        events.add_scalar("train/loss", 1.0, 1)
    port = free_port()
    process = start_script("run_tensorboard.sh", tmp_path / "tb", cwd=tmp_path, PORT=str(port))

    def answers() -> bool:
        try:
            address = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
            with urllib.request.urlopen(address, timeout=5) as page:
                return "train/loss" in page.read().decode()
        except OSError:
            return False

    try:
        wait_until(answers, process, "an answer")
        listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True)
        addresses = re.findall(rf"\s(\S+):{port}\s", listening.stdout)
        assert addresses == ["127.0.0.1"]
    finally:
        process.terminate()
        finish(process)


def test_without_an_environment_of_its_own_a_script_takes_python(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("_nsa.sh", "train_m7c_prime.sh"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    fake = tmp_path / "nsa" / "cli"
    fake.mkdir(parents=True)
    for folder in (fake.parent, fake):
        (folder / "__init__.py").touch()
    (fake / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "train_m7c_prime.sh"), "--list"],
        env=environment(PYTHON=sys.executable),
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['launch', '--profile', 'prime', '--list']\n", done.stderr
