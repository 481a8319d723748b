"""Muon: its updates are orthogonal, sized as AdamW's, and can be left out on the device."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from nsa.config import Config
from nsa.model import TinyLM
from nsa.model.cost import training_memory
from nsa.train import run
from nsa.train.optimizer import RMS, Muon, MuonAndAdamW, build_optimizer, orthogonalize, set_lr

BuildConfig = Callable[..., Config]


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40), (1, 16)], ids=str)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = (
        torch.randn(3, *shape, generator=generator) * torch.tensor([1e-4, 1, 1e4])[:, None, None]
    )
    found = torch.linalg.svdvals(orthogonalize(matrices))
    assert found.min() > 0.4 and found.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    toward = (orthogonalize(matrices) * (u @ vh)).sum(dim=(-2, -1)) / min(shape)
    assert (toward > 0.65).all(), "the same directions, all with about the same weight"


def test_matrices_of_a_batch_do_not_touch_each_other() -> None:
    matrices = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in matrices])
    assert torch.allclose(orthogonalize(matrices), alone, atol=1e-5)
    assert orthogonalize(torch.zeros(1, 4, 4)).abs().max() == 0


def matrix_with_gradient(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.randn(shape, generator=generator))
    parameter.grad = torch.randn(shape, generator=generator)
    return parameter


@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (16, 64)], ids=str)
def test_an_update_has_the_size_of_adamws(shape: tuple[int, int]) -> None:
    parameter = matrix_with_gradient(*shape)
    before = parameter.detach().clone()
    Muon([parameter], lr=0.1, weight_decay=0.0).step()
    rms = ((parameter.detach() - before) / 0.1).square().mean().sqrt().item()
    assert rms == pytest.approx(RMS, rel=0.25)


def test_weight_decay_is_apart_from_the_gradient() -> None:
    parameter = matrix_with_gradient(8, 8)
    parameter.grad = torch.zeros(8, 8)
    before = parameter.detach().clone()
    Muon([parameter], lr=0.5, weight_decay=0.1).step()
    assert torch.allclose(parameter, before * 0.95)


def test_a_rate_on_the_device_does_the_same_update() -> None:
    """A captured update reads its rate from a tensor."""
    found = []
    for rate in (0.5, torch.tensor(0.5)):
        parameter = matrix_with_gradient(8, 12)
        muon = Muon([parameter], lr=0.1, weight_decay=0.1, capturable=True)
        muon.param_groups[0]["lr"] = rate
        muon.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], matrix_with_gradient(8, 12))


def test_momentum_of_an_older_checkpoint_is_loaded() -> None:
    """Its groups do not say whether they can be captured."""
    old, new = (Muon([matrix_with_gradient(4, 4)], lr=0.1, weight_decay=0.0) for _ in range(2))
    old.step()
    state = old.state_dict()
    del state["param_groups"][0]["capturable"]
    new.load_state_dict(state)
    assert new.param_groups[0]["capturable"] is False
    assert new.state_dict()["state"][0]["momentum"].abs().sum() > 0


def test_momentum_remembers_and_points_ahead() -> None:
    """After a turn of the gradient the update lies between the old way and the new one."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    muon = Muon([parameter], lr=1.0, weight_decay=0.0)
    first, second = torch.eye(2), torch.diag(torch.tensor([1.0, -4.0]))
    for gradient in (first, second):
        parameter.grad = gradient.clone()
        muon.step()
    kept = muon.state[parameter]["momentum"]
    assert torch.allclose(kept, 0.95 * 0.05 * first + 0.05 * second)


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="shape .3.; it takes matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=1.0, weight_decay=0.0)


def tiny_model(cfg: Config) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM.from_config(cfg, 256)


def test_muon_gets_the_linear_layers_of_the_blocks_and_adamw_the_rest(
    tiny_config: BuildConfig,
) -> None:
    cfg = tiny_config("train.optimizer=muon", "nsa.phi=mlp", "train.weight_decay=0.25")
    model = tiny_model(cfg)
    optimizer = build_optimizer(model, cfg.train)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, *others = ([names[id(p)] for p in g["params"]] for g in optimizer.param_groups)
    assert sorted([*muon, *(name for group in others for name in group)]) == sorted(names.values())
    ends = {name.split(".", 2)[2] for name in muon}
    assert {"attn.qkv.weight", "attn.out.weight", "mlp.fc1.weight", "mlp.fc2.weight"} < ends
    assert not any(name.endswith(("bias", "place")) or "norm" in name for name in muon)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.25, 0.0]
    set_lr(optimizer, 0.5)
    assert {g["lr"] for g in optimizer.param_groups} == {0.5}


def filled(model: nn.Module, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) if value is None else p * 0 + value


def snapshot(model: nn.Module, optimizer: MuonAndAdamW) -> list[Tensor]:
    states = [part.state for part in optimizer._optimizers]
    kept = [x for state in states for by_name in state.values() for x in by_name.values()]
    return [x.detach().clone() for x in [*model.parameters(), *kept]]


def test_an_update_is_left_out_on_the_device_and_the_next_is_not(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.optimizer=muon")
    model = tiny_model(cfg)
    optimizer = build_optimizer(model, cfg.train)
    assert isinstance(optimizer, MuonAndAdamW)
    filled(model)
    optimizer.step()
    before = snapshot(model, optimizer)

    filled(model, math.nan)
    optimizer.skip = torch.tensor(1.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))

    filled(model)
    optimizer.skip = torch.tensor(0.0)
    optimizer.step()
    after = snapshot(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(x.isfinite().all() for x in after)


def test_loss_scaling_leaves_an_overflow_out(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.optimizer=muon")
    model = tiny_model(cfg)
    optimizer = build_optimizer(model, cfg.train)
    assert isinstance(optimizer, MuonAndAdamW)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # which makes the scale
    before = [p.detach().clone() for p in model.parameters()]
    for value, moves in ((math.inf, False), (1.0, True)):
        filled(model, value)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(a, b) != moves for a, b in pairs)
    assert scaler.get_scale() == 2.0


def test_muon_learns_the_text(tiny_config: BuildConfig) -> None:
    settings = ("train.steps=40", "train.lr=2e-2", "train.eval_every=40")
    untrained = run(
        tiny_config(*settings, "train.lr=1e-12"), config_path="x", out=io.StringIO()
    ).metrics
    cfg = tiny_config(*settings, "train.optimizer=muon", "train.save_every=40")
    trained = run(cfg, config_path="x", out=io.StringIO()).metrics
    assert trained.val_loss is not None and untrained.val_loss is not None
    assert trained.val_loss < untrained.val_loss - 1.5
    path = Path(cfg.train.out_dir) / "checkpoint_step40.pt"
    saved = torch.load(path, weights_only=True)["optimizer"]
    assert saved["muon"]["state"][0]["momentum"].shape == (64, 16)


def test_the_estimate_of_memory_knows_its_one_moment(tiny_config: BuildConfig) -> None:
    plain, muon = (
        training_memory(tiny_config(f"train.optimizer={name}"))["optimizer"]
        for name in ("adamw", "muon")
    )
    assert muon < plain
