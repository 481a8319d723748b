"""The phases of a launch: each trains, is judged from its artifacts, and lets the next start."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from nsa.operate.child import Child, Ended, Transcript
from nsa.operate.launch_plan import Plan
from nsa.operate.profiles import Phase
from nsa.operate.report import judge
from nsa.operate.verdict import write_report
from nsa.telemetry.best_effort import best_effort
from nsa.telemetry.heartbeat import iso
from nsa.telemetry.metrics import NAME as METRICS
from nsa.telemetry.metrics import Metrics, read_metrics
from nsa.telemetry.phase_file import NAME as VERDICT
from nsa.telemetry.phase_file import PhaseVerdict, read_verdict, write_verdict
from nsa.telemetry.run_info import NAME as RUN_INFO
from nsa.telemetry.run_info import write_run_info
from nsa.telemetry.run_lock import LAUNCH, RUN, STOPPING, FolderHeld, FolderLock, take_lock
from nsa.telemetry.sentinels import HALT, read_halt, write_halt

OK, NO_GO, FAILED, REFUSED = 0, 1, 1, 3
BY_STATUS = {"non_finite": 10, "no_data": 11, "bad_data": 2}
"""Exit codes that torchrun hides: it ends with 1 whatever its ranks did."""
NOT_AGAIN = (0, 2, 3, 10)
"""Exit codes after which another start would end in the same way."""
LAUNCHER = "launcher: "
RESTARTED = "NSA_RESTART_COUNT"


STEPS = {"launch": "steps_launch", "phase1": "steps_phase1", "phase2": "steps_phase2"}
"""The limit that says how many steps a point of a report needs: so many as the phase has."""


class Phases:
    """Runs the phases of a plan one after the other, and keeps run.info."""

    def __init__(
        self,
        plan: Plan,
        lock: FolderLock | None = None,
        *,
        limits: Mapping[str, float] | None = None,
        redo: bool = False,
        go_anyway: bool = False,
    ) -> None:
        """`lock` is that of the launch, which its first node holds. `limits` replaces some of
        limits.toml. `redo`: verdicts of earlier launches do not count. `go_anyway`: nor do those of
        now.
        """
        self._plan, self._lock, self._limits = plan, lock, dict(limits or {})
        self._redo, self._go_anyway = redo, go_anyway
        self._info = plan.info()

    def run(self) -> int:
        """All phases, or up to the one that does not end well; the exit code of the launch."""
        code, text = OK, "all phases are done"
        for phase in self._plan.profile.phases:
            code, text = self._phase(phase)
            if text:
                break
        self._info.done(text or "all phases are done", code)
        self._write()
        return code

    def preflight(self) -> bool:
        """Whether `nsa preflight` of the last phase, in a process of its own, says GO."""
        plan, phase = self._plan, self._plan.profile.phases[-1]
        transcript = Transcript(
            [plan.records / "preflight.log", *map(plan.place, plan.profile.logs)]
        )
        command = [sys.executable, "-m", "nsa.cli", "preflight", "--config", plan.config_of(phase)]
        command += ["--ranks", str(plan.ranks), "--out", str(plan.records / "preflight.json")]
        command += [f"--limit={name}={value:g}" for name, value in self._limits.items()]
        try:
            self._say(transcript, "preflight")
            child = Child(
                [*command, *plan.overrides_of(phase)],
                plan.environ,
                transcript,
                halt=lambda who: None,  # SIGTERM, the next step, is gentle enough
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
        path = self._plan.records / RUN_INFO
        with best_effort(path):  # a full disk is no reason to leave a run alone
            write_run_info(path, self._info)

    def _phase(self, phase: Phase) -> tuple[int, str]:
        """Exit code, and why the launch ends here; empty if it goes on."""
        plan, folder = self._plan, self._plan.folder(phase)
        transcript = Transcript(plan.logs(phase))
        try:
            if self._stands(phase):
                self._say(transcript, f"phase {phase.name}: GO from before stands; not run again")
                return OK, ""
            with ExitStack() as stack:
                try:
                    self._keep_others_out(stack, folder, transcript)
                except (FolderHeld, OSError) as problem:
                    text = f"refused: {problem}; wait for its end, or use another --out-dir"
                    return REFUSED, self._end(transcript, phase, text)
                self._say(transcript, f"phase {phase.name}: {plan.steps(phase)} steps in {folder}")
                before = _stamp(folder)
                ended = self._train(phase, transcript)
                metrics = _metrics(folder) if _stamp(folder) != before else None
                return self._judged(phase, transcript, ended, metrics)
        finally:
            transcript.close()

    def _keep_others_out(self, stack: ExitStack, folder: Path, transcript: Transcript) -> None:
        """Lock the folder of a phase against other launches, and wait until no run is there."""
        if self._lock is None:
            return
        if folder != self._plan.out_dir:
            stack.enter_context(take_lock(folder, LAUNCH, say=transcript.say))
        # The trainer takes it again; but torchrun would hide why its ranks were refused.
        take_lock(folder, RUN, say=transcript.say).release()

    def _train(self, phase: Phase, transcript: Transcript) -> Ended:
        plan, folder = self._plan, self._plan.folder(phase)
        (folder / VERDICT).unlink(missing_ok=True)
        command = plan.command(phase)
        alone = "torch.distributed.run" not in command
        left = plan.restarts(phase) if alone else 0  # torchrun counts its own
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
            _take_back_halt(folder)
            if ended.code in NOT_AGAIN or ended.stopped or left == 0:
                return ended
            left, again = left - 1, again + 1
            self._say(transcript, f"exit code {ended.code}; starting again, {left} times left")

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
        if ended.code != 0 and not halted:  # torchrun calls a signal to it a failure
            code = _exit_code(ended.code, metrics)
            return code, self._end(transcript, phase, f"NO-GO: the trainer ended with {code}")
        if metrics is None or metrics.status != "finished":
            at = f"at step {metrics.step}" if metrics else "before its first step"
            text = f"stopped {at} ({ended.stopped or 'asked to'}); the same command goes on"
            return OK, self._end(transcript, phase, text)
        verdict = judge(folder, phase.judged, limits=self._limits_of(phase))
        transcript.write(f"{verdict.text()}\n".encode())
        with best_effort(folder / VERDICT):
            write_report(self._plan.records / f"report_{phase.name}", verdict)
            write_verdict(folder, self._verdict(phase, verdict.go))
        if verdict.go:
            self._say(transcript, f"phase {phase.name}: GO")
            return OK, ""
        text = self._end(transcript, phase, verdict.summary())
        if self._go_anyway:
            self._say(transcript, f"phase {phase.name}: NO-GO, and on by --go-anyway")
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

    def _stands(self, phase: Phase) -> bool:
        """Whether a verdict of an earlier launch of the same thing lets this phase be passed."""
        if self._redo:
            return False
        verdict = read_verdict(self._plan.folder(phase))
        return verdict is not None and verdict.go and verdict.launched == self._plan.launched(phase)


def _take_back_halt(folder: Path) -> None:
    """A request of ours that nobody obeyed, because the run had ended, would stop the next one."""
    halt = read_halt(folder)
    if halt is not None and halt.reason.startswith(LAUNCHER.strip()):
        (folder / HALT).unlink(missing_ok=True)


def _stamp(folder: Path) -> int | None:
    """Changes whenever metrics.json is replaced."""
    try:
        return (folder / METRICS).stat().st_mtime_ns
    except OSError:
        return None


def _metrics(folder: Path) -> Metrics | None:
    try:
        return read_metrics(folder)
    except (OSError, ValueError, TypeError):  # gone, torn, or of another version
        return None


def _exit_code(code: int, metrics: Metrics | None) -> int:
    if code == 1 and metrics is not None:
        return BY_STATUS.get(metrics.status, code)
    return 128 - code if code < 0 else code  # a signal, as shells say it
