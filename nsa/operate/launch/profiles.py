"""Launch profiles from profiles.toml: config, environment and phases of each kind of run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nsa.config.check import nearest

FILE = Path(__file__).with_name("profiles.toml")
ALL = "all"
"""As many steps as the config has."""
ONE_PER_GPU = "gpus"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a launch: its own run, judged before the next phase starts."""

    name: str
    steps: int | str
    judged: str
    """The point of `nsa report --at` that it must pass."""
    folder: str
    """Run folder; {out_dir} and {records} are filled in, as in `log`."""
    log: str
    dataset: str = ""
    """Empty: the profile's dataset."""
    config: str = ""
    """Empty: the profile's config."""
    flags: tuple[str, ...] = ()
    """Extra flags for scripts/train_showcase.py."""
    restarts: int = 0
    """Restarts after a crash; 0 for short phases, which should show a crash, not hide it."""
    timeout_min: float | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How one kind of run is launched; profiles.toml documents the fields."""

    name: str
    meaning: str
    config: str | Mapping[str, str]
    ranks: int | str
    dataset: str
    session: str
    run: str
    phases: tuple[Phase, ...]
    logs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    """Config overrides; the command line's come after them."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Overrides of limits.toml."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_environment: Mapping[str, str] = field(default_factory=dict)

    def config_for(self, max_bytes: int) -> str:
        """The config file for a machine whose largest GPU has `max_bytes` of memory."""
        if isinstance(self.config, str):
            return self.config
        # Keys are minimum GPU memory in GB (1e9 bytes); the largest one that fits wins.
        by_size = sorted(
            ((float(least), path) for least, path in self.config.items()), reverse=True
        )
        return next(path for least, path in by_size if max_bytes >= least * 1e9)

    def with_steps(self, text: str) -> Profile:
        """The profile with other step counts, comma-separated per phase; empty keeps one."""
        if not text:
            return self
        sizes = [size.strip() for size in text.split(",")]
        names = ", ".join(phase.name for phase in self.phases)
        if len(sizes) != len(self.phases) or any(not _is_size(size) for size in sizes):
            raise ValueError(
                f"phase steps {text!r} do not fit profile {self.name}, which has the phases "
                f"{names}; write a whole number >= 1, {ALL} or nothing for each, between commas"
            )
        phases = (
            replace(phase, steps=int(size) if size.isdigit() else size or phase.steps)
            for phase, size in zip(self.phases, sizes, strict=True)
        )
        return replace(self, phases=tuple(phases))

    def only(self, text: str) -> Profile:
        """The profile with only the named phases, comma-separated; empty keeps all."""
        wanted = [name.strip() for name in text.split(",")] if text else []
        known = [phase.name for phase in self.phases]
        for name in wanted:
            if name not in known:
                raise ValueError(
                    f"profile {self.name} has no phase {name!r}; choose from {', '.join(known)}"
                )
        if not wanted:
            return self
        return replace(self, phases=tuple(p for p in self.phases if p.name in wanted))


def load_profiles(path: Path = FILE) -> dict[str, Profile]:
    """All profiles of the file by name."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: _profile(name, table, path) for name, table in content.items()}


def load_profile(name: str) -> Profile:
    """One profile; for an unknown name the error suggests the nearest."""
    profiles = load_profiles()
    if name not in profiles:
        raise ValueError(
            f"there is no profile {name!r}; the nearest is {nearest(name, profiles)!r}; "
            f"all of them: {', '.join(profiles)}"
        )
    return profiles[name]


def _profile(name: str, table: Mapping[str, Any], path: Path) -> Profile:
    where = f"{path.name}: {name}"
    # A typing error in profiles.toml must not be ignored silently.
    _only_known(table, [item.name for item in fields(Profile)], where)
    phases = []
    for phase in table["phases"]:
        _only_known(phase, [item.name for item in fields(Phase)], f"{where}.phases")
        phases.append(Phase(**{**phase, "flags": tuple(phase.get("flags", ()))}))
    given: dict[str, Any] = {**table, "name": name, "phases": phases}
    # TOML arrays are lists; the frozen dataclasses hold tuples.
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    return Profile(**given)


def _only_known(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {key!r}; the nearest is {nearest(key, known)!r}"
            )


def _is_size(text: str) -> bool:
    return text in ("", ALL) or (text.isascii() and text.isdigit() and int(text) >= 1)
