"""What goes wrong on one of two ranks, really: how all end, what is left, and what is lost.

docs/reliability.md has the promises, each with the name of its test here. Ranks come from the
nursery, within half a second, and from torchrun where torchrun is what a test is about.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.records import TRAINING, TrainingRow, read_heartbeat, read_metrics, read_rows
from nsa.records.alarms import last_alarms
from nsa.records.folder import take_lock
from nsa.records.hang_report import PATTERN, HangReport, read_report
from nsa.records.metrics import write_metrics
from nsa.records.sentinels import read_anomaly, read_halt
from nsa.records.spans import read_span
from nsa.tests.data.test_shards import flip, make
from nsa.tests.distributed.test_ranks import (
    alone,
    begun,
    config,
    last_steps,
    losses,
    weights,
    write,
)
from nsa.tests.support import launch
from nsa.tests.support.nursery import Nursery, Ranks
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.distributed.hang import kill

pytestmark = [pytest.mark.chaos, pytest.mark.dist]

PLAIN: dict[str, Any] = {"NSA_DDP_COMPRESS": "off"}
QUICK: dict[str, Any] = {"NSA_HANG_LEAST_S": "1.5", "NSA_PG_TIMEOUT_MIN": "0.2"}
"""A second and a half is a hang, and within twelve seconds of waiting it ends."""
LONG = ("train.steps=4000", "train.eval_every=0")
STEPS = 12


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Callable[..., Ranks]:
    """Start two ranks in tmp_path / "a" / "run"."""

    def begin(*overrides: str, flags: tuple[object, ...] = (), **options: Any) -> Ranks:
        place = tmp_path / "a"
        config = place / "config.yaml" if place.exists() else write(place, *overrides)
        return nursery.start(tmp_path / "log.txt", "--config", config, *flags, **options)

    return begin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "run"


@pytest.fixture(scope="module")
def undisturbed(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The weights after a run that nothing happens to."""
    place = tmp_path_factory.mktemp("undisturbed")
    config = write(place / "a", f"train.steps={STEPS}")
    codes, printed = nursery.start(place / "log.txt", "--config", config, **PLAIN).finish()
    assert codes == [0, 0], printed
    return weights(place / "a" / "run")


def assert_equal(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = weights(folder)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def checkpoints(folder: Path) -> list[int]:
    return sorted(checkpoint_file.steps_of(folder))


def only_report(folder: Path) -> HangReport:
    (path,) = folder.glob(PATTERN)
    report = read_report(path)
    assert path.read_text(encoding="utf-8").startswith(report.sentence + "\n{")
    return report


def no_half_file(folder: Path) -> bool:
    return not list(folder.glob(".*.tmp")) and not list(folder.glob(".hang_*_*.json"))


def test_nan_on_one_rank_ends_all_at_the_same_step(
    start: Callable[..., Ranks], folder: Path
) -> None:
    codes, printed = start(trouble="nan").finish()
    assert codes == [10, 10], printed
    assert printed.count("[FATAL] non-finite loss") == 1
    assert "Step 3: loss nan, gradient norm nan (the loss of rank 1); its update was" in printed
    assert read_metrics(folder).status == "non_finite"
    assert last_steps(folder)[0] == last_steps(folder)[1]
    assert read_anomaly(folder) == "nan_loss" and read_halt(folder) is not None
    rows = [torch.load(folder / f"anomaly_step3{r}.pt", weights_only=True) for r in ("", "_rank1")]
    assert [len(content["batch"]) for content in rows] == [2, 2]
    assert not torch.equal(rows[0]["batch"], rows[1]["batch"])


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    start: Callable[..., Ranks], folder: Path
) -> None:
    codes, printed = start(trouble="term").finish()
    assert codes == [0, 0], printed
    assert printed.count("stopped by SIGTERM after step 3") == 1
    assert last_steps(folder) == [3, 3]
    assert read_metrics(folder).status == "halted"
    assert checkpoints(folder) == [3]


def test_halt_in_the_middle_of_a_step_stops_all_after_it(
    start: Callable[..., Ranks], folder: Path
) -> None:
    ranks = start(*LONG, "train.save_every=0")
    ranks.wait_for("step 0004")
    (folder / ".HALT").touch()
    codes, printed = ranks.finish()
    assert codes == [0, 0], printed
    (step,) = re.findall(r"stopped by \.HALT after step (\d+)", printed)
    assert printed.count("[train] HALT file detected") == 1
    assert last_steps(folder) == [int(step)] * 2
    assert checkpoints(folder) == [int(step)]
    assert read_metrics(folder).status == "halted"
    assert not (folder / ".HALT").exists() and (folder / ".HALT.done").exists()


def test_sigterm_to_torchrun_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    process = launch.start("--config", write(tmp_path / "a", *LONG, "train.save_every=0"))
    wait_until(lambda: step_of(folder, 1) > 3, process)
    process.send_signal(signal.SIGTERM)
    code, printed = launch.finish(process)
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+)", printed)
    assert code == 1, "torchrun that gets a signal reports a failure of its own"
    assert last_steps(folder) == [int(step)] * 2
    assert checkpoints(folder) == [int(step)]
    assert read_metrics(folder).status == "halted"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_ranks_whose_torchrun_is_killed_stop_with_a_checkpoint(
    number: signal.Signals, tmp_path: Path
) -> None:
    """SIGUSR1 goes to all that `pgrep -f scripts/train_showcase.py` finds, and ends torchrun."""
    folder = tmp_path / "a" / "run"
    process = launch.start("--config", write(tmp_path / "a", *LONG, "train.save_every=0"))
    wait_until(lambda: step_of(folder, 1) > 3, process)
    places = [place for rank in range(2) if (place := read_span(folder, rank)) is not None]
    ranks = [place.pid for place in places]
    for pid in (*ranks, process.pid) if number == signal.SIGUSR1 else (process.pid,):
        os.kill(pid, number)
    try:
        code, printed = launch.finish(process)  # their output ends when the last rank has left
    finally:
        for place in places:  # where they have not stopped, nobody else ends them
            kill(place)
    assert code == -number
    (step,) = re.findall(r"stopped by the end of torchrun after step (\d+)", printed)
    assert "torchrun, which started these ranks, is gone" in printed
    assert last_steps(folder) == [int(step)] * 2
    assert checkpoints(folder) == [int(step)]
    assert read_metrics(folder).status == "halted"
    take_lock(folder, say=pytest.fail, patience_s=60).release()


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(
    start: Callable[..., Ranks], nursery: Nursery, folder: Path, tmp_path: Path
) -> None:
    first = start(*LONG, "train.save_every=5", "train.keep_last=0")
    first.wait_for("step 0006")
    kept = checkpoints(folder)
    codes, printed = nursery.start(
        tmp_path / "second.txt", "--config", tmp_path / "a" / "config.yaml"
    ).finish()
    assert codes == [3, 3], printed
    assert printed.count(f"{folder} is in use by process {first.pids[0]} on ") == 1
    assert {*kept} <= {*checkpoints(folder)} and not (folder / "previous").exists()
    (folder / ".HALT").touch()
    codes, printed = first.finish()
    assert codes == [0, 0], printed
    steps = begun(read_heartbeat(folder / "heartbeat_rank0.jsonl"))
    assert steps == sorted(set(steps)), "nobody else has written there"


def test_a_folder_that_is_removed_under_a_run_is_made_anew_with_an_alarm(
    start: Callable[..., Ranks], folder: Path
) -> None:
    ranks = start(*LONG, "train.save_every=1000")
    ranks.wait_for("step 0004")
    while folder.exists():  # the ranks write while it is being emptied
        shutil.rmtree(folder, ignore_errors=True)
    ranks.wait_for("[folder] ALARM")
    (alarmed,) = re.findall(r"during the run, before update (\d+)", ranks.printed())
    ranks.wait_for(f"step {int(alarmed) + 3:04d}")
    (folder / ".HALT").touch()
    codes, printed = ranks.finish()
    assert codes == [0, 0] and printed.count("[folder]") == 1, printed
    (alarm,) = last_alarms(folder, 9)
    assert (alarm.type, alarm.step) == ("folder_removed", int(alarmed))
    (last,) = re.findall(r"stopped by \.HALT after step (\d+)", printed)
    assert last_steps(folder) == [int(last)] * 2, "the heartbeats of both ranks go on"
    rows = read_rows(TrainingRow, folder / TRAINING)
    assert [row.step for row in rows] == list(range(1, int(last) + 1))
    assert checkpoints(folder) == [int(alarmed), int(last)]
    assert {"config.yaml", "env.json", "metrics.json", ".lock"} <= {*os.listdir(folder)}
    assert read_metrics(folder).status == "halted"


def test_a_folder_that_another_run_has_taken_ends_all_and_is_left_alone(
    start: Callable[..., Ranks], folder: Path, tmp_path: Path
) -> None:
    ranks = start(*LONG, "train.save_every=2")
    ranks.wait_for("step 0004")
    with take_lock(tmp_path / "theirs", say=pytest.fail):
        folder.rename(tmp_path / "ours")
        (tmp_path / "theirs").rename(folder)
        codes, printed = ranks.finish()
    assert codes == [3, 3], printed
    assert printed.count(f"{folder} was removed or moved during this run") == 1
    assert f"in use by process {os.getpid()} on " in printed
    assert os.listdir(folder) == [".lock"]


@pytest.mark.parametrize(
    ("trouble", "code", "message"),
    [("lost", 11, "rank 1 got no data"), ("spoilt", 2, "rank 1 got no data")],
    ids=["ends-early", "raises"],
)
def test_a_loader_that_fails_on_one_rank_ends_all_with_a_checkpoint(
    trouble: str, code: int, message: str, start: Callable[..., Ranks], folder: Path
) -> None:
    codes, printed = start("train.save_every=0", trouble=trouble).finish()
    assert codes == [code, code], printed
    assert message in printed
    assert read_metrics(folder).status == "no_data"
    assert last_steps(folder) == [3, 3]
    assert checkpoints(folder) == [2]
    for rank in range(2):
        assert read_heartbeat(folder / f"heartbeat_rank{rank}.jsonl")[-1].step >= 2


def test_a_loader_that_stalls_on_one_rank_is_named_and_ends_all(
    start: Callable[..., Ranks], folder: Path
) -> None:
    codes, printed = start("train.steps=12", trouble="stall", **QUICK).finish()
    assert codes == [11, 11], printed
    report = only_report(folder)
    assert re.fullmatch(
        r"Rank 1 \(pid \d+ on .*\) has been in fetch of update 6 for \d+ s; "
        r"rank 0 waits for it in agreement of update 6\.",
        report.sentence,
    )
    assert report.sentence in printed
    assert any("in fetch" in line for line in report.ranks[1].stacks)
    assert any("all_reduce" in line for line in report.ranks[0].stacks)
    assert [state.state for state in report.ranks] == ["runs", "runs"]
    begun, ended = (report.ranks[0].recorder or {})["begun"], report.ranks[1].exchanges
    assert ended is not None and begun == ended + 1, "rank 0 is in an exchange that 1 has not begun"
    assert len(list(folder.glob("watchdog_stackdump_*.txt"))) == 2
    assert checkpoints(folder) == [3, 5] and no_half_file(folder)


def test_a_rank_without_python_is_dumped_from_c_and_ended(
    start: Callable[..., Ranks], folder: Path
) -> None:
    """It keeps the interpreter lock, so neither its watch nor a signal handler can run."""
    codes, printed = start("train.steps=12", trouble="locked", **QUICK).finish()
    assert codes[1] == -signal.SIGKILL and codes[0] in (1, 11), printed
    report = only_report(folder)
    assert "Rank 1" in report.sentence and "gives no sign of life" in report.sentence
    assert "rank 0 waits for it in agreement of update 6" in report.sentence
    assert any("_hold_lock" in line for line in report.ranks[1].stacks)
    assert checkpoints(folder) == [3]


def test_slow_evaluations_checkpoints_and_first_updates_are_no_hang(
    start: Callable[..., Ranks], folder: Path
) -> None:
    """Any of them takes four times as long as what would be a hang in an update."""
    codes, printed = start(trouble="slow", NSA_HANG_LEAST_S="0.5").finish()
    assert codes == [0, 0], printed
    assert not list(folder.glob(PATTERN)) and "[hang]" not in printed


def test_a_full_disk_on_rank_0_costs_checkpoints_and_not_the_run(
    start: Callable[..., Ranks], folder: Path
) -> None:
    ranks = start(*LONG, "train.save_every=2", "train.keep_last=0")
    ranks.wait_for("step 0004")
    _, hard = resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE)
    resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE, (64 * 1024, hard))
    ranks.wait_for("not written")
    resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE, (hard, hard))
    lost = int(re.findall(r"checkpoint_step(\d+)\.pt in .* not written", ranks.printed())[0])
    ranks.wait_for(f"step {lost + 6:04d}")
    (folder / ".HALT").touch()
    codes, printed = ranks.finish()
    assert codes == [0, 0], printed
    assert "the run continues without it" in printed
    steps = checkpoints(folder)
    assert lost not in steps and steps[0] == 2 and steps[-1] > lost
    for step in steps:
        checkpoint_file.read(folder / checkpoint_file.NAME.format(step=step))
    assert no_half_file(folder)


def test_a_disk_that_is_full_at_the_end_is_said_without_a_traceback_of_any_rank(
    start: Callable[..., Ranks], folder: Path
) -> None:
    ranks = start("train.steps=20", "train.save_every=0", trouble="steady")
    ranks.wait_for("step 0004")
    _, hard = resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE)
    resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE, (32 * 1024, hard))
    codes, printed = ranks.finish()
    assert codes == [1, 1], printed
    assert "model.pt could not be written" in printed
    assert "rank 1 of 2 had finished, but another rank failed at the end of the run" in printed
    assert "Traceback" not in printed, printed
    assert no_half_file(folder)


def test_a_corrupt_latest_checkpoint_is_passed_over(
    start: Callable[..., Ranks], folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    overrides = (f"train.steps={STEPS}",)
    codes, printed = start(*overrides, flags=("--steps", 6), **PLAIN).finish()
    assert codes == [0, 0] and checkpoints(folder) == [3, 6], printed
    newest = folder / "checkpoint_step6.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    codes, printed = start(**PLAIN).finish()
    assert codes == [0, 0], printed
    assert printed.count("[resume] skipped") == 1 and "checkpoint_step6.pt" in printed
    assert f"3 of {STEPS} steps are done" in printed
    assert_equal(folder, undisturbed)


def say_it_was_long(folder: Path) -> None:
    """Its record tells of an hour of training, and of no end."""
    metrics = read_metrics(folder)
    metrics.train_s, metrics.status = 3600.0, "running"
    write_metrics(folder, metrics)


def test_a_run_whose_checkpoints_are_all_corrupt_is_refused_and_stays(
    start: Callable[..., Ranks], folder: Path
) -> None:
    codes, printed = start(f"train.steps={STEPS}", flags=("--steps", 6)).finish()
    assert codes == [0, 0] and checkpoints(folder) == [3, 6], printed
    say_it_was_long(folder)
    for path in folder.glob("checkpoint_step*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(path.name for path in folder.iterdir())
    codes, printed = start().finish()
    assert codes == [3, 3], printed
    assert "none of its checkpoints is intact" in printed
    assert "to resume it:" in printed and "the same command with --resume none" in printed
    assert sorted(path.name for path in folder.iterdir()) == before


def test_two_ranks_go_on_on_one_and_on_two_again(
    start: Callable[..., Ranks], folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """The same command each time: accumulation keeps the global batch, and what is learned."""
    codes, printed = start(f"train.steps={STEPS}", flags=("--steps", 3)).finish()
    assert codes == [0, 0], printed
    for until, ranks in ((6, 1), (9, 1), (STEPS, 2)):
        say_it_was_long(folder)
        codes, printed = start(flags=("--steps", until), ranks=ranks).finish()
        assert codes == [0] * ranks, printed
        assert f"{until - 3} of {until} steps are done" in printed
        assert printed.count("train.accumulate_grad_batches is 2, not 1") == min(until - 3, 6) // 3
    assert not (folder / "previous").exists()
    assert read_metrics(folder).batch_global == 4
    for name, tensor in weights(folder).items():
        assert torch.allclose(tensor, undisturbed[name], rtol=1e-3, atol=1e-5), name


def test_what_a_kill_in_a_save_leaves_is_removed_at_the_next_start(
    start: Callable[..., Ranks], folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    codes, printed = start(f"train.steps={STEPS}", trouble="die in save", **PLAIN).finish()
    assert codes == [-signal.SIGKILL, 1], printed
    (half,) = folder.glob(".checkpoint_step6.pt.*.tmp")
    assert checkpoints(folder) == [3]
    codes, printed = start(**PLAIN).finish()
    assert codes == [0, 0], printed
    removed = (
        f"[boot] removed 1 unfinished file of processes that were killed (0.1 MB): {half.name}"
    )
    assert printed.count(removed) == 1
    assert no_half_file(folder)
    assert_equal(folder, undisturbed)


def test_a_changed_byte_in_a_shard_ends_all_before_the_first_update(
    start: Callable[..., Ranks], folder: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    make(shards)
    flip(shards / "train-00000.bin")
    data = ("data.dataset=shards", f"data.local_path={shards}", "train.seq_len=16")
    codes, printed = start(*data).finish()
    assert codes == [2, 2], printed
    assert f"{shards / 'train-00000.bin'}: sha256 is" in printed
    assert "has left before" not in printed  # both wait for each other
    assert not (folder / TRAINING).exists()


def test_a_port_in_use_is_said_and_nothing_is_touched(
    start: Callable[..., Ranks], folder: Path
) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        port = somebody.getsockname()[1]
        codes, printed = start(port=port, NSA_START_TIMEOUT_MIN="0.05").finish()
    assert codes == [3, 3], printed
    assert f"rank 0 of 2 did not meet the others at 127.0.0.1:{port}" in printed
    assert "EADDRINUSE" in printed and "choose another" in printed
    assert not folder.exists()


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("config", "rank 1 has NSA_LR=0.5, but rank 0 has nothing"),
        ("code", "rank 1 has code=0123456789abcdef, but rank 0 has"),
    ],
    ids=["config", "code"],
)
def test_ranks_that_differ_are_refused(
    trouble: str, message: str, start: Callable[..., Ranks], folder: Path
) -> None:
    codes, printed = start(trouble=trouble).finish()
    assert codes == [3, 3], printed
    assert printed.count(message) == 1
    assert not (folder / TRAINING).exists()


def test_clocks_that_differ_change_nothing(
    start: Callable[..., Ranks], folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    environ = PLAIN | {"NSA_HANG_LEAST_S": "5"}
    codes, printed = start(f"train.steps={STEPS}", trouble="clock", **environ).finish()
    assert codes == [0, 0], printed
    first, second = (read_heartbeat(folder / f"heartbeat_rank{r}.jsonl")[-1].ts for r in range(2))
    assert first - second > 3000, "the clock of rank 1 was behind"
    assert not list(folder.glob(PATTERN))
    assert_equal(folder, undisturbed)


class Restarted:
    """A run under torchrun in which rank 1 is killed once, and stopped once."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "a" / "run"
        config = write(place / "a", f"train.steps={STEPS}", "train.save_every=2")
        environ = PLAIN | {"NSA_HANG_LEAST_S": "1.5", "NSA_PG_TIMEOUT_MIN": "0.25"}
        script = Path(launch.__file__)
        process = launch.start("steady", "--config", config, script=script, restarts=2, **environ)
        self.killed_at, pid = self._signal(process, signal.SIGKILL, 5)
        wait_until(lambda: self._pid() not in (0, pid), process)
        self.stopped_at, _ = self._signal(process, signal.SIGSTOP, 8)
        self.code, self.printed = launch.finish(process)

    def _pid(self) -> int:
        place = read_span(self.folder, 1)
        return place.pid if place else 0

    def _signal(
        self, process: subprocess.Popen[str], number: signal.Signals, step: int
    ) -> tuple[int, int]:
        wait_until(lambda: step_of(self.folder, 1) >= step, process)
        place = read_span(self.folder, 1)
        assert place is not None
        os.kill(place.pid, number)
        return place.step, place.pid


def step_of(folder: Path, rank: int) -> int:
    """The update that a rank is in."""
    place = read_span(folder, rank)
    return place.step if place else 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + launch.TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"it did not come to that: {launch.finish(process)[1]}")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    return Restarted(tmp_path_factory.mktemp("restarted"))


def resumed_at(printed: str) -> list[int]:
    return [int(step) for step in re.findall(r"(\d+) of \d+ steps are done", printed)]


def test_after_a_killed_rank_training_resumes_by_itself(restarted: Restarted) -> None:
    """From the last checkpoint: with one every 2 updates, no more than those are done again."""
    assert restarted.code == 0, restarted.printed
    again = resumed_at(restarted.printed)[0]
    assert restarted.killed_at - 1 - again <= 2 + 1, "one more: its file was being written"
    steps = begun(read_heartbeat(restarted.folder / "heartbeat_rank0.jsonl"))
    assert steps[steps.index(again + 1) :] and max(steps) == STEPS


def test_a_stopped_rank_is_named_killed_and_training_resumes(restarted: Restarted) -> None:
    report = only_report(restarted.folder)
    assert re.match(r"Rank 1 \(pid \d+ on .*\) is stopped by a signal, in ", report.sentence)
    assert "; rank 0 waits for it in " in report.sentence
    assert report.ranks[1].state == "stopped" and report.ranks[1].stacks == []
    assert any("MainThread" in line for line in report.ranks[0].stacks)
    assert "rank 1 does not respond and is killed" in restarted.printed
    assert len(resumed_at(restarted.printed)) == 2, "after the kill and after the stop"
    assert restarted.stopped_at - 1 - resumed_at(restarted.printed)[1] <= 2 + 1


def test_a_run_that_lost_ranks_ends_as_if_nothing_had_happened(
    restarted: Restarted, undisturbed: dict[str, torch.Tensor]
) -> None:
    assert_equal(restarted.folder, undisturbed)
    assert read_metrics(restarted.folder).status == "finished"
    assert no_half_file(restarted.folder)


# --- ranks that share rows, each of which waits for the others in every layer ---

SHARED = ("runtime.cp=2", "model.n_kv_groups=2", "train.save_every=2", "train.eval_every=0")


def test_a_stopped_rank_of_a_row_is_named_and_ends_all(
    start: Callable[..., Ranks], folder: Path
) -> None:
    ranks = start(*SHARED, "train.steps=4000", **QUICK)
    ranks.wait_for("step 0006")
    ranks.send(1, signal.SIGSTOP)
    codes, printed = ranks.finish()
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, printed
    report = only_report(folder)
    assert re.match(r"Rank 1 \(pid \d+ on .*\) is stopped by a signal, in ", report.sentence)
    assert "; rank 0 waits for it in " in report.sentence
    assert no_half_file(folder)


def test_a_killed_rank_of_a_row_is_named_and_the_run_goes_on_with_another_degree(
    start: Callable[..., Ranks], folder: Path, tmp_path: Path
) -> None:
    ranks = start(*SHARED, f"train.steps={STEPS}", trouble="steady", **PLAIN)
    ranks.wait_for("step 0005")
    ranks.send(1, signal.SIGKILL)
    codes, printed = ranks.finish()
    assert codes == [1, -signal.SIGKILL], printed
    assert "rank 0 of 2 (dp 0, cp 0, tp 0) lost rank 1, in " in printed
    given = ("runtime.cp=1", "runtime.tp=2", "--resume", "latest")
    codes, printed = start(flags=given).finish()
    assert codes == [0, 0], printed
    assert resumed_at(printed)[-1] in (2, 4)
    alone(config(tmp_path / "one", *SHARED, "runtime.cp=1", f"train.steps={STEPS}"))
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
