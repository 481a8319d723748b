"""Which tokens each branch reads, seen from the outside: through the gradients of the values."""

import pytest
import torch

from nsa import BlockSpec, select_blocks
from nsa.tests.support.helpers import BACKENDS, Case, make_inputs, run, torch_path

CASE = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=80, Hkv=2, G=2)
ROWS = (0, 6, 7, 8, 10, 11, 12, 31, 39, 40, 63, 79)


def values_read(branch: str, t: int, backend: str) -> list[set[int]]:
    """For each KV head: the tokens of the branch whose value has weight in row t's output."""
    inputs = make_inputs(CASE)
    gate = {"cmp": [1.0, 0, 0], "sel": [0.0, 1, 0], "win": [0.0, 0, 1]}[branch]
    inputs["gates"] = torch.tensor(gate, dtype=torch.float64).expand_as(inputs["gates"])
    v = inputs[f"v_{branch}"].requires_grad_()
    (grad,) = torch.autograd.grad(run(CASE, inputs, backend)[0, t].sum(), v)
    weight = grad[0].abs().sum(dim=-1)  # [K, Hkv]
    return [set(weight[:, head].nonzero().flatten().tolist()) for head in range(CASE.Hkv)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", ROWS)
def test_compressed_branch_reads_the_complete_blocks_only(backend, t):
    complete = {i for i in range(19) if i * 4 + 7 <= t}
    assert values_read("cmp", t, backend) == [complete, complete]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", ROWS)
def test_window_reads_the_latest_w_tokens_and_itself(backend, t):
    window = set(range(max(0, t - 10), t + 1))
    assert values_read("win", t, backend) == [window, window]


@pytest.mark.parametrize("order", ["prefix", "gather"])
@pytest.mark.parametrize("t", ROWS)
def test_selected_branch_reads_its_blocks_up_to_the_query(order, t, monkeypatch):
    inputs = make_inputs(CASE)
    ids = select_blocks(inputs["q"], inputs["k_cmp"], CASE.spec, backend="reference")[0, t]
    expected = [
        {token for block in head if block >= 0 for token in range(block * 8, block * 8 + 8)}
        for head in ids.tolist()
    ]
    with torch_path(monkeypatch, order=order):
        actual = values_read("sel", t, "torch")
    assert actual == [{token for token in head if token <= t} for head in expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_branches_of_packed_documents_never_cross_a_boundary(backend):
    case = Case(CASE.spec, S=100, docs=(37, 63))
    inputs = make_inputs(case, grad=True)
    out = run(case, inputs, backend)
    out[:, 37:].sum().backward()
    num_cmp_first = case.spec.num_cmp(37)
    for name in ("k_sel", "v_sel", "k_win", "v_win", "q"):
        assert inputs[name].grad[:, :37].abs().max() == 0, name
    for name in ("k_cmp", "v_cmp"):
        assert inputs[name].grad[:, :num_cmp_first].abs().max() == 0, name
        assert inputs[name].grad[:, num_cmp_first:].abs().max() > 0, name
