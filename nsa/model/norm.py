"""RMSNorm that always computes in fp32 (or float64), whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight, eps 1e-6.

    Under autocast the result has autocast's type: only products read it, and each of them would
    otherwise make a rounded copy of its own.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if x.is_cuda and x.dtype == self.weight.dtype and not torch.is_autocast_enabled(kind):
            # One kernel, which computes in fp32 and rounds once.
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        normed = F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps)
        rounded = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return normed.to(rounded)
