"""Random shapes: the torch path equals the oracle in float64, outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa import BlockSpec, select_blocks
from nsa.tests.support.helpers import (
    NAMES,
    PATHS,
    Case,
    assert_near,
    make_inputs,
    make_module,
    run_with_gradients,
    torch_path,
)


@st.composite
def specs(draw: st.DrawFn) -> BlockSpec:
    d = draw(st.sampled_from([1, 2, 4]))
    return BlockSpec(
        l=d * draw(st.integers(1, 4)),
        d=d,
        l_sel=d * draw(st.integers(1, 5)),
        n_sel=draw(st.integers(3, 12)),
        w=draw(st.integers(1, 90)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    docs = tuple(draw(st.lists(st.integers(1, 30), min_size=0, max_size=4)))
    return Case(
        draw(specs()),
        S=sum(docs) if docs else draw(st.integers(1, 80)),
        B=1 if docs else draw(st.integers(1, 2)),
        Hkv=draw(st.integers(1, 3)),
        G=draw(st.integers(1, 16)),
        Dk=draw(st.integers(1, 9)),
        Dv=draw(st.integers(1, 9)),
        docs=docs,
    )


@settings(deadline=None, max_examples=120)
@given(
    case=cases(),
    order=st.sampled_from(["auto", "prefix", "gather"]),
    chunk=st.sampled_from([None, 7, 16]),
    seed=st.integers(0, 100),
)
def test_torch_path_equals_the_oracle(case, order, chunk, seed):
    inputs = make_inputs(case, seed=seed)
    args = dict(cu_seqlens=case.cu_seqlens)
    selection = select_blocks(inputs["q"], inputs["k_cmp"], case.spec, backend="reference", **args)
    expected, expected_grads = run_with_gradients(case, inputs, "reference", selection=selection)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        torch_path(monkeypatch, order=order, chunk=chunk),
    ):
        chosen = select_blocks(inputs["q"], inputs["k_cmp"], case.spec, backend="torch", **args)
        out, grads = run_with_gradients(case, inputs, "torch", selection=selection)
    assert torch.equal(chosen, selection)
    assert_near(out, expected, 1e-10)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], 1e-10, f"gradient of {name}")


@settings(deadline=None, max_examples=40)
@given(
    spec=specs(),
    length=st.integers(1, 50),
    groups=st.integers(1, 3),
    heads=st.integers(1, 4),
    phi=st.sampled_from(["avg", "mlp"]),
    path=st.sampled_from(sorted(PATHS)),
    seed=st.integers(0, 100),
)
def test_module_paths_equal_the_oracle(spec, length, groups, heads, phi, path, seed):
    options = dict(
        n_heads=groups * heads,
        n_kv_groups=groups,
        l=spec.l,
        d=spec.d,
        l_sel=spec.l_sel,
        n_sel=spec.n_sel,
        w=spec.w,
        phi=phi,
    )
    x = torch.randn(
        2, length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        expected = make_module(seed, **options, backend="reference")(x)
    assert_near(PATHS[path](make_module(seed, **options), x), expected, 1e-10)
