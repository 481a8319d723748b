"""Retrieval in a long text: what the study hides, and how it asks for it.

A needle is " The number VALUE for KEY." between two tokens of real text; the question, " The number
for KEY", is a line at the end, and the value is the answer. `needle` hides one, `multi` many, asked
in another order, `passkey` one without a key. The value stands before its key, so that the key can
carry it when the question comes to look for the same word: two layers on random tokens learned that
much sooner than to look for what follows the word. nsa.evaluate.needles builds the documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nsa.evaluate.needles import Ids, Secret
from studies.long_context.vocabulary import Words

TASKS = ("needle", "passkey", "multi")


def draw_secrets(
    task: str, depths: Sequence[float], words: Words, keys: Ids, draw: np.random.Generator
) -> list[Secret]:
    """One secret for each depth; `keys` are as many ids of keys."""
    num = len(depths)
    values = draw.choice(words.values, num, replace=num > len(words.values))
    secrets = []
    for depth, value, key in zip(depths, values, keys[:num], strict=True):
        if task == "passkey":
            owner, question = words.pass_key, words.ask_pass
        else:
            owner, question = np.append(words.owner, key), np.append(words.ask, key)
        needle = np.concatenate([words.opening, [value], owner, words.end])
        told = len(words.opening)
        secret = Secret(
            needle=needle, question=question, value=np.array([value]), told=told, depth=depth
        )
        secrets.append(secret)
    return secrets
