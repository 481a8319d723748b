"""config.yaml: every setting of a run as it was resolved; the file can be trained again."""

from __future__ import annotations

from pathlib import Path

import yaml

from nsa.config import Config, to_container
from nsa.config.load import parse_config
from nsa.files import read_text
from nsa.telemetry.atomic import write_text

NAME = "config.yaml"


def write_config(folder: Path, config: Config, source: str) -> Path:
    """Write the resolved settings, with the file that they came from in the first line."""
    head = f"# Resolved settings of a run that was started with {source}\n"
    write_text(folder / NAME, head + yaml.safe_dump(to_container(config), sort_keys=False))
    return folder / NAME


def read_config(folder: Path) -> Config:
    """Read the settings back; the environment took part when they were resolved, not again."""
    return parse_config(read_text(folder / NAME), str(folder / NAME))
