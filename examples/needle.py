"""A needle in a haystack, seen through the selection.

Four pairs (key, value) lie in a haystack of noise, far beyond the window of 8 tokens; the last
token repeats one of the keys, and the model has to name its value. A model of one layer learns it
in seconds. The table shows how often the answer is right, and how often the last token selected the
block of the needle: it may choose one block, the other three are forced. The compressed branch sees
the needle too, as part of a mean of 4 tokens, so some answers are right without the block.

    python examples/needle.py [--steps N] [--picture needle.png]
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import nsa
from nsa.model import AttentionStats

KEYS, VALUES, NOISE = range(0, 8), range(8, 16), range(16, 24)  # token ids
NUM_PAIRS, NUM_QUESTIONS = 4, 8
BLOCK, WINDOW = 8, 8  # tokens
HAY_BLOCKS = 6  # in training
LEARNED = 0.1  # nats per answer; a guess has ln 8 = 2.1
IGNORED = -100  # a target that cross_entropy leaves out


def make_rows(num_rows: int, hay_blocks: int, needle_block: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets, both [B, S]: haystack, a block of noise, then the questions.

    The pair of the last question is in `needle_block`, or anywhere. Block 0, which every query
    reads, has no pair.
    """
    asked_at = (hay_blocks + 1) * BLOCK + 2 + 2 * torch.arange(NUM_QUESTIONS)
    length = int(asked_at[-1]) + 1  # the last question is alone in the last block
    ids = torch.randint(NOISE.start, NOISE.stop, (num_rows, length))
    order = torch.rand(num_rows, hay_blocks)
    order[:, 0] = 2.0  # last in the order, so never taken
    if needle_block:
        order[:, needle_block] = -1.0  # always pair 0
    places = order.argsort(dim=-1)[:, :NUM_PAIRS] * BLOCK
    places += 2 * torch.randint(BLOCK // 2, places.shape)
    keys = torch.rand(num_rows, len(KEYS)).argsort(dim=-1)[:, :NUM_PAIRS] + KEYS.start
    values = torch.randint(VALUES.start, VALUES.stop, keys.shape)
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    asked = torch.randint(NUM_PAIRS, (num_rows, NUM_QUESTIONS))
    asked[:, -1] = 0
    ids[:, asked_at] = keys.gather(1, asked)
    # The answer is a target, and never a token: no later question can copy it.
    targets = torch.full_like(ids, IGNORED)
    targets[:, asked_at] = values.gather(1, asked)
    return ids, targets


def train(model: nsa.TinyLM, most_steps: int) -> int:
    """Train until the task is learned; return the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0)
    recent = 3.0  # running mean of the loss
    for step in range(1, most_steps + 1):
        ids, targets = make_rows(16, HAY_BLOCKS)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = 0.9 * recent + 0.1 * loss.item()
        if recent < LEARNED:
            return step
    return most_steps


@torch.no_grad()
def look(model: nsa.TinyLM, hay_blocks: int, needle_block: int) -> list[list[float]]:
    """Print a line of the table; return the share of reads by block of the query and block read."""
    ids, targets = make_rows(128, hay_blocks, needle_block)
    stats = AttentionStats(maps=True)
    answers = model(ids, stats=stats)[:, -1].argmax(dim=-1)
    right = (answers == targets[:, -1]).float().mean().item()
    maps = stats.selection_maps()
    assert maps is not None
    reads = maps[0].reads[0]  # of layer 0 and its only KV head
    # The last block has one query, so this is the share of rows that selected the needle's block.
    selected = reads[-1][needle_block]
    print(f"{ids.shape[1]:6} {needle_block:12} {right:13.0%} {selected:14.0%}")
    return reads


def draw(reads: list[list[float]], needle_block: int, file: str) -> None:
    from matplotlib import pyplot  # optional: the extra `plot`

    pyplot.imshow(reads, cmap="magma", vmin=0, vmax=1)
    pyplot.colorbar(label="share of queries that read the block")
    pyplot.axvline(needle_block, color="cyan", linewidth=0.5)
    pyplot.xlabel("block read (line: the needle's)")
    pyplot.ylabel("block of the query (last: the question)")
    pyplot.savefig(file, dpi=150)


parser = argparse.ArgumentParser(description="A needle in a haystack, seen through the selection.")
parser.add_argument("--steps", type=int, default=600, help="most of them (600)")
parser.add_argument("--picture", metavar="FILE", help="draw which blocks are read")
args = parser.parse_args()

torch.manual_seed(0)
sizes: dict[str, Any] = dict(vocab=24, dim=32, n_layers=1, n_heads=4, n_kv_groups=1, d_k=16, d_v=16)
blocks: dict[str, Any] = dict(l=4, d=4, l_sel=BLOCK, n_sel=4, w=WINDOW)
# A tied head answers with the embedding it reads; slow positions help to compare distant tokens.
model = nsa.TinyLM(**sizes, **blocks, tie_embeddings=True, embed_std=0.3, rope_scale=16.0)

print("tokens needle_block  answer_right  block_selected\nbefore training")
look(model, HAY_BLOCKS, needle_block=3)
steps = train(model, args.steps)
print(f"after {steps} steps with {HAY_BLOCKS} blocks of hay, and with 4 times as many")
for hay_blocks, needle_block in ((6, 1), (6, 3), (6, 5), (24, 1), (24, 23), (24, 12)):
    reads = look(model, hay_blocks, needle_block)
if args.picture:
    draw(reads, needle_block, args.picture)
    print(f"wrote {args.picture}")
