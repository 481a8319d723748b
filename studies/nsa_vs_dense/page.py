"""The page of the results: Markdown with tables, pictures, and two sentences for each picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from studies.nsa_vs_dense.pictures import BRANCHES, GOAL
from studies.nsa_vs_dense.results import dense_twin, gap

HEAD = (
    "| variant | seed | parameters without embedding | in all | held-out loss | minus dense | "
    "tokens/s | of dense | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def write_page(
    results: dict[str, Any], pictures: dict[str, str], shown: str | None, remarks: str = ""
) -> str:
    """The whole page; `pictures` are file names by kind, `shown` the arm that is looked into.

    `remarks` is Markdown that follows the head.
    """
    arms = results["arms"]
    parts = ["# NSA and dense attention, trained side by side", _where(results)]
    parts += [remarks.strip()] if remarks.strip() else []
    for name, group in groupby(arms, key=lambda arm: arm["comparison"]):
        parts.append(_comparison(name, list(group), pictures))
    if results["failed"]:
        lines = [f"- {entry['name']}: {_first(entry['reason'])}" for entry in results["failed"]]
        parts += ["## Arms that did not finish", "\n".join(lines)]
    arm = next((arm for arm in arms if arm["name"] == shown), None)
    if arm is not None:
        parts += [f"## What the model does ({shown})", *_looked_into(arm, pictures)]
    return "\n\n".join(parts) + "\n"


def final_table(arms: Sequence[dict[str, Any]]) -> str:
    """Final losses of a comparison: each arm with its seed and its gap to the dense one."""
    return "\n".join([HEAD, *(_row(arm, arms) for arm in arms)])


def machine_line(results: dict[str, Any]) -> str:
    """Devices, versions, commits and days of the arms."""
    machines = [arm["machine"] for arm in results["arms"]]
    cards = _all(m["device"] for m in machines)
    versions = _all(
        f"torch {m['torch']}, triton {m['triton']}, Python {m['python']}" for m in machines
    )
    commits = _all((m["commit"] or "unknown")[:12] for m in machines)
    days = _all(call["started"][:10] for call in results["calls"])
    return f"{cards}; {versions}; commit {commits}; {days}."


def _where(results: dict[str, Any]) -> str:
    arms, calls = results["arms"], results["calls"]
    data = arms[0]["data"]
    seconds = sum(call["seconds"] for call in calls)
    lines = [
        machine_line(results),
        f"Data: {data['training_tokens']:,} training and {data['held_out_tokens']:,} held-out "
        f"tokens ({data['tokenizer']}, {data['vocab']:,} ids), manifest {data['sha256'][:12]}. "
        "Arms of a comparison differ in the attention alone: same data, order, steps, optimizer, "
        "schedule. Losses are nats per token on held-out documents, ± standard error over rows; "
        "the difference is taken row by row against the dense arm of the same seed. Tokens/s is "
        f"of the median update{_timed(arms)}.",
        "\n".join(dict.fromkeys(f"    {call['command']}" for call in calls)),
        f"{seconds:,.0f} s in all{_cost(calls)}.",
    ]
    return "\n\n".join(lines)


def _timed(arms: Sequence[dict[str, Any]]) -> str:
    """Where the speed of arms that were trained side by side comes from."""
    counts = sorted({arm["speed_steps"] for arm in arms if arm["speed_steps"] is not None})
    if not counts:
        return ""
    return (
        f"; that of arms trained beside others is from {_all(map(str, counts))} updates done alone "
        "afterwards, for one seed of a variant"
    )


def _cost(calls: Sequence[dict[str, Any]]) -> str:
    costs = [call["cost"] for call in calls]
    if not all(cost is not None for cost in costs):
        return ""
    prices = _all(f"{call['price_per_hour']:g}" for call in calls)
    return f", {sum(costs):.2f} at {prices} an hour"


def _comparison(name: str, arms: list[dict[str, Any]], pictures: dict[str, str]) -> str:
    parts = [f"## {name}", final_table(arms), _verdict(arms)]
    for part in (name, f"{name}-diagnosis"):
        for kind, alt in (("curves", "losses"), ("positions", "loss by position")):
            if file := pictures.get(f"{kind}-{part}"):
                parts.append(f"![{part}: {alt}]({file})")
    return "\n\n".join(part for part in parts if part)


def _row(arm: dict[str, Any], arms: Sequence[dict[str, Any]]) -> str:
    twin, held_out = dense_twin(arm, arms), arm["held_out"]
    difference, ratio = "", ""
    if twin is not None and twin is not arm:
        mean, error = gap(arm, twin)
        difference = f"{mean:+.4f} ± {error:.4f}"
        if arm["tokens_per_s"] and twin["tokens_per_s"]:
            ratio = f"{arm['tokens_per_s'] / twin['tokens_per_s']:.2f}"
    speed = f"{arm['tokens_per_s']:,.0f}" if arm["tokens_per_s"] else ""
    loss = f"{held_out['loss']:.4f} ± {held_out['standard_error']:.4f}"
    params = arm["params"]
    return (
        f"| {arm['variant']} | {arm['seed']} | {params['non_embedding']:,} | {params['total']:,} | "
        f"{loss} | {difference} | {speed} | {ratio} | {_seconds(arm):.0f} |"
    )


def _seconds(arm: dict[str, Any]) -> float:
    """Of all processes that worked on the arm, without their starts."""
    spent = arm["seconds"]
    return float(spent["steps"] + spent["evaluate_and_save"] + spent["measure"])


def _verdict(arms: Sequence[dict[str, Any]]) -> str:
    """The mean gap of each variant over its seeds, held to the goal."""
    sentences = []
    for variant in dict.fromkeys(arm["variant"] for arm in arms if arm["variant"] != "dense"):
        pairs = [(a, dense_twin(a, arms)) for a in arms if a["variant"] == variant]
        gaps = [gap(arm, twin)[0] for arm, twin in pairs if twin is not None]
        if gaps:
            mean = fmean(gaps)
            word = "**beyond**" if mean > GOAL else "better by more than"
            word = "within" if abs(mean) <= GOAL else word
            count = f"{len(gaps)} seed{'s' if len(gaps) > 1 else ''}"
            sentences.append(f"{variant}: {mean:+.4f} nats against dense ({count}), {word} {GOAL}.")
    return " ".join([*sentences, *_seed_spread(arms)])


def _seed_spread(arms: Sequence[dict[str, Any]]) -> list[str]:
    """How far two seeds of dense attention are apart: the noise that a gap must be held against."""
    losses = [arm["held_out"]["loss"] for arm in arms if arm["variant"] == "dense"]
    if len(losses) < 2:
        return []
    return [f"Seeds of dense attention are {max(losses) - min(losses):.4f} nats apart."]


def _looked_into(arm: dict[str, Any], pictures: dict[str, str]) -> list[str]:
    parts = []
    for kind, words in (("gates", _gates), ("distances", _distances), ("overlap", _overlap)):
        if file := pictures.get(kind):
            parts += [f"![{kind}]({file})", words(arm)]
    return parts


def _gates(arm: dict[str, Any]) -> str:
    layers = arm["gates"]["shares"][-1]
    means = [fmean(layer[branch] for layer in layers) for branch in range(3)]
    named = ", ".join(f"{name} {mean:.0%}" for name, mean in zip(BRANCHES, means, strict=True))
    most = max(range(len(layers)), key=lambda layer: layers[layer][1])
    least = min(range(len(layers)), key=lambda layer: layers[layer][1])
    return (
        f"At the end the gates give, as a mean over the layers: {named}. Selection weighs most in "
        f"layer {most} ({layers[most][1]:.0%}) and least in layer {least} ({layers[least][1]:.0%})."
    )


def _distances(arm: dict[str, Any]) -> str:
    found = arm["selection"]
    # Bins after the two nearest blocks, without the first block of the sequence.
    far = range(2, len(found["edges"]))
    half = far[len(far) // 2 :]
    ours = [fmean(layer[i] for layer in found["distances"]) for i in range(len(found["edges"]))]
    chosen, random = sum(ours[i] for i in far), sum(found["random_distances"][i] for i in far)
    away = (found["edges"][half[0] - 1] + 1) * found["block_tokens"] if half else 0
    far_ours, far_random = (sum(x[i] for i in half) for x in (ours, found["random_distances"]))
    return (
        f"{chosen:.0%} of the reads are of blocks chosen by score; the others are forced. Of "
        f"the chosen, {far_ours / max(chosen, 1e-9):.0%} lie {away:,} tokens back or more, against "
        f"{far_random / max(random, 1e-9):.0%} where blocks are drawn at random."
    )


def _overlap(arm: dict[str, Any]) -> str:
    found = arm["selection"]
    place = max(i for i, tile in enumerate(found["tiles"]) if tile <= 64)
    shared = fmean(layer[0] for layer in found["overlap"])
    together = fmean(layer[place] for layer in found["union"])
    return (
        f"A token shares {shared:.0%} of its scored blocks with the next one, against "
        f"{found['random_overlap'][0]:.0%} at random. {found['tiles'][place]} neighbours read "
        f"{together:.2f} n different blocks together, against {found['random_union'][place]:.2f} n "
        "at random: the fewer, the more a kernel gains that loads the blocks of a tile once."
    )


def _all(values: Any) -> str:
    return " and ".join(dict.fromkeys(values))


def _first(text: str) -> str:
    return text.strip().splitlines()[-1][:200]
