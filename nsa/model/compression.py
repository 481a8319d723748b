"""phi: how a block of l raw tokens becomes one compressed token (Eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa.ops.spec import BlockSpec

PHIS = ("avg", "mlp")


class BlockMLP(nn.Module):
    """The learned phi of one branch tensor: a two-layer MLP on a block, shared by the KV heads.

    Input: the block's l unrotated tokens plus a learned encoding of their place in the block.
    """

    def __init__(self, spec: BlockSpec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.place = nn.Parameter(torch.empty(spec.l, dim))
        self.fc1 = nn.Linear(spec.l * dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.place, std=0.02)
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, doc_lens: list[int]) -> Tensor:
        """[B, S, H, D] -> [B, N, H, D]."""
        return torch.cat([self._one_document(doc) for doc in x.split(doc_lens, dim=1)], dim=1)

    def _one_document(self, x: Tensor) -> Tensor:
        if x.shape[1] < self.spec.l:
            return x[:, :0]
        blocks = x.unfold(1, self.spec.l, self.spec.d).transpose(-1, -2)  # [B, N, H, l, D]
        hidden = self.fc1((blocks + self.place.to(x.dtype)).flatten(-2))
        return self.fc2(nn.functional.silu(hidden)).to(x.dtype)
