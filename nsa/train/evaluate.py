"""The loss on held-out rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.data import ByteTokenizer, Data, Tokenizer
from nsa.model import TinyLM
from nsa.train.loss import next_token_loss
from nsa.train.ranks import Alone
from nsa.train.runtime import Runtime


class Evaluation(NamedTuple):
    """What an evaluation found."""

    loss: float
    """Nats per token."""
    num_tokens: int
    num_bytes: int
    """Bytes of the text of these tokens; an end mark counts as one."""

    @property
    def ppl(self) -> float:
        """Perplexity: the number of equally likely tokens that are as hard to guess."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits, over the bytes of the text: comparable between tokenizers."""
        return self.loss / math.log(2) * self.num_tokens / self.num_bytes


@torch.no_grad()
def evaluate(
    model: TinyLM, data: Data, train: TrainConfig, runtime: Runtime, ranks: Alone | None = None
) -> Evaluation:
    """Average over the first eval_batches * batch_size held-out rows, each at most once.

    So many for each rank; a rank takes every world_size-th batch, and all get the same result. All
    do as many passes, because ranks that share a model out can only do them together: one without
    rows left does its last for nothing.
    """
    rows, ranks = data.val, ranks or Alone()
    stride = ranks.world_size * train.batch_size
    wanted = train.eval_batches * stride
    num_rows = min(wanted, rows.num_rows or wanted)
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    num_bytes = 0
    for first in range(0, num_rows, stride):
        position = first + ranks.rank * train.batch_size
        size = max(min(train.batch_size, num_rows - position), 0)
        batch = rows.batch(position, size) if size else rows.batch(0, 1)
        if size:
            num_bytes += _num_bytes(batch[:, 1:], data.tokenizer)
        on_device = batch.to(runtime.device)
        loss = next_token_loss(model, on_device, runtime, bounds=data.bounds(batch))
        if size:
            total += loss.double() * size
    model.train(was_training)
    loss_sum, all_bytes = ranks.total(total, num_bytes)
    return Evaluation(loss_sum / num_rows, num_rows * train.seq_len, int(all_bytes))


def _num_bytes(targets: Tensor, tokenizer: Tokenizer) -> int:  # [B, S]
    """Bytes of the text that the targets stand for."""
    if tokenizer.vocab == ByteTokenizer.vocab:
        return targets.numel()
    rows = targets.tolist()
    ends = sum(row.count(tokenizer.eos) for row in rows)
    texts = (tokenizer.decode(i for i in row if i != tokenizer.eos) for row in rows)
    return ends + sum(len(text.encode("utf-8", errors="replace")) for text in texts)
