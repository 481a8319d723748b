"""FLOPs per token are those of every visible key, sparse and dense, and the MFU is their rate."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from nsa.cli.info import describe_config
from nsa.config import load_config
from nsa.config.load import REPOSITORY
from nsa.model.cost import (
    dense_forward_flops,
    dense_pairs,
    dense_training_flops_per_token,
    peak_flops,
    step_flops,
    training_flops_per_token,
    utilization,
)
from nsa.tests.model.test_counts import small, visible_pairs

PRODUCTION = REPOSITORY / "configs" / "m7c_125m_2xa100_production.yaml"


@pytest.mark.parametrize("seq_len", [1, 7, 12, 61, 200])
def test_a_token_trains_three_times_what_its_visible_keys_cost(seq_len: int) -> None:
    config = small(f"train.seq_len={seq_len}")
    model, flops = config.model, training_flops_per_token(config)

    for branch, pairs in visible_pairs(config).items():
        products = 2 * model.n_heads * (model.d_k + model.d_v) * pairs * model.n_layers
        assert flops[branch] == pytest.approx(3 * products / seq_len)


def test_a_step_is_its_tokens() -> None:
    config = small("train.accumulate_grad_batches=3")
    tokens = config.train.batch_size * 3 * config.train.seq_len
    per_token = training_flops_per_token(config)

    assert {part: count * tokens for part, count in per_token.items()} == pytest.approx(
        step_flops(config)
    )


@pytest.mark.parametrize("seq_len", [1, 2, 61])
def test_dense_attention_sees_the_lower_triangle(seq_len: int) -> None:
    config = small(f"train.seq_len={seq_len}")
    model = config.model
    triangle = int(torch.ones(seq_len, seq_len).tril().sum())

    assert dense_pairs(seq_len) == triangle
    flops = dense_forward_flops(config)["all"]
    assert flops == model.n_layers * 2 * model.n_heads * (model.d_k + model.d_v) * triangle


def test_dense_matrices_equal_torchs_own_counter() -> None:
    config = small()
    model, x = config.model, torch.randn(config.train.seq_len, config.model.dim)
    shapes = [(model.n_heads * model.d_k, model.dim), (model.n_kv_groups * model.d_k, model.dim)]
    shapes += [(model.n_kv_groups * model.d_v, model.dim)]

    with FlopCounterMode(display=False) as counter:
        for shape in shapes:
            F.linear(x, torch.randn(*shape))
        F.linear(
            torch.randn(config.train.seq_len, model.n_heads * model.d_v),
            torch.randn(model.dim, model.n_heads * model.d_v),
        )

    flops = dense_forward_flops(config)
    assert flops["projections"] == model.n_layers * counter.get_total_flops()


def test_with_all_blocks_selected_the_branch_costs_what_dense_attention_costs() -> None:
    config = small("nsa.n_sel=6", "train.seq_len=72")

    sparse, dense = training_flops_per_token(config), dense_training_flops_per_token(config)

    assert sparse["sel"] == dense["all"]
    assert sparse["mlp"] == dense["mlp"] and sparse["head"] == dense["head"]


def test_at_64k_the_sparse_model_needs_fewer_flops_than_the_dense_one() -> None:
    config = load_config(PRODUCTION, ["train.seq_len=65536"], environ={})
    sparse, dense = training_flops_per_token(config), dense_training_flops_per_token(config)

    assert sum(sparse.values()) < sum(dense.values()) / 3


def test_the_report_shows_both() -> None:
    config = small()
    ours = sum(training_flops_per_token(config).values())
    dense = sum(dense_training_flops_per_token(config).values())

    text = describe_config(config, "x.yaml")

    assert f"{ours / 1e3:.4g} kFLOP; with dense causal attention {dense / 1e3:.4g} kFLOP" in text


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_peaks_are_those_of_the_device(name: str, tflops: float) -> None:
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == tflops * 1e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA A10", "NVIDIA L40", "Tesla T4", "AMD MI300X"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None
    assert utilization(1e9, 1e5, peak_flops(name, "bf16")) is None


def test_fp32_has_no_peak_because_the_table_is_of_16_bits() -> None:
    assert peak_flops("NVIDIA H200", "fp32") is None


def test_utilization_is_the_rate_over_the_peak_of_all_devices() -> None:
    assert utilization(1e9, 4.945e5, 989e12) == pytest.approx(0.5)
    assert utilization(1e9, 4.945e5, 989e12, num_devices=2) == pytest.approx(0.25)
