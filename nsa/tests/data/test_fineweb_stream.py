"""`--dataset fineweb_edu` as it is run, with the real client, against a hub that misbehaves."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nsa.config import Config, load_config
from nsa.data import ArrayRows, ByteTokenizer, Data, SourceLost
from nsa.data.documents import Document, is_held_out
from nsa.data.encode import Place, first_held_out
from nsa.data.open import HELD_OUT_DOCUMENTS
from nsa.data.streamed_rows import StreamedRows
from nsa.records import (
    MODEL,
    TRAINING,
    VAL,
    TrainingRow,
    ValRow,
    read_heartbeat,
    read_metrics,
    read_rows,
    write_config,
)
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.tests.support.nursery import Nursery
from nsa.tests.support.streams import ListDocuments, wait_for
from nsa.train import Halted, LoaderFailed, LoaderOptions, run

pytest.importorskip("datasets")
from nsa.tests.support.hub import SHA, SUBSET, Hub, parquet_bytes

SCRIPT = REPOSITORY / "scripts" / "train_showcase.py"
STEPS = 24
SETTINGS = [
    *TINY,
    f"train.steps={STEPS}",
    "train.batch_size=16",
    "train.save_every=6",
    "train.eval_every=12",
    "data.dataset=fineweb_edu",
]


def documents(number: int, held_out: bool, name: str) -> Iterator[str]:
    """Texts on one side of the split."""
    candidates = (f"{name} {i}: " + "lorem ipsum dolor " * (1 + i % 5) for i in range(10**6))
    return (next(t for t in candidates if is_held_out(t) == held_out) for _ in range(number))


FILES = [
    [*documents(HELD_OUT_DOCUMENTS + 2, True, "held"), *documents(20, False, "first")],
    *([*documents(28, False, f"file {number}")] for number in range(5)),
]
"""All held-out documents are in the first file. The training documents last for 20 steps, and those
before the last file for the 16 steps of a block."""
NAMES = [f"data/CC-MAIN-2013-20/train-{number:05d}.parquet" for number in range(len(FILES))]


@pytest.fixture
def hub() -> Iterator[Hub]:
    content = {name: parquet_bytes(texts) for name, texts in zip(NAMES, FILES, strict=True)}
    with Hub(content) as hub:
        yield hub


class Run(NamedTuple):
    """A run of the script that has ended."""

    code: int
    out: str
    err: str
    folder: Path


def start(
    python: Path, hub: Hub, folder: Path, *flags: str, **variables: str
) -> subprocess.Popen[str]:
    config = write_config(folder.parent, config_of(folder), "test")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NSA_", "HF_"))}
    environment |= hub.environment(folder.parent / "cache") | {"OMP_NUM_THREADS": "1"} | variables
    command = [str(python), str(SCRIPT), "--config", str(config), "--out-dir", str(folder)]
    return subprocess.Popen(
        [*command, "--dataset", "fineweb_edu", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def train(python: Path, hub: Hub, folder: Path, *flags: str, **variables: str) -> Run:
    process = start(python, hub, folder, *flags, **variables)
    out, err = process.communicate(timeout=240)
    return Run(process.returncode, out, err, folder)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row.step, row.loss) for row in read_rows(TrainingRow, folder / TRAINING)]


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / MODEL, weights_only=True)["state_dict"]
    return found


def messages(folder: Path, kind: str) -> list[dict[str, object]]:
    beats = read_heartbeat(folder / "heartbeat_rank0.jsonl")
    return [beat.extra for beat in beats if beat.msg == f"fineweb_loader_{kind}"]


Source = Callable[..., Data]


def from_lists(files: list[list[str]]) -> Source:
    """The same documents without a hub, in the place of open_data."""

    def open_lists(config: object, seq_len: int, seed: int, **options: object) -> Data:
        texts, tokenizer = ListDocuments(*files), ByteTokenizer()
        held_out = first_held_out(texts, tokenizer, HELD_OUT_DOCUMENTS)
        rows = StreamedRows(texts, tokenizer, seq_len, seed)
        return Data(rows, ArrayRows(held_out, seq_len, 0, "held-out"), tokenizer)

    return open_lists


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that every other one must equal: its documents come from memory."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsa.train.batches.open_data", from_lists(FILES))
        in_process(config_of(folder))
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    base = REPOSITORY / "configs" / "base.yaml"
    return load_config(base, [*SETTINGS, f"train.out_dir={folder}", *overrides], environ={})


def in_process(cfg: Config, **options: object) -> str:
    out = io.StringIO()
    run(cfg, config_path="tiny.yaml", out=out, **options)  # type: ignore[arg-type]
    return out.getvalue()


def assert_equal(folder: Path, whole: Path) -> None:
    assert losses(folder) == losses(whole)
    assert read_rows(ValRow, folder / VAL) == read_rows(ValRow, whole / VAL)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(folder)[name], tensor), name


def test_a_healthy_hub(nursery: Nursery, hub: Hub, whole: Path, tmp_path: Path) -> None:
    done = train(
        nursery.python,
        hub,
        tmp_path / "run",
        "--fwe-report-docs",
        "100",
        NSA_FWE_WARMUP_BATCHES="2",
    )

    assert done.code == 0, done.err
    assert_equal(done.folder, whole)
    assert "[train] first FineWeb‑Edu batch fetched in " in done.out  # noqa: RUF001
    assert "[debug] step 1: input shape torch.Size([16, 32])" in done.out
    assert "[debug] step 6" not in done.out
    assert "[data] 100 documents, " in done.out and "(epoch 2)" in done.out
    (ready,), (warmup,) = messages(done.folder, "ready"), messages(done.folder, "warmup")
    assert 0 < float(str(ready["dt"])) < 60
    assert (warmup["requested"], warmup["filled"]) == (2, 2)
    assert read_metrics(done.folder).data_fallback is None
    assert f"6 files of commit {SHA}" in done.out


def test_connections_that_are_cut_or_stall_in_the_middle_lose_nothing(
    nursery: Nursery, hub: Hub, whole: Path, tmp_path: Path
) -> None:
    hub.cut, hub.stalled = range(5, 7), range(9, 10)

    done = train(nursery.python, hub, tmp_path / "run", NSA_FWE_PREFETCH="0")

    assert done.code == 0, done.err
    assert done.err.count("Retrying in") == 3 and "timed out" in done.err
    assert_equal(done.folder, whole)


def test_killed_with_a_full_queue_it_goes_on_to_the_bit(
    nursery: Nursery, hub: Hub, whole: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "run" / "checkpoint_step6.json"
    with start(
        nursery.python, hub, tmp_path / "run", NSA_FWE_Q="16", NSA_FWE_WARMUP_BATCHES="16"
    ) as process:
        wait_for(lambda: saved.exists() or process.poll() is not None, timeout_s=120)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"

    done = train(nursery.python, hub, tmp_path / "run", NSA_FWE_Q="16")

    assert done.code == 0, done.err
    assert "of 24 steps are done" in done.out
    assert_equal(done.folder, whole)


def test_a_stalled_hub_ends_the_run_in_time(hub: Hub, tmp_path: Path) -> None:
    """And its process, in which a thread of the client is left behind: a new interpreter."""
    hub.stalled = range(1, 1000)
    begin = time.perf_counter()

    done = train(Path(sys.executable), hub, tmp_path / "run", "--loader-timeout", "1")

    assert done.code == 11
    assert "did not arrive within 1 s" in done.err and "--loader-timeout" in done.err
    assert "Traceback" not in done.err
    assert time.perf_counter() - begin < 60
    (error,) = messages(done.folder, "error")
    assert "did not arrive within 1 s" in str(error["error"])


def test_a_stalled_hub_gives_random_tokens_only_when_asked(
    nursery: Nursery, hub: Hub, tmp_path: Path
) -> None:
    hub.stalled = range(1, 1000)

    done = train(
        nursery.python, hub, tmp_path / "run", "--loader-timeout", "2", "--synthetic-on-fail"
    )

    assert done.code == 0, done.err
    assert "RANDOM TOKENS" in done.out and "did not arrive within 2 s" in done.out
    metrics = read_metrics(done.folder)
    assert "did not arrive within 2 s" in str(metrics.data_fallback)
    assert (metrics.status, metrics.step) == ("finished", STEPS)
    assert "dataset: synthetic" in (done.folder / "config.yaml").read_text()
    assert len(messages(done.folder, "error")) == 1


def test_corrupt_data_is_never_trained_on(
    nursery: Nursery, hub: Hub, whole: Path, tmp_path: Path
) -> None:
    name = NAMES[5]
    hub.corrupt[name] = [hub.files[name].index(b"lorem") + 2]

    done = train(nursery.python, hub, tmp_path / "run")

    assert done.code == 2
    assert f"{name} row 0: cannot be read" in done.err and "Traceback" not in done.err
    metrics = read_metrics(done.folder)
    assert (metrics.status, metrics.step) == ("no_data", 16)
    assert losses(done.folder) == losses(whole)[:16]
    assert (done.folder / "checkpoint_step16.pt").exists()
    assert name in str(messages(done.folder, "error")[0]["error"])


def test_the_stream_can_be_checked(nursery: Nursery, hub: Hub, tmp_path: Path) -> None:
    hub.files |= {f"sample/10BT/{n}.parquet": parquet_bytes(t) for n, t in enumerate(FILES)}
    script = REPOSITORY / "scripts" / "datasets" / "check_fwe_stream.py"
    environment = os.environ | hub.environment(tmp_path / "cache")

    found = subprocess.run(
        [str(nursery.python), str(script), "--subset", SUBSET],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    lines = [f"ok batch[{number}] lens: [128, 128]" for number in range(3)]
    assert (found.returncode, found.stdout.splitlines()) == (0, lines), found.stderr
    assert all(path.startswith("sample/10BT/") for path, _, _ in hub.reads)


RESUMED = """
from nsa.config import DataConfig
from nsa.data.encode import Place
from nsa.data.hub import HubDocuments
documents = HubDocuments(DataConfig(dataset="fineweb_edu"), lambda line: None)
for place in [Place(0, 0, 0), Place(0, 2, 0), Place(0, 0, 101), Place(3, 5, 27), Place(0, 5, 28)]:
    found = documents.read(place)
    for _ in range(3):
        here, document = next(found)
        print(*here, document.text)
"""


def test_reading_starts_at_any_document(nursery: Nursery, hub: Hub, tmp_path: Path) -> None:
    """Also in the middle of a row group, at the last document, and at the end of a file."""
    found = subprocess.run(
        [str(nursery.python), "-c", RESUMED],
        env=os.environ | hub.environment(tmp_path / "cache"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    places = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 2, 0), (0, 2, 1), (0, 2, 2)]
    places += [(0, 0, 101), (0, 0, 102), (0, 0, 103), (3, 5, 27), (4, 0, 0), (4, 0, 1)]
    places += [(1, 0, 0), (1, 0, 1), (1, 0, 2)]
    lines = [f"{epoch} {file} {row} {FILES[file][row]}" for epoch, file, row in places]
    assert found.stdout.splitlines() == lines


# What happens to a run when its stream ends, without a hub.


class Ending(ListDocuments):
    """Documents up to a place; there, something else happens."""

    def __init__(self, files: list[list[str]], until: Place, then: Callable[[], None]) -> None:
        super().__init__(*files)
        self.until, self.then = until, then

    def read(self, place: Place) -> Iterator[tuple[Place, Document]]:
        for here, document in super().read(place):
            if here >= self.until:
                self.then()
            yield here, document


def ending(then: Callable[[], None]) -> Source:
    def open_ending(config: object, seq_len: int, seed: int, **options: object) -> Data:
        data = from_lists(FILES)(config, seq_len, seed)
        texts = Ending(FILES, Place(0, 5), then)
        return data._replace(train=StreamedRows(texts, ByteTokenizer(), seq_len, seed))

    return open_ending


def test_a_stream_that_ends_leaves_a_checkpoint_and_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        raise SourceLost("the hub is gone")

    cfg = config_of(tmp_path / "run")
    monkeypatch.setattr("nsa.train.batches.open_data", ending(lose))
    with pytest.raises(LoaderFailed, match="the hub is gone; stopped after step.*resumes") as error:
        in_process(cfg, loader=LoaderOptions(synthetic_on_fail=True))  # not once it has started
    assert error.value.exit_code == 11
    step = read_metrics(tmp_path / "run").step
    assert step == 16
    assert len(messages(tmp_path / "run", "error")) == 1

    monkeypatch.setattr("nsa.train.batches.open_data", from_lists(FILES))
    assert f"{step} of {STEPS} steps are done" in in_process(cfg)

    assert_equal(tmp_path / "run", whole)


def test_a_resume_in_the_middle_of_an_epoch_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.accumulate_grad_batches=2", "train.batch_size=8")
    monkeypatch.setattr("nsa.train.batches.open_data", from_lists(FILES))
    monkeypatch.setattr("nsa.data.streamed_rows.MOST_ROWS", 40)  # a checkpoint lies between two
    whole, parts = (config_of(tmp_path / name, *settings) for name in ("whole", "parts"))
    in_process(whole)
    in_process(parts, stop_after=8)  # the last two steps are after the last checkpoint

    assert f"6 of {STEPS} steps are done" in in_process(parts)

    assert_equal(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_is_obeyed_while_no_data_comes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> None:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)
        raise SourceLost("too late")

    cfg = config_of(tmp_path / "run")
    monkeypatch.setattr("nsa.train.batches.open_data", ending(hang))
    with pytest.raises(Halted, match="stopped by SIGTERM after step"):
        in_process(cfg)

    monkeypatch.setattr("nsa.train.batches.open_data", from_lists(FILES))
    in_process(cfg)

    assert_equal(tmp_path / "run", whole)


def test_a_run_with_checkpoints_is_not_put_aside_for_random_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.train.batches.open_data", from_lists(FILES))
    in_process(config_of(tmp_path / "run"), stop_after=6)

    def lost(*args: object, **options: object) -> Data:
        raise SourceLost("no network")

    monkeypatch.setattr("nsa.train.batches.open_data", lost)
    with pytest.raises(LoaderFailed, match="no network.*was ignored.*checkpoint of step 6"):
        in_process(config_of(tmp_path / "run"), loader=LoaderOptions(synthetic_on_fail=True))
    assert (tmp_path / "run" / "checkpoint_step6.pt").exists()
