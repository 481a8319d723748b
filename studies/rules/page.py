"""The page of a study: one table, two pictures, and a sentence for what a table cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from studies.nsa_vs_dense.arms import INIT
from studies.nsa_vs_dense.page import machine_line
from studies.nsa_vs_dense.results import gap
from studies.rules.measure import accuracy, mean_recall

CONVERT = "convert"
"""The page about a dense model that becomes sparse; the other one is `rules`."""
WIDE = "dense-wide"
"""How the names of the dense variants with as many parameters as NSA begin."""
FELL = 0.02
"""Nats by which a loss must have risen again to be mentioned."""
HEAD = (
    "| rows | updates | attention | parameters | rate | held-out loss | minus dense | tokens/s "
    "| recall | mass read, of | needle | multi |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
Arm = dict[str, Any]


def arms_of_page(page: str, arms: Sequence[Arm]) -> list[Arm]:
    """Those that became sparse, or went on beside them, with the model that they started from; or
    all others, shorter rows first."""
    converted = [arm for arm in arms if is_converted(arm)]
    if page == CONVERT:
        starts = {arm["settings"][INIT] for arm in converted}
        return [arm for arm in arms if arm["name"] in starts] + converted
    return sorted((arm for arm in arms if arm not in converted), key=length_of)


def shown_arms(arms: Sequence[Arm], measures: dict[str, Any]) -> list[Arm]:
    """The measured arms, by comparison; of the twins with several rates only the best one."""
    kept = []
    for _, group in groupby(arms, key=lambda arm: arm["comparison"]):
        members = [arm for arm in group if arm["name"] in measures["arms"]]
        other = reference(members)
        kept += [arm for arm in members if arm is other or not arm["variant"].startswith(WIDE)]
    return kept


def reference(arms: Sequence[Arm]) -> Arm | None:
    """The dense arm that the others of a comparison are compared with: that with as many parameters
    as NSA whose rate was the best, or without such a twin the plain one."""
    twins = [arm for arm in arms if arm["variant"].startswith(WIDE)]
    plain = [arm for arm in arms if arm["variant"] == "dense"]
    return min(twins or plain, key=lambda arm: arm["held_out"]["loss"], default=None)


def write_page(
    results: dict[str, Any], measures: dict[str, Any], pictures: Sequence[str], title: str
) -> str:
    """The whole page; `pictures` are the names of the files."""
    arms = [arm for arm in results["arms"] if arm["name"] in measures["arms"]]
    shown = shown_arms(arms, measures)
    parts = [
        f"# {title}",
        machine_line(results | {"arms": arms}),
        _how(shown, measures),
        "\n".join([HEAD, *(_row(arm, arms, measures) for arm in shown)]),
        _rates(arms),
        _in_dense(shown, measures),
        _on_the_way(shown),
        f"![Held-out loss during training, and recall by layer]({pictures[0]})",
        f"![Right answers by depth of the needle]({pictures[1]})",
    ]
    if results["failed"]:
        names = ", ".join(entry["name"] for entry in results["failed"])
        parts.append(f"Arms that did not finish: {names}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def is_converted(arm: Arm) -> bool:
    """Whether an arm starts from a model that has learned in rows of its own length."""
    return f"-{length_of(arm)}-" in str(arm["settings"].get(INIT))


def length_of(arm: Arm) -> int:
    """Tokens of a row."""
    return int(arm["settings"]["train.seq_len"])


def _how(arms: Sequence[Arm], measures: dict[str, Any]) -> str:
    """What the columns are."""
    data = [
        f"rows of {length_of(arm)}: updates of {arm['tokens_per_step']:,} tokens, "
        f"{arm['held_out']['tokens']:,} held-out tokens, recall by chance "
        f"{measures['chance'][arm['comparison']]:.0%}"
        for arm in {length_of(arm): arm for arm in arms}.values()
    ]
    has_twin = any(arm["variant"].startswith(WIDE) for arm in arms)
    other = " with as many parameters as NSA, at its best rate" if has_twin else ""
    return (
        "All arms of a comparison have read the same rows in the same order ([the study]"
        "(../../studies/rules/README.md)). Loss: nats per token of held-out text. Minus dense: row "
        f"by row against dense attention{other}, ± standard error over rows. Parameters are "
        "without the embedding. Recall: of the free blocks that dense attention over the same "
        "queries and keys looks at most, the share that the rule reads. Mass read: of the dense "
        "attention, what lies in the blocks that are read, of what the best choice has. Needle and "
        "multi: right answers at the length of a row, where a guess finds one in a hundred. "
        f"{_sentence('; '.join(data))}."
    )


def _row(arm: Arm, arms: Sequence[Arm], measures: dict[str, Any]) -> str:
    same = [other for other in arms if other["comparison"] == arm["comparison"]]
    other, found = reference(same), measures["arms"][arm["name"]]
    difference = ""
    if other is not None and other is not arm:
        mean, error = gap(arm, other)
        difference = f"{mean:+.4f} ± {error:.4f}"
    recall, mass = "", ""
    if "own" in found["recall"]:
        recall = f"{mean_recall(found, 'own'):.0%}"
        mass = f"{mean_recall(found, 'own', 1):.1%}, {mean_recall(found, 'own', 2):.1%}"
    name, start = arm["variant"], arm["settings"].get(INIT)
    cells = [
        str(length_of(arm)),
        str(arm["steps"]),
        f"{name}, from {start}" if is_converted(arm) else name,
        f"{arm['params']['non_embedding']:,}",
        f"{arm['settings']['train.lr']:g}",
        f"{arm['held_out']['loss']:.4f}",
        difference,
        _speed(arm, same),
        recall,
        mass,
        *(f"{accuracy(found, task):.0%}" for task in ("needle", "multi")),
    ]
    return f"| {' | '.join(cells)} |"


def _speed(arm: Arm, arms: Sequence[Arm]) -> str:
    """That of the middle rate, where another one is the best: the rate costs no time."""
    if arm["tokens_per_s"]:
        eager = "" if arm["settings"].get("runtime.compile") else " (not compiled)"
        return f"{arm['tokens_per_s']:,.0f}{eager}"
    known = [a["tokens_per_s"] for a in arms if a["variant"] == WIDE and a["tokens_per_s"]]
    return f"{known[0]:,.0f}" if known and arm["variant"].startswith(WIDE) else ""


def _rates(arms: Sequence[Arm]) -> str:
    """What the twin reached with each of its rates."""
    lines = []
    for _, group in groupby(arms, key=lambda arm: arm["comparison"]):
        twins = [arm for arm in group if arm["variant"].startswith(WIDE)]
        twins.sort(key=lambda arm: float(arm["settings"]["train.lr"]))
        losses = [f"{a['held_out']['loss']:.4f} at {a['settings']['train.lr']:g}" for a in twins]
        if losses:
            lines.append(f"rows of {length_of(twins[0])}: {', '.join(losses)}")
    return f"Rates of the dense twin, {'; '.join(lines)}." if lines else ""


def _in_dense(arms: Sequence[Arm], measures: dict[str, Any]) -> str:
    """The recall of rules that are put into a model trained with dense attention."""
    lines = []
    for arm in arms:
        found = measures["arms"][arm["name"]]
        if arm["variant"] == "dense" and not is_converted(arm):
            shares = [f"{rule} {mean_recall(found, rule):.0%}" for rule in found["recall"]]
            lines.append(f"rows of {length_of(arm)}: {', '.join(shares)}")
    if not lines:
        return ""
    return (
        f"Recall of rules without weights on the queries and keys of `dense`, {'; '.join(lines)}."
    )


def _on_the_way(arms: Sequence[Arm]) -> str:
    """Whether the loss has risen again: a small corpus is read many times."""
    losses = [arm["val"]["loss"] for arm in arms if arm["val"]["loss"]]
    lowest = [min(values) for values in losses]
    rises = [values[-1] - least for values, least in zip(losses, lowest, strict=True)]
    risen = [rise for rise in rises if rise > FELL]
    if not risen:
        return ""
    return (
        f"{len(risen)} of {len(rises)} losses have risen again after their lowest value, by "
        f"{min(risen):.2f} to {max(risen):.2f} nats: the text is read many times and learned by "
        f"heart. The lowest values on the way, {min(lowest):.4f} to {max(lowest):.4f} nats in the "
        "first held-out rows, then say more about an attention than the last ones."
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
