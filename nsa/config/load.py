"""Parse command lines strictly, and resolve YAML, environment and overrides into one Config."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nsa.config.check import ConfigError, nearest
from nsa.config.env import BOOLEANS, config_overrides
from nsa.config.schema import Config

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
PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parent
"""The clone; for an installed wheel it is site-packages."""
DEFAULT = "quickstart"
"""The config of a command that names none."""
MOST_BYTES, MOST_DEPTH, MOST_NODES, MOST_HEIRS = 1 << 18, 16, 10_000, 16
"""Limits of a config: bytes per file, nesting depth, number of values, length of the chain."""


GROUPS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
"""The groups of the tree by name, each a class."""
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
    """Resolve defaults < YAML (base first) < environment < `group.key=value` overrides.

    `path` is a file, or the name of a bundled config.
    """
    settings = _from_yaml(find_config(path), ())
    settings += [
        parse_override(text, f"environment {name}") for name, text in config_overrides(environ)
    ]
    settings += [parse_override(text, "command line") for text in overrides]
    return build(settings)


def find_config(name: str | Path) -> Path:
    """A file by its path, or a bundled config by its name: `quickstart`, `configs/quickstart.yaml`.

    A file of that path wins, except over a bare name: a folder or file called `quickstart` in the
    working directory must not change what `--config quickstart` means. `./quickstart` is a file.
    """
    path = Path(name)
    bundled = None if str(name).startswith(f".{os.sep}") else _bundled(path)
    is_bare = path.suffix != ".yaml" and path.parent == Path()
    return bundled if bundled is not None and (is_bare or not path.is_file()) else path


def bundled_names() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(path.stem for path in _bundled_folder().glob("*.yaml"))


def _bundled(path: Path) -> Path | None:
    if path.parent not in (Path(), Path("configs")):
        return None
    if path.parent == Path("configs") and path.suffix != ".yaml":
        return None
    file = _bundled_folder() / f"{path.name.removesuffix('.yaml')}.yaml"
    return file if file.is_file() else None


def _bundled_folder() -> Path:
    """In a wheel the configs are inside the package, in a clone beside it."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else REPOSITORY / "configs"


def build(settings: Sequence[Setting]) -> Config:
    """Apply settings to the defaults in order (last wins), then validate the whole tree."""
    values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for setting in settings:
        value = _convert(setting)
        group, _, key = setting.key.partition(".")
        values[group][key] = value
    try:
        return Config(**{group: kind(**values[group]) for group, kind in GROUPS.items()})
    except ConfigError as error:
        # The later setting wins here as well, so the error names the source that took effect.
        origins = {setting.key: setting.origin for setting in settings}
        raise ConfigError(f"{error} ({origins.get(error.key, 'default')})", key=error.key) from None


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
        raise ConfigError(f"{path}: {INHERITS} is circular ({chain}); remove one of these lines")
    if len(heirs) >= MOST_HEIRS:
        raise ConfigError(f"{path}: inherits through more than {MOST_HEIRS} files; use fewer")
    content = _parse_yaml(_read_file(path), str(path))
    parent = content.pop(INHERITS, None)
    inherited: list[Setting] = []
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: {INHERITS}={parent!r} is not a file name; name one file")
        beside = path.parent / parent
        base = beside if beside.is_file() else _bundled(Path(parent)) or beside
        inherited = _from_yaml(base, (*heirs, path.resolve()))
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
            raise ConfigError(
                f"{path}: has more than {MOST_BYTES} bytes, so is not a config; use another file"
            )
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8, so not a config; use another file") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); use a readable file"
        ) from None


def _parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """The groups of a config.

    For a file that is not a config, the error shows none of its content: it may be a file that the
    reader of the message must not see.
    """
    import yaml  # here, because what needs no config starts faster without it

    class Loader(_safe_loader()):  # type: ignore[misc]  # one of two classes
        """Refuses a key that is given twice, where YAML would take the last; a date is text."""

        yaml_implicit_resolvers = {  # noqa: RUF012  as the base class has it
            first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in names:
                if key.value in [other.value for other in names if other is not key]:
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate key {key.value!r:.80}", problem_mark=key.start_mark
                    )
            return dict(super().construct_mapping(node, deep=deep))

    try:
        _limit_nesting(text)
        content = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        reason = f": {_reason(error)}" if KNOWN_LINE.search(text) else ""
        raise ConfigError(f"{origin}: cannot be read as YAML{reason}; correct the file") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{origin}: contains a {type(content).__name__}; a config has groups of keys"
        )
    if not content:
        raise ConfigError(f"{origin}: is empty, which would mean every default; {WRITE}")
    keys = [str(key) for key in content]
    # A misspelled group is a typing error with a better message later; here nothing matches.
    if not any(get_close_matches(key, (INHERITS, *GROUPS), n=1) for key in keys):
        raise ConfigError(f"{origin}: is not a config: it has none of the groups; {WRITE}")
    return dict(zip(keys, content.values(), strict=True))


def _safe_loader() -> Any:
    """PyYAML's SafeLoader, the C one where it was built: ten times as fast."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
    for event in yaml.parse(text, Loader=_safe_loader()):
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
    """Suggestions: the configs in the same folder, and the bundled names."""
    bundled = f"a bundled config is named without a path: {', '.join(bundled_names())}"
    if path.parent == Path() and path.suffix != ".yaml":
        return f"{bundled}; a file is named with one: ./{path.name}.yaml"
    names = sorted(str(path.parent / p.name) for p in path.parent.glob("*.yaml"))
    return f"choose one of {', '.join(names)}; {bundled}" if names else bundled


def _flatten(content: Mapping[str, Any], origin: str) -> Iterator[Setting]:
    for group, values in content.items():
        if group not in GROUPS:
            known = nearest(group, GROUPS)
            raise ConfigError(f"{origin}: unknown group {group!r}; the nearest known is {known!r}")
        if not isinstance(values, dict):
            raise ConfigError(f"{origin}: {group}={values!r:.80} is not a group; put keys under it")
        for key, value in values.items():
            yield Setting(f"{group}.{key}", value, origin)


def parse_override(text: str, origin: str) -> Setting:
    """The setting of `group.key=value`; `build` checks and converts it."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{origin}: {text!r} is not an override; write group.key=value")
    return Setting(key.strip(), value.strip(), origin)


def _convert(setting: Setting) -> bool | int | float | str:
    """The value as its key's type. Text is parsed; nothing else turns into another type."""
    kinds = known_keys()
    if setting.key not in kinds:
        known = nearest(setting.key, kinds)
        raise ConfigError(
            f"{setting.origin}: unknown key {setting.key!r}; the nearest known is {known!r}; "
            "correct it or remove it"
        )
    kind, value = kinds[setting.key], setting.value
    if kind is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    if kind is str and isinstance(value, str) and "${" not in value:
        return value
    # type(), because isinstance would take True for the number 1.
    if (kind is int and type(value) in (int, str)) or (
        kind is float and type(value) in (int, float, str)
    ):
        try:
            return int(value) if kind is int else float(value)
        except (ValueError, OverflowError):
            pass
    raise _wrong_type(setting, kind)


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
