"""Losses: chunked linear cross-entropy, the next-token objective, and evaluation on held-out rows.

With V ids, the logits of N rows and their gradient take 8 N V bytes in fp32; for a large vocabulary
that is more than the rest of the step. Linear cross-entropy therefore processes a chunk of rows at
a time, computes the gradient in the forward pass, and keeps only the gradients of the hidden states
and of the head matrix.

On a GPU, a kernel reads the logits of a chunk twice and overwrites them with their gradient. Chunks
are larger there, because each one adds to the gradient of the full matrix, and the matrix is padded
with zero rows, because matrix products of odd width are slow.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.data import ByteTokenizer, Data, Tokenizer
from nsa.model import TinyLM
from nsa.model.cost import FUSED_PART, PART
from nsa.model.stats import AttentionStats
from nsa.ops.machine import machine_obstacle, machine_of
from nsa.train.distributed.strategy import Strategy
from nsa.train.runtime import Runtime

# Chunk sizes in logits (rows x vocabulary), not in rows.
PART_NUMBERS = PART
FUSED_PART_NUMBERS = FUSED_PART
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH_STEP = 64
"""The kernel needs logits whose width is a multiple of this."""
IGNORED = -100
"""Target excluded from the mean; torch's default ignore_index."""


def linear_cross_entropy(
    hidden: Tensor,  # [N, dim]
    weight: Tensor,  # [V, dim]
    targets: Tensor,  # [N] integer: 0 .. V - 1, or IGNORED
    dtype: torch.dtype,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats of softmax(hidden @ weight.T), with products in `dtype`.

    The mean is over targets that are not IGNORED; NaN if there are none.
    """
    targets = targets.long()
    _check_targets(targets, weight.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, dtype)
    return loss


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernel computes the loss of a chunk."""
    if device.type != "cuda" or dtype not in FUSED_DTYPES:
        return False
    return not machine_obstacle(machine_of(device))


def _check_targets(targets: Tensor, vocab: int) -> None:
    """Raise for ids outside the vocabulary.

    On a GPU this is an asynchronous device assertion, as in torch: no host sync, and a CUDA graph
    can capture it.
    """
    known = ((targets >= 0) & (targets < vocab)) | (targets == IGNORED)
    if targets.device.type != "cpu":
        torch._assert_async(known.all(), f"a target is outside [0, {vocab}) and not {IGNORED}")
    elif not known.all():
        wrong = int(targets[~known][0])
        raise IndexError(
            f"target {wrong} is outside the vocabulary of {vocab} ids; use 0 to {vocab - 1}, or "
            f"{IGNORED} to exclude a token from the loss"
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
            # The first chunk allocates the fp32 accumulator; the others add to it.
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
        share = grad / num_counted.clamp(min=1)  # no targets: zero gradient, as in torch
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
    """Write the losses of a chunk and return the gradient of their sum with respect to the logits:
    softmax(logits) - onehot(target).

    Not divided by the number of rows here: in fp16 the quotient would underflow.
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
    """The same with the Triton kernel, in place of the logits."""
    from nsa.ops.triton.cross_entropy import losses_and_gradient

    losses_and_gradient(logits, targets, losses, vocab, ignored=IGNORED, with_grad=wanted)
    return logits


# --- the next-token objective ---

SAMPLE = 8192
"""Tokens per batch used by the extra statistics pass: as many rows as fit, at least one."""


def next_token_loss(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats | None = None,
    bounds: Tensor | None = None,  # [documents + 1] int32, on the host
    index_losses: list[Tensor] | None = None,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats: the first S tokens of a row predict the last S.

    Under context parallelism it is the mean over this rank's tokens. All ranks have as many, so the
    mean over the ranks is that over all tokens.

    With `bounds`, attention and positions stay inside a document. All S targets still count: the
    first token of a document is predicted from the previous document's EOS. So every row has the
    same number of targets, and losses with and without bounds are comparable. In training, the
    losses of indexers are appended to `index_losses`.
    """
    if stats is not None and model.compiled:
        collect_stats(model, batch, runtime, stats, bounds)
        stats = None
    inputs, targets = _own_rows(model, batch, bounds)
    with runtime.compute():
        hidden = model.hidden(
            inputs, cu_seqlens=bounds, stats=stats, index_losses=index_losses
        )  # [B, S, dim]
    loss = partial(linear_cross_entropy, dtype=runtime.dtype)
    return model.mean_loss(hidden.flatten(0, 1), targets.flatten(), loss)


def collect_stats(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats,
    bounds: Tensor | None = None,
) -> None:
    """Collect attention statistics of the first rows of a batch in an extra forward pass.

    For compiled models and CUDA graphs, which cannot collect them: a logged step must train bitwise
    like any other. Limited to SAMPLE tokens, because a full pass would cost a third of a step.
    """
    rows = batch[: max(1, SAMPLE // (batch.shape[1] - 1))]
    if bounds is not None:
        end = rows.shape[0] * (batch.shape[1] - 1)
        bounds = torch.cat([bounds[bounds < end], bounds.new_tensor([end])])
    with torch.no_grad(), runtime.compute():
        model.hidden(_own_rows(model, rows, bounds)[0], cu_seqlens=bounds, stats=stats)


def _own_rows(model: TinyLM, batch: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """All but the last token of each row, and all but the first: [B, S] each, this rank's share.

    With `bounds`, rows are packed into a single one.
    """
    pair = batch[:, :-1], batch[:, 1:]
    if bounds is not None:
        pair = pair[0].reshape(1, -1), pair[1].reshape(1, -1)
    return model.own_tokens(pair[0]), model.own_tokens(pair[1])


# --- evaluation on held-out rows ---


class Evaluation(NamedTuple):
    """Result of an evaluation."""

    loss: float
    """Nats per token."""
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of the text of these tokens; an EOS counts as one byte."""

    @property
    def ppl(self) -> float:
        """Perplexity: e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp overflows above 709

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text: comparable across tokenizers."""
        return self.loss / math.log(2) * self.num_tokens / self.num_bytes


@torch.no_grad()
def evaluate(
    model: TinyLM, data: Data, train: TrainConfig, runtime: Runtime, ranks: Strategy | None = None
) -> Evaluation:
    """Mean loss over the first eval_batches * batch_size held-out rows for each data rank.

    Each row counts at most once. Data ranks take batches in turn; all ranks return the same
    result. All ranks run the same number of forward passes, because a forward pass may be
    collective; a rank without rows left runs a dummy batch.
    """
    rows, ranks = data.val, ranks or Strategy()
    stride = ranks.num_data_ranks * train.batch_size
    wanted = train.eval_batches * stride
    num_rows = min(wanted, rows.num_rows or wanted)
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    num_bytes = 0
    for first in range(0, num_rows, stride):
        position = first + ranks.data_rank * train.batch_size
        size = max(min(train.batch_size, num_rows - position), 0)
        batch = rows.batch(position, size) if size else rows.batch(0, 1)
        if size:
            num_bytes += _num_bytes(batch[:, 1:], data.tokenizer)
        on_device = batch.to(runtime.device)
        loss = next_token_loss(model, on_device, runtime, bounds=data.bounds(batch))
        if size:
            # Weighted by rows: the last batch may be smaller.
            total += loss.double() * size
    model.train(was_training)
    # Ranks that share rows have a mean over their tokens each, and count the same bytes.
    sums = ranks.sum_over_ranks(total, num_bytes)
    loss_sum, all_bytes = (x / (ranks.cp * ranks.tp) for x in sums)
    return Evaluation(loss_sum / num_rows, num_rows * train.seq_len, round(all_bytes))


def _num_bytes(targets: Tensor, tokenizer: Tokenizer) -> int:  # [B, S]
    """UTF-8 bytes of the text of the targets."""
    if tokenizer.vocab == ByteTokenizer.vocab:  # one token is one byte
        return targets.numel()
    rows = targets.tolist()
    ends = sum(row.count(tokenizer.eos) for row in rows)
    texts = (tokenizer.decode(i for i in row if i != tokenizer.eos) for row in rows)
    return ends + sum(len(text.encode("utf-8", errors="replace")) for text in texts)
