"""What every layer does in one forward pass, for the studies that look at it: the selection, and
the queries, keys and gates of the attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa.model import TinyLM
from nsa.model.attention import NSAAttention
from nsa.model.rope import document_positions
from nsa.model.stats import AttentionStats, Where


class SelectionRecorder(AttentionStats):
    """Keeps the selection of every layer instead of numbers about it."""

    def __init__(self) -> None:
        super().__init__()
        self.selections: dict[int, Tensor] = {}
        self.block_tokens = 0

    @property
    def layers(self) -> list[Tensor]:
        """Of every layer, in their order: [B, S, Hkv, n_sel] int32; none of dense attention."""
        return [self.selections[layer] for layer in sorted(self.selections)]

    def record(
        self,
        layer: int,
        gates: Tensor | None,  # [B, S, Hq, 3]
        selection: Tensor,  # [B, S, Hkv, n_sel] int32
        *,
        block_tokens: int,
        cu_seqlens: Tensor | None = None,
        where: Where | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.selections[layer] = selection


class View(NamedTuple):
    """The attention of one layer, in one forward pass."""

    x: Tensor  # [B, S, dim]  its input
    q: Tensor  # [B, S, Hq, Dk]  rotated
    k: Tensor  # [B, S, Hkv, Dk]  rotated: the keys of the selected branch, or the only ones
    gates: Tensor | None  # [B, S, Hq, 3]  None where there are no branches
    selection: Tensor | None  # [B, S, H, n_sel] int32  None of dense attention


class Look:
    """A forward pass of a model over rows, of which every layer can be looked at afterwards."""

    @torch.no_grad()
    def __init__(self, model: TinyLM, ids: Tensor) -> None:  # [B, S]
        self._layers = [block.attn for block in model.layers]
        self._recorder = SelectionRecorder()
        self._inputs: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
            self._inputs[module] = given[0]

        hooks = [layer.register_forward_pre_hook(keep) for layer in self._layers]
        try:
            self.hidden = model.hidden(ids, stats=self._recorder)  # [B, S, dim]
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def views(self) -> Iterator[View]:
        """Layer by layer; queries and keys are computed when they are asked for.

        Under the same autocast as the forward pass, they are what attention has seen.
        """
        for layer, attn in enumerate(self._layers):
            x, selection = self._inputs[attn], self._recorder.selections.get(layer)
            rope = attn.rope(document_positions(x.shape[1], None, x.device), x.dtype)
            if isinstance(attn, NSAAttention):
                q, k, _, gates = attn._project(x, rope)
                yield View(x, q, k[1], gates, selection)
            else:
                q, k, _ = (t.transpose(1, 2) for t in attn._project(x, rope))
                yield View(x, q, k, None, selection)
