"""The counts of `nsa info` equal what the real model has, does, reads and keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nsa import select_blocks
from nsa.config import Config, load_config
from nsa.config.load import REPOSITORY
from nsa.model import NSAAttention, TinyLM
from nsa.model.cost import (
    block_spec,
    cache_bytes,
    decode_reads,
    dense_cache_bytes,
    forward_bytes,
    forward_flops,
    parameter_counts,
    step_bytes,
    step_flops,
    training_memory,
)
from nsa.tests.support.effects import keep_mkldnn
from nsa.train.loss import next_token_loss
from nsa.train.runtime import resolve_runtime

PRODUCTION = REPOSITORY / "configs" / "m7c_125m_2xa100_production.yaml"
SMALL = [
    *("model.dim=24", "model.n_layers=2", "model.n_heads=6", "model.n_kv_groups=2"),
    *("model.d_k=8", "model.d_v=12", "nsa.l=8", "nsa.d=4", "nsa.l_sel=12", "nsa.n_sel=3"),
    *("nsa.w=10", "train.seq_len=61", "train.batch_size=2", "train.steps=1"),
    *("runtime.precision=fp32", "runtime.device=cpu"),
]
VARIANTS = {
    "avg": [],
    "mlp": ["nsa.phi=mlp"],
    "tied": ["model.tie_embeddings=true"],
    "one head per group": ["model.n_kv_groups=6"],
    "one group": ["model.n_kv_groups=1", "model.n_layers=1"],
    "gpt2": ["data.tokenizer=gpt2"],
    "dense": ["model.attention=dense"],
    "infllm": ["model.rule=pooled", "nsa.l_sel=16"],
    "moba": ["model.rule=pooled", "nsa.l_sel=16", "nsa.pool=moba", "nsa.pool_block=48"],
    "one K and V": ["model.kv=shared", "nsa.l_sel=16", "nsa.num_local=1"],
    "msa": ["model.rule=msa,reuse", "nsa.l_sel=16", "nsa.d_index=4"],
    "mixed": ["model.rule=nsa,msa", "nsa.l_sel=16", "nsa.d_index=6"],
    "biases and norms": ["model.mlp=gated", "model.qkv_bias=true", "model.qk_norm=true"],
    "dense layers": ["model.rule=dense,msa", "nsa.l_sel=16", "model.qkv_bias=true"],
}


def small(*overrides: str) -> Config:
    base = REPOSITORY / "configs" / "base.yaml"
    return load_config(base, [*SMALL, *overrides], environ={})


def build(config: Config) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM.from_config(config, config.data.vocab)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_parameter_counts_equal_the_model(overrides: list[str]) -> None:
    config = small(*overrides)
    counts, model = parameter_counts(config), build(config)

    def real(*words: str) -> int:
        named = model.named_parameters()
        return sum(p.numel() for n, p in named if any(f".{w}" in f".{n}" for w in words))

    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert counts == {
        "embedding": real("embed."),
        "qkv": real("attn.qkv."),
        "out": real("attn.out."),
        "gate": real("attn.gate."),
        "phi": real("attn.phi_k.", "attn.phi_v."),
        "mlp": real("mlp."),
        "norms": real("norm1.", "norm2.", "norm.", "attn.q_norm.", "attn.k_norm."),
        "head": real("lm_head."),
        **({"index": real("attn.rule.")} if config.model.learns_index else {}),
    }


def test_the_model_called_125m_has_78_million_parameters_with_bytes() -> None:
    def count(tokenizer: str) -> int:
        config = load_config(PRODUCTION, [f"data.tokenizer={tokenizer}"], environ={})
        return sum(parameter_counts(config).values())

    assert count("byte") // 10**6 == 78
    assert count("gpt2") // 10**6 == 155


def visible_pairs(config: Config) -> dict[str, int]:
    """Count, from the definitions and a real selection, what all queries of a row see."""
    spec, seq_len = block_spec(config), config.train.seq_len
    t = torch.arange(seq_len)[:, None]
    q = torch.randn(1, seq_len, config.model.n_heads, config.model.d_k)
    k_cmp = torch.randn(1, spec.num_cmp(seq_len), config.model.n_kv_groups, config.model.d_k)
    chosen = select_blocks(q, k_cmp, spec)[0, :, 0]  # [S, n_sel]
    token_block = torch.arange(seq_len) // spec.l_sel
    selected = (chosen[:, :, None] == token_block).any(dim=1) & (torch.arange(seq_len) <= t)
    block_end = torch.arange(seq_len) * spec.d + spec.l - 1
    age = t - torch.arange(seq_len)
    return {
        "cmp": int((block_end <= t).sum()),
        "sel": int(selected.sum()),
        "win": int(((age >= 0) & (age < spec.w)).sum()),
    }


@pytest.mark.parametrize("seq_len", [1, 7, 8, 12, 61, 200])
def test_branch_costs_equal_a_count_of_what_each_query_sees(seq_len: int) -> None:
    config = small(f"train.seq_len={seq_len}")
    model, flops, moved = config.model, forward_flops(config), forward_bytes(config)

    for branch, pairs in visible_pairs(config).items():
        heads = model.n_layers * pairs * (model.d_k + model.d_v)
        assert flops[branch] == 2 * model.n_heads * heads
        assert moved[branch] == 4 * model.n_kv_groups * heads


def test_score_flops_equal_a_count_of_overlapping_blocks() -> None:
    config = small()
    spec, model = block_spec(config), config.model
    group_sums = spreads = 0
    for t in range(config.train.seq_len):
        for i in range(spec.num_cmp(t + 1)):
            group_sums += model.n_heads
            tokens = range(i * spec.d, i * spec.d + spec.l)
            spreads += 2 * model.n_kv_groups * len({token // spec.l_sel for token in tokens})

    assert forward_flops(config)["scores"] == model.n_layers * (group_sums + spreads)


@pytest.mark.parametrize("mlp", ["plain", "gated"])
def test_matrix_flops_equal_torchs_own_counter(mlp: str) -> None:
    config = small(f"model.mlp={mlp}")
    flops, model = forward_flops(config), build(config)
    attn, part = model.get_submodule("blocks.0.attn"), model.get_submodule("blocks.0.mlp")
    assert isinstance(attn, NSAAttention) and model.lm_head is not None
    x = torch.randn(1, config.train.seq_len, config.model.dim)
    heads = torch.randn(1, config.train.seq_len, attn.out.in_features)

    def counted(*calls: tuple[torch.nn.Module, torch.Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            for module, given in calls:
                module(given)
        return counter.get_total_flops()

    layers = config.model.n_layers
    assert flops["head"] == counted((model.lm_head, x))
    assert flops["mlp"] == layers * counted((part, x))
    assert flops["projections"] == layers * counted((attn.qkv, x), (attn.out, heads))
    weighing = 2 * 3 * config.model.n_heads * config.model.d_v * config.train.seq_len
    assert flops["gates"] == layers * (counted((attn.gate, x)) + weighing)


def test_phi_flops_equal_torchs_own_counter_plus_the_sums() -> None:
    config = small("nsa.phi=mlp")
    model, shape = config.model, (1, config.train.seq_len, config.model.n_kv_groups)
    attn = build(config).get_submodule("blocks.0.attn")
    assert isinstance(attn, NSAAttention)

    with FlopCounterMode(display=False) as counter:
        attn.phi_k(torch.randn(*shape, model.d_k), [config.train.seq_len])
        attn.phi_v(torch.randn(*shape, model.d_v), [config.train.seq_len])

    num_blocks = block_spec(config).num_cmp(config.train.seq_len) * model.n_kv_groups
    sums = num_blocks * config.nsa.l * (model.d_k + model.d_v)  # adding the place encoding
    total = model.n_layers * (counter.get_total_flops() + sums)
    assert forward_flops(config)["compression"] == total
    assert forward_flops(small())["compression"] == model.n_layers * sums


def test_a_step_is_all_rows_forward_and_backward_and_scores_have_no_backward() -> None:
    config = small("train.accumulate_grad_batches=5")
    forward, step = forward_flops(config), step_flops(config)

    assert step["mlp"] == 2 * 5 * 3 * forward["mlp"]
    assert step["scores"] == 2 * 5 * forward["scores"]


def test_a_batch_reads_a_matrix_once() -> None:
    one, two = small("train.batch_size=1"), small("train.batch_size=2")
    matrix = 4 * one.model.dim * one.data.vocab

    assert 3 * matrix == 2 * step_bytes(one)["head"] - step_bytes(two)["head"]
    assert step_bytes(two)["win"] == 2 * step_bytes(one)["win"]


@pytest.mark.parametrize("length", [1, 9, 12, 13, 40, 61])
def test_decode_reads_and_cache_equal_the_real_cache(length: int) -> None:
    config = small()
    model = build(config)
    cache = model.new_cache(batch=3, max_len=length)
    ids = torch.randint(256, (3, length))
    for token in ids.unbind(dim=1):
        model.step(token, cache)

    reads = decode_reads(config, length)
    for layer in cache.layers:
        assert (layer.last_reads == torch.tensor([*reads.values()])).all()
    assert sum(cache_bytes(config, length, batch=3).values()) == cache.nbytes()
    dense = 4 * 3 * length * config.model.n_layers * config.model.n_kv_groups * 20
    assert dense_cache_bytes(config, length, batch=3) == dense


def test_decode_reads_at_64k_are_those_of_the_paper() -> None:
    reads = decode_reads(load_config(PRODUCTION, environ={}), 65536)

    assert reads == {"cmp": 4095, "sel": 16 * 64, "win": 512}


MEMORY = {
    "fp32": [],
    "bf16": ["runtime.precision=bf16"],
    "mlp": ["nsa.phi=mlp"],
    # with d_k = d_v: otherwise a CPU has plain math alone, which keeps the probabilities
    "dense": ["model.attention=dense", "model.d_v=24"],
    "dense in bf16": ["model.attention=dense", "model.d_v=24", "runtime.precision=bf16"],
    "infllm": ["model.rule=pooled", "nsa.l_sel=16"],
    "msa": ["model.rule=msa,reuse", "nsa.l_sel=16", "nsa.d_index=8"],
    "biases and norms": ["model.mlp=gated", "model.qkv_bias=true", "model.qk_norm=true"],
    "norms in bf16": ["model.mlp=gated", "model.qk_norm=true", "runtime.precision=bf16"],
    "checkpointed": ["runtime.gradient_checkpointing=true"],
    "some checkpointed": ["runtime.gradient_checkpointing=true", "runtime.gc_layers=1:2"],
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 says so
@pytest.mark.parametrize("overrides", MEMORY.values(), ids=MEMORY.keys())
def test_the_activation_estimate_is_near_what_autograd_keeps(overrides: list[str]) -> None:
    config = small("model.dim=96", "model.d_k=24", "model.d_v=16", "train.seq_len=200", *overrides)
    estimate = training_memory(config)

    kept = _bytes_kept_for_backward(config)

    expected = estimate["activations"] + estimate["16-bit weights"] + estimate["head"]
    assert kept == pytest.approx(expected, rel=0.03)


def _bytes_kept_for_backward(config: Config) -> int:
    model = build(config).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    batch = torch.randint(256, (config.train.batch_size, config.train.seq_len + 1))
    with keep_mkldnn(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        next_token_loss(model, batch, resolve_runtime(config.runtime))
    return sum(storage.nbytes() for storage in kept.values())


def test_weights_gradients_and_optimizer_take_sixteen_bytes_per_parameter() -> None:
    config = load_config(PRODUCTION, environ={})
    memory = training_memory(config)

    fixed = memory["weights"] + memory["gradients"] + memory["optimizer"]

    assert fixed == 16 * sum(parameter_counts(config).values())
