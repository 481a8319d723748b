"""From a YAML file, the environment and the command line to one checked config tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa.config.env import BOOLEANS, config_overrides
from nsa.config.errors import ConfigError, nearest
from nsa.config.schema import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig

INHERITS = "inherits"
REPOSITORY = Path(__file__).resolve().parents[2]


class Setting(NamedTuple):
    """One value for one key, and who asks for it."""

    key: str
    value: Any
    origin: str


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Resolve defaults < YAML (base first) < environment < `group.key=value` overrides."""
    settings = [*_from_yaml(Path(path), ())]
    settings += [_split(text, f"environment {name}") for name, text in config_overrides(environ)]
    settings += [_split(text, "command line") for text in overrides]
    return build(settings)


def build(settings: Sequence[Setting]) -> Config:
    """Apply settings to the defaults, the last one wins, and check the result as a whole."""
    from omegaconf import OmegaConf  # half of the start of a command that reads no config

    tree = OmegaConf.structured(Config)
    OmegaConf.set_readonly(tree, False)  # the dataclasses are frozen, the tree is not yet
    for group in tree:
        OmegaConf.set_readonly(tree[group], False)
    for setting in settings:
        _apply(tree, setting)
    try:
        config = OmegaConf.to_object(tree)
    except ConfigError as error:
        origins = {setting.key: setting.origin for setting in settings}
        raise ConfigError(f"{error} ({origins.get(error.key, 'default')})", key=error.key) from None
    assert isinstance(config, Config)
    return config


def to_container(config: Config) -> dict[str, dict[str, Any]]:
    """Return the tree as plain dicts of plain values, as checkpoints store it."""
    return dataclasses.asdict(config)


@cache
def known_keys() -> dict[str, type]:
    """Return every "group.key" of the tree with its type."""
    return {
        f"{group}.{key}": type(value)
        for group, values in to_container(Config()).items()
        for key, value in values.items()
    }


def _from_yaml(path: Path, heirs: tuple[Path, ...]) -> Iterator[Setting]:
    if path.resolve() in heirs:
        chain = " -> ".join(p.name for p in (*heirs, path))
        raise ConfigError(f"{path}: {INHERITS} goes in a circle ({chain}); remove one of the links")
    content = _read_yaml(path)
    parent = content.pop(INHERITS, None)
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: {INHERITS}={parent!r} is not a file name; name one file")
        yield from _from_yaml(path.parent / parent, (*heirs, path.resolve()))
    yield from _flatten(content, str(path))


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file; {_existing(path)}")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {reason}; correct the file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}; it must hold groups of keys")
    return {str(key): value for key, value in content.items()}


def _existing(path: Path) -> str:
    for folder in (path.parent, REPOSITORY / "configs"):
        names = sorted(str(folder / p.name) for p in folder.glob("*.yaml"))
        if names:
            return "choose one of " + ", ".join(names)
    return f"there is no config in {path.parent}"


def _flatten(content: Mapping[str, Any], origin: str) -> Iterator[Setting]:
    groups = {key.split(".")[0] for key in known_keys()}
    for group, values in content.items():
        if group not in groups:
            known = nearest(group, groups)
            raise ConfigError(f"{origin}: unknown group {group!r}; the nearest known is {known!r}")
        if not isinstance(values, dict):
            raise ConfigError(f"{origin}: {group}={values!r} is no group; put its keys under it")
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
    """Refuse what OmegaConf would convert: 2 to True, 5 to "5", and ${...} to something else."""
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
        f"{setting.origin}: {setting.key}={setting.value!r} has the wrong type; "
        f"it must be {allowed}; correct the value"
    )
