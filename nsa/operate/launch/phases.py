"""Run the phases of a launch: train, judge from the run's files, then start the next phase."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from nsa.files import APPEND, best_effort, complain, open_regular
from nsa.operate.launch.plan import Plan
from nsa.operate.launch.profiles import Phase
from nsa.operate.report.command import judge
from nsa.operate.report.verdict import write_report
from nsa.operate.run_files import RunFiles
from nsa.records.folder import LAUNCH, RUN, STOPPING, FolderHeld, FolderLock, take_lock
from nsa.records.heartbeat import iso
from nsa.records.launch import (
    PHASE_FILE,
    RUN_INFO_FILE,
    PhaseVerdict,
    read_verdict,
    write_run_info,
    write_verdict,
)
from nsa.records.metrics import METRICS_FILE, Metrics
from nsa.records.sentinels import HALT, read_halt, write_halt

OK, NO_GO, FAILED, REFUSED = 0, 1, 1, 3
BY_STATUS = {"non_finite": 10, "no_data": 11, "bad_data": 2}
"""Exit codes by run status: torchrun exits with 1 whatever its ranks returned."""
NO_RESTART = (0, 2, 3, 10)
"""Exit codes after which a restart would fail in the same way."""
LAUNCHER = "launcher: "
RESTARTED = "NSA_RESTART_COUNT"


STEPS = {"launch": "steps_launch", "phase1": "steps_phase1", "phase2": "steps_phase2"}
"""Limit with the required number of steps per report point; replaced by the phase's steps."""


# --- the phases ---


class Phases:
    """Runs the phases of a plan in order, and writes run.info."""

    def __init__(
        self,
        plan: Plan,
        lock: FolderLock | None = None,
        *,
        limits: Mapping[str, float] | None = None,
        redo: bool = False,
        go_anyway: bool = False,
    ) -> None:
        """`lock` is the launch lock, held by node 0; None on other nodes.

        `limits` overrides limits.toml. `redo` ignores GO verdicts of earlier launches;
        `go_anyway` continues after a NO-GO.
        """
        self._plan, self._lock, self._limits = plan, lock, dict(limits or {})
        self._redo, self._go_anyway = redo, go_anyway
        self._info = plan.info()

    def run(self) -> int:
        """Run all phases, or stop at the first one that fails; returns the exit code."""
        code, text = OK, "all phases are done"
        for phase in self._plan.profile.phases:
            code, text = self._phase(phase)
            if text:
                break
        self._info.done(text or "all phases are done", code)
        self._write()
        return code

    def preflight(self) -> bool:
        """Run `nsa preflight` for the last phase in a subprocess; True for GO."""
        plan, phase = self._plan, self._plan.profile.phases[-1]
        transcript = Transcript(
            [plan.records / "preflight.log", *map(plan.place, plan.profile.logs)]
        )
        command = [
            sys.executable,
            "-m",
            "nsa.cli",
            "preflight",
            "--config",
            plan.config_of(phase),
        ]
        command += ["--ranks", str(plan.ranks), "--out", str(plan.records / "preflight.json")]
        command += [f"--limit={name}={value:g}" for name, value in self._limits.items()]
        try:
            self._say(transcript, "preflight")
            child = Child(
                [*command, *plan.overrides_of(phase)],
                plan.environ,
                transcript,
                halt=lambda who: None,  # preflight reads no .HALT; the second request is SIGTERM
                kill_last=True,
            )
            go = child.run().code == 0
            self._say(transcript, f"preflight: {'GO' if go else 'NO-GO'}")
        finally:
            transcript.close()
        if not go and not self._go_anyway:
            self._info.done("preflight: NO-GO", NO_GO)
            self._write()
        return go or self._go_anyway

    def note(self, text: str) -> None:
        """Add a line to run.info."""
        self._info.note(text)
        self._write()

    def _write(self) -> None:
        path = self._plan.records / RUN_INFO_FILE
        with best_effort(path):  # a full disk must not stop the supervision of a run
            write_run_info(path, self._info)

    def _phase(self, phase: Phase) -> tuple[int, str]:
        """Run one phase: exit code, and the reason to end the launch ("" to continue)."""
        plan, folder = self._plan, self._plan.folder(phase)
        transcript = Transcript(plan.logs(phase))
        try:
            if self._has_go(phase):
                self._say(transcript, f"phase {phase.name}: GO already; skipped")
                return OK, ""
            with ExitStack() as stack:
                try:
                    self._keep_others_out(stack, folder, transcript)
                except (FolderHeld, OSError) as problem:
                    text = f"refused: {problem}; wait for its end, or use another --out-dir"
                    return REFUSED, self._end(transcript, phase, text)
                self._say(transcript, f"phase {phase.name}: {plan.steps(phase)} steps in {folder}")
                # metrics.json of an earlier run must not be taken for a result of this one.
                before = _metrics_mtime(folder)
                ended = self._train(phase, transcript)
                metrics = RunFiles(folder).metrics() if _metrics_mtime(folder) != before else None
                return self._judged(phase, transcript, ended, metrics)
        finally:
            transcript.close()

    def _keep_others_out(self, stack: ExitStack, folder: Path, transcript: Transcript) -> None:
        """Lock the phase folder against other launches, and wait until no run holds it."""
        if self._lock is None:
            return
        if folder != self._plan.out_dir:
            stack.enter_context(take_lock(folder, LAUNCH, say=transcript.say))
        # Take and release the run lock: the trainer takes it too, but torchrun would hide the
        # message of a rank that was refused.
        take_lock(folder, RUN, say=transcript.say).release()

    def _train(self, phase: Phase, transcript: Transcript) -> Ended:
        plan, folder = self._plan, self._plan.folder(phase)
        (folder / PHASE_FILE).unlink(missing_ok=True)
        command = plan.command(phase)
        alone = "torch.distributed.run" not in command
        left = plan.restarts(phase) if alone else 0  # torchrun does its own restarts
        timeout_s = None if phase.timeout_min is None else 60.0 * phase.timeout_min
        again = 0
        while True:
            self._say(transcript, "command: " + " ".join(command))
            child = Child(
                command,
                {**plan.environ, **({RESTARTED: str(again)} if again else {})},
                transcript,
                halt=lambda who: self._ask_to_halt(folder, who),
                timeout_s=timeout_s,
                kill_last=alone,
            )
            ended = child.run()
            _remove_own_halt(folder)
            if ended.code in NO_RESTART or ended.stopped or left == 0:
                return ended
            left, again = left - 1, again + 1
            self._say(transcript, f"exit code {ended.code}; restarting, {left} restarts left")

    def _ask_to_halt(self, folder: Path, who: str) -> None:
        if self._lock is not None:
            self._lock.mark(STOPPING)
        folder.mkdir(parents=True, exist_ok=True)
        write_halt(folder, LAUNCHER + who)

    def _judged(
        self, phase: Phase, transcript: Transcript, ended: Ended, metrics: Metrics | None
    ) -> tuple[int, str]:
        folder = self._plan.folder(phase)
        if ended.stopped == "timeout":
            text = f"NO-GO: not done in {phase.timeout_min:g} minutes"
            return FAILED, self._end(transcript, phase, text)
        halted = metrics is not None and metrics.status == "halted"
        if ended.code != 0 and not halted:  # torchrun reports a stop by signal as a failure
            code = _exit_code(ended.code, metrics)
            return code, self._end(transcript, phase, f"NO-GO: the trainer exited with {code}")
        if metrics is None or metrics.status != "finished":
            at = f"at step {metrics.step}" if metrics else "before its first step"
            text = f"stopped {at} ({ended.stopped or 'asked to'}); the same command resumes it"
            return OK, self._end(transcript, phase, text)
        verdict = judge(folder, phase.judged, limits=self._limits_of(phase))
        transcript.write(f"{verdict.text()}\n".encode())
        with best_effort(folder / PHASE_FILE):
            write_report(self._plan.records / f"report_{phase.name}", verdict)
            write_verdict(folder, self._verdict(phase, verdict.go))
        if verdict.go:
            self._say(transcript, f"phase {phase.name}: GO")
            return OK, ""
        text = self._end(transcript, phase, verdict.summary())
        if self._go_anyway:
            self._say(transcript, f"phase {phase.name}: NO-GO, continuing because of --go-anyway")
        return (OK, "") if self._go_anyway else (NO_GO, text)

    def _limits_of(self, phase: Phase) -> dict[str, float]:
        steps = {STEPS[phase.judged]: self._plan.steps(phase)} if phase.judged in STEPS else {}
        return {**self._plan.profile.limits, **steps, **self._limits}

    def _end(self, transcript: Transcript, phase: Phase, text: str) -> str:
        text = f"phase {phase.name}: {text}"
        self._say(transcript, text)
        return text

    def _say(self, transcript: Transcript, text: str) -> None:
        transcript.say(text)
        self.note(text)

    def _verdict(self, phase: Phase, go: bool) -> PhaseVerdict:
        return PhaseVerdict(
            phase=phase.name,
            judged=phase.judged,
            go=go,
            time=iso(time.time()),
            launched=self._plan.launched(phase),
        )

    def _has_go(self, phase: Phase) -> bool:
        """Skip the phase: an earlier launch with the same code and config got GO."""
        if self._redo:
            return False
        verdict = read_verdict(self._plan.folder(phase))
        return verdict is not None and verdict.go and verdict.launched == self._plan.launched(phase)


def _remove_own_halt(folder: Path) -> None:
    """Remove our own .HALT if the run ended before reading it: it would stop the next run."""
    halt = read_halt(folder)
    if halt is not None and halt.reason.startswith(LAUNCHER.strip()):
        (folder / HALT).unlink(missing_ok=True)


def _metrics_mtime(folder: Path) -> int | None:
    """Modification time of metrics.json, to detect that it was replaced."""
    try:
        return (folder / METRICS_FILE).stat().st_mtime_ns
    except OSError:
        return None


def _exit_code(code: int, metrics: Metrics | None) -> int:
    if code == 1 and metrics is not None:
        return BY_STATUS.get(metrics.status, code)
    return 128 - code if code < 0 else code  # killed by a signal: shell convention 128 + n


# --- the training process: output to logs, stop gently first ---
# It gets its own session, so that Ctrl-C reaches only the launcher. SIGUSR1 is ignored at start:
# ranks install a handler (stack dump), but torchrun, which has the same command line, would die.

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TICK_S = 0.5
DRAIN_S = 2.0
"""Seconds to wait for output after the process has ended while a child still holds the pipe."""
PATIENCE_S = 180.0
"""Seconds from .HALT to SIGTERM after a timeout, and from SIGTERM to SIGKILL."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    stopped: str
    """Who requested the stop: a signal name, `timeout`, or empty."""


class Transcript:
    """Copies output to the console and to log files; a full disk only loses lines."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[Path, int] = {}
        self._has_console = True
        for path in dict.fromkeys(paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = open_regular(path, APPEND)

    def say(self, text: str) -> None:
        """Write a line of the launcher itself."""
        self.write(f"[launch] {text}\n".encode())

    def write(self, data: bytes) -> None:
        """Write raw output of the process."""
        for path, descriptor in list(self._files.items()):
            try:
                os.write(descriptor, data)
            except OSError as error:
                complain(path, error)
        if self._has_console:
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            except (OSError, ValueError):  # terminal closed, or broken pipe
                self._has_console = False

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


class Child:
    """One supervised process, from start to end."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        transcript: Transcript,
        *,
        halt: Callable[[str], None],
        timeout_s: float | None = None,
        kill_last: bool,
    ) -> None:
        """`halt` writes .HALT. `kill_last` allows SIGKILL; torchrun kills its ranks itself."""
        self._command, self._environ, self._transcript = command, environ, transcript
        self._halt, self._kill_last = halt, kill_last
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._received: list[str] = []
        self._stopped, self._requests = "", 0

    def run(self) -> Ended:
        """Start the process, forward its output, and wait for its end."""
        with self._signals():
            self._process = subprocess.Popen(
                self._command,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._forward_output()
            return Ended(self._process.wait(), self._stopped)

    def _forward_output(self) -> None:
        assert self._process.stdout is not None
        silent_since: float | None = None
        with self._process.stdout as pipe:
            while True:
                if select.select([pipe], [], [], TICK_S)[0]:
                    data = os.read(pipe.fileno(), 1 << 16)
                    if not data:
                        return
                    self._transcript.write(data)
                    silent_since = None
                elif self._process.poll() is not None:
                    silent_since = silent_since or time.monotonic()
                    if time.monotonic() - silent_since > DRAIN_S:
                        return
                self._handle_requests()

    def _handle_requests(self) -> None:
        """Handle queued signals and the timeout; a signal handler itself must not do I/O."""
        while self._received:
            self._request_stop(self._received.pop(0))
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = time.monotonic() + PATIENCE_S
            self._request_stop("timeout")

    def _request_stop(self, who: str) -> None:
        """Stop in steps: .HALT, then SIGTERM, then SIGKILL if `kill_last`."""
        self._requests += 1
        self._stopped = self._stopped or who
        if self._requests == 1:
            self._transcript.say(
                f"{who}: the run stops after the current step; repeat to send SIGTERM"
            )
            self._halt(who)
        elif self._requests > 2 and self._kill_last:
            self._process.kill()
        else:
            self._transcript.say(f"{who} again: SIGTERM to the run")
            self._process.terminate()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        # Inherited by the child; see the comment at the top of this section.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number).name)
