"""`nsa dashboard`: serve the page until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from nsa.config.env import check_environment
from nsa.web.access import Access, find_token
from nsa.web.server import Server
from nsa.web.source import Sources


def dashboard(args: argparse.Namespace) -> int:
    """Listen at once, and read meanwhile."""
    folders = [_folder(path) for path in args.folders]
    check_environment()
    access = Access.of(args.host, find_token(args.token, args.token_file))
    sources = Sources(folders)
    with _listen(args.host, args.port, access, sources) as server:
        sources.start()
        print(f"nsa dashboard: {server.url} (Ctrl-C ends it; it only reads)", flush=True)
        if access.token is not None:
            print("open it with ?token=... once; the browser keeps a cookie", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give run folders (train.out_dir)")
    return path.resolve()


def _listen(host: str, port: int, access: Access, sources: Sources) -> Server:
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port} is not a port; give 0 to 65535")
    try:
        return Server(host, port, access, sources)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host} port {port} ({error.strerror or error}); "
            "give another --port, or 0 for a free one"
        ) from None
