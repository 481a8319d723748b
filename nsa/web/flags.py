"""The flags of `nsa dashboard`, apart from what it does: the command line needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

HOST, PORT = "127.0.0.1", 8787


def add_dashboard_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nsa dashboard`."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_DIR", help="one, or many")
    parser.add_argument(
        "--host", default=HOST, help="address to listen at (%(default)s); others need a token"
    )
    parser.add_argument("--port", type=int, default=PORT, help="(%(default)d); 0 takes a free one")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds what a browser must know; only its owner may read it "
        "(or the variable NSA_DASHBOARD_TOKEN)",
    )
    parser.add_argument(
        "--token", metavar="TEXT", help="the same; others on this machine see it in `ps`"
    )
