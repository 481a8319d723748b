"""A hub on loopback that the real `datasets` client streams from, and that misbehaves on demand.

It speaks the part of the Hugging Face Hub protocol that streaming needs: the description of a
dataset, its tree, the paths of files, and files by range. Run it in the test's own process, and
give `environment()` to the process that reads from it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet

REPO = "HuggingFaceFW/fineweb-edu"
SUBSET = "sample-10BT"
SHA = "0123456789abcdef0123456789abcdef01234567"
README = f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: {SUBSET}
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def parquet_bytes(texts: Iterable[str], rows_per_group: int = 8) -> bytes:
    """A Parquet file like those of the real dataset: text and other columns, in row groups."""
    texts = list(texts)
    table = pyarrow.table({"text": texts, "id": [str(i) for i in range(len(texts))]})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        table, sink, row_group_size=rows_per_group, write_page_checksum=True, compression="snappy"
    )
    return sink.getvalue().to_pybytes()


class Hub:
    """Serves files of one dataset; `files` maps a path in the repository to its bytes.

    Requests for the bytes of data files are numbered from 1, those for descriptions are not.
    `stalled` are never answered, `cut` get half of their answer before the connection is closed;
    `corrupt` has the offsets of bytes that are changed, by file.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = {"README.md": README.encode(), **files}
        self.stalled, self.cut = range(0), range(0)
        self.corrupt: dict[str, list[int]] = {}
        self.reads: list[tuple[str, int, int]] = []
        """(path, first byte, length) of every request for a data file."""
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables of a process that reads from here, and leaves nothing outside of `cache`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "HF_HUB_ETAG_TIMEOUT": "2",
        }

    def release(self) -> None:
        """Let stalled requests go, unanswered."""
        self._released.set()

    def count(self, path: str, start: int, length: int) -> tuple[bool, bool]:
        """Note a request for data, and return whether it stalls, and whether it is cut."""
        with self._lock:
            self.reads.append((path, start, length))
            number = len(self.reads)
            return number in self.stalled, number in self.cut

    def content(self, path: str) -> bytes:
        """The bytes of a file as they are sent."""
        content = bytearray(self.files[path])
        for offset in self.corrupt.get(path, []):
            content[offset] ^= 0xFF
        return bytes(content)

    def entry(self, path: str) -> dict[str, Any]:
        """A file as the tree lists it."""
        oid = hashlib.sha1(self.files[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": oid}

    def entries_under(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """What a folder holds, as the tree lists it."""
        prefix = f"{folder}/" if folder else ""
        inside = sorted(path for path in self.files if path.startswith(prefix))
        found: dict[str, dict[str, Any]] = {}
        for path in inside:
            *parents, _ = path[len(prefix) :].split("/")
            for depth in range(1, len(parents) + 1 if recursive else min(len(parents), 1) + 1):
                name = prefix + "/".join(parents[:depth])
                found[name] = {"type": "directory", "path": name, "size": 0, "oid": SHA}
            if recursive or not parents:
                found[path] = self.entry(path)
        return list(found.values())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self
        api = re.compile(rf"/api/datasets/{REPO}(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?")
        resolve = re.compile(rf"/datasets/{REPO}/resolve/([^/]+)/(.+)")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """The requests are kept in `reads`, not printed."""

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                path = unquote(url.path)
                if found := api.fullmatch(path):
                    self.describe(found[1], found[3] or "", "recursive=true" in url.query.lower())
                elif (found := resolve.fullmatch(path)) and found[2] in hub.files:
                    self.send_file(found[2])
                else:
                    self.send_json(
                        {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"}
                    )

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                found = api.fullmatch(unquote(urlsplit(self.path).path))
                if not found or found[1] != "paths-info":
                    self.send_json({"error": "Not found"}, 404)
                    return
                paths = parse_qs(body.decode())["paths"]
                self.send_json([hub.entry(path) for path in paths if path in hub.files])

            def describe(self, what: str | None, folder: str, recursive: bool) -> None:
                if what == "tree":
                    self.send_json(hub.entries_under(folder, recursive))
                    return
                siblings = [{"rfilename": path} for path in hub.files]
                self.send_json(
                    {"id": REPO, "sha": SHA, "private": False, "tags": [], "siblings": siblings}
                    | {"_id": "0", "downloads": 0, "likes": 0, "gated": False, "disabled": False}
                )

            def send_json(
                self, content: object, status: int = 200, headers: dict[str, str] | None = None
            ) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                for name, value in {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(body)),
                    "X-Repo-Commit": SHA,
                    **(headers or {}),
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def send_file(self, path: str) -> None:
                content = hub.content(path)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                first = int(wanted[1]) if wanted else 0
                last = int(wanted[2]) if wanted and wanted[2] else len(content) - 1
                body = content[first : last + 1]
                stalls = cuts = False
                if path != "README.md" and self.command == "GET":
                    stalls, cuts = hub.count(path, first, len(body))
                if stalls:
                    hub._released.wait()
                    self.close_connection = True
                    return
                self.send_response(206 if wanted else 200)
                if wanted:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hub.entry(path)["oid"]}"')
                self.send_header("X-Repo-Commit", SHA)
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(body[: len(body) // 2] if cuts else body)
                if cuts:
                    self.wfile.flush()
                    self.close_connection = True

        return Handler
