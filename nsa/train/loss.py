"""The loss of an output head without its logits: a part of the rows at a time.

With V ids, the logits of N rows and their gradient take 8 N V bytes in fp32; for a large
vocabulary that is more than the rest of the step. Here the gradient of a part follows at once, and
only the gradients of the hidden states and of the matrix are kept for the backward.

On a GPU a kernel reads the logits of a part twice and leaves their gradient in their place; there
a part has more rows, because each adds its share to the gradient of the whole matrix, and the
matrix is padded with zero rows, because products of an odd width are slow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.data import ByteTokenizer, Data, Tokenizer
from nsa.model import TinyLM
from nsa.model.cost import FUSED_PART, PART
from nsa.model.stats import AttentionStats
from nsa.ops.plan import machine_obstacle, machine_of
from nsa.train.distributed.strategy import Strategy
from nsa.train.runtime import Runtime

PART_NUMBERS = PART
FUSED_PART_NUMBERS = FUSED_PART
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH_STEP = 64
"""The kernel's logits have a width that is a multiple of this."""
IGNORED = -100
"""A target that is left out of the mean, as torch does by default."""


def linear_cross_entropy(
    hidden: Tensor,  # [N, dim]
    weight: Tensor,  # [V, dim]
    targets: Tensor,  # [N] integer: 0 .. V - 1, or IGNORED
    dtype: torch.dtype,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats of softmax(hidden @ weight.T), with products in `dtype`.

    Over the targets that are not IGNORED; NaN where there are none.
    """
    targets = targets.long()
    _check_targets(targets, weight.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, dtype)
    return loss


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel computes the loss of a part."""
    if device.type != "cuda" or dtype not in FUSED_DTYPES:
        return False
    return not machine_obstacle(machine_of(device))


def _check_targets(targets: Tensor, vocab: int) -> None:
    """Refuse ids that are not in the vocabulary. On a GPU by an assertion on the device, as torch
    does: nobody waits for the answer, and a CUDA graph that is captured holds it."""
    known = ((targets >= 0) & (targets < vocab)) | (targets == IGNORED)
    if targets.device.type != "cpu":
        torch._assert_async(known.all(), f"a target is outside [0, {vocab}) and not {IGNORED}")
    elif not known.all():
        wrong = int(targets[~known][0])
        raise IndexError(
            f"target {wrong} is outside the vocabulary of {vocab} ids; give 0 to {vocab - 1}, or "
            f"{IGNORED} to leave a token out of the loss"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        ctx.dtypes = hidden.dtype, weight.dtype
        fused = is_fused(hidden.device, dtype)
        rows = hidden.detach().to(dtype)
        matrix = _matrix(weight.detach(), dtype, WIDTH_STEP if fused else 1)
        num_rows, vocab = rows.shape[0], weight.shape[0]
        losses = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
        d_rows = torch.empty_like(rows) if wanted else None
        d_matrix: Tensor | None = None
        size = max((FUSED_PART_NUMBERS if fused else PART_NUMBERS) // len(matrix), 1)
        part_of = _fused_part if fused else _plain_part
        for first in range(0, num_rows, size):
            span = slice(first, first + size)
            logits = rows[span] @ matrix.t()
            d_logits = part_of(logits, targets[span], losses[span], vocab, wanted)
            if d_rows is None:
                continue
            d_rows[span] = d_logits @ matrix
            share = d_logits.t() @ rows[span]
            d_matrix = share.float() if d_matrix is None else d_matrix.add_(share)
        num_counted = (targets != IGNORED).sum()
        if d_rows is not None:
            if d_matrix is None:  # no rows at all
                d_matrix = torch.zeros_like(matrix, dtype=torch.float32)
            ctx.save_for_backward(d_rows, d_matrix[:vocab], num_counted)
        return losses.sum() / num_counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_rows, d_matrix, num_counted = ctx.saved_tensors
        rows_dtype, matrix_dtype = ctx.dtypes
        share = grad / num_counted.clamp(min=1)  # none counted: no gradient, as in torch
        return (d_rows * share).to(rows_dtype), (d_matrix * share).to(matrix_dtype), None, None


def _matrix(weight: Tensor, dtype: torch.dtype, step: int) -> Tensor:  # [V, dim] -> [V_PAD, dim]
    """The matrix in `dtype`, with zero rows up to a multiple of `step`."""
    vocab, dim = weight.shape
    padded = -(-vocab // step) * step
    if padded == vocab:
        return weight.to(dtype)
    matrix = torch.empty(padded, dim, dtype=dtype, device=weight.device)
    matrix[:vocab] = weight
    matrix[vocab:] = 0
    return matrix


def _plain_part(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, wanted: bool
) -> Tensor:
    """Write the losses of a part, and return the gradient of their sum for the logits.

    It is not divided by the number of rows here: fp16 has no such numbers.
    """
    wide, left_out = logits.float(), targets == IGNORED
    column = targets.masked_fill(left_out, 0)[:, None]
    norm = wide.logsumexp(dim=-1, keepdim=True)
    losses.copy_((norm - wide.gather(1, column))[:, 0].masked_fill_(left_out, 0.0))
    if not wanted:
        return logits
    probs = wide.sub_(norm).exp_()
    probs[torch.arange(len(targets), device=logits.device), column[:, 0]] -= 1.0
    return probs.masked_fill_(left_out[:, None], 0.0).to(logits.dtype)


def _fused_part(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, wanted: bool
) -> Tensor:
    """The same by the kernel, in the memory of the logits."""
    from nsa.ops.triton.cross_entropy import losses_and_gradient

    losses_and_gradient(logits, targets, losses, vocab, ignored=IGNORED, with_grad=wanted)
    return logits


# The training objective: the next token of each row.

SAMPLE = 8192
"""Tokens of a batch that statistics in a pass of their own look at: as many rows as fit, or one."""


def next_token_loss(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats | None = None,
    bounds: Tensor | None = None,  # [documents + 1] int32, on the host
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats: the first S tokens of a row predict the last S.

    With `bounds`, attention and positions stay inside a document. All S targets count even then:
    the first token of a document is predicted from the end mark before it, so that every row has
    equally many, and losses with and without bounds are of the same targets.
    """
    if stats is not None and model.compiled:
        collect_stats(model, batch, runtime, stats, bounds)
        stats = None
    inputs = _inputs(batch, bounds)
    with runtime.compute():
        hidden = model.hidden(inputs, cu_seqlens=bounds, stats=stats)  # [B, S, dim]
    targets = batch[:, 1:].flatten()
    return linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets, runtime.dtype)


def collect_stats(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats,
    bounds: Tensor | None = None,
) -> None:
    """Statistics of the attention to the first rows of a batch, where an update cannot collect any.

    In a pass of its own, for a logged step must train as any other, to the bit; over `SAMPLE`
    tokens, for a pass over the whole batch would cost a third of a step.
    """
    rows = batch[: max(1, SAMPLE // (batch.shape[1] - 1))]
    if bounds is not None:
        end = rows.shape[0] * (batch.shape[1] - 1)
        bounds = torch.cat([bounds[bounds < end], bounds.new_tensor([end])])
    with torch.no_grad(), runtime.compute():
        model.hidden(_inputs(rows, bounds), cu_seqlens=bounds, stats=stats)


def _inputs(batch: Tensor, bounds: Tensor | None) -> Tensor:
    """All but the last token of each row; packed documents lie in one row."""
    inputs = batch[:, :-1]
    return inputs if bounds is None else inputs.reshape(1, -1)


# The loss on held-out rows.


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
    model: TinyLM, data: Data, train: TrainConfig, runtime: Runtime, ranks: Strategy | None = None
) -> Evaluation:
    """Average over the first eval_batches * batch_size held-out rows, each at most once.

    So many for each rank; a rank takes every world_size-th batch, and all get the same result. All
    do as many passes, because ranks that share a model out can only do them together: one without
    rows left does its last for nothing.
    """
    rows, ranks = data.val, ranks or Strategy()
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
