"""Redact secrets in text: by the name beside them, by their format, and every repetition.

Deliberately over-cautious: a harmless value after a word like `token` is replaced too. Redacted
text reads ***.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import IO

HIDDEN = "***"
LONGEST_LINE = 1 << 18
"""Longest line in bytes that is scanned; a longer one is not log text and is dropped."""
WORD = r"""(?: (?<![a-z]) (?:
        apikey | (?<=[_.-]) key | accesskey | token | secret | password | passwd
        | credentials? | authorization | cookie | signature | sig
    ) | (?-i: (?<=[a-z]) (?: Key | Token | Secret | Password ) ) ) (?![a-z])"""
"""A whole word for a secret: hfToken matches; `tokenizer` and `tokens` do not."""
VALUE = r"""(?P<value> (?<=") [^"\n]+ | (?<=') [^'\n]+ | [^\s"',;&)\]}]+ )"""
NAMED = re.compile(
    rf"""
    (?P<name> {WORD} [\w.-]{{0,64}} )
    (?P<gap> ["']? \s{{0,8}} (?: [=:] | , (?=\s*["']) ) \s{{0,8}} ["']?
        (?: (?:bearer|basic|token) \s+ )? )
    {VALUE}
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""NAME=value or NAME: value; in an argument list also a comma between them."""
FLAG = re.compile(
    rf"(?P<name> (?<![\w-]) --? [\w-]{{0,64}} {WORD} [\w-]{{0,64}} ) "
    rf"(?P<gap> ['\"]?,?\s{{1,8}}['\"]? ) "
    rf"(?! - ) {VALUE}",
    re.VERBOSE | re.IGNORECASE,
)
"""A flag and its value: on a command line, or in a JSON list of arguments."""
LAST_FLAG = re.compile(
    rf"(?<![\w-]) --? [\w-]{{0,64}} {WORD} [\w-]{{0,64}} ['\"],\s*$", re.VERBOSE | re.I
)
"""A flag at the end of a JSON line; its value is on the next line."""
# user:password@ in a URL.
IN_URL = re.compile(
    r"(?P<name>\b[a-z][a-z0-9+.-]{1,20}://)(?P<value>[^\s/@\"'<>]{1,512})(?=@)", re.IGNORECASE
)
# Formats that identify a secret without a name beside it.
FORMS = re.compile(
    r"""
      \b hf_[A-Za-z0-9]{16,}                        # Hugging Face
    | \b gh[pousr]_[A-Za-z0-9]{20,} | \b github_pat_[A-Za-z0-9_]{20,}
    | \b glpat-[A-Za-z0-9_-]{16,}
    | \b sk-[A-Za-z0-9_-]{16,}
    | \b (?:AKIA|ASIA)[A-Z0-9]{16} \b               # Amazon
    | \b AIza[A-Za-z0-9_-]{30,}                     # Google
    | \b xox[abeprs]-[A-Za-z0-9-]{10,}              # Slack
    | \b eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+    # a JSON web token
    | (?<=hooks\.slack\.com/services/) [A-Za-z0-9/]+
    | (?<=/api/webhooks/) \d+/[A-Za-z0-9_-]+
    | (?i: (?<=\bbearer\s) [A-Za-z0-9._~+/=-]{8,} )
    """,
    re.VERBOSE,
)
KEY_BEGIN = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
KEY_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")


def hide(text: str, known: Iterable[str] = ()) -> tuple[str, int]:
    """A line without its secrets, and how many were replaced; `known` ones match anywhere."""
    count = 0

    def named(match: re.Match[str]) -> str:
        nonlocal count
        if match["value"] == HIDDEN:
            return match[0]
        count += 1
        return match["name"] + match.groupdict().get("gap", "") + HIDDEN

    def whole(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return HIDDEN

    for pattern in (IN_URL, NAMED, FLAG):
        text = pattern.sub(named, text)
    text = FORMS.sub(whole, text)
    for secret in known:
        count += text.count(secret)
        text = text.replace(secret, HIDDEN)
    return text, count


def secrets_in(lines: Iterable[str]) -> set[str]:
    """Values found by name that are worth searching everywhere: at least 8 chars with a digit."""
    found: set[str] = set()
    for line in lines:
        for pattern in (IN_URL, NAMED, FLAG):
            for match in pattern.finditer(line):
                found |= {match["value"], *match["value"].split(":")}
        found |= {match[0] for match in FORMS.finditer(line)}
    return {value for value in found if len(value) >= 8 and re.search(r"\d", value)}


def hide_lines(lines: Iterable[str], known: Iterable[str] = ()) -> Iterator[tuple[str, int]]:
    """Redact a stream of lines, including private keys and JSON flags that span lines."""
    longest_first = sorted(known, key=lambda value: (-len(value), value))
    # Longest first, so that a secret that contains another is replaced as a whole.
    in_key = after_flag = False
    for line in lines:
        if in_key or KEY_BEGIN.search(line):
            is_first, in_key = not in_key, not KEY_END.search(line)
            yield (HIDDEN + "\n", 1) if is_first else ("", 0)
            continue
        if after_flag:
            line, extra = re.subn(r"(\"|')(?!-|\*\*\*)[^\"']+(\"|')", rf"\1{HIDDEN}\2", line)
        else:
            extra = 0
        after_flag = bool(LAST_FLAG.search(line))
        text, count = hide(line, longest_first)
        yield text, count + extra


def lines_of(file: IO[bytes]) -> Iterator[str]:
    """Decode a file line by line, losslessly (surrogateescape); overlong lines are dropped."""
    while line := file.readline(LONGEST_LINE):
        if len(line) < LONGEST_LINE or line.endswith(b"\n"):
            yield line.decode("utf-8", "surrogateescape")
            continue
        while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        yield f"[a line of more than {LONGEST_LINE} bytes was dropped]\n"


def as_bytes(text: str) -> bytes:
    """Encode a line of `lines_of` back to its original bytes."""
    return text.encode("utf-8", "surrogateescape")
