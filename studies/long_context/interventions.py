"""What would have to be different for a far question to be answered.

diagnose.py says how right and wrong answers differ, which may be cause or consequence. Here the
attention at the token before an answer is changed, and the model is asked again: an answer that is
right then was wrong for what was changed. Every change is made in all layers, or in one alone, and
only at those tokens:

  given     the block of the needle's value and that of its key are among those that are read; they
            replace free blocks, so that as many are read as before
  alone     of the free blocks, these alone are read
  gated     the gates are 1 for the selected branch and 0 for the others
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa import BlockSpec
from nsa.evaluate.needles import Document
from nsa.model import TinyLM, attention
from studies.long_context.vocabulary import Words

Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, gates, selection) -> gates, selection."""


@dataclass(frozen=True)
class Trial:
    """What is changed."""

    name: str
    given: bool = False
    alone: bool = False
    gated: bool = False
    layer: int | None = None
    """The only layer that is changed; None: all."""


def trials_of(reader: int) -> list[Trial]:
    """All changes, in all layers and in that of the reader."""
    return [
        Trial("as it is"),
        Trial("given, all layers", given=True),
        Trial("alone, all layers", given=True, alone=True),
        Trial("given, reader's layer", given=True, layer=reader),
        Trial("alone, reader's layer", given=True, alone=True, layer=reader),
        Trial("gated, reader's layer", gated=True, layer=reader),
        Trial("given and gated, reader's layer", given=True, gated=True, layer=reader),
        Trial("alone and gated, reader's layer", given=True, alone=True, gated=True, layer=reader),
    ]


@torch.no_grad()
def intervene(
    model: TinyLM, rows: Sequence[Document], words: Words, spec: BlockSpec, far: int, reader: int
) -> dict[str, dict[str, int]]:
    """By trial: right answers to the far questions of the rows, those that were wrong before it
    (`repaired`), and those that are wrong only now (`broken`)."""
    trials = trials_of(reader)
    answers = {trial.name: list(_answers(model, rows, words, spec, far, trial)) for trial in trials}
    before = answers[trials[0].name]
    return {name: _compared(after, before) for name, after in answers.items()}


def _compared(after: list[bool], before: list[bool]) -> dict[str, int]:
    pairs = list(zip(after, before, strict=True))
    return {
        "questions": len(after),
        "right": sum(after),
        "repaired": sum(now and not then for now, then in pairs),
        "broken": sum(then and not now for now, then in pairs),
    }


def _answers(
    model: TinyLM,
    rows: Sequence[Document],
    words: Words,
    spec: BlockSpec,
    far: int,
    trial: Trial,
) -> Iterator[bool]:
    """Whether each question is answered."""
    device, to_key = model.embed.weight.device, 1 + len(words.owner)
    for row in rows:
        pairs = [(a, a - d) for a, d in zip(row.answers, row.distances, strict=True) if d > far]
        if not pairs:
            continue
        ids = torch.from_numpy(row.ids).to(device)
        place, told = torch.tensor(pairs, device=device).unbind(1)
        wanted = torch.stack([told, told + to_key], dim=1) // spec.l_sel  # [Q, 2]
        with changed(change_of(trial, place - 1, wanted, spec)):
            hidden = model.hidden(ids[None])
        given = model.head(hidden[0, place - 1]).argmax(-1)
        yield from (given == ids[place]).tolist()


def change_of(
    trial: Trial,
    query: Tensor,  # [Q], the tokens before the answers
    wanted: Tensor,  # [Q, 2], the blocks of value and key
    spec: BlockSpec,
) -> Change:
    """What a trial changes, for `changed`."""

    def change(layer: int, gates: Tensor, selection: Tensor) -> tuple[Tensor, Tensor]:
        if trial.layer not in (None, layer):
            return gates, selection
        if trial.given:
            selection = selection.clone()
            read = selection[0, query]  # [Q, Hkv, n_sel]
            selection[0, query] = with_blocks(read, query, wanted, spec, trial.alone)
        if trial.gated:
            gates = gates.clone()
            gates[0, query] = gates.new_tensor([0.0, 1.0, 0.0])
        return gates, selection

    return change


def with_blocks(
    read: Tensor,  # [Q, Hkv, n_sel] int32
    query: Tensor,  # [Q]
    wanted: Tensor,  # [Q, 2]
    spec: BlockSpec,
    alone: bool,
) -> Tensor:  # [Q, Hkv, n_sel] int32, ascending, then -1
    """The selection with the wanted blocks in the place of free ones."""
    own = (query // spec.l_sel)[:, None, None]
    forced = (read < spec.num_first) | (read > own - spec.num_local)
    is_wanted = (read[..., None] == wanted[:, None, None]).any(-1)
    # Forced ones first, then the wanted ones, then the others as they are; duplicates are dropped.
    rest = torch.full_like(read, -1) if alone else torch.where(forced | is_wanted, -1, read)
    kept = torch.where(forced, read, -1)
    both = wanted[:, None].expand(-1, read.shape[1], -1).to(read.dtype)
    twice = both[..., 1:] == both[..., :1]
    both = torch.cat([both[..., :1], torch.where(twice, -1, both[..., 1:])], dim=-1)
    is_kept = (both[..., None] == kept[..., None, :]).any(-1)
    both = torch.where(is_kept, -1, both)
    every = torch.cat([kept, both, rest], dim=-1)
    order = (every < 0).to(torch.int8).argsort(dim=-1, stable=True)
    chosen = every.gather(-1, order)[..., : read.shape[-1]]
    last = torch.iinfo(chosen.dtype).max
    ordered = torch.where(chosen < 0, last, chosen).sort(dim=-1).values
    return torch.where(ordered == last, -1, ordered)


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Within it, every layer of NSA attends by what `change` makes of its gates and selection."""
    original: Any = vars(attention)["nsa_attention"]
    calls = itertools.count()

    def attend(*given: Any, **options: Any) -> Any:
        _, selection = original(*given, **options)
        gates, selection = change(next(calls), given[7], selection)
        return original(*given[:7], gates, *given[8:], selection=selection, **options)

    setattr(attention, "nsa_attention", attend)  # noqa: B010  a function of another module
    try:
        yield
    finally:
        setattr(attention, "nsa_attention", original)  # noqa: B010
