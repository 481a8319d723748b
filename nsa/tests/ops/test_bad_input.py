"""Wrong input is a ValueError that says what was given, what is allowed and what to do."""

from typing import Any

import pytest
import torch

import nsa
from nsa import BlockSpec
from nsa.tests.support.helpers import Case, make_inputs, make_module

CASE = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=20, Hkv=2, G=2, Dk=8, Dv=6)


def cu(*bounds: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(bounds, dtype=dtype)


BAD_TENSORS = [
    ("q", lambda x: x[0], r"q has shape \[20, 4, 8\]; it must be \[B, S, Hq, Dk\]"),
    ("q", lambda x: x[:, :0], r"q has shape .* with S=0; .* leave out empty inputs"),
    ("q", lambda x: x[:0], r"with B=0"),
    ("q", lambda x: x.to(torch.int64), r"q has dtype torch.int64; allowed are bfloat16"),
    ("q", lambda x: x[:, :, :3], r"Hq=3 heads and k_\* have Hkv=2; Hq must be a multiple"),
    ("q", lambda x: x[:, :5], r"gates has shape \[1, 20, 4, 3\]; \[1, 5, 4, 3\] is needed"),
    ("q", lambda x: x.to("meta"), r"k_cmp is on cpu and q on meta; move all tensors"),
    ("q", lambda x: x.tolist(), r"q is a list; give a torch.Tensor"),
    ("k_cmp", lambda x: x[:, :-1], r"k_cmp has shape \[1, 3, 2, 8\]; .* nsa.compress gives the 4"),
    ("v_cmp", lambda x: x[..., :-1], r"v_cmp has shape \[1, 4, 2, 5\]; \[1, 4, 2, 6\] is needed"),
    ("k_sel", lambda x: x[..., :-1], r"k_sel has shape \[1, 20, 2, 7\]; \[1, 20, 2, 8\]"),
    ("k_sel", lambda x: x[0, 0], r"k_sel has shape \[2, 8\]; it must be"),
    ("v_sel", lambda x: x[:, 1:], r"v_sel has shape \[1, 19, 2, 6\]"),
    ("v_sel", lambda x: x[0], r"v_sel has shape \[20, 2, 6\]; it must be"),
    ("k_win", lambda x: x[:, :, :1], r"k_win has shape \[1, 20, 1, 8\]"),
    ("v_win", lambda x: x.expand(2, -1, -1, -1), r"v_win has shape \[2, 20, 2, 6\]"),
    (
        "v_win",
        lambda x: x.float(),
        r"v_win has dtype torch.float32 and q torch.float64; nothing is",
    ),
    ("gates", lambda x: x[..., :2], r"gates has shape \[1, 20, 4, 2\]"),
    ("gates", lambda x: x.float(), r"gates may be float32 beside bfloat16"),
]


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize(("name", "change", "message"), BAD_TENSORS)
def test_wrong_tensors_are_refused(backend, name, change, message):
    inputs = make_inputs(CASE)
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        nsa.nsa_attention(**inputs, spec=CASE.spec, backend=backend)


@pytest.mark.parametrize("function", ["nsa_attention", "select_blocks", "compress"])
@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (cu(0, 7, 19), r"cu_seqlens goes from 0 to 19; it must start at 0 and end at S=20"),
        (cu(0, 21), r"end at S=20"),
        (cu(1, 20), r"goes from 1 to 20"),
        (cu(0, 9, 9, 20), r"not strictly increasing at 9, 9; leave out empty documents"),
        (cu(0, 12, 5, 20), r"not strictly increasing at 12, 5"),
        (cu(20), r"cu_seqlens has shape \[1\]; give \[docs \+ 1\]"),
        (cu(0, 20, dtype=torch.int64), r"cu_seqlens is torch.int64; give an int32 tensor"),
        ([0, 20], r"cu_seqlens is list"),
        (cu(0, 20).to("meta"), r"cu_seqlens is on meta and q on cpu"),
    ],
)
def test_wrong_documents_are_refused(function, cu_seqlens, message):
    inputs = make_inputs(CASE)
    with pytest.raises(ValueError, match=message):
        _call(function, inputs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("function", ["nsa_attention", "select_blocks", "compress"])
def test_packed_documents_need_one_row(function):
    inputs = make_inputs(Case(CASE.spec, S=20, B=2))
    with pytest.raises(ValueError, match="B=2; packed documents need B=1: put the rows one after"):
        _call(function, inputs, cu_seqlens=cu(0, 20))


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (torch.zeros(1, 20, 2, 4), r"selection is torch.float32; give int32 block ids"),
        (torch.zeros(1, 20, 2, 5, dtype=torch.int32), r"selection has shape \[1, 20, 2, 5\]"),
        (torch.zeros(1, 20, 2, 4, dtype=torch.int32, device="meta"), r"selection is on meta"),
        ([0], r"selection is list"),
    ],
)
def test_wrong_selection_is_refused(selection, message):
    with pytest.raises(ValueError, match=message):
        nsa.nsa_attention(**make_inputs(CASE), spec=CASE.spec, selection=selection)


@pytest.mark.parametrize("function", ["nsa_attention", "select_blocks"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.1", True])
def test_wrong_scale_is_refused(function, scale):
    with pytest.raises(ValueError, match="scale=.* give a float, or None for 1/sqrt"):
        _call(function, make_inputs(CASE), scale=scale)


@pytest.mark.parametrize("function", ["nsa_attention", "select_blocks", "compress"])
def test_unknown_backend_and_spec_are_refused(function):
    inputs = make_inputs(CASE)
    with pytest.raises(ValueError, match="backend='cuda' is not known; use one of auto, reference"):
        _call(function, inputs, backend="cuda")
    with pytest.raises(ValueError, match="spec is a dict; give a nsa.BlockSpec"):
        _call(function, inputs, spec={"l": 8})


@pytest.mark.parametrize("function", ["nsa_attention", "select_blocks", "compress"])
def test_triton_backend_says_that_it_cannot_run(function):
    with pytest.raises(ValueError, match="backend='triton' cannot run: .* use backend='torch'"):
        _call(function, make_inputs(CASE), backend="triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n_heads=5), "n_heads=5 is not a multiple of n_kv_groups=2"),
        (dict(d_k=7), "d_k=7 is odd; rotary positions need pairs"),
        (dict(dim=0), "dim=0; give a positive size"),
        (dict(d_v=-4), "d_v=-4; give a positive size"),
        (dict(phi="max"), "phi='max' is not known; use one of avg, mlp"),
        (dict(gate="relu"), "gate='relu' is not known; use one of softmax, sigmoid"),
        (dict(rope_scale=0.0), "rope_scale=0.0; give a positive number"),
        (dict(rope_base=-1.0), "rope_base=-1.0; give a positive number"),
        (dict(d=3), "l=8 is not a multiple of d=3"),
    ],
)
def test_wrong_module_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


def test_cache_refuses_what_does_not_fit():
    module = make_module()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    cache = module.new_cache(batch=2, max_len=10)
    module.prefill(x, cache)
    with pytest.raises(ValueError, match=r"9 \+ 9 tokens do not fit a cache for 10; .* >= 18"):
        module.prefill(x, cache)
    assert cache.length == 9  # a refused call leaves the cache as it was
    with pytest.raises(ValueError, match="1 sequences given to a cache for 2"):
        module.step(x[:1, :1], cache)
    with pytest.raises(ValueError, match="step got 2 tokens per sequence; it takes one"):
        module.step(x[:, :2], cache)
    with pytest.raises(ValueError, match="cache max_len=0; give at least 1"):
        module.new_cache(batch=2, max_len=0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"ids has shape \[3\]; give \[B, S\]"),
        (torch.zeros(1, 0, dtype=torch.long), r"ids has shape \[1, 0\]"),
        (torch.zeros(1, 4), r"ids has dtype torch.float32; give integer token ids"),
    ],
)
def test_language_model_refuses_wrong_ids(ids, message):
    model = nsa.TinyLM(vocab=16, dim=8, n_layers=1, n_heads=2, n_kv_groups=1, d_k=4, d_v=4)
    with pytest.raises(ValueError, match=message):
        model(ids)


@pytest.mark.parametrize("gc_layers", [(0, 3), (1, 1), (-1, 1)])
def test_language_model_refuses_wrong_checkpoint_ranges(gc_layers):
    sizes = dict(vocab=16, dim=8, n_layers=2, n_heads=2, n_kv_groups=1, d_k=4, d_v=4)
    with pytest.raises(ValueError, match="does not fit 2 layers; give first:last"):
        nsa.TinyLM(**sizes, grad_checkpointing=True, gc_layers=gc_layers)


def _call(function: str, inputs: dict[str, Any], **options: Any) -> object:
    args = {"spec": CASE.spec, **options}
    if function == "nsa_attention":
        return nsa.nsa_attention(**inputs, **args)
    if function == "select_blocks":
        return nsa.select_blocks(inputs["q"], inputs["k_cmp"], **args)
    return nsa.compress(inputs["k_sel"], **args)
