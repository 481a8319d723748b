"""One sequence over several ranks: context parallelism for the model and its attention layers.

`split` says who holds which tokens, `exchange` moves keys and values (`chosen`: only those of
blocks that somebody reads), `attention` reads them, `style` applies it to a model.
"""

from nsa.parallel.attention import received_bytes
from nsa.parallel.split import PARTS, Split, shard_sequence
from nsa.parallel.style import ContextParallel, average_gradients, gather_sequence

__all__ = [
    "PARTS",
    "ContextParallel",
    "Split",
    "average_gradients",
    "gather_sequence",
    "received_bytes",
    "shard_sequence",
]
