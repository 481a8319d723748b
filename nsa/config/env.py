"""The only module that reads environment variables: by name, with type and default."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.config.env_table import HIDDEN, TABLE, Value, Variable
from nsa.config.errors import ConfigError, nearest

BOOLEANS = {"1": True, "true": True, "yes": True, "on": True}
BOOLEANS |= {"0": False, "false": False, "no": False, "off": False}
"""Words for yes and no, in variables and in overrides; case does not matter."""


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return the value of a variable of the table, in its type; its default when unset or empty."""
    if name not in TABLE:
        raise KeyError(f"{name} is not in nsa/config/env_table.py; add a row for it there")
    text = _environ(environ).get(name, "")
    return _parse(TABLE[name], text) if text else TABLE[name].default


def raw(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return a variable as it was written, or None; for tables and for "was it chosen?"."""
    return _environ(environ).get(name)


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse unknown NSA_* names, values that do not parse, and switches nothing honours yet."""
    environ = _environ(environ)
    for name in sorted(environ):
        if name in TABLE:
            _check_known(TABLE[name], environ)
        elif name.startswith("NSA_"):
            known = nearest(name, (n for n in TABLE if n.startswith("NSA_")))
            raise ConfigError(
                f"{name}={environ[name]!r}: no such environment variable; the nearest known one is "
                f"{known}; unset it, or see all with `nsa env`"
            )


def config_overrides(environ: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (variable, "group.key=value") for each config setting that the environment makes."""
    environ = _environ(environ)
    if read("NSA_NO_GC", environ) and read("NSA_GC_RANGE", environ):
        raise ConfigError(
            f"NSA_NO_GC={environ['NSA_NO_GC']} and NSA_GC_RANGE={environ['NSA_GC_RANGE']} "
            "contradict each other; one turns gradient checkpointing off, the other on; unset one"
        )
    for variable in TABLE.values():
        if read(variable.name, environ) != variable.default:
            for override in variable.sets:
                yield variable.name, override.format(environ[variable.name])


def in_effect(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that this package honours and that are not at their default."""
    environ = _environ(environ)
    return {
        name: HIDDEN if variable.secret else environ[name]
        for name, variable in TABLE.items()
        if variable.honoured == "code" and read(name, environ) != variable.default
    }


def recorded(
    names: Sequence[str], prefixes: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables with these names or prefixes as they are written, for a run's record."""
    environ = _environ(environ)
    chosen = (name for name in environ if name in names or name.startswith(tuple(prefixes)))
    return {name: environ[name] for name in sorted(chosen)}


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def _check_known(variable: Variable, environ: Mapping[str, str]) -> None:
    ours = variable.name.startswith("NSA_") or variable.honoured == "code"
    if not ours:  # HOST or PORT may be somebody else's, and mean something else
        return
    value = read(variable.name, environ)
    if variable.honoured == "planned" and value != variable.default:
        raise ConfigError(
            f"{variable.name}={environ[variable.name]!r}: this version does not honour it "
            f"({variable.meaning}); only its default {variable.default!r} is allowed; unset it"
        )


def _parse(variable: Variable, text: str) -> Value:
    if variable.kind is bool:
        if text.lower() not in BOOLEANS:
            raise _bad_value(variable, text, "0 or 1")
        return BOOLEANS[text.lower()]
    if variable.kind is str:
        if variable.choices and text not in variable.choices:
            raise _bad_value(variable, text, " or ".join(variable.choices))
        return text
    return _parse_number(variable, text)


def _parse_number(variable: Variable, text: str) -> Value:
    allowed = "a whole number >= 0" if variable.kind is int else "a number >= 0"
    try:
        value: float = variable.kind(text)
    except ValueError:
        raise _bad_value(variable, text, allowed) from None
    if not 0 <= value < float("inf"):
        raise _bad_value(variable, text, allowed)
    return value


def _bad_value(variable: Variable, text: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{variable.name}={text!r} is not allowed; use {allowed}, or unset it ({variable.meaning})"
    )


def set_default(name: str, value: str) -> None:
    """Set a variable that a library reads when it starts, unless somebody has set it."""
    os.environ.setdefault(name, value)


def translate_torch_logs() -> None:
    """Take the old channel `sdp` out of TORCH_LOGS, and log the routes of attention instead.

    torch raises on that name when it is imported, so entries call this before. Where something has
    tried to import torch already, as a sitecustomize may, half of it is left in this process, which
    then starts itself anew.
    """
    channels = os.environ.get("TORCH_LOGS", "").split(",")
    kept = [channel for channel in channels if channel.strip().lstrip("+-") != "sdp"]
    if kept == channels:
        return
    os.environ["TORCH_LOGS"] = ",".join(kept)
    if not os.environ["TORCH_LOGS"]:
        del os.environ["TORCH_LOGS"]
    os.environ.setdefault("NSA_SDPA_AUDIT", "1")
    text = "[boot] TORCH_LOGS: torch has no channel `sdp`; NSA_SDPA_AUDIT=1 logs the routes instead"
    print(text, file=sys.stderr, flush=True)
    if any(name.partition(".")[0] == "torch" for name in sys.modules):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def with_package() -> dict[str, str]:
    """The environment with this package's folder first among those that Python imports from."""
    folder = str(Path(__file__).resolve().parents[2])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *others])}


def changed(values: Mapping[str, str]) -> dict[str, str]:
    """The environment with other values for some variables, for a process that is started."""
    return {**os.environ, **values}
