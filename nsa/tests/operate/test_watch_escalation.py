"""What the watchdog does about an alarm: step by step, to this run alone, and never in its way."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsa import files
from nsa.operate.limits import GPU, Limits
from nsa.operate.process import is_gone, same_command, send, why_not_ours
from nsa.operate.run_folder import read_run
from nsa.operate.watch.rules import judge
from nsa.operate.watch.watchdog import Escalation, Watch, Webhook
from nsa.records import RunEnvironment, read_env, sentinels
from nsa.records.alarms import Alarm, last_alarms
from nsa.records.dumps import PREFIX
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.effects import TINY
from nsa.tests.support.recording import Recorder, dead_pid

LIMITS = dataclasses.replace(GPU, free_gib=0.0, free_checkpoints=0.0)
HANGS = """
import io, sys, time
from nsa.config import load_config
from nsa.train import run
from nsa.train.trainer import Trainer

real = Trainer.update

def update(self, step, *args):
    while step == 4:  # deaf to .HALT and to SIGTERM, which ask for the end of a step
        time.sleep(0.2)
    return real(self, step, *args)

Trainer.update = update
path = sys.argv[1]
cfg = load_config(path, [f"train.out_dir={path}.run", "train.steps=6"])
run(cfg, config_path=path, out=io.StringIO())
"""


def until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A real run that stands still in its fourth update."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    command = [sys.executable, "-c", HANGS, str(path)]
    run = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "tiny.yaml.run"
    heartbeat = folder / "heartbeat_rank0.jsonl"
    try:
        until(lambda: heartbeat.exists() and '"step": 4' in heartbeat.read_text())
        yield run, folder
    finally:
        run.kill()
        run.communicate()


def test_a_run_that_hangs_is_asked_dumped_asked_again_and_killed(
    hanging: tuple[subprocess.Popen[str], Path],
) -> None:
    run, folder = hanging

    def quick(limits: Limits) -> Limits:
        roomy = dataclasses.replace(limits, free_gib=0.0)
        return dataclasses.replace(roomy, dump_after_s=10, term_after_s=20, kill_after_s=30)

    watch = Watch(folder, kill=True, say=lambda text: None, adapt=quick)
    now = time.time()
    assert watch.look(now=now + 100).new == []
    actions = {}
    for later_s in (200, 205, 211, 225, 232, 255, 263):
        actions[later_s] = [alarm.action for alarm in watch.look(now=now + later_s).new]
        if later_s == 211:
            until(lambda: bool(list(folder.glob(f"{PREFIX}_*.txt"))))
        if later_s < 263:
            time.sleep(0.3)
            assert run.poll() is None
    assert actions == {
        200: ["note", "halt"],
        205: [],
        211: ["dump"],
        225: [],
        232: ["term"],
        255: [],
        263: ["kill"],
    }
    assert run.wait(timeout=30) == -signal.SIGKILL
    (dump,) = folder.glob(f"{PREFIX}_*.txt")
    assert "in update" in dump.read_text()
    assert (folder / ".HALT").read_text() == "halt: heartbeat_stall\n"
    said = [alarm.text for alarm in last_alarms(folder, 9)]
    assert said[2] == f"SIGUSR1 to pid {run.pid} of rank 0" and "SIGKILL" in said[4]
    after = watch.look(now=now + 400)
    assert after.alarms[0].values["gone"] and after.new == [], "nobody is left to be stopped"


def test_without_kill_it_stops_at_halt_and_without_halt_at_the_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch)
    recorder.run(40)
    alarms = judge(read_run(tmp_path, now=recorder.now + 300), LIMITS)
    for options, actions in (({"halt": False}, ["note"]), ({}, ["note", "halt"])):
        escalation = Escalation(**options)
        done = []
        for later_s in (300, 3000, 30_000):
            run = read_run(tmp_path, now=recorder.now + later_s)
            done += [alarm.action for alarm in escalation.update(run, alarms, LIMITS)]
        assert done == actions


def test_an_alarm_is_noted_once_and_its_end_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch)
    watch = Watch(tmp_path, halt=False, say=lambda text: None, adapt=lambda limits: LIMITS)
    recorder.run(40)
    for later_s in (300, 330, 360):
        watch.look(now=recorder.now + later_s)
    recorder.now += 400
    recorder.run(1)
    watch.look(now=recorder.now)
    found = [(alarm.type, alarm.action) for alarm in last_alarms(tmp_path, 9)]
    assert found == [("heartbeat_stall", "note"), ("heartbeat_stall", "clear")]


def test_a_halt_of_the_operator_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch)
    recorder.run(40)
    sentinels.write_halt(tmp_path, "operator")
    watch = Watch(tmp_path, say=lambda text: None, adapt=lambda limits: LIMITS)
    assert ".HALT already exists" in watch.look(now=recorder.now + 300).new[-1].text
    assert (tmp_path / ".HALT").read_text() == "halt: operator\n"
    assert sentinels.read_anomaly(tmp_path) is None


# whose process it is


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is nobody's run."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", "word"])
    try:
        until(lambda: b"word" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEnvironment:
    Recorder(tmp_path, monkeypatch)
    return dataclasses.replace(read_env(tmp_path), argv=["-c", "word"])


def test_only_the_process_that_wrote_the_heartbeat_gets_a_signal(
    sleeper: subprocess.Popen[bytes], env: RunEnvironment
) -> None:
    pid, now = sleeper.pid, time.time()
    assert why_not_ours(pid, now, env) == ""
    other = dataclasses.replace(env, hostname="elsewhere")
    cases = {
        "started after the last heartbeat": (pid, now - 3600, env),
        "runs another command": (pid, now, dataclasses.replace(env, argv=["-c", "other"])),
        "the run is on elsewhere": (pid, now, other),
        "env.json": (pid, now, None),
        "is gone": (dead_pid(), now, env),
        "is this process": (os.getpid(), now, env),
        "names no process": (None, now, env),
    }
    for reason, case in cases.items():
        assert reason in why_not_ours(*case)
        given, last_beat, environment = case
        assert reason in send(given, signal.SIGKILL, last_beat, environment)
    assert "no handler for SIGUSR1" in send(pid, signal.SIGUSR1, now, env)
    assert sleeper.poll() is None
    assert send(pid, signal.SIGTERM, now, env) == ""
    assert sleeper.wait(timeout=30) == -signal.SIGTERM


def test_whether_a_process_is_gone_is_only_known_on_its_machine(env: RunEnvironment) -> None:
    assert env.hostname == platform.node()
    assert is_gone(os.getpid(), env) is False
    assert is_gone(dead_pid(), env) is True
    assert is_gone(os.getpid(), env, files.start_ticks()) is False
    assert is_gone(os.getpid(), env, files.start_ticks() - 1) is True, "its number was given anew"
    assert is_gone(dead_pid(), dataclasses.replace(env, hostname="elsewhere")) is None


@pytest.mark.parametrize(
    ("command", "argv", "is_same"),
    [
        ("python -u scripts/t.py --steps 3", "scripts/t.py --steps 3", True),
        ("python -m nsa.cli train --key secret", "/x/nsa/cli/__main__.py train --key ***", True),
        ("/v/bin/python /v/bin/nsa train a=secret", "/v/bin/nsa train a=***", True),
        ("python -m pytest x", "/lib/pytest/__main__.py x", True),
        ("python scripts/t.py --steps 4", "scripts/t.py --steps 3", False),
        ("python scripts/t.py", "scripts/t.py --steps 3", False),
        ("python other.py --steps 3", "scripts/t.py --steps 3", False),
        ("python scripts/t.py", "", False),
    ],
)
def test_commands_are_compared_as_python_shows_them(command: str, argv: str, is_same: bool) -> None:
    assert same_command(command.split(), argv.split()) == is_same


def test_a_process_that_died_rings_soon_and_nothing_is_written_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, monkeypatch)
    recorder.run(40)
    path = recorder.beats[0].path
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    watch = Watch(tmp_path, kill=True, say=lambda text: None, adapt=lambda limits: LIMITS)
    assert watch.look(now=recorder.now + 5).alarms == []
    (alarm,) = watch.look(now=recorder.now + 30).new
    assert "is gone" in alarm.text and alarm.action == "note"
    assert sentinels.read_halt(tmp_path) is None


def test_proc_that_cannot_be_read_is_nobody_to_signal(
    env: RunEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PROC", tmp_path)
    assert is_gone(os.getpid(), env) is None
    assert "is gone" in why_not_ours(os.getppid(), time.time(), env)


# the webhook


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; with `wait` set it answers late."""

    got: list[dict[str, object]]
    wait: threading.Event | None = None

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.wait is not None:
            self.wait.wait(30)
        self.got.append(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, type[Receiver]]]:
    handler = type("Handler", (Receiver,), {"got": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/alarm", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_webhook_gets_every_alarm_as_json(
    receiver: tuple[str, type[Receiver]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = receiver
    recorder = Recorder(tmp_path, monkeypatch)
    recorder.run(40)
    hook = Webhook(url, say=print)
    watch = Watch(tmp_path, webhook=hook, say=lambda text: None, adapt=lambda limits: LIMITS)
    watch.look(now=recorder.now + 300)
    hook.close()
    assert [(got["type"], got["action"]) for got in handler.got] == [
        ("heartbeat_stall", "note"),
        ("heartbeat_stall", "halt"),
    ]
    assert handler.got[0]["folder"] == str(tmp_path)


def test_a_webhook_that_does_not_answer_holds_nothing_up_and_is_said(
    receiver: tuple[str, type[Receiver]], tmp_path: Path
) -> None:
    url, handler = receiver
    handler.wait = threading.Event()
    said: list[str] = []
    hook = Webhook(url, say=said.append, timeout_s=0.3)
    start = time.monotonic()
    hook.post(tmp_path, Alarm(type="zero_grad"))
    assert time.monotonic() - start < 0.2
    hook.close()
    handler.wait.set()
    assert len(said) == 1 and "timed out" in said[0]
    refused = Webhook("http://127.0.0.1:9/", say=said.append)
    refused.post(tmp_path, Alarm(type="zero_grad"))
    refused.close()
    assert len(said) == 2 and "refused" in said[1]
