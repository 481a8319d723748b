"""The loss on held-out rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nsa.config import TrainConfig
from nsa.data import Rows
from nsa.model import TinyLM
from nsa.train.loss import next_token_loss
from nsa.train.runtime import Runtime


class Evaluation(NamedTuple):
    """What an evaluation found; a token is a byte here."""

    loss: float
    """Nats per token."""
    num_tokens: int

    @property
    def ppl(self) -> float:
        """Perplexity: the number of equally likely tokens that are as hard to guess."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits."""
        return self.loss / math.log(2)


@torch.no_grad()
def evaluate(model: TinyLM, rows: Rows, train: TrainConfig, runtime: Runtime) -> Evaluation:
    """Average over the first eval_batches * batch_size rows, each at most once."""
    wanted = train.eval_batches * train.batch_size
    num_rows = min(wanted, rows.num_rows or wanted)
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    for position in range(0, num_rows, train.batch_size):
        size = min(train.batch_size, num_rows - position)
        batch = rows.batch(position, size).to(runtime.device)
        total += next_token_loss(model, batch, runtime).double() * size
    model.train(was_training)
    return Evaluation(total.item() / num_rows, num_rows * train.seq_len)
