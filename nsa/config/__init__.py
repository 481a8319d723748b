"""Settings: the typed config tree, how it is resolved, and the table of environment variables."""

from nsa.config.check import ConfigError, nearest, parse_layers
from nsa.config.load import (
    BAD_INPUT,
    INTERRUPTED,
    Setting,
    StrictParser,
    build,
    known_keys,
    load_config,
    to_container,
)
from nsa.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    NSAConfig,
    RuntimeConfig,
    TrainConfig,
)

__all__ = [
    "BAD_INPUT",
    "INTERRUPTED",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "NSAConfig",
    "RuntimeConfig",
    "Setting",
    "StrictParser",
    "TrainConfig",
    "build",
    "known_keys",
    "load_config",
    "nearest",
    "parse_layers",
    "to_container",
]
