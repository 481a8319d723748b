"""Copies of a training state on the host: what later steps, and the next copy, do to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.tests.support.gpu import needs_gpu
from nsa.train.checkpoint.writer import HostMemory


def state_of(weight: Tensor, moment: Tensor) -> dict[str, object]:
    return {"state_dict": {"w": weight}, "optimizer": {"state": {0: {"m": moment}}, "groups": [3]}}


def tensors_of(copy: dict) -> tuple[Tensor, Tensor]:  # type: ignore[type-arg]
    return copy["state_dict"]["w"], copy["optimizer"]["state"][0]["m"]


def test_a_copy_from_a_cpu_is_a_new_one_each_time() -> None:
    weight, moment = torch.arange(6.0).view(2, 3).T, torch.ones(4, dtype=torch.int64)
    memory = HostMemory()
    memory.reserve(state_of(weight, moment))
    first = memory.copy(state_of(weight, moment))
    assert first["optimizer"]["groups"] == [3]
    weight += 1
    second = memory.copy(state_of(weight, moment))
    assert torch.equal(tensors_of(first)[0], weight - 1)
    assert torch.equal(tensors_of(second)[0], weight)
    assert torch.equal(tensors_of(second)[1], moment) and tensors_of(second)[1] is not moment


@pytest.mark.gpu
@needs_gpu[1]
def test_a_copy_from_a_gpu_goes_to_pinned_memory_that_is_kept() -> None:
    weight = torch.randn(512, 300, device="cuda").T
    moment = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    memory = HostMemory()
    memory.reserve(state_of(weight, moment))
    first = tensors_of(memory.copy(state_of(weight, moment)))
    places = [x.data_ptr() for x in first]
    for copy, origin in zip(first, (weight, moment), strict=True):
        assert copy.is_pinned() and torch.equal(copy, origin.cpu())
    weight.mul_(2)  # queued after the copy: it must not show
    assert torch.equal(first[0] * 2, weight.cpu())
    second = tensors_of(memory.copy(state_of(weight, moment)))
    assert [x.data_ptr() for x in second] == places
    assert torch.equal(second[0], weight.cpu())
    wider = torch.randn(700, 300, device="cuda")
    assert torch.equal(tensors_of(memory.copy(state_of(wider, moment)))[0], wider.cpu())
