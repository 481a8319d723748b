"""The selection of every layer in one forward pass, for the studies that look at it."""

from __future__ import annotations

from torch import Tensor

from nsa.model.stats import AttentionStats


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
    ) -> None:
        self.block_tokens = block_tokens
        self.selections[layer] = selection
