"""The command `nsa` as a user meets it: in a shell, in a pipe, and with mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nsa.cli.__main__ import main
from nsa.config import StrictParser, known_keys, load_config
from nsa.config.env import TABLE, in_effect
from nsa.config.load import REPOSITORY
from nsa.model.cost import parameter_counts
from nsa.tests.support.nursery import Nursery

QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
TINY = [
    *("model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_groups=1"),
    *("model.d_k=8", "model.d_v=8", "nsa.n_sel=3", "train.seq_len=64", "train.batch_size=2"),
    *("train.steps=2", "train.warmup_steps=0", "train.eval_every=0", "train.log_every=1"),
]


Nsa = Callable[..., subprocess.CompletedProcess[str]]


def run_nsa(python: object, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command as its own process, in an environment that holds only `environ`."""
    return subprocess.run(
        [str(python), "-m", "nsa.cli", *arguments],
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "error", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def nsa(nursery: Nursery) -> Nsa:
    """Run the command in a process of the nursery."""
    return partial(run_nsa, nursery.python)


def test_env_lists_every_variable_with_its_value_in_a_pipe() -> None:
    result = run_nsa(sys.executable, "env", NSA_LR="0.125")

    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert result.returncode == 0, result.stderr
    assert lines.keys() >= TABLE.keys()
    assert lines["NSA_LR"][1:4] == ["-", "'0.125'", "code"]
    assert lines["NSA_USE_FA2"][1:4] == ["0", "-", "code"]
    assert lines["NSA_DEBUG_LOG"][1:4] == ["0", "-", "planned"]


def test_env_still_lists_when_a_name_is_wrong_and_then_says_so(nsa: Nsa) -> None:
    result = nsa("env", NSA_SEQLEN="64")

    assert result.returncode == 2
    assert "NSA_STRICT_ASSERTS" in result.stdout
    assert "NSA_SEQ_LEN" in result.stderr and result.stderr.count("\n") == 1


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"set -o pipefail; {sys.executable} -m nsa.cli keys | (exec <&-; sleep 1)"

    result = subprocess.run(
        ["bash", "-c", command],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (result.returncode, result.stderr) == (0, "")


def test_keys_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0

    printed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert printed >= known_keys().keys()


def test_info_prints_the_resolved_config_and_the_true_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["info", "--config", QUICKSTART, "train.steps=77", "train.batch_size=3"]) == 0

    out = capsys.readouterr().out
    config = load_config(QUICKSTART, ["train.batch_size=3"], environ={})
    assert out.startswith(f"config: {QUICKSTART}\n")
    assert ["train.steps", "77"] in [line.split() for line in out.splitlines()]
    assert f"{sum(parameter_counts(config).values()):,}" in out
    assert f"tokens per step: {3 * config.train.seq_len:,}" in out


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=str)
def test_info_knows_every_shipped_config(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--config", str(path), "train.seq_len=256"]) == 0

    assert "training memory" in capsys.readouterr().out


def test_the_variable_config_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONFIG", QUICKSTART)

    assert main(["info"]) == 0

    out = capsys.readouterr().out
    assert out.startswith(f"environment: CONFIG={QUICKSTART}\nconfig: {QUICKSTART}\n")


def test_plan_says_which_backend_runs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", QUICKSTART, "runtime.device=cpu"]) == 0
    automatic = capsys.readouterr().out
    assert main(["plan", "--config", QUICKSTART, "runtime.backend=reference"]) == 0
    named = capsys.readouterr().out

    assert "device: cpu" in automatic
    assert "attention backend: torch (asked for: auto; " in automatic
    assert "attention backend: reference" in named


def test_train_trains(tmp_path: Path) -> None:
    words = ["train", "--config", QUICKSTART, *TINY, f"train.out_dir={tmp_path / 'run'}"]
    result = run_nsa(sys.executable, *words)  # a new interpreter: imports may warn, too

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "model.pt").is_file()
    assert str(tmp_path / "run") in result.stdout
    assert (tmp_path / "run" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")) > 50


def test_a_long_run_without_checkpoints_is_refused(nsa: Nsa, tmp_path: Path) -> None:
    result = nsa(
        *("train", "--config", QUICKSTART, *TINY),
        *("train.steps=5000", "train.save_every=0", f"train.out_dir={tmp_path / 'run'}"),
    )

    assert result.returncode == 3
    assert "train.save_every=0" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "model.pt").exists()


MISTAKES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "an unknown flag": (["info", "--confg=x"], {}, "'--config'"),
    "an unknown command": (["trian"], {}, "train"),
    "no command": ([], {}, "COMMAND"),
    "an unknown key": (["info", "--config", QUICKSTART, "train.stepz=1"], {}, "'train.steps'"),
    "no override": (["info", "--config", QUICKSTART, "steps"], {}, "group.key=value"),
    "no such file": (["train", "--config", "configs/nope.yaml"], {}, "quickstart.yaml"),
    "an unknown variable": (["plan"], {"NSA_ACUM": "2"}, "NSA_ACCUM"),
    "a planned variable": (["plan"], {"NSA_DEBUG_LOG": "1"}, "not supported by this version"),
    "a bad value": (["train"], {"NSA_LR": "fast"}, "NSA_LR='fast'"),
    "warmup without a GPU": (
        ["warmup", "--config", QUICKSTART, "runtime.device=cpu"],
        {},
        "run `nsa warmup` on the machine that will train",
    ),
    "no such device": (["plan", "--config", QUICKSTART, "runtime.device=cuda:99"], {}, "cuda:99"),
    "a backend of later": (
        ["train", "--config", QUICKSTART, "runtime.backend=triton"],
        {},
        "backend='triton'",
    ),
    "training without the batched path": (
        ["train", "--config", QUICKSTART, *TINY],
        {"NSA_PREFILL_BATCHED": "0"},
        "NSA_PREFILL_BATCHED=0",
    ),
    "a dataset of nobody": (
        ["train", "--config", QUICKSTART, "data.dataset=fineweb_edu", "data.hub_dataset=x"],
        {},
        "data.hub_dataset='x'",
    ),
    "a tokenizer that is not there": (
        ["train", "--config", QUICKSTART, "data.tokenizer=nowhere/tokenizer.json"],
        {},
        "nowhere/tokenizer.json: no such tokenizer file",
    ),
    "shards that are not there": (
        ["data", "show", "nowhere"],
        {},
        "nowhere has no manifest.json",
    ),
}


@pytest.mark.parametrize(("arguments", "environ", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_code_2(
    nsa: Nsa, arguments: list[str], environ: dict[str, str], said: str
) -> None:
    result = nsa(*arguments, **environ)

    assert result.returncode == 2
    assert said in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_flags_are_never_abbreviated() -> None:
    parser = StrictParser(prog="x")
    parser.add_argument("--dataset")

    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--data", "y"])


def test_version_is_that_of_the_package(nsa: Nsa) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    result = nsa("--version")

    assert (result.returncode, result.stdout) == (0, f"nsa {project['version']}\n")


def test_listing_settings_does_not_load_torch() -> None:
    call = "from nsa.cli.__main__ import main; main(['keys'])"
    code = f"import sys; {call}; sys.exit('torch' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/sys/kernel", "Permission denied|Operation not permitted|Read-only"),
        ("/proc/nsa/run", "No such file"),
        ("{file}", "File exists"),
        ("{file}/run", "Not a directory"),
    ],
    ids=["read-only", "not-makeable", "a-file", "under-a-file"],
)
def test_a_run_folder_that_cannot_be_written_is_one_line(
    folder: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = folder.format(file=tmp_path / "file")
    assert main(["train", "--config", QUICKSTART, *TINY, f"train.out_dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert f"train.out_dir={folder}: the folder cannot be created or written" in error
    assert re.search(reason, error) and error.count("\n") == 1


def test_an_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--out", "/proc/nsa/report"]) == 2
    error = capsys.readouterr().err
    assert "/proc/nsa" in error and "No such file" in error and error.count("\n") == 1


@pytest.mark.parametrize("early", [False, True], ids=["plain", "torch-in-sitecustomize"])
def test_the_old_torch_logs_channel_is_translated_with_one_line(
    early: bool, tmp_path: Path
) -> None:
    """torch raises on `sdp` when it is imported; some environments import it at their start."""
    if early:
        (tmp_path / "sitecustomize.py").write_text("import torch\n")
    path = f"{tmp_path}:{REPOSITORY}"
    for program in (
        [str(REPOSITORY / "scripts" / "train_showcase.py"), "--help"],
        [str(REPOSITORY / "scripts" / "train_showcase_fsdp.py"), "--help"],
        ["-m", "nsa.cli", "plan", "--config", QUICKSTART],
    )[: 1 if early else 3]:
        result = subprocess.run(
            [sys.executable, *program],
            env={"PYTHONPATH": path, "TORCH_LOGS": "+sdp,dynamo"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        said = [line for line in result.stderr.splitlines() if line.startswith("[boot]")]
        assert said == [
            "[boot] TORCH_LOGS: torch has no channel `sdp`; NSA_SDPA_AUDIT=1 logs the routes "
            "instead"
        ]
        assert "Traceback" not in result.stderr


def test_a_secret_of_the_environment_is_never_shown(nsa: Nsa) -> None:
    result = nsa("env", NSA_DASHBOARD_TOKEN="a-token-of-many-characters")
    assert result.returncode == 0 and "of-many" not in result.stdout
    (line,) = (x for x in result.stdout.splitlines() if x.startswith("NSA_DASHBOARD_TOKEN"))
    assert "***" in line
    environ = {"NSA_DASHBOARD_TOKEN": "a-token-of-many-characters"}
    assert in_effect(environ) == {"NSA_DASHBOARD_TOKEN": "***"}
