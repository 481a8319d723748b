"""Why a question is not answered although the block of its needle is read.

`python studies/long_context/diagnose.py --model RUN/model.pt --text OUT/text --out FILE.json` asks
a trained model the far questions of held-out training rows, and records for every question what
each layer did at the token before the answer:

  reads    by layer and KV head: whether the block of the needle's value was selected
  key      the same for the block of the needle's key, which is another one where they straddle two
  block    by layer and query head: the mass that the selected branch puts on the value's block
  value    ... and on the value token
  needle   ... and on the needle from its value to its full stop: the key may carry the value
  gates    by layer, query head and branch (compressed, selected, window); null without branches
  rivals   other needles in the block; `from_rival`: the answer given is the value of one of them
  right    whether the answer is right

The mass is a softmax over the tokens of all blocks that the head has selected, up to the query. The
summary looks at the reader, the head with the most gate * needle in right answers, and sorts the
wrong answers by what differs there: no head reads the block; only others do; little mass (below
half the median of right answers); a small gate (the same); or none of these, and the value is lost
in a later layer. Works for NSA and for rules with one K and V. Of NSA, interventions.py then says
which of these differences decide the answer; `needles` are those of a row, `by_needles` says how
many questions are answered in rows with few and with many of them.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

import numpy as np
import torch
from torch import Tensor

from nsa.config import BAD_INPUT, Config, StrictParser
from nsa.data.documents import VAL
from nsa.data.tokenizers import HFTokenizer
from nsa.evaluate.needles import Document
from nsa.files import write_text
from nsa.model import TinyLM
from nsa.model.cost import block_spec
from nsa.train.checkpoint.model_file import load_model
from nsa.train.runtime import resolve_runtime
from studies.long_context.interventions import intervene
from studies.long_context.text import TOKENIZER, read_hay
from studies.long_context.training_rows import Mixture, make_row
from studies.long_context.vocabulary import Words, find_words
from studies.recorder import Look, View

SCHEMA = 1
LITTLE = 0.5
"""Of the median of right answers; less counts as little."""
CAUSES = ("no head reads", "only others read", "little mass", "small gate", "lost later")
Question = dict[str, Any]


@torch.no_grad()
def diagnose(
    model: TinyLM, rows: Sequence[Document], words: Words, block: int, far: int
) -> list[Question]:
    """Every question of the rows whose needle lies more than `far` tokens back."""
    device = model.embed.weight.device
    to_key, to_end = 1 + len(words.owner), 1 + len(words.owner) + len(words.end)
    found: list[Question] = []
    for number, row in enumerate(rows):
        pairs = [(a, a - d) for a, d in zip(row.answers, row.distances, strict=True) if d > far]
        if not pairs:
            continue
        ids = torch.from_numpy(row.ids).to(device)
        place, told = torch.tensor(pairs, device=device).unbind(1)
        look = Look(model, ids[None])
        given = model.head(look.hidden[0, place - 1]).argmax(-1)
        layers = [
            _at_questions(view, place - 1, told, block, to_key, to_end) for view in look.views()
        ]
        others = _values_by_block(row, block)
        for i, (answer, value) in enumerate(pairs):
            rivals, is_right = others[value // block] - {value}, bool(given[i] == ids[answer])
            values = {int(row.ids[other]) for other in rivals}
            found.append(
                {
                    "row": number,
                    "needles": sum(map(len, others.values())),
                    "distance": answer - value,
                    "right": is_right,
                    "rivals": len(rivals),
                    "from_rival": not is_right and int(given[i]) in values,
                    **{key: [_listed(layer[key], i) for layer in layers] for key in layers[0]},
                }
            )
    return found


def _at_questions(
    view: View, query: Tensor, told: Tensor, block: int, to_key: int, to_end: int
) -> dict[str, Tensor | None]:
    """What a layer does at the queries [Q]; every tensor has the questions first."""
    if view.selection is None:
        raise ValueError("dense attention selects no blocks; give a model of NSA or of a rule")
    chosen = view.selection[0, query]  # [Q, H, n_sel]
    probs = selected_mass(view, query, chosen, block)  # [Q, Hq, S]
    place = torch.arange(probs.shape[-1], device=probs.device)
    start, end = told[:, None], told[:, None] + to_end
    spans = {
        "block": place // block == start // block,
        "value": place == start,
        "needle": (place >= start) & (place <= end),
    }
    masses = {key: (probs * span[:, None]).sum(-1) for key, span in spans.items()}
    key_block = (told + to_key) // block
    return {
        "reads": (chosen == (told // block)[:, None, None]).any(-1),
        "key": (chosen == key_block[:, None, None]).any(-1),
        **masses,
        "gates": None if view.gates is None else view.gates[0, query],
    }


def selected_mass(
    view: View,
    query: Tensor,  # [Q]
    chosen: Tensor,  # [Q, H, n_sel] int32
    block: int,
) -> Tensor:  # [Q, Hq, S] fp32
    """Attention of the selected branch at the queries; 0 outside of the blocks that are read."""
    q, k = view.q[0, query].float(), view.k[0].float()
    (num_tokens, groups), heads = k.shape[:2], q.shape[1]
    place = torch.arange(num_tokens, device=q.device)
    num_blocks = -(-num_tokens // block)
    ids = torch.where(chosen < 0, num_blocks, chosen).long()
    read = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=q.device)
    read = read.scatter_(-1, ids, True)[..., place // block]  # [Q, H, S]
    read = read.repeat_interleave(heads // read.shape[1], dim=1) & (place <= query[:, None, None])
    with torch.autocast(q.device.type, enabled=False):
        logits = torch.einsum("qhgd,shd->qhgs", q.unflatten(1, (groups, -1)), k).flatten(1, 2)
    return (logits / math.sqrt(q.shape[-1])).masked_fill(~read, -math.inf).softmax(-1)


def summarize(questions: Sequence[Question]) -> dict[str, Any]:
    """Right answers, the reader, its medians, and the causes of the wrong answers."""
    right = np.array([question["right"] for question in questions], bool)
    needle = np.array([question["needle"] for question in questions])  # [Q, layers, Hq]
    gate = np.ones_like(needle)
    if questions[0]["gates"][0] is not None:
        gate = np.array([question["gates"] for question in questions])[..., 1]
    reads = np.array([question["reads"] for question in questions], bool)  # [Q, layers, H]
    weight = (gate * needle)[right if right.any() else slice(None)].mean(0)
    layer, head = np.unravel_index(weight.argmax(), weight.shape)
    own = reads[:, layer, head * reads.shape[2] // needle.shape[2]]
    mass, share = needle[:, layer, head], gate[:, layer, head]
    usual = [np.median(of[right]) if right.any() else 0.0 for of in (mass, share)]
    conditions = [~reads.any((1, 2)), ~own, mass < LITTLE * usual[0], share < LITTLE * usual[1]]
    cause = np.select(conditions, CAUSES[:4], CAUSES[4])
    counted = Counter(cause[~right].tolist())
    rivals = np.array([question["rivals"] for question in questions])
    return {
        "questions": len(questions),
        "right": int(right.sum()),
        "from_rival": sum(question["from_rival"] for question in questions),
        "reader": {"layer": int(layer), "head": int(head)},
        "read_by_any": [_share(reads[:, n].any(1)) for n in range(reads.shape[1])],
        "causes": {name: counted[name] for name in CAUSES},
        "by_needles": _by_needles(questions),
        **{
            name: {
                "read_by_reader": _share(own[of]),
                "needle": _median(mass[of & own]),
                "gate": _median(share[of & own]),
                "rivals": _median(rivals[of]),
            }
            for name, of in (("right_answers", right), ("wrong_answers", ~right))
        },
    }


def main(argv: list[str] | None = None) -> int:
    """Ask, write the file, and print the summary."""
    args = _parser().parse_args(argv)
    try:
        model, cfg = load_model(args.model)
        runtime = resolve_runtime(
            cfg.runtime, (cfg.model.d_k, cfg.model.d_v), cfg.model.attention_kind
        )
        rows, words = held_out_rows(args.text, cfg, args.rows, args.keys, args.seed)
        with runtime.compute():
            model = model.to(runtime.device)
            questions = diagnose(model, rows, words, cfg.nsa.l_sel, args.far)
            if not questions:
                raise ValueError(
                    f"no question is more than {args.far} tokens away; give a lower --far"
                )
            summary = summarize(questions)
            if all(cfg.model.branched):
                reader, spec = summary["reader"]["layer"], block_spec(cfg)
                summary["trials"] = intervene(model, rows, words, spec, args.far, reader)
    except ValueError as error:
        print(f"diagnose: error: {error}", file=sys.stderr)
        return BAD_INPUT
    content = {"schema": SCHEMA, "model": str(args.model), "far": args.far, "summary": summary}
    write_text(args.out, json.dumps(content | {"questions": questions}, allow_nan=False) + "\n")
    print(json.dumps(summary, indent=1))
    return 0


def held_out_rows(
    text: Path, cfg: Config, num_rows: int, num_keys: int, seed: int
) -> tuple[list[Document], Words]:
    """Held-out rows as the probe of a stage asks them, and the words of their needles."""
    tokenizer = HFTokenizer(text / TOKENIZER)
    words = find_words(tokenizer, 2, num_keys)
    mixture, hay = Mixture(seq_len=cfg.train.seq_len), read_hay(text, VAL, words)
    rows = (make_row(i, VAL, mixture, hay, words, tokenizer.eos, seed) for i in range(num_rows))
    return list(rows), words


def _values_by_block(row: Document, block: int) -> dict[int, set[int]]:
    """Places of the values of all needles that are asked for, by block."""
    places: dict[int, set[int]] = {}
    for answer, distance in zip(row.answers, row.distances, strict=True):
        value = answer - distance
        places.setdefault(value // block, set()).add(value)
    return places


def _by_needles(questions: Sequence[Question]) -> dict[str, list[int]]:
    """By the needles of a row, up to a power of four: questions, and those answered."""
    found: dict[str, list[int]] = {}
    for question in sorted(questions, key=lambda question: int(question["needles"])):
        most = 4 ** math.ceil(math.log(max(1, question["needles"]), 4))
        count = found.setdefault(f"up to {most}", [0, 0])
        count[0] += 1
        count[1] += question["right"]
    return found


def _listed(values: Tensor | None, question: int) -> Any:
    if values is None:
        return None
    one = values[question]
    return one.tolist() if one.dtype == torch.bool else one.double().cpu().numpy().round(4).tolist()


def _share(of: Any) -> float | None:
    return round(float(of.mean()), 4) if of.size else None


def _median(of: Any) -> float | None:
    return round(float(np.median(of)), 4) if of.size else None


def _parser() -> StrictParser:
    parser = StrictParser(prog="diagnose", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a model.pt")
    text = "the folder `text` of the study that trained it"
    parser.add_argument("--text", type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON")
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="held-out rows (16)")
    far = "tokens from a needle to its question, at least (1024)"
    parser.add_argument("--far", type=int, default=1024, metavar="N", help=far)
    parser.add_argument("--keys", type=int, default=512, metavar="N", help="of the needles (512)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the rows (1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
