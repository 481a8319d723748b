"""`nsa dashboard`: serve the page until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.config.env import check_environment

if TYPE_CHECKING:
    from nsa.web.access import Access
    from nsa.web.server import Server
    from nsa.web.source import Sources

HOST, PORT = "127.0.0.1", 8787


def register(commands: Any) -> None:
    """Add the command to the `nsa` parser."""
    text = "show run folders in a browser, live and side by side; read-only"
    parser = commands.add_parser("dashboard", help=text, description=text)
    parser.set_defaults(command=dashboard)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="RUN_DIR", help="run folders (train.out_dir)"
    )
    parser.add_argument(
        "--host",
        default=HOST,
        help="address to listen on (%(default)s); a reachable one needs a token",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="port (%(default)d); 0 picks a free one"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the access token, mode 600; default: $NSA_DASHBOARD_TOKEN",
    )
    parser.add_argument(
        "--token",
        metavar="TEXT",
        help="the token itself; other users of this machine can see it in `ps`",
    )


def dashboard(args: argparse.Namespace) -> int:
    """Serve immediately; a thread reads the run folders in the background."""
    from nsa.web.access import Access, find_token
    from nsa.web.source import Sources

    folders = [_folder(path) for path in args.folders]
    check_environment()
    access = Access.of(args.host, find_token(args.token, args.token_file))
    sources = Sources(folders)
    # Bind the port before the reader thread starts, so that a port in use fails at once.
    with _listen(args.host, args.port, access, sources) as server:
        sources.start()
        print(f"nsa dashboard: {server.url} (read-only; Ctrl-C to stop)", flush=True)
        if access.token is not None:
            print("open it with ?token=... once; the browser keeps a cookie", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; pass run folders (train.out_dir)")
    return path.resolve()


def _listen(host: str, port: int, access: Access, sources: Sources) -> Server:
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port} is not a port; use 0 to 65535")
    from nsa.web.server import Server

    try:
        return Server(host, port, access, sources)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); "
            "use another --port, or 0 for a free one"
        ) from None
