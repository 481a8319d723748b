"""Rules: each chooses what its definition says, and a model works with any of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa import BlockSpec, TinyLM, sparse_attention
from nsa.config import ConfigError, ModelConfig
from nsa.model.block import SparseBlock
from nsa.model.dense import DenseAttention
from nsa.model.rope import apply_rope, rope_tables
from nsa.model.rules import InfLLMRule, MoBARule, MSARule, NSARule, Rule, Span
from nsa.model.sparse import SparseAttention
from nsa.model.stats import AttentionStats
from nsa.ops import reference

SPEC = BlockSpec(l=8, d=4, l_sel=16, n_sel=4, w=16)
HEADS: dict[str, Any] = {"dim": 24, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 6}
KINDS: dict[str, dict[str, Any]] = {
    "nsa": {"rule": "nsa"},
    "infllm": {"rule": "pooled", "pool": "infllm"},
    "moba": {"rule": "pooled", "pool": "moba", "pool_block": 32},
    "msa": {"rule": "msa", "d_index": 4},
}
SIZES: dict[str, Any] = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 16}
LENGTH = 150
DOCS = [0, 5, 70, 87, 150]


def new_layer(kind: str, spec: BlockSpec = SPEC) -> SparseAttention:
    torch.manual_seed(3)
    return SparseAttention(**HEADS, spec=spec, **KINDS[kind]).double()


def new_input(length: int = LENGTH, batch: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, HEADS["dim"], generator=draw, dtype=torch.float64)


def new_model(kind: str, **more: Any) -> TinyLM:
    torch.manual_seed(5)
    names = {"rule": "nsa", **KINDS.get(kind, {})} | more
    return TinyLM(vocab=31, n_layers=3, **HEADS, **SIZES, kv="shared", **names).double()


# --- each rule by its definition, query by query ---


def best(scores: dict[int, float], forced: set[int], n: int) -> list[int]:
    """The forced blocks and the best others; a tie goes to the lower block."""
    others = sorted((j for j in scores if j not in forced), key=lambda j: (-scores[j], j))
    return sorted([*forced, *others[: n - len(forced)]])


def forced_blocks(t: int, spec: BlockSpec) -> set[int]:
    own = t // spec.l_sel
    return {j for j in range(own + 1) if j < spec.num_first or j > own - spec.num_local}


def infllm_blocks(q: Tensor, k: Tensor, t: int, spec: BlockSpec) -> list[int]:
    """q [G, D] at position t, keys [S, D] of its KV head."""
    num = spec.num_cmp(t + 1)
    summed = torch.zeros(num, dtype=q.dtype)
    for head in q:
        pools = [k[i * spec.d : i * spec.d + spec.l].mean(0) for i in range(num)]
        if pools:
            summed += (torch.stack(pools) @ head / math.sqrt(len(head))).softmax(0)
    scores = {}
    for j in range(t // spec.l_sel + 1):
        touching = [
            summed[i].item()
            for i in range(num)
            if i * spec.d < (j + 1) * spec.l_sel and i * spec.d + spec.l > j * spec.l_sel
        ]
        scores[j] = max(touching, default=0.0)
    return best(scores, forced_blocks(t, spec), spec.n_sel)


def moba_blocks(q: Tensor, k: Tensor, t: int, spec: BlockSpec, size: int) -> list[int]:
    """q [D] of one query head."""
    own, per_block = t // size, size // spec.l_sel
    scores = {j: (q @ k[j * size : (j + 1) * size].mean(0)).item() for j in range(own)}
    large = best(scores, {own}, spec.n_sel // per_block)
    small = [j * per_block + i for j in large for i in range(per_block)]
    return [j for j in small if j <= t // spec.l_sel]


def msa_blocks(q: Tensor, k: Tensor, t: int, spec: BlockSpec) -> list[int]:
    """q [d_index] of a KV head, index keys [S, d_index]."""
    scores = {}
    for j in range(t // spec.l_sel + 1):
        tokens = k[j * spec.l_sel : min((j + 1) * spec.l_sel, t + 1)]
        scores[j] = (tokens @ q).max().item()
    return best(scores, forced_blocks(t, spec), spec.n_sel)


def index_heads(rule: MSARule, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries and keys of one document [S, dim], by hand."""
    rope = rope_tables(torch.arange(len(x)), rule.d_index, base=1e4, scale=1.0, dtype=x.dtype)

    def normed(weight: Tensor, heads: int) -> Tensor:
        projected = (x @ weight.t()).unflatten(-1, (heads, rule.d_index))
        rms = (projected.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return apply_rope((projected / rms)[None], rope)[0]

    return normed(rule.proj_q.weight, rule.num_groups), normed(rule.proj_k.weight, 1)[:, 0]


def expected(kind: str, rule: Rule, q: Tensor, k: Tensor, x: Tensor) -> list[list[list[int]]]:
    """Blocks of every query and head of one document: [S][H]."""
    spec, per_group = rule.spec, q.shape[1] // k.shape[1]
    if kind == "nsa":
        pools = reference.compress(k[None], spec, doc_lens=[len(k)])
        chosen = reference.select_blocks(
            q[None], pools, spec, scale=q.shape[-1] ** -0.5, doc_lens=[len(k)]
        )[0]
        return [[[j for j in row if j >= 0] for row in heads] for heads in chosen.tolist()]
    rows: list[list[list[int]]] = []
    asked, keys = index_heads(rule, x) if isinstance(rule, MSARule) else (q, k)
    for t in range(len(q)):
        if isinstance(rule, MSARule):
            rows.append([msa_blocks(asked[t, g], keys, t, spec) for g in range(k.shape[1])])
        elif isinstance(rule, MoBARule):
            heads = range(q.shape[1])
            size = rule.pool_block
            rows.append([moba_blocks(q[t, h], k[:, h // per_group], t, spec, size) for h in heads])
        else:
            groups = q[t].unflatten(0, (k.shape[1], per_group))
            pairs = zip(groups, k.unbind(1), strict=True)
            rows.append([infllm_blocks(heads, own, t, spec) for heads, own in pairs])
    return rows


@pytest.mark.parametrize("forced", [(1, 2), (0, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_chooses_what_its_definition_says(kind: str, forced: tuple[int, int]) -> None:
    """Whole rows, packed documents, and the queries from an offset on choose alike."""
    spec = BlockSpec(**SIZES, num_first=forced[0], num_local=forced[1])
    layer, x = new_layer(kind, spec), new_input(batch=1)
    rule = layer.rule
    assert rule is not None
    for bounds in ([0, LENGTH], DOCS):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if len(bounds) > 2 else None
        q, k = torch.randn(2, 1, LENGTH, 4, 8, dtype=x.dtype).unbind()
        k = k[:, :, :2]
        index = rule.index(q, k, x, Span(0, cu_seqlens))
        assert index.shape == (1, LENGTH, 4 if kind == "moba" else 2, spec.n_sel)
        for first, stop in pairwise(bounds):
            span = slice(first, stop)
            wanted = expected(kind, rule, q[0, span], k[0, span], x[0, span])
            found = index[0, span].tolist()
            assert [[[j for j in ids if j >= 0] for ids in row] for row in found] == wanted
    # Queries from 40 on, as chunked prefill asks.
    later, summary = Span(40), rule.summarize(k, x, Span())
    late = rule.choose(rule.queries(q[:, 40:], x[:, 40:], later), summary, 2, later)
    assert torch.equal(late, rule.index(q, k, x)[:, 40:])


def test_kinds_are_the_rules_they_name() -> None:
    kinds = {kind: type(new_layer(kind).rule) for kind in KINDS}
    assert kinds == {"nsa": NSARule, "infllm": InfLLMRule, "moba": MoBARule, "msa": MSARule}


# --- a layer ---


def outputs_and_gradients(layer: Any, x: Tensor, **options: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    done = layer(x, **options)
    out = done if isinstance(done, Tensor) else done[0]
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=draw, dtype=out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), [x, layer.qkv.weight, layer.out.weight])
    return [out, *grads]


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_blocks_a_rule_is_dense_attention(kind: str) -> None:
    layer = new_layer(kind, BlockSpec(**SIZES | {"n_sel": 10}))
    dense = DenseAttention(**HEADS).double()
    dense.load_state_dict({k: v for k, v in layer.state_dict().items() if "rule" not in k})
    for length, bounds in ((LENGTH, None), (150, DOCS)):
        x = new_input(length, batch=1)
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        pairs = zip(
            outputs_and_gradients(layer, x, cu_seqlens=cu_seqlens),
            outputs_and_gradients(dense, x, cu_seqlens=cu_seqlens),
            strict=True,
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_no_output_depends_on_a_later_token(kind: str) -> None:
    layer, x = new_layer(kind), new_input()
    other = x.clone()
    other[:, 77:] += 1.0
    ours, theirs = layer(x)[0], layer(other)[0]
    assert torch.equal(ours[:, :77], theirs[:, :77])
    assert not torch.equal(ours[:, 77:], theirs[:, 77:])


@pytest.mark.parametrize("rule", [*KINDS, "msa,reuse", "moba,reuse,reuse"])
def test_prefill_and_decode_equal_the_forward_pass(rule: str) -> None:
    first, *rest = rule.split(",")
    names = ",".join([KINDS[first]["rule"], *rest])
    model = new_model(first, rule=names).eval()
    ids = torch.randint(31, (2, 90), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = model(ids)
    cache = model.new_cache(2, 90)
    parts = [model.prefill(part, cache) for part in ids[:, :80].split([1, 30, 16, 33], dim=1)]
    parts += [model.step(token, cache)[:, None] for token in ids[:, 80:].unbind(1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, rtol=0, atol=1e-10)
    assert cache.nbytes() == sum(
        x.nbytes for layer in cache.layers for x in (layer.k, layer.v, layer.summary)
    )


def test_a_layer_that_reuses_reads_the_blocks_of_the_layer_before() -> None:
    model = new_model("msa", rule="msa,reuse,msa")
    seen: list[Tensor] = []
    for block in model.layers:
        assert isinstance(block, SparseBlock)
        block.register_forward_hook(lambda _, __, done: seen.append(done[1]))
    model(torch.randint(31, (1, 90)))
    assert seen[0] is seen[1]
    assert not torch.equal(seen[1], seen[2])
    assert [block.attn.rule is None for block in model.layers] == [False, True, False]
    with pytest.raises(ValueError, match="rule 'reuse' got no index.*pass index="):
        model.layers[1](torch.zeros(1, 4, 24, dtype=torch.float64))


def test_recomputation_in_backward_changes_nothing() -> None:
    """Also not the loss of the indexer."""
    ids = torch.randint(31, (1, 90), generator=torch.Generator().manual_seed(2))
    found = []
    for checkpointing in (False, True):
        model = new_model("msa", rule="msa,reuse", grad_checkpointing=checkpointing)
        losses: list[Tensor] = []
        hidden = model.hidden(ids, index_losses=losses)
        assert len(losses) == 2  # layers 0 and 2
        (hidden.square().mean() + torch.stack(losses).mean()).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_statistics_tell_blocks_and_have_no_gates() -> None:
    model, stats = new_model("infllm"), AttentionStats(maps=True)
    model(torch.randint(31, (1, 90)), stats=stats)
    summary, layers = stats.summary(), stats.per_layer()
    assert summary["entropy_mean"] is None and summary["branch_shares"] is None
    assert summary["total_gates"] == 0 and summary["sel_rows"] == 3 * 90 * 2
    assert summary["sel_k_max"] == 4 and layers[0]["share_sel"] is None
    maps = stats.selection_maps()
    assert maps is not None and len(maps) == 3 and maps[0].block_tokens == 16
    mixed = AttentionStats()
    torch.manual_seed(0)
    both = TinyLM(vocab=31, n_layers=2, **HEADS, **SIZES, rule="nsa,pooled")
    both(torch.randint(31, (1, 90)), stats=mixed)
    alone = mixed.per_layer()
    assert mixed.summary()["entropy_mean"] == alone[0]["entropy_mean"]
    assert alone[0]["entropy_mean"] == pytest.approx(math.log(3), abs=1e-5)
    assert alone[1]["entropy_mean"] is None


# --- the indexer's loss ---


def explicit_loss(layer: SparseAttention, x: Tensor, read: Tensor | None, of_mean: bool) -> Tensor:
    """The KL by probabilities over all tokens: of each head, or of a group's mean."""
    rule = layer.rule
    assert isinstance(rule, MSARule)
    num = x.shape[1]
    rope = layer.rope(torch.arange(num), x.dtype)
    q, k, _ = layer._project(x, rope)  # [B, H, S, D]
    token = torch.arange(num)
    seen = (token <= token[:, None]).expand(1, 2, num, num)
    if read is not None:
        blocks = (token // SPEC.l_sel == read[..., None]).any(dim=-2)  # [B, S, H, S]
        seen = seen & blocks.transpose(1, 2)
    keys = k.repeat_interleave(2, dim=1)
    logits = q @ keys.mT / math.sqrt(layer.d_k)
    p = logits.masked_fill(~seen.repeat_interleave(2, dim=1), -math.inf).softmax(-1).detach()
    asked, ours = rule.queries(q, x, Span()), rule.summarize(k, x, Span())
    scores = asked.transpose(1, 2) @ ours.transpose(1, 2).mT / math.sqrt(rule.d_index)
    s = scores.masked_fill(~seen, -math.inf).log_softmax(-1)  # [B, Hkv, S, S]
    p = p.unflatten(1, (2, 2))  # [B, Hkv, G, S, S]
    p, s = (p.mean(2), s) if of_mean else (p, s[:, :, None].expand_as(p))
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - s), 0.0).sum(-1).mean()


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_loss_of_the_indexer_is_the_kl_and_reaches_it_alone(warm_up: bool) -> None:
    layer, x = new_layer("msa"), new_input(120, batch=1).requires_grad_()
    out, index, loss = layer(x, warm_up=warm_up)
    read = None if warm_up else index
    wanted = explicit_loss(layer, x, read, of_mean=False)
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    weights = [p for name, p in layer.named_parameters() if name.startswith("rule.")]
    ours = torch.autograd.grad(loss, weights, retain_graph=True)
    theirs = torch.autograd.grad(explicit_loss(layer, x, read, of_mean=True), weights)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)  # the loss is fp32
        assert mine.abs().max() > 1e-6
    others = [x, layer.qkv.weight, layer.out.weight]
    assert not any(x is not None for x in torch.autograd.grad(loss, others, allow_unused=True))
    # Attention reads what it chose, and everything during a warm-up.
    dense = DenseAttention(**HEADS).double()
    dense.load_state_dict({k: v for k, v in layer.state_dict().items() if "rule" not in k})
    close = torch.allclose(out, dense(x), atol=1e-10)
    assert close == warm_up
    assert layer.eval()(x)[2] is None, "only in training"


def test_an_indexer_learns_what_attention_reads() -> None:
    """A dense teacher, and an indexer that is trained alone, find the same block."""
    layer = new_layer("msa").float()
    x = new_input(128, batch=1).float()
    weights = [p for name, p in layer.named_parameters() if name.startswith("rule.")]
    optimizer = torch.optim.Adam(weights, lr=3e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        _, _, loss = layer(x, warm_up=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    floor = explicit_loss(layer.double(), x.double(), None, of_mean=True).item()
    assert losses[-1] < 0.7 * losses[0]
    assert 0 <= floor < losses[-1]


# --- refusals ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "mosa"}, "model.rule='mosa'.*nearest is 'msa'"),
        ({"rule": "reuse,msa"}, "reuse after pooled, msa"),
        ({"rule": "nsa,reuse"}, "reuse after pooled, msa.*model.kv=shared"),
        ({"rule": "dense,reuse"}, "reuse after pooled, msa.*model.kv=shared"),
        ({"kv": "split"}, "model.kv='split'.*separate | shared"),
    ],
)
def test_rules_that_cannot_be_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**given)  # type: ignore[arg-type]


def test_a_list_of_rules_repeats_over_the_layers() -> None:
    model = ModelConfig(rule="msa, reuse", n_layers=5)
    assert model.rules == ["msa", "reuse"] and model.learns_index
    assert model.branched == [False, False]
    assert ModelConfig(n_layers=2).branched == [True]
    assert ModelConfig(kv="shared", n_layers=2).branched == [False]
    assert ModelConfig(rule="nsa,msa", n_layers=1).rules == ["nsa"]
    some = ModelConfig(rule="nsa,dense,msa", n_layers=3)
    assert some.branched == [True, False, False] and some.chosen == [False, False, True]
    assert ModelConfig(rule="dense", n_layers=3).attention_kind == "dense"
    built = new_model("msa", rule="msa,reuse")
    assert [block.attn.rule is None for block in built.layers] == [False, True, False]


def test_blocks_that_a_rule_cannot_use_are_refused() -> None:
    with pytest.raises(ValueError, match="pool_block=24.*multiple of l_sel"):
        MoBARule(SPEC, 24)
    with pytest.raises(ValueError, match="d_index=3.*even"):
        MSARule(SPEC, 24, 2, 3, 1e4, 1.0)
    for l_sel, allowed in ((8, "use 16"), (24, "use 32"), (512, "use 256")):
        spec = BlockSpec(l=8, d=8, l_sel=l_sel)
        with pytest.raises(ValueError, match=f"l_sel={l_sel} is not a multiple of 16.*{allowed}"):
            SparseAttention(**HEADS, spec=spec, rule="nsa")
    with pytest.raises(ValueError, match="one of .*separate"):
        TinyLM(vocab=4, n_layers=1, **HEADS, kv="none")
    model = new_model("msa")
    with pytest.raises(ValueError, match="only layers with the branches of NSA"):
        model.new_paged_cache(1, 64, 4)


def test_sparse_attention_of_an_index_equals_a_mask() -> None:
    """The operator that all rules share, by torch's own attention."""
    layer = new_layer("infllm")
    for _ in range(2):
        q, k, v = (
            torch.randn(1, 90, h, d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 6))
        )
        assert layer.rule is not None
        index = layer.rule.index(q, k, new_input(90, 1))
        out = sparse_attention(q, k, v, index, block=16)
        token = torch.arange(90)
        mask = (token // 16 == index[..., None]).any(-2).transpose(1, 2)
        mask = (mask & (token <= token[:, None])).repeat_interleave(2, dim=1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=0, atol=1e-10)
