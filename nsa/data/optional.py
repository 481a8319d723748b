"""Packages that only some data needs: imported where used, and asked for by their install line."""

from __future__ import annotations

import importlib
from types import ModuleType

from nsa.data.errors import DataError

INSTALL = "pip install -c constraints.txt 'nsa[{extra}]'"


def need(module: str, reason: str, extra: str = "data") -> ModuleType:
    """Import a module of an extra, or say which line installs it."""
    try:
        found = importlib.import_module(module)
        if found.__file__ is None:  # a mere folder of that name somewhere on the import path
            raise ImportError(f"{list(found.__path__)} is not it")
        return found
    except ImportError as error:
        package = module.partition(".")[0]
        install = INSTALL.format(extra=extra)
        raise DataError(f"{reason} needs the package {package} ({error}); {install}") from None
