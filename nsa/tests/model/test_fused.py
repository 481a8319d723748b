"""The fused linear layers of a decode step equal their layers: on a GPU, or interpreted.

test_triton_on_cpu.py runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.model import fused
from nsa.model.block import MLP
from nsa.model.rope import RMSNorm
from nsa.ops.triton.decode.linear import MAX_ROWS
from nsa.tests.support.gpu import DEVICE

pytestmark = pytest.mark.gpu

WIDTHS = ((40, 70), (768, 36), (1040, 9))
"""Columns and rows of the first matrix; no power of two, and more rows than a program takes."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32] if DEVICE == "cpu" else list(TOLERANCE)


class Layers:
    """Layers of random weights, and rows to give them."""

    def __init__(self, rows: int, width: int, num: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.norm = RMSNorm(width)
        nn.init.normal_(self.norm.weight)
        self.first, self.second = nn.Linear(width, num), nn.Linear(width, num // 2 + 1)
        self.plain, self.gate = (nn.Linear(width, num, bias=False) for _ in range(2))
        for layer in (self.norm, self.first, self.second, self.plain, self.gate):
            layer.to(DEVICE, dtype)
        # Every second number of a wider tensor: the rows need not be contiguous.
        self.x = 3 * torch.randn(rows, 1, 2 * width, device=DEVICE, dtype=dtype)[..., ::2]
        self.residual = torch.randn(rows, 1, 2 * num, device=DEVICE, dtype=dtype)[..., ::2]

    def all_ways(self) -> list[Tensor]:
        """What every function of the module gives."""
        x, norm = self.x, self.norm
        return [
            *fused.norm_and_project(x, norm, self.first, self.second),
            *fused.norm_and_project(x, norm, self.plain, self.second),
            fused.norm_and_activate(x, norm, self.first, None),
            fused.norm_and_activate(x, norm, self.plain, self.gate),
            fused.add_product(self.residual, self.plain, x),
        ]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one for each fused product."""
    seen: list[object] = []
    product: Callable[..., tuple[Tensor, Tensor | None]] = fused._product

    def counted(*given, **named):
        seen.append(given)
        return product(*given, **named)

    monkeypatch.setattr(fused, "_product", counted)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_a_fused_product_equals_its_layers(launches, dtype, monkeypatch) -> None:
    for rows in (1, MAX_ROWS - 1):
        for width, num in WIDTHS:
            layers = Layers(rows, width, num, dtype)
            launches.clear()
            got = layers.all_ways()
            assert len(launches) == 5
            with monkeypatch.context() as patch:
                patch.setattr(fused, "_runs", lambda *_given, **_named: False)
                wanted = layers.all_ways()
            for mine, theirs in zip(got, wanted, strict=True):
                assert mine.shape == theirs.shape and mine.dtype == dtype
                error = (mine - theirs).abs().max() / theirs.abs().max()
                assert error < TOLERANCE[dtype], (rows, width, num)


@torch.no_grad()
def test_layers_that_are_not_plain_are_called(launches) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class DoubledMLP(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layers = Layers(1, 40, 70)
    wanted = layers.residual + 2 * layers.plain(layers.x)
    layers.plain.__class__ = Doubled
    got = fused.add_product(layers.residual, layers.plain, layers.x)
    assert not launches and torch.allclose(got, wanted)

    called: list[nn.Module] = []
    layers.norm.register_forward_hook(lambda module, *_: called.append(module))
    layers.first.register_forward_pre_hook(lambda module, *_: called.append(module))
    fused.norm_and_activate(layers.x, layers.norm, layers.first, None)
    assert not launches and called == [layers.norm, layers.first]

    mlp = DoubledMLP(40, 16).to(DEVICE)
    assert torch.allclose(
        mlp.add_step(layers.x, layers.norm), layers.x + mlp(layers.norm(layers.x))
    )
    hooked = MLP(40, 16).to(DEVICE)
    hooked.register_forward_hook(lambda module, *_: called.append(module))
    hooked.add_step(layers.x, layers.norm)
    assert not launches and called[-1] is hooked

    many = Layers(MAX_ROWS + 1, 40, 70)
    assert len(many.all_ways()) == 7 and not launches
    with torch.autocast(DEVICE, torch.bfloat16):
        assert Layers(1, 40, 70).all_ways()[0].dtype == torch.bfloat16 and not launches
