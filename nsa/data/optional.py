"""Packages that only some data needs: imported where used, and asked for by their install line."""

from __future__ import annotations

import importlib
from types import ModuleType

from nsa.data.errors import DataError

INSTALL = "pip install -c constraints.txt 'nsa[data]'"


def need(module: str, reason: str) -> ModuleType:
    """Import a module of the `data` extra, or say which line installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{reason} needs the package {package} ({error}); {INSTALL}") from None
