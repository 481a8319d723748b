"""TinyLM: shapes, initialisation, options, checkpointing, statistics, learning."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import TinyLM
from nsa.model import AttentionStats
from nsa.model.stats import GATE_FIELDS, SELECTION_FIELDS
from nsa.tests.support.helpers import assert_near

SIZES = dict(vocab=64, dim=32, n_layers=3, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)


def make_model(seed: int = 0, **options: Any) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**{**SIZES, **BLOCKS, **options})


@pytest.mark.parametrize("length", [1, 7, 11, 75])
def test_any_length_gives_logits_of_the_vocabulary(length):
    logits = make_model()(torch.randint(0, 64, (2, length)))
    assert logits.shape == (2, length, 64)
    assert logits.isfinite().all()


@pytest.mark.parametrize("dim", [32, 128])
def test_first_loss_is_that_of_a_uniform_guess(dim):
    ids = torch.randint(0, 64, (4, 64))
    with torch.no_grad():
        logits = make_model(dim=dim)(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - math.log(64)) < 0.1


def test_gates_start_equal_and_residual_branches_shrink_with_depth():
    deep, shallow = make_model(n_layers=8), make_model(n_layers=2)
    assert all(p.abs().max() == 0 for b in deep.layers for p in b.attn.gate.parameters())
    ratio = shallow.layers[0].mlp.fc2.weight.std() / deep.layers[0].mlp.fc2.weight.std()
    assert ratio.item() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("gc_layers", [None, (0, 1), (1, 3)])
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_gradient_checkpointing_changes_memory_not_gradients(gc_layers, phi):
    ids = torch.randint(0, 64, (2, 40))
    plain = make_model(phi=phi).double()
    recomputing = make_model(phi=phi, grad_checkpointing=True, gc_layers=gc_layers).double()
    calls = _count_calls(recomputing)
    for model in (plain, recomputing):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    first, last = gc_layers or (0, 3)
    assert calls == [2 if first <= i < last else 1 for i in range(3)]
    for (name, p), q in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def _count_calls(model: TinyLM) -> list[int]:
    """How often each block has run so far."""
    calls = [0] * len(model.layers)

    def hook(block, *_):
        calls[block.layer] += 1

    for block in model.layers:
        block.register_forward_pre_hook(hook)
    return calls


def test_tied_embeddings_share_the_matrix_and_its_gradient():
    tied, untied = make_model(tie_embeddings=True), make_model()
    assert "lm_head.weight" not in tied.state_dict()
    assert "lm_head.weight" in untied.state_dict()
    ids = torch.randint(0, 64, (1, 20))
    torch.testing.assert_close(tied(ids), tied.hidden(ids) @ tied.embed.weight.T)
    tied(ids).sum().backward()
    unused = next(i for i in range(64) if i not in ids)
    assert tied.embed.weight.grad[unused].abs().max() > 0  # only the head sees this row


def test_embed_std_is_of_the_embedding_alone():
    wide = make_model(embed_std=0.3)
    assert wide.embed.weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert make_model().embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert wide.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "option",
    [
        dict(rope_scale=8.0),
        dict(rope_base=100.0),
        dict(phi="mlp"),
        dict(gate="sigmoid"),
        dict(w=3),
        dict(n_sel=3),
        dict(l=16, d=8),
        dict(l_sel=16),
    ],
    ids=str,
)
def test_every_option_changes_the_function(option):
    ids = torch.randint(0, 64, (1, 60))
    with torch.no_grad():
        assert not torch.allclose(make_model()(ids), make_model(**option)(ids), atol=1e-7)


def test_norm_computes_in_fp32_in_a_bf16_model():
    from nsa.model.block import RMSNorm

    norm = RMSNorm(64).to(torch.bfloat16)
    x = (torch.randn(8, 64) * 300).to(torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (norm(x).double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_packed_documents_equal_separate_ones():
    model = make_model().double().eval()
    lengths = [9, 31, 20]
    ids = torch.randint(0, 64, (1, 60))
    cu_seqlens = torch.tensor([0, 9, 40, 60], dtype=torch.int32)
    with torch.no_grad():
        packed = model(ids, cu_seqlens=cu_seqlens)
        separate = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    assert_near(packed, separate, 1e-12)


def test_statistics_of_all_layers_come_from_one_forward():
    model = make_model()
    torch.nn.init.constant_(model.layers[1].attn.gate.bias.view(4, 3)[:, 2], 30.0)
    stats = AttentionStats()
    model(torch.randint(0, 64, (2, 40)), stats=stats)
    layers = stats.per_layer()
    assert [set(layer) for layer in layers] == [{*GATE_FIELDS, *SELECTION_FIELDS}] * 3
    assert layers[0]["entropy_mean"] == pytest.approx(math.log(3), abs=1e-5)
    assert layers[0]["collapse_fraction"] == 0
    assert layers[1]["collapse_fraction"] == 1  # the window has all the weight
    assert layers[1]["share_win"] == pytest.approx(1.0, abs=1e-6)
    summary = stats.summary()
    assert summary["collapse_fraction"] == pytest.approx(1 / 3)
    assert summary["entropy_min"] == pytest.approx(0, abs=1e-6)
    assert summary["max_gate_max"] == pytest.approx(1.0)
    assert summary["branch_shares"] == pytest.approx([2 / 9, 2 / 9, 5 / 9], abs=1e-5)
    assert summary["total_gates"] == 3 * 2 * 40 * 4
    assert summary["sel_rows"] == 3 * 2 * 40 * 2
    # Blocks of 8: a query in block c has min(c + 1, 4) of them.
    assert summary["sel_k_mean"] == pytest.approx((1 + 2 + 3 + 4 + 4) / 5)
    assert summary["sel_pct_at_max"] == pytest.approx(2 / 5)


def test_sigmoid_gates_are_normalised_before_their_entropy():
    model = make_model(gate="sigmoid")
    stats = AttentionStats()
    model(torch.randint(0, 64, (1, 20)), stats=stats)
    assert stats.summary()["entropy_mean"] == pytest.approx(math.log(3), abs=1e-5)


def test_recomputation_overwrites_a_layers_statistics():
    model = make_model(grad_checkpointing=True)
    stats = AttentionStats()
    model(torch.randint(0, 64, (1, 20)), stats=stats).sum().backward()
    assert len(stats.per_layer()) == 3
    assert stats.summary()["total_gates"] == 3 * 20 * 4


def test_statistics_before_a_forward_say_so():
    with pytest.raises(ValueError, match="no layer was recorded; run"):
        AttentionStats().summary()


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_forced_branch_is_the_only_one_that_speaks(branch, monkeypatch):
    monkeypatch.setenv("NSA_FORCE_BRANCH", branch)
    stats = AttentionStats()
    make_model()(torch.randint(0, 64, (1, 40)), stats=stats)
    expected = [1.0 if name == branch else 0.0 for name in ("cmp", "sel", "win")]
    assert stats.summary()["branch_shares"] == expected


def test_bfloat16_model_runs_and_stays_close():
    model = make_model().eval()
    ids = torch.randint(0, 64, (1, 75))
    with torch.no_grad():
        exact = model(ids)
        low = model.to(torch.bfloat16)(ids)
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().max() < 0.1 * exact.abs().max()


def _train(model: TinyLM, batches: list[torch.Tensor], lr: float = 3e-3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for ids in batches:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_random_tokens_cannot_be_learned():
    """Fresh uniform tokens: a loss below ln V would mean that a target leaks into its input. With
    phi avg the trainer's test of this name shows it."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 64, (8, 49), generator=generator) for _ in range(100)]
    losses = _train(make_model(phi="mlp", n_layers=2), batches)
    assert sum(losses[-25:]) / 25 >= math.log(64) - 0.02


def test_a_copy_from_far_beyond_the_window_is_learned():
    """The second half repeats the first, 16 tokens back; the window reaches 4."""
    generator = torch.Generator().manual_seed(2)
    model = make_model(n_layers=2, w=4, l=4, d=4, l_sel=4, n_sel=16, vocab=8)

    def twice(num_rows: int) -> torch.Tensor:
        half = torch.randint(0, 8, (num_rows, 16), generator=generator)
        return torch.cat([half, half], dim=1)

    def accuracy() -> float:
        ids = twice(64)
        with torch.no_grad():
            guesses = model(ids[:, :-1])[:, 16:].argmax(-1)
        return (guesses == ids[:, 17:]).float().mean().item()

    for _ in range(8):  # when the copy is found depends on rounding: mostly after 100 to 150 steps
        _train(model, [twice(16) for _ in range(50)], lr=1e-2)
        if accuracy() > 0.5:  # chance is 0.125
            return
    pytest.fail("no copy was learned in 400 steps")


class HostSyncs(TorchDispatchMode):
    """Counts the operations that make the host wait for a number of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
        return func(*args, **(kwargs or {}))


def test_a_forward_with_statistics_waits_for_the_device_only_in_the_end():
    model, ids = make_model(n_layers=4), torch.randint(0, 64, (2, 40))
    stats = AttentionStats()
    with HostSyncs() as forward:
        model(ids, stats=stats)
    with HostSyncs() as probe:
        torch.ones(1).item()
    assert forward.count == 0
    assert probe.count == 1  # the count can be other than zero
