"""A long sequence through the default sizes: finite, causal, linear in memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import BlockSpec
from nsa.tests.support.helpers import Case, make_inputs, make_module, run, torch_path


class LargestTensor(TorchDispatchMode):
    """Records the largest floating-point tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.numel = max(self.numel, x.numel())
        return out


def test_no_tensor_grows_with_the_square_of_the_sequence(monkeypatch):
    largest = {}
    for length in (2048, 4096):
        case = Case(BlockSpec(), S=length, Hkv=1, G=2, Dk=4, Dv=4)
        inputs = make_inputs(case, torch.float32, grad=True)
        with torch_path(monkeypatch, chunk=32), LargestTensor() as record:
            run(case, inputs, "torch").sum().backward()
        largest[length] = record.numel
        # G heads of a whole S x N matrix of compressed logits would already be larger.
        assert record.numel < case.G * length * case.spec.num_cmp(length)
    assert largest[4096] <= 2.2 * largest[2048]


def test_8k_tokens_forward_and_the_next_steps():
    torch.manual_seed(0)
    module = make_module(l=32, d=16, l_sel=64, n_sel=16, w=512, n_heads=2, n_kv_groups=1).float()
    x = torch.randn(1, 8200, 24)
    with torch.no_grad():
        expected = module(x)
    assert expected.isfinite().all()
    cache = module.new_cache(1, 8200)
    module.prefill(x[:, :8190], cache)
    for t in range(8190, 8200):
        out = module.step(x[:, t : t + 1], cache)
        assert (out[:, 0] - expected[:, t]).abs().max() < 1e-4 * expected.abs().max()
    assert cache.last_reads[0, 0].tolist() == [511, 15 * 64 + 8, 512]
