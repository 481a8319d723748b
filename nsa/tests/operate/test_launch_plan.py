"""What a launch would do on other machines: config, processes, environment, refusals."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from nsa.cli.__main__ import main
from nsa.cli.operate import add_launch_flags
from nsa.config import StrictParser, load_config
from nsa.config.env import TABLE, check_environment
from nsa.operate.launch.command import make_plan
from nsa.operate.launch.plan import Nodes, Plan, check_mesh, check_requirements, config_changes
from nsa.operate.launch.profiles import load_profile, load_profiles
from nsa.operate.process import Gpu, Machine, find_gpus, trainer
from nsa.records import folder as folders
from nsa.records.folder import LAUNCH, RUN, held_by, take_lock
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.launching import write_tiny

TESTED = {"NP", "DATASET", "LOCAL_PATH", "NSA_PHASE_STEPS"}
"""Variables whose effect is shown here."""
A100 = Gpu("NVIDIA A100-SXM4-80GB", 85_095_874_560)
NONE = Machine([])


@pytest.fixture(autouse=True)
def _no_launch_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NP", "DATASET", "LOCAL_PATH", "OUT_DIR", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def flags(*arguments: str) -> argparse.Namespace:
    parser = StrictParser(prog="launch")
    add_launch_flags(parser)
    return parser.parse_args(arguments)


def plan(*arguments: str, gpus: int = 0, gpu: Gpu = A100) -> Plan:
    return make_plan(flags(*arguments), Machine([gpu] * gpus))


@pytest.mark.parametrize("name", [RUN, LAUNCH])
@pytest.mark.parametrize("place", ["run", "run/phase0"])
def test_a_launch_is_refused_where_another_has_the_folder(
    place: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tiny(tmp_path)
    monkeypatch.setattr(folders, "GRACE_S", 0.1)
    launch = ("launch", "--profile", "rehearsal", "--config", "tiny.yaml", "--out-dir", "run")
    with take_lock(tmp_path / place, name, say=pytest.fail):
        assert main([*launch, "--where", "foreground"]) == 3
        assert held_by(tmp_path / place, name)
    printed = "".join(capsys.readouterr())
    assert f"process {os.getpid()} on " in printed and "command:" not in printed
    assert held_by(tmp_path / "run", LAUNCH) == "", "a launch that is refused lets go"
    assert not (tmp_path / place / "training.csv").exists()


@pytest.mark.parametrize("name", load_profiles())
def test_every_profile_can_be_launched(name: str) -> None:
    made = plan("--profile", name, gpus=2)
    check_environment(made.environ)
    assert made.profile.environment.keys() | made.profile.gpu_environment.keys() <= TABLE.keys()
    for phase in made.profile.phases:
        config = made.resolve(phase)
        assert config.train.out_dir == str(made.folder(phase))
        assert made.command(phase)[-1] == f"train.out_dir={made.folder(phase)}"
    assert len({made.folder(phase) for phase in made.profile.phases}) == len(made.profile.phases)


def test_production_has_the_phases_of_the_plan() -> None:
    made = plan("--profile", "production", gpus=2)
    phases = made.profile.phases
    assert [(made.steps(p), p.judged) for p in phases] == [
        (1, "launch"),
        (300, "phase1"),
        (1000, "phase2"),
        (50000, "final"),
    ]
    datasets = [made.resolve(p).data.dataset for p in phases]
    assert datasets == ["synthetic", "fineweb_edu", "fineweb_edu", "fineweb_edu"]
    assert [str(made.folder(p)) for p in phases] == [
        *(f"artifacts/m7c_125m_2xa100_prod/phase{n}" for n in range(3)),
        "artifacts/m7c_125m_2xa100_prod",
    ]
    logs = [str(path) for path in made.logs(phases[-1])]
    assert logs[1:] == [
        "artifacts/m7c_125m_2xa100_prod/production.log",
        "artifacts/production_50k_FINAL.log",
    ]
    assert made.profile.session == "production_50k_FINAL"


@pytest.mark.parametrize(
    ("num_bytes", "config"),
    [
        (85_095_874_560, "m7c_125m_80g.yaml"),
        (80_000_000_000, "m7c_125m_80g.yaml"),
        (79_999_999_999, "m7c_125m_40g.yaml"),
        (42_298_834_944, "m7c_125m_40g.yaml"),
        (35_000_000_000, "m7c_125m_40g.yaml"),
        (34_999_999_999, "m7c_125m_24g.yaml"),
        (0, "m7c_125m_24g.yaml"),
    ],
)
def test_the_pilot_takes_its_config_by_the_memory_of_the_largest_gpu(
    num_bytes: int, config: str
) -> None:
    machine = Machine([Gpu("small", 1), Gpu("large", num_bytes)] if num_bytes else [])
    made = make_plan(flags("--profile", "prime"), machine)
    assert Path(made.config) == REPOSITORY / "configs" / config


@pytest.mark.parametrize(
    ("gpus", "ranks"), [(0, 1), (1, 1), (2, 2), (8, 8)], ids=["cpu", "one", "two", "eight"]
)
def test_the_launcher_follows_the_number_of_gpus(gpus: int, ranks: int) -> None:
    made = plan("--profile", "prime", gpus=gpus)
    command = made.command(made.profile.phases[-1])
    assert made.ranks == ranks
    assert ("torch.distributed.run" in command) == (ranks > 1)
    assert (f"--nproc-per-node={ranks}" in command) == (ranks > 1)
    position = command.index(trainer()[-1])
    assert command[position + 1 : position + 3] == ["--ddp", "1" if ranks > 1 else "0"]


def test_the_environment_wins_over_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = plan("--profile", "production", gpus=2)
    assert usual.environ["NSA_DDP_COMPRESS"] == "bf16"
    assert usual.environ["TORCH_BACKEND"] == "nccl"
    assert "TORCH_BACKEND" not in plan("--profile", "production").environ
    for name, value in (("NSA_DDP_COMPRESS", "off"), ("NSA_SEL_RANGES_V2", "0")):
        monkeypatch.setenv(name, value)
        assert plan("--profile", "production", gpus=2).environ[name] == value


def test_variables_of_the_launcher_become_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path)
    texts = tmp_path / "texts.txt"
    texts.write_text("some words")
    given = {
        "CONFIG": "tiny.yaml",
        "NP": "3",
        "OUT_DIR": "elsewhere",
        "NSA_PHASE_STEPS": "2,,all,4",
    }
    given |= {"DATASET": "fineweb_edu_local", "LOCAL_PATH": str(texts)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = plan("--profile", "production")
    assert made.ranks == 3 and str(made.out_dir) == "elsewhere"
    assert [made.steps(phase) for phase in made.profile.phases] == [2, 12, 12, 4]
    config = made.resolve(made.profile.phases[1])
    assert (config.data.dataset, config.data.local_path) == ("fineweb_edu_local", str(texts))
    synthetic = made.resolve(made.profile.phases[0])
    assert (synthetic.data.dataset, synthetic.data.local_path) == ("synthetic", "")
    assert not {"NP", "DATASET", "LOCAL_PATH", "OUT_DIR", "NSA_PHASE_STEPS"} & made.environ.keys()
    assert plan("--np", "1", "--dataset", "shakespeare").dataset == "shakespeare"


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--profile", "prod"], {}, "the nearest is 'production'"),
        (["--phase-steps", "1,2"], {}, "has the phases 0, 1, 2, 3"),
        (["--phase-steps", "1,2,x,4"], {}, "whole number >= 1"),
        (["--phases", "7"], {}, "no phase '7'; choose from 0, 1, 2, 3"),
        ([], {"NP": "many"}, "NP='many' is not a number of processes"),
        (["--nnodes", "2", "--node-rank", "2"], {}, "from 0 to nnodes - 1"),
        (["--nnodes", "2", "--node-rank", "1"], {}, "is not HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "host"], {}, "is not HOST:PORT"),
        (["--config", "absent.yaml"], {}, "no such config file"),
    ],
)
def test_what_cannot_be_launched_says_why(
    arguments: list[str],
    environ: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        plan(*arguments)
    assert message in str(error.value)


def test_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("nsa.operate.launch.command.find_gpus", lambda: Machine([A100]))
    assert main(["launch", "--profile", "production"]) == 3
    assert "2 processes on 1 GPUs: each needs one; set NP=1" in capsys.readouterr().err
    assert main(["launch", "--profile", "prime", "--min-gpus", "2"]) == 3
    assert "1 GPUs here, but this launch needs 2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_is_not_the_required_one_is_refused() -> None:
    config = load_config(REPOSITORY / "configs" / "m7c_125m_2xa100_production.yaml", environ={})
    good = ["train.steps=50000", "runtime.precision=bf16", "train.save_every>0"]
    check_requirements(config, [*good, "train.steps>=50000"])
    for text in ("train.steps=300", "train.save_every>5000", "runtime.precision=fp32"):
        with pytest.raises(ValueError, match="this launch requires"):
            check_requirements(config, [text])
    for text in ("train.step=1", "steps", "train.steps<3"):
        with pytest.raises(ValueError, match="is not a requirement"):
            check_requirements(config, [text])


def test_many_nodes_meet_at_the_first() -> None:
    where = ("--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:29500")
    first, second = (plan("--node-rank", str(rank), *where, gpus=2) for rank in range(2))
    phase = first.profile.phases[1]
    commands = [made.command(phase) for made in (first, second)]
    shared = ["--nnodes=2", "--rdzv-endpoint=10.0.0.1:29500", "--rdzv-id=production-1"]
    assert all(flag in command for flag in shared for command in commands)
    assert "--rdzv-conf=is_host=true" in commands[0]
    assert "--rdzv-conf=is_host=false" in commands[1] and "--node-rank=1" in commands[1]
    assert str(second.records).endswith("_node1")
    assert not Nodes(count=2, endpoint="10.0.0.1:29500").on_loopback
    assert Nodes(count=2, endpoint="127.0.0.1:29500").on_loopback


def test_restarts_belong_to_the_long_phase() -> None:
    usual, chosen = plan("--profile", "production"), plan("--max-restarts", "7")
    assert [usual.restarts(phase) for phase in usual.profile.phases] == [0, 0, 0, 3]
    assert [chosen.restarts(phase) for phase in chosen.profile.phases] == [0, 0, 0, 7]


def test_a_verdict_is_of_one_config_one_code_and_one_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phase = load_profile("rehearsal").phases[1]
    usual = plan("--profile", "rehearsal").launched(phase)
    assert usual == plan("--profile", "rehearsal", "--out-dir", "x").launched(phase)
    assert usual != plan("--profile", "rehearsal", "train.lr=0.5").launched(phase)
    assert usual != plan("--profile", "rehearsal", "--np", "2").launched(phase)
    monkeypatch.setenv("NSA_DDP_COMPRESS", "off")
    assert usual != plan("--profile", "rehearsal").launched(phase)


def test_changes_of_a_config_are_named() -> None:
    path = REPOSITORY / "configs" / "quickstart.yaml"
    plain, changed = (load_config(path, texts, environ={}) for texts in ((), ("train.lr=0.5",)))
    assert config_changes(plain, plain) == []
    assert config_changes(plain, changed) == ["train.lr: 0.004 -> 0.5"]


def test_this_machine_can_be_looked_at() -> None:
    machine = find_gpus()
    assert machine.describe().startswith(f"{len(machine.gpus)} (max_mem=")


def test_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["production", "m7c", "prime", "rehearsal"]


def test_processes_that_cannot_share_rows_are_refused() -> None:
    """Those of all nodes count together."""
    rehearsal = ("--profile", "rehearsal", "runtime.cp=2", "train.seq_len=64")
    check_mesh(plan(*rehearsal, "--np", "4"))
    with pytest.raises(ValueError, match="NP=3 on 1 node is 3 ranks, but runtime.cp=2 x .* NP, or"):
        check_mesh(plan(*rehearsal, "--np", "3"))
    two = ("--nnodes", "2", "--rdzv-endpoint", "localhost:29400")
    check_mesh(plan(*rehearsal, "--np", "3", *two))
