"""Taking secrets out of text: by the names beside them, by their form, and wherever they return.

Over-cautious on purpose: a harmless value that follows a word like `token` is hidden, too. What is
hidden reads ***.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import IO

HIDDEN = "***"
LONGEST_LINE = 1 << 18
"""Bytes of a line that are looked at; a longer one is no line of a log, and is left out whole."""
WORD = r"""(?: (?<![a-z]) (?:
        apikey | (?<=[_.-]) key | accesskey | token | secret | password | passwd
        | credentials? | authorization | cookie | signature | sig
    ) | (?-i: (?<=[a-z]) (?: Key | Token | Secret | Password ) ) ) (?![a-z])"""
"""A whole word for a secret: `tokenizer` and `tokens` are none, hfToken is one."""
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
"""Such a word, then = or : and its value; in a list of arguments a comma."""
FLAG = re.compile(
    rf"(?P<name> (?<![\w-]) --? [\w-]{{0,64}} {WORD} [\w-]{{0,64}} ) "
    rf"(?P<gap> ['\"]?,?\s{{1,8}}['\"]? ) "
    rf"(?! - ) {VALUE}",
    re.VERBOSE | re.IGNORECASE,
)
"""A flag, and what follows it: on a command line, or in a list of arguments."""
LAST_FLAG = re.compile(
    rf"(?<![\w-]) --? [\w-]{{0,64}} {WORD} [\w-]{{0,64}} ['\"],\s*$", re.VERBOSE | re.I
)
"""Such a flag at the end of a line of JSON; its value is on the next one."""
IN_URL = re.compile(
    r"(?P<name>\b[a-z][a-z0-9+.-]{1,20}://)(?P<value>[^\s/@\"'<>]{1,512})(?=@)", re.IGNORECASE
)
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
    """One line without its secrets, and how many were hidden; `known` ones wherever they stand."""
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
    """Values that names give away and that are worth looking for elsewhere: long, with a digit."""
    found: set[str] = set()
    for line in lines:
        for pattern in (IN_URL, NAMED, FLAG):
            for match in pattern.finditer(line):
                found |= {match["value"], *match["value"].split(":")}
        found |= {match[0] for match in FORMS.finditer(line)}
    return {value for value in found if len(value) >= 8 and re.search(r"\d", value)}


def hide_lines(lines: Iterable[str], known: Iterable[str] = ()) -> Iterator[tuple[str, int]]:
    """Every line without its secrets; private keys span lines, and so do flags in JSON."""
    longest_first = sorted(known, key=lambda value: (-len(value), value))
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
    """The lines of a file, as text that gives its bytes back; what is too long is left out."""
    while line := file.readline(LONGEST_LINE):
        if len(line) < LONGEST_LINE or line.endswith(b"\n"):
            yield line.decode("utf-8", "surrogateescape")
            continue
        while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        yield f"[a line of more than {LONGEST_LINE} bytes is left out]\n"


def as_bytes(text: str) -> bytes:
    """What `lines_of` read, as bytes again."""
    return text.encode("utf-8", "surrogateescape")
