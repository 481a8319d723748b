"""The dashboard's server: who may ask, what can be read, what is never read, and how it grows."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from nsa.cli import dashboard as command
from nsa.cli.__main__ import main
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.recording import Recorder
from nsa.web.access import COOKIE, Access, find_token
from nsa.web.server import MOST_CONNECTIONS, Server, page_files
from nsa.web.source import Sources, names

TOKEN = "a-token-of-many-characters"


class Client:
    """Talks to a server under test; every answer is (status, headers, body)."""

    def __init__(self, server: Server) -> None:
        self.port = server.server_address[1]

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        response = connection.getresponse()
        found = response.status, response.headers, response.read()
        connection.close()
        return found

    def api(self, path: str, **query: object) -> Any:
        status, _, body = self.ask(f"/api/{path}?{urlencode(query)}")
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(tmp_path / "run", monkeypatch, ranks=2, log_every=10)
    recorder.run(200)
    recorder.status("running")
    return recorder


def serve(sources: Sources, token: str | None = None) -> Iterator[Client]:
    server = Server("127.0.0.1", 0, Access.of("127.0.0.1", token), sources)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Client(server)
    server.shutdown()
    thread.join()
    server.server_close()


def settled(*folders: Path) -> Sources:
    """Sources that have read everything; no thread runs."""
    sources = Sources(folders)
    for index in range(len(folders)):
        while sources.get(index).refresh():
            pass
    return sources


@pytest.fixture
def client(recorder: Recorder) -> Iterator[Client]:
    yield from serve(settled(recorder.folder))


# what is shown


def test_everything_that_a_run_recorded_can_be_asked_for(client: Client) -> None:
    (run,) = client.api("runs")["runs"]
    assert (run["name"], run["step"], run["steps"]) == ("run", 200, 50_000)
    assert run["loss"] > 0 and run["mfu"] == 0.31 and len(run["ranks"]) == 2
    series = client.api("series", run=0)
    columns = series["progress"]["columns"]
    assert series["progress"]["step"] == list(range(10, 201, 10))
    for name in ("loss", "toks_per_s", "mfu", "grad_norm", "fetch_p95_ms", "gpu_mem_alloc"):
        assert None not in columns[name]["mean"]
    assert columns["share_win"]["mean"][0] == 0.4 and columns["fb_total_fallbacks"]["mean"][0] == 0
    layers = client.api("layers", run=0)
    assert layers["fields"]["share_cmp"] == [[0.3] * 20] * 2
    timeline = client.api("timeline", run=0, cells=50)
    assert [rank["rank"] for rank in timeline["ranks"]] == [0, 1]
    settings = client.api("settings")
    assert any(row["key"] == "torch" for row in settings["env"])


def test_a_window_of_steps_can_be_asked_for(client: Client) -> None:
    window = client.api("series", run=0, **{"from": 55, "to": 95})["progress"]
    assert window["step"] == [60, 70, 80, 90]


def test_what_grows_is_read_on_and_what_is_cut_off_waits(recorder: Recorder) -> None:
    sources = settled(recorder.folder)
    source = sources.get(0)
    before = sources.runs()["runs"][0]["version"]
    recorder.run(20)
    with recorder.beats[0].path.open("a") as file:
        file.write('{"schema": 1, "ts": 18000')
    source.refresh()
    steps = source.series(0, 1e9, 500)["progress"]["step"]
    assert steps == list(range(10, 221, 10))
    run = sources.runs()["runs"][0]
    assert run["version"] > before and run["problems"] == []


def test_two_runs_are_told_apart_and_their_differences_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lr in (("a", "1e-3"), ("b", "2e-3")):
        Recorder(tmp_path / name / "run", monkeypatch).run(40)
        (tmp_path / name / "run" / "config.yaml").write_text(f"train: {{lr: {lr}, steps: 5}}\n")
    sources = settled(tmp_path / "a" / "run", tmp_path / "b" / "run")
    assert sources.names == ["a/run", "b/run"]
    rows = {row["key"]: row for row in sources.settings()["config"]}
    assert rows["train.lr"] == {"key": "train.lr", "values": ["1e-3", "2e-3"], "differs": True}
    assert rows["train.steps"]["differs"] is False


def test_names_are_as_short_as_they_can_be() -> None:
    assert names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]
    assert names([Path("/x/a"), Path("/x/a")]) == ["//x/a"] * 2


# who may ask


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1234", 200),
        ("localhost:9999", 200),
        ("[::1]:80", 200),
        ("10.1.2.3", 200),
        ("evil.example", 421),
        ("localhost.evil.example:80", 421),
        ("", 421),
    ],
)
def test_a_foreign_name_is_refused(client: Client, host: str, status: int) -> None:
    assert client.ask("/api/runs", Host=host)[0] == status
    assert client.ask("/", Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_there_is_nothing_but_get(client: Client, method: str) -> None:
    status, headers, _ = client.ask("/api/runs", method)
    assert status == 501 and headers["X-Content-Type-Options"] == "nosniff"


def test_answers_carry_headers_that_keep_other_sites_out(client: Client) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/nothing"):
        _, headers, _ = client.ask(path)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_token_is_wanted_where_there_is_one(recorder: Recorder) -> None:
    for client in serve(settled(recorder.folder), TOKEN):
        for path in ("/api/runs", "/api/log", "/api/samples"):
            assert client.ask(path)[0] == 401
        status, _, body = client.ask("/")
        assert status == 401 and b'name="token"' in body and b"run" not in client.ask("/api/x")[2]
        assert client.ask("/api/runs", Authorization="Bearer wrong")[0] == 401
        assert client.ask("/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert client.ask("/?token=wrong")[0] == 401
        status, headers, _ = client.ask(f"/?token={TOKEN}")
        assert status == 303 and headers["Location"] == "/", "it leaves the address"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
        assert client.ask("/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        assert client.ask("/api/runs", Cookie=f"{COOKIE}={TOKEN}")[0] == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "somewhere.example"])
def test_others_need_a_token(host: str) -> None:
    with pytest.raises(ValueError, match="is reachable from other machines; use a --token"):
        Access.of(host, None)
    with pytest.raises(ValueError, match="at least 16"):
        Access.of(host, "short")
    assert Access.of(host, TOKEN).token == TOKEN


def test_a_token_comes_from_a_private_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    assert find_token(None, None) is None
    monkeypatch.setenv("NSA_DASHBOARD_TOKEN", "of-the-environment")
    assert find_token(None, None) == "of-the-environment"
    assert find_token(TOKEN, None) == TOKEN
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert find_token(None, file) == TOKEN
    serve = ["dashboard", str(tmp_path), "--port", "0"]
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        assert main([*serve, "--token-file", str(file)]) == 2
        error = capsys.readouterr().err
        assert f"(mode {mode:04o})" in error and f"chmod 600 {file}" in error and TOKEN not in error
    for words, reason in (
        (["--token-file", str(tmp_path / "none")], "No such file"),
        (["--token-file", str(tmp_path)], "Is a directory"),
        (["--token-file", str(file), "--token", TOKEN], "use one of them"),
    ):
        assert main([*serve, *words]) == 2
        assert reason in capsys.readouterr().err
    file.write_bytes(b"\xff" * 20)
    file.chmod(0o600)
    assert main([*serve, "--token-file", str(file)]) == 2
    assert "not text" in capsys.readouterr().err


def test_the_command_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path / "nothing")]) == 2
    assert "is not a folder; pass run folders" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "--token" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path), "--port", "70000"]) == 2
    assert "0 to 65535" in capsys.readouterr().err


def test_more_connections_than_there_is_room_for_are_closed(client: Client) -> None:
    held = []
    for _ in range(MOST_CONNECTIONS):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
        connection.request("GET", "/static/icon.svg")
        connection.getresponse().read()
        held.append(connection)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        client.ask("/static/icon.svg")
    for connection in held:
        connection.close()


# what is never read


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/%2e%2e/server.py",
        "/static/",
        "/run/metrics.json",
        "/api/../../etc/passwd",
        "//etc/passwd",
    ],
)
def test_no_path_of_a_request_is_opened(client: Client, path: str) -> None:
    status, _, body = client.ask(path)
    assert status == 404 and b"root:" not in body and b"import" not in body


@pytest.mark.parametrize(
    "query",
    ["run=../x", "run=-1", "run=nan", "run=7", "points=1e9", "points=0", "from=x", "cells=inf"],
)
def test_a_bad_query_is_an_answer(client: Client, query: str) -> None:
    path = "timeline" if query.startswith("cells") else "series"
    status, _, body = client.ask(f"/api/{path}?{query}")
    assert status in (400, 404) and "error" in json.loads(body)


SECRET = "a secret outside"


@pytest.mark.parametrize(
    "name",
    [
        "heartbeat_rank0.jsonl",
        "training.csv",
        "val.csv",
        "metrics.json",
        "env.json",
        "config.yaml",
        "alarms.jsonl",
        "selection.jsonl",
        ".HALT",
        ".anomaly_type",
    ],
)
def test_links_are_not_followed_and_pipes_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text(f"{SECRET}\n")
    for kind in ("link", "pipe", "folder"):
        folder = tmp_path / kind
        folder.mkdir()
        if kind == "link":
            (folder / name).symlink_to(tmp_path / "outside")
        elif kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).mkdir()
        (folder / "checkpoint_step5.pt").symlink_to(tmp_path / "outside")
        sources = settled(folder)
        assert not sources.runs()["runs"][0]["checkpoints"], "not even its size"
        shown = json.dumps([sources.runs(), sources.settings(), answers(sources)])
        assert SECRET not in shown
        if kind != "folder" or name not in (".HALT", ".anomaly_type"):
            said = " ".join(sources.runs()["runs"][0]["problems"])
            assert name in said, f"{kind}: it is said: {said}"


def answers(sources: Sources) -> list[Any]:
    source = sources.get(0)
    return [
        source.series(0, 1e9, 100),
        source.layers(0, 1e9, 100),
        source.selection(10),
        source.timeline(1e9, 50),
        source.samples(),
        source.log(),
    ]


def test_the_run_folder_is_not_touched(recorder: Recorder) -> None:
    def look() -> list[tuple[str, int, int]]:
        paths = sorted(recorder.folder.rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths]

    before = look()
    answers(settled(recorder.folder))
    assert look() == before


# the command and its files


def test_the_command_listens_without_torch_and_ends_by_ctrl_c(recorder: Recorder) -> None:
    code = (
        "import signal, sys, nsa.cli.__main__\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `&` ignores it\n"
        f"code = nsa.cli.__main__.main(['dashboard', {str(recorder.folder)!r}, '--port', '0'])\n"
        "sys.exit(99 if 'torch' in sys.modules else code)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.rpartition(":")[2].partition("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/api/runs")
            assert json.loads(connection.getresponse().read())["runs"][0]["name"] == "run"
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_reading_a_run_folder_needs_no_torch() -> None:
    code = "import sys, nsa.cli.dashboard, nsa.operate.watch.watchdog, nsa.operate.monitor\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_a_port_that_is_taken_is_said(tmp_path: Path, client: Client) -> None:
    args = argparse.Namespace(
        folders=[tmp_path], host="127.0.0.1", port=client.port, token=None, token_file=None
    )
    Server.allow_reuse_address, before = False, Server.allow_reuse_address
    try:
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1 port .*use another"):
            command.dashboard(args)
    finally:
        Server.allow_reuse_address = before


def test_the_page_needs_nothing_from_outside() -> None:
    files = page_files()
    assert {"index.html", "login.html", "app.js", "style.css"} <= files.keys()
    for name, content in files.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "@import" not in text, name
        assert "innerHTML" not in text and "eval(" not in text, name
