"""One model over several ranks: its sequences (context parallelism), its weights (tensor
parallelism).

`split` says who holds which tokens, `exchange` moves keys and values (`chosen`: only those of
blocks that somebody reads), `attention` reads them, `plan` says how and why, `style` applies it to
a model. `shards` has layers whose weights are sharded by head, `tensor` applies them to a model.
"""

from nsa.parallel.attention import received_bytes
from nsa.parallel.plan import ExchangePlan, decided, plan_exchange
from nsa.parallel.split import PARTS, Split, shard_sequence
from nsa.parallel.style import ContextParallel, average_gradients, gather_sequence
from nsa.parallel.tensor import TensorParallel

__all__ = [
    "PARTS",
    "ContextParallel",
    "ExchangePlan",
    "Split",
    "TensorParallel",
    "average_gradients",
    "decided",
    "gather_sequence",
    "plan_exchange",
    "received_bytes",
    "shard_sequence",
]
