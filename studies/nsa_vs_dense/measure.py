"""What a trained model does on held-out rows: its loss on each, and the blocks that it reads."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from nsa import BlockSpec
from nsa.config import Config
from nsa.data import Data
from nsa.evaluate.perplexity import binned, token_losses
from nsa.model import TinyLM
from nsa.train.runtime import Runtime
from studies.nsa_vs_dense.selection_stats import describe_selection
from studies.recorder import SelectionRecorder

STATISTICS_TOKENS = 32768
"""Of rows whose selections are counted."""


@torch.no_grad()
def measure_loss(
    model: TinyLM, data: Data, cfg: Config, runtime: Runtime, num_tokens: int
) -> dict[str, Any]:
    """The mean loss over about so many held-out tokens, each row once, and its standard error.

    The rows are the same for all models of a row length, so that two of them can be compared row
    by row: how hard a row is then falls out of the difference.
    """
    seq_len, size = cfg.train.seq_len, cfg.train.batch_size
    wanted = max(2, math.ceil(num_tokens / seq_len))
    num_rows = min(wanted, data.val.num_rows or wanted)
    by_row: list[float] = []
    by_position = torch.zeros(seq_len, dtype=torch.float64)
    model.eval()
    for first in range(0, num_rows, size):
        rows = data.val.batch(first, min(size, num_rows - first))
        with runtime.compute():
            losses = token_losses(model, rows.to(runtime.device)).cpu()  # [B, S]
        by_row += losses.mean(1).tolist()
        by_position += losses.sum(0)
    spread = statistics.stdev(by_row) if num_rows > 1 else float("nan")
    return {
        "tokens": num_rows * seq_len,
        "rows": num_rows,
        "loss": statistics.fmean(by_row),
        "standard_error": spread / math.sqrt(num_rows),
        "row_losses": [round(loss, 5) for loss in by_row],
        "by_position": binned(by_position / num_rows),
    }


@torch.no_grad()
def record_selection(
    model: TinyLM, data: Data, cfg: Config, runtime: Runtime
) -> tuple[dict[str, Any], Tensor, BlockSpec]:
    """Statistics of some held-out rows, and the selection of the first: [layers, S, Hkv, n_sel]."""
    seq_len = cfg.train.seq_len
    num_rows = min(data.val.num_rows or 1, max(1, STATISTICS_TOKENS // seq_len))
    rows = data.val.batch(0, num_rows).to(runtime.device)
    recorder = SelectionRecorder()
    model.eval()
    with runtime.compute():
        model.hidden(rows[:, :-1], stats=recorder)
    spec = BlockSpec(cfg.nsa.l, cfg.nsa.d, cfg.nsa.l_sel, cfg.nsa.n_sel, cfg.nsa.w)
    first = torch.stack([ids[0] for ids in recorder.layers]).cpu()
    return describe_selection(recorder.layers, spec), first, spec
