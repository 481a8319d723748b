"""Parse command lines strictly, and resolve YAML, environment and overrides into one Config."""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from nsa.config.check import ConfigError, nearest
from nsa.config.env import BOOLEANS, config_overrides
from nsa.config.schema import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig


# --- command-line parsing ---

BAD_INPUT = 2
"""Exit code for bad input."""
INTERRUPTED = 130
"""Exit code after Ctrl-C; a training run handles Ctrl-C itself and exits with 0."""


class StrictParser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations; errors are one line with exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]  # typeshed overloads the namespace type
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; reject unknown arguments here, where this subcommand's flags are known."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._explain(rest[0]))
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _explain(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; remove it, or write it after all flags"
        flag = word.partition("=")[0]
        known = nearest(flag, self._option_string_actions)
        return f"unknown flag {flag!r}; the nearest known one is {known!r}"


# --- the config: defaults < YAML < environment < overrides ---

INHERITS = "inherits"
REPOSITORY = Path(__file__).resolve().parents[2]
MOST_BYTES, MOST_DEPTH, MOST_NODES, MOST_HEIRS = 1 << 18, 16, 10_000, 16
"""Limits of a config: bytes per file, nesting depth, number of values, length of the chain."""


GROUPS = tuple(field.name for field in dataclasses.fields(Config))
KNOWN_LINE = re.compile(
    rf"(?:^|[{{,])[ \t]*[\"']?({'|'.join((INHERITS, *GROUPS))})[\"']?[ \t]*:", re.MULTILINE
)
"""Matches a line that only a config contains."""
WRITE = f"write at least one of {', '.join(GROUPS)}, or `{INHERITS}: base.yaml`"


class Setting(NamedTuple):
    """One value for one key, and the source that set it."""

    key: str
    value: Any
    origin: str


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Resolve defaults < YAML (base first) < environment < `group.key=value` overrides."""
    settings = _from_yaml(Path(path), ())
    settings += [_split(text, f"environment {name}") for name, text in config_overrides(environ)]
    settings += [_split(text, "command line") for text in overrides]
    return build(settings)


def build(settings: Sequence[Setting]) -> Config:
    """Apply settings to the defaults in order (last wins), then validate the whole tree."""
    from omegaconf import OmegaConf  # slow import: half the start-up time of a small command

    tree = OmegaConf.structured(Config)
    OmegaConf.set_readonly(tree, False)  # OmegaConf makes frozen dataclasses read-only
    for group in tree:
        OmegaConf.set_readonly(tree[group], False)
    for setting in settings:
        _apply(tree, setting)
    try:
        config = OmegaConf.to_object(tree)
    except ConfigError as error:
        # The later setting wins here as well, so the error names the source that took effect.
        origins = {setting.key: setting.origin for setting in settings}
        raise ConfigError(f"{error} ({origins.get(error.key, 'default')})", key=error.key) from None
    assert isinstance(config, Config)
    return config


def to_container(config: Config) -> dict[str, dict[str, Any]]:
    """The tree as plain dicts and values, as stored in checkpoints."""
    return dataclasses.asdict(config)


@cache
def known_keys() -> dict[str, type]:
    """Every "group.key" of the tree with its type."""
    return {
        f"{group}.{key}": type(value)
        for group, values in to_container(Config()).items()
        for key, value in values.items()
    }


def parse_config(text: str, origin: str) -> Config:
    """Parse a config without `inherits`, as stored in a run folder."""
    return build([*_flatten(_parse_yaml(text, origin), origin)])


def _from_yaml(path: Path, heirs: tuple[Path, ...]) -> list[Setting]:
    # Resolved paths, or a symlink could hide a cycle.
    if path.resolve() in heirs:
        chain = " -> ".join(p.name for p in (*heirs, path))
        raise ConfigError(f"{path}: {INHERITS} goes in a circle ({chain}); remove one of the links")
    if len(heirs) >= MOST_HEIRS:
        raise ConfigError(f"{path}: more than {MOST_HEIRS} files inherit in a row; use fewer")
    content = _parse_yaml(_read_file(path), str(path))
    parent = content.pop(INHERITS, None)
    inherited: list[Setting] = []
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: {INHERITS}={parent!r} is not a file name; name one file")
        inherited = _from_yaml(path.parent / parent, (*heirs, path.resolve()))
    return [*inherited, *_flatten(content, str(path))]


def _read_file(path: Path) -> str:
    """Read a file named by the user; symlinks are allowed."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file; {_existing(path)}")
    try:
        with path.open("rb") as file:
            # One byte more than allowed tells "too large" without reading all of it.
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: is larger than {MOST_BYTES} bytes, so it is no config")
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8, so it is no config; name another file") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a file that you can read"
        ) from None


def _parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """The groups of a config.

    For a file that is not a config, the error shows none of its content: it may be a file that the
    reader of the message must not see.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        _limit_nesting(text)
        # resolve=False: ${...} must not read the environment or other keys.
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except (YAMLError, ValueError, OSError, OmegaConfBaseException) as error:
        reason = f": {_reason(error)}" if KNOWN_LINE.search(text) else ""
        raise ConfigError(f"{origin}: cannot be read as YAML{reason}; correct the file") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{origin}: holds a {type(content).__name__}; it must hold groups of keys"
        )
    if not content:
        raise ConfigError(f"{origin}: is empty, which would be a run with every default; {WRITE}")
    keys = [str(key) for key in content]
    # A misspelled group is a typing error with a better message later; here nothing matches.
    if not any(get_close_matches(key, (INHERITS, *GROUPS), n=1) for key in keys):
        raise ConfigError(f"{origin}: is no config, it has none of the groups; {WRITE}")
    return dict(zip(keys, content.values(), strict=True))


def _reason(error: Exception) -> str:
    """What is wrong and where, without quoting the text."""
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return where + " ".join(f"{error.problem or error.context}".split())
    return " ".join(str(error).split())[:200]


def _limit_nesting(text: str) -> None:
    """Reject YAML that is small as text but huge or deeply nested as data, before building it.

    YAML aliases can expand exponentially ("billion laughs"); a config needs only groups of keys.
    """
    import yaml

    sizes: dict[str, int] = {}  # nodes below each anchor, with aliases expanded
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
        elif isinstance(event, yaml.ScalarEvent | yaml.AliasEvent | yaml.CollectionEndEvent):
            anchor, size = event.anchor if isinstance(event, yaml.NodeEvent) else None, 1
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = open_nodes.pop()
            elif isinstance(event, yaml.AliasEvent):
                anchor, size = None, sizes.get(str(event.anchor), 1)
            if anchor is not None:
                sizes[anchor] = size
            outer, so_far = open_nodes[-1]
            open_nodes[-1] = outer, so_far + size
        if len(open_nodes) - 1 > MOST_DEPTH or open_nodes[-1][1] > MOST_NODES:
            raise yaml.YAMLError(
                f"more than {MOST_DEPTH} levels, or {MOST_NODES} values; a config has groups of "
                "keys, each with one value"
            )


def _existing(path: Path) -> str:
    for folder in (path.parent, REPOSITORY / "configs"):
        names = sorted(str(folder / p.name) for p in folder.glob("*.yaml"))
        if names:
            return "choose one of " + ", ".join(names)
    return f"there is no config in {path.parent}"


def _flatten(content: Mapping[str, Any], origin: str) -> Iterator[Setting]:
    for group, values in content.items():
        if group not in GROUPS:
            known = nearest(group, GROUPS)
            raise ConfigError(f"{origin}: unknown group {group!r}; the nearest known is {known!r}")
        if not isinstance(values, dict):
            raise ConfigError(
                f"{origin}: {group}={values!r:.80} is no group; put its keys under it"
            )
        for key, value in values.items():
            yield Setting(f"{group}.{key}", value, origin)


def _split(text: str, origin: str) -> Setting:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{origin}: {text!r} is not an override; write group.key=value")
    return Setting(key.strip(), value.strip(), origin)


def _apply(tree: DictConfig, setting: Setting) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    kinds = known_keys()
    if setting.key not in kinds:
        known = nearest(setting.key, kinds)
        raise ConfigError(
            f"{setting.origin}: unknown key {setting.key!r}; the nearest known is {known!r}; "
            "correct it or remove it"
        )
    kind = kinds[setting.key]
    if not _fits(kind, setting.value):
        raise _wrong_type(setting, kind)
    try:
        OmegaConf.update(tree, setting.key, setting.value)
    except OmegaConfBaseException:
        raise _wrong_type(setting, kind) from None


def _fits(kind: type, value: Any) -> bool:
    """Reject values that OmegaConf would convert silently: 2 to True, 5 to "5", ${...}."""
    if kind is bool:
        return str(value).lower() in BOOLEANS
    if isinstance(value, str):
        return "${" not in value
    return kind is not str


def _wrong_type(setting: Setting, kind: type) -> ConfigError:
    allowed = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text (in YAML: quote it; no ${...})",
    }[kind]
    return ConfigError(
        f"{setting.origin}: {setting.key}={setting.value!r:.80} has the wrong type; "
        f"it must be {allowed}; correct the value"
    )
