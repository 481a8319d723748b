"""Where packed documents and their blocks start and end, as the kernels look it up."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import refuse_captured_documents
from nsa.ops.spec import BlockSpec


class Documents(NamedTuple):
    """Index tensors, int32: [S] for raw tokens, [N] for compressed ones, [blocks] for blocks."""

    row_start: Tensor  # first token of the row's document
    row_cmp: Tensor  # first compressed token of the row's document
    row_block: Tensor  # first selection block of the row's document
    raw_first: Tensor  # first query that sees the raw token: itself
    raw_last: Tensor  # last token of its document
    win_last: Tensor  # last query whose window reaches the raw token
    cmp_first: Tensor  # first query that sees the compressed token
    cmp_last: Tensor  # last token of its document
    block_start: Tensor  # first token of the selection block
    block_stop: Tensor  # one past its last token


def index_documents(doc_lens: list[int], spec: BlockSpec, device: torch.device) -> Documents:
    """Build the index on the host, where the lengths are, and copy it in one piece.

    The layers of a step ask for the same one; it is kept for them.
    """
    wanted = tuple(doc_lens), spec, device
    if device.type != "cuda":
        return _kept_index(*wanted, stream=0)
    refuse_captured_documents(device)
    return _kept_index(*wanted, stream=torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=2)  # training, and an evaluation between its steps
def _kept_index(
    doc_lens: tuple[int, ...], spec: BlockSpec, device: torch.device, stream: int
) -> Documents:
    """`stream`: another one could read the index before it has been copied."""
    lengths = torch.tensor(doc_lens)
    num_cmp = torch.tensor([spec.num_cmp(length) for length in doc_lens])
    num_blocks = torch.tensor([spec.num_blocks(length) for length in doc_lens])
    starts, cmp_starts = lengths.cumsum(0) - lengths, num_cmp.cumsum(0) - num_cmp
    block_starts = num_blocks.cumsum(0) - num_blocks
    token = torch.arange(int(lengths.sum()))
    raw_last = (starts + lengths - 1).repeat_interleave(lengths)
    compressed = torch.arange(int(num_cmp.sum())) - cmp_starts.repeat_interleave(num_cmp)
    block = torch.arange(int(num_blocks.sum())) - block_starts.repeat_interleave(num_blocks)
    block_start = starts.repeat_interleave(num_blocks) + block * spec.l_sel
    doc_stop = (starts + lengths).repeat_interleave(num_blocks)
    rows = [
        starts.repeat_interleave(lengths),
        cmp_starts.repeat_interleave(lengths),
        block_starts.repeat_interleave(lengths),
        token,
        raw_last,
        torch.minimum(raw_last, token + spec.w - 1),
        starts.repeat_interleave(num_cmp) + compressed * spec.d + spec.l - 1,
        (starts + lengths - 1).repeat_interleave(num_cmp),
        block_start,
        torch.minimum(block_start + spec.l_sel, doc_stop),
    ]
    packed = torch.cat(rows).to(torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory()  # so that the copy does not wait for the device
    packed = packed.to(device, non_blocking=True)
    return Documents(*packed.split([len(row) for row in rows]))
