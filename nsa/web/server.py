"""The dashboard's HTTP server: JSON under /api, the static page, and access checks."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from nsa.web.access import Access
from nsa.web.header import describe_charts

MOST_POINTS = 2000
FAR = 1e15
"""Larger than any step and any number of seconds."""
Query = Mapping[str, str]


# --- /api: each path is a function of the query that returns plain data ---


class Run(Protocol):
    """One run; implemented by nsa.web.source.Source."""

    def series(self, first: float, last: float, points: int) -> dict[str, Any]: ...
    def layers(self, first: float, last: float, points: int) -> dict[str, Any]: ...
    def selection(self, step: int) -> dict[str, Any]: ...
    def timeline(self, last_s: float, cells: int) -> dict[str, Any]: ...
    def samples(self) -> dict[str, Any]: ...
    def log(self) -> dict[str, Any]: ...


class Runs(Protocol):
    """All runs; implemented by nsa.web.source.Sources."""

    def runs(self) -> dict[str, Any]: ...
    def get(self, index: int) -> Run: ...
    def settings(self) -> dict[str, Any]: ...


def answer(runs: Runs, path: str, query: Query) -> dict[str, Any]:
    """The answer for a path; LookupError if unknown, ValueError for a bad query."""
    return PATHS[path](runs, query)


def _series(runs: Runs, query: Query) -> dict[str, Any]:
    first, last, points = _window(query)
    return _run(runs, query).series(first, last, points)


def _layers(runs: Runs, query: Query) -> dict[str, Any]:
    first, last, points = _window(query)
    return _run(runs, query).layers(first, last, points)


def _selection(runs: Runs, query: Query) -> dict[str, Any]:
    return _run(runs, query).selection(int(_number(query, "step", FAR, 0, FAR)))


def _timeline(runs: Runs, query: Query) -> dict[str, Any]:
    last_s = _number(query, "last_s", FAR, 1, FAR)
    return _run(runs, query).timeline(last_s, int(_number(query, "cells", 240, 1, MOST_POINTS)))


PATHS: dict[str, Callable[[Runs, Query], dict[str, Any]]] = {
    "/api/runs": lambda runs, query: runs.runs(),
    "/api/charts": lambda runs, query: describe_charts(),
    "/api/settings": lambda runs, query: runs.settings(),
    "/api/series": _series,
    "/api/layers": _layers,
    "/api/selection": _selection,
    "/api/timeline": _timeline,
    "/api/samples": lambda runs, query: _run(runs, query).samples(),
    "/api/log": lambda runs, query: _run(runs, query).log(),
}


def _run(runs: Runs, query: Query) -> Run:
    return runs.get(int(_number(query, "run", 0, 0, FAR)))


def _window(query: Query) -> tuple[float, float, int]:
    first, last = _number(query, "from", 0, -FAR, FAR), _number(query, "to", FAR, -FAR, FAR)
    return first, last, int(_number(query, "points", 600, 1, MOST_POINTS))


def _number(query: Query, name: str, default: float, least: float, most: float) -> float:
    text = query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ValueError(f"{name}={text!r:.40} is not a number from {least:g} to {most:g}")
    return value


# --- HTTP: GET and HEAD only ---
# A request path is never opened as a file: static files come from a table by name, runs by index.
# The number of connections and the size of answers are bounded.

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
PAGE, LOGIN = "index.html", "login.html"
MOST_CONNECTIONS = 64
WRONG_TOKEN_S = 0.5
"""Delay before a wrong token is answered, to slow down guessing."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_files() -> dict[str, bytes]:
    """The static files by name."""
    folder = resources.files("nsa.web") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


class Server(ThreadingHTTPServer):
    """Binds and listens on construction."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, access: Access, runs: Runs) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.access, self.runs, self.files = access, runs, page_files()
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """Address for a browser on this machine."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread; drop it if MOST_CONNECTIONS are open."""
        # Do not block: this is the accept loop, and would stop serving everybody.
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In that thread: release the connection slot at the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect; log everything else."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "nsa", ""
    timeout = 30

    def do_GET(self) -> None:
        """Check access, then route the request."""
        if not self.server.access.knows_host(self.headers.get("Host")):
            self._error(
                HTTPStatus.MISDIRECTED_REQUEST, "the Host header does not name this machine"
            )
            return
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, max_num_fields=20))
        # Static files need no token: the login page uses them.
        if parts.path.startswith("/static/"):
            self._file(parts.path.removeprefix("/static/"))
        elif parts.path == "/" and "token" in query:
            self._log_in(query["token"])
        elif not self._is_admitted():
            self._refuse(parts.path)
        elif parts.path == "/":
            self._file(PAGE)
        elif parts.path in PATHS:
            self._api(parts.path, query)
        else:
            self._error(HTTPStatus.NOT_FOUND, "there is nothing here")

    # `_send` omits the body for HEAD.
    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the request line may contain the token."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors raised by the base class, e.g. an unknown method, as our JSON."""
        self.close_connection = True
        self._error(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _is_admitted(self) -> bool:
        authorization, cookie = self.headers.get("Authorization"), self.headers.get("Cookie")
        return self.server.access.admits(authorization, cookie)

    def _log_in(self, token: str) -> None:
        """Log in: store a session cookie and redirect, so that the token leaves the address bar."""
        if not self.server.access.knows_token(token):
            time.sleep(WRONG_TOKEN_S)
            self._file(LOGIN, HTTPStatus.UNAUTHORIZED)
            return
        headers = {"Location": "/", "Set-Cookie": self.server.access.cookie()}
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", headers)

    def _refuse(self, path: str) -> None:
        if path == "/":
            self._file(LOGIN, HTTPStatus.UNAUTHORIZED)
        else:
            self._error(HTTPStatus.UNAUTHORIZED, "this dashboard requires a token")

    def _api(self, path: str, query: dict[str, str]) -> None:
        try:
            self._json(answer(self.server.runs, path, query))
        except LookupError as error:
            self._error(HTTPStatus.NOT_FOUND, str(error))
        except ValueError as error:
            self._error(HTTPStatus.BAD_REQUEST, str(error))

    def _file(self, name: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = self.server.files.get(name)
        kind = TYPES.get(name[name.rfind(".") :])
        if content is None or kind is None:
            self._error(HTTPStatus.NOT_FOUND, "there is no such file")
            return
        self._send(status, content, kind)

    def _error(self, status: HTTPStatus, text: str) -> None:
        self._json({"error": text}, status)

    def _json(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        self._send(status, text.encode(), "application/json")

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        # An unparsable request fails before the headers are set.
        accepted = getattr(self, "headers", None)
        # Level 1: on a slow machine the answer must not wait for the compressor.
        is_zipped = len(body) > 1000 and "gzip" in (accepted or {}).get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if is_zipped else body
        self.send_response(status)
        for name, value in (HEADERS | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if is_zipped:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
