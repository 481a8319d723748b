"""Access control of the dashboard: token, session cookie, and a check of the Host header."""

from __future__ import annotations

import hmac
import ipaddress
import os
import platform
import secrets
import stat
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import NamedTuple

from nsa.config.env import read

COOKIE = "nsa_dashboard"
SHORTEST = 16
MOST_TOKEN = 4096
LOCAL_NAMES = ("localhost", "localhost.localdomain")


def find_token(text: str | None, file: Path | None) -> str | None:
    """The token from the command line, a private file, or the environment.

    Prefer the file: every user of the machine can see the command line of a process.
    """
    if text is not None and file is not None:
        raise ValueError("--token and --token-file are both given; use one of them")
    if file is None:
        return text if text is not None else read("NSA_DASHBOARD_TOKEN") or None
    try:
        with file.open(encoding="utf-8") as opened:
            # fstat on the open file, so that it cannot be swapped between check and read.
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError(
                    f"--token-file {file} is open to other users (mode {stat.S_IMODE(mode):04o}); "
                    f"run: chmod 600 {file}"
                )
            return opened.read(MOST_TOKEN).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(
            f"--token-file {file} cannot be read ({reason}); use a file with the token"
        ) from None


class Access(NamedTuple):
    """The access rules of one server."""

    host: str
    token: str | None
    key: bytes
    """Random per server: the cookie never contains the token, and expires with the server."""

    @staticmethod
    def of(host: str, token: str | None) -> Access:
        """Reject a reachable address without a token, and a token that is easy to guess."""
        if token is None and not is_loopback(host):
            raise ValueError(
                f"--host {host} is reachable from other machines; use a --token-file with at least "
                f"{SHORTEST} characters, or keep --host 127.0.0.1 and connect through ssh -L"
            )
        if token is not None and (len(token) < SHORTEST or not token.isascii()):
            raise ValueError(
                f"the token has {len(token)} characters; use at least {SHORTEST} ASCII ones, "
                f'for example from `python -c "import secrets; print(secrets.token_urlsafe())"`'
            )
        return Access(host, token, secrets.token_bytes(32))

    def knows_host(self, header: str | None) -> bool:
        """Whether a Host header is an IP address or a name of this machine.

        This blocks DNS rebinding, where a foreign name resolves to our address. A literal IP
        address cannot be rebound.
        """
        name = _host_name(header or "")
        if name in (*LOCAL_NAMES, platform.node().lower(), self.host.lower()):
            return True
        return _is_address(name)

    def knows_token(self, given: str | None) -> bool:
        """Compare with the token in constant time."""
        if self.token is None:
            return True
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def admits(self, authorization: str | None, cookie: str | None) -> bool:
        """Whether the Authorization or Cookie header gives access."""
        if self.token is None:
            return True
        kind, _, given = (authorization or "").partition(" ")
        if kind.lower() == "bearer" and self.knows_token(given.strip()):
            return True
        try:
            found = SimpleCookie(cookie or "").get(COOKIE)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(
            found.value.encode(), self.session_value().encode()
        )

    def session_value(self) -> str:
        """The value of the session cookie: an HMAC of the token under this server's key."""
        return hmac.new(self.key, (self.token or "").encode(), "sha256").hexdigest()

    def cookie(self) -> str:
        """A Set-Cookie header; HttpOnly and SameSite keep it from scripts and other sites."""
        return f"{COOKIE}={self.session_value()}; Path=/; HttpOnly; SameSite=Strict"


def is_loopback(host: str) -> bool:
    """Whether the address is reachable only from this machine."""
    if host.lower() in LOCAL_NAMES:
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _host_name(header: str) -> str:
    """The host in a Host header, without the port; IPv6 addresses are in brackets."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if ":" in text else text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
