"""The commands of `nsa` and their exit codes as Markdown tables, for docs/reference/cli.md.

`python -m nsa.cli.describe PAGE` rewrites the generated parts of a page.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator
from pathlib import Path

from nsa.cli.__main__ import _parser
from nsa.config import BAD_INPUT, INTERRUPTED
from nsa.config.describe import Rows, fill, markdown_table


def refresh(page: str) -> str:
    """Return a documentation page with its generated parts updated."""
    return fill(page, {"commands": command_markdown(), "exit codes": exit_code_markdown()})


# --- commands ---


def command_markdown() -> str:
    """A section for each command: what it does, its arguments and flags."""
    return "\n\n".join(_section(*command) for command in _commands(_parser(), "nsa", ""))


def _commands(
    parser: argparse.ArgumentParser, name: str, text: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Every command that can be called, in the order of `--help`, with its line there."""
    families = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not families:
        yield name, text, parser
    for family in families:
        for choice in family._choices_actions:
            inner = family.choices[choice.dest]
            yield from _commands(inner, f"{name} {choice.dest}", choice.help or "")


def _section(name: str, text: str, parser: argparse.ArgumentParser) -> str:
    rows: Rows = [("argument", "meaning")]
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            rows.append((f"`{_form(action)}`", _meaning(action)))
    table = markdown_table(rows) if len(rows) > 1 else "It takes no arguments."
    return f"### {name}\n\n{_escaped(text[:1].upper() + text[1:])}.\n\n{table}"


def _form(action: argparse.Action) -> str:
    """An argument as typed: `--steps N`, `[PROMPT]`, `RUN_DIR ...`."""
    if isinstance(action.metavar, str):
        value = action.metavar
    elif action.choices is not None:
        value = "|".join(str(choice) for choice in action.choices)
    else:
        value = action.dest.upper()
    if action.option_strings:
        flags = ", ".join(action.option_strings)
        return flags if action.nargs == 0 else f"{flags} {value}"
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}.get(
        str(action.nargs), value
    )


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default}
    if isinstance(action, argparse._AppendAction) and "repeated" not in text:
        text += "; can be repeated"
    return _escaped(text + (" (required)" if action.option_strings and action.required else ""))


def _escaped(text: str) -> str:
    """Escape characters with a meaning in Markdown."""
    return html.escape(text, quote=False).replace("*", "\\*")


# --- exit codes ---


def exit_code_markdown() -> str:
    """The exit codes of a run by reason, then those of a verdict."""
    from nsa.operate.report.verdict import EXIT_CODES  # imports torch, which takes seconds

    rows: Rows = [("code", "name", "when")]
    rows += [(str(code), f"`{name}`", _escaped(when)) for code, name, when in _endings()]
    verdicts: Rows = [("code", "verdict")]
    verdicts += [(str(code), word) for word, code in EXIT_CODES.items()]
    return (
        f"{markdown_table(rows)}\n\n"
        f"`nsa report` and `nsa preflight` return their verdict:\n\n{markdown_table(verdicts)}"
    )


def _endings() -> list[tuple[int, str, str]]:
    """Constants and exceptions with a fixed code, sorted by code."""
    from nsa.train import errors

    found = [
        (0, "finished", "Success."),
        (
            BAD_INPUT,
            "BAD_INPUT",
            "Invalid input: a flag, config key, environment variable or file.",
        ),
        (errors.BAD_DATA, "BAD_DATA", "The data is invalid."),
        (errors.NO_DATA, "NO_DATA", "The data did not arrive."),
        (errors.STALLED, "STALLED", "Killed because this rank, or one it waits for, hangs."),
        (INTERRUPTED, "INTERRUPTED", "Ctrl-C in a command that is not a training run."),
    ]
    kinds: list[type[errors.TrainError]] = [errors.TrainError]
    for kind in kinds + errors.TrainError.__subclasses__():
        # Classes with an __init__ and no class-level code get it per instance.
        if "exit_code" in vars(kind) or "__init__" not in vars(kind):
            found.append((kind.exit_code, kind.__name__, (kind.__doc__ or "").splitlines()[0]))
    return sorted(found)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(refresh(document.read_text(encoding="utf-8")), encoding="utf-8")
