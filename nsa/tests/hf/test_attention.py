"""Models of transformers on our attention: `nsa.hf.register()` and `set_attn_implementation`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.model.rules import Span
from nsa.train import load_model
from nsa.train.sparsify import sparsify

transformers = pytest.importorskip("transformers", reason="the extra hf installs it")

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

import nsa.hf  # noqa: E402
from nsa.hf.attention import RULES, attend  # noqa: E402
from nsa.hf.layout import Sizes, sizes_of  # noqa: E402

NAMES = nsa.hf.register()
VOCAB, LENGTH = 97, 150
SIZES: dict[str, Any] = {
    "nsa_block": 16, "nsa_n": 4, "nsa_pool": 16, "nsa_stride": 8, "nsa_moba_block": 32,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
} | SIZES  # fmt: skip
FULL = ["full_attention"] * 2
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, tie_word_embeddings=True),
    "mistral without a window": lambda: transformers.MistralConfig(**TINY, sliding_window=None),
    "gemma with a scale": lambda: transformers.Gemma3TextConfig(
        **TINY, query_pre_attn_scalar=7, layer_types=FULL
    ),
    "granite with a scale": lambda: transformers.GraniteConfig(**TINY, attention_multiplier=0.5),
    "gpt2 without groups": lambda: transformers.GPT2Config(
        **TINY, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "gpt-oss with sinks": lambda: transformers.GptOssConfig(
        **TINY, layer_types=FULL, num_local_experts=2, num_experts_per_tok=1
    ),
}
EVERY = {"n": 16}
"""Blocks for LENGTH tokens, all of them; a multiple of what nsa-moba needs."""


def model_of(config: Any, name: str = "eager") -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    for each, parameter in model.named_parameters():
        if "sinks" in each:  # not initialized by transformers
            torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of(MODELS["llama"](), "nsa-pooled")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model: Any, ids: Tensor, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    found = model(ids, labels=ids, **given)
    found.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found.logits.detach(), grads


def assert_alike(first: Any, second: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=atol)
    assert first[1].keys() == second[1].keys() and len(first[1]) > 15
    for name, grad in first[1].items():
        torch.testing.assert_close(second[1][name], grad, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_with_all_blocks_logits_and_gradients_are_those_of_eager(kind: str, ids: Tensor) -> None:
    model = model_of(MODELS[kind]())
    dense = logits_and_gradients(model, ids)
    for name in NAMES if kind == "llama" else NAMES[:1]:
        model.set_attn_implementation(name)
        with nsa.hf.sizes(**EVERY):
            assert_alike(dense, logits_and_gradients(model, ids))
        sparse = model(ids).logits
        assert (sparse[:, 64:] - dense[0][:, 64:]).abs().max() > 1e-3, "4 blocks are not all"
    model.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, dense[0]), "back again"


def test_the_last_layer_reads_the_blocks_of_its_rule(ids: Tensor) -> None:
    """Against a dense softmax over the blocks that the rule gives for whole sequences."""
    seen: list[tuple[Tensor, ...]] = []
    for name in NAMES:

        def record(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kw: Any) -> Any:
            out = attend(name, module, q, k, v, *rest, **kw)  # noqa: B023 - called in this turn
            seen.append((q, k, v, out[0]))
            return out

        AttentionInterface.register("nsa-recorded", record)
        ALL_MASK_ATTENTION_FUNCTIONS.register("nsa-recorded", ALL_MASK_ATTENTION_FUNCTIONS[name])
        model = model_of(MODELS["qwen3"](), "nsa-recorded")
        model(ids)
        q, k, v, out = (x.detach() for x in seen[-1])
        sizes = sizes_of(model.config)
        index = RULES[name](sizes).index(q.transpose(1, 2), k.transpose(1, 2), q, Span())
        blocks = index.transpose(1, 2)  # [B, H, S, n]
        blocks = blocks.repeat_interleave(4 // blocks.shape[1], dim=1)
        own = torch.arange(LENGTH) // sizes.block
        chosen = (blocks[..., None] == own).any(dim=3)  # [B, Hq, S, S]
        visible = chosen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
        expected = (scores.softmax(-1) @ values).transpose(1, 2)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert not visible.logical_not().tril().any(dim=-1)[..., :32].any()
        assert visible.logical_not().tril().any(), "some blocks are left out"


def test_a_switched_model_is_what_nsa_sparsify_makes_of_it(ids: Tensor, tmp_path: Path) -> None:
    """The same blocks in our own model: two ways from a Qwen3 to sparse attention."""
    model = model_of(MODELS["qwen3"]())
    model.save_pretrained(tmp_path / "dense")
    shared = ["nsa.l=16", "nsa.d=8", "nsa.l_sel=16", "nsa.n_sel=4"]
    moba = ["nsa.pool=moba", "nsa.pool_block=32"]
    rules = {"nsa-pooled": ("pooled", []), "nsa-mean": ("nsa", []), "nsa-moba": ("pooled", moba)}
    said: list[str] = []
    with torch.no_grad():
        for name, (rule, more) in rules.items():
            overrides = [*shared, *more]
            folder = sparsify(
                tmp_path / "dense", tmp_path / name, rule=rule, overrides=overrides, say=said.append
            )
            ours, _ = load_model(folder)
            model.set_attn_implementation(name)
            torch.testing.assert_close(ours(ids), model(ids).logits, rtol=0, atol=1e-5)


def test_sizes_of_a_pass_hold_for_its_checkpointed_backward_pass(llama: Any, ids: Tensor) -> None:
    """Gradient checkpointing runs the layers again, after the context has ended."""
    found = []
    llama.train()
    for reentrant in (None, False, True):
        if reentrant is not None:
            llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
        llama.zero_grad()
        with nsa.hf.sizes(n=6):
            loss = llama(ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in llama.named_parameters()}
        found.append((loss.detach(), grads))
    llama.gradient_checkpointing_disable()
    llama.eval()
    assert_alike(found[0], found[1], atol=1e-6)
    assert_alike(found[0], found[2], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_cached_greedy_text_is_that_of_the_plain_forward(
    name: str, llama: Any, ids: Tensor
) -> None:
    llama.set_attn_implementation(name)
    for options in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 32}):
        text = llama.generate(ids, max_new_tokens=24, do_sample=False, **options)
        plain = llama(text[:, :-1], use_cache=False).logits[:, LENGTH - 1 :].argmax(-1)
        assert torch.equal(text[:, LENGTH:], plain), options
    llama.set_attn_implementation("nsa-pooled")


@pytest.mark.parametrize("kind", ["llama", "gpt-oss with sinks"])
def test_a_padded_batch_is_its_rows(kind: str, ids: Tensor) -> None:
    """Left-padded generation, and logits and gradients with padding on either side."""
    model, lens = model_of(MODELS[kind](), "nsa-pooled"), (LENGTH, 90, 37)
    left, right = (torch.zeros(3, LENGTH, dtype=torch.long) for _ in range(2))
    for row, num in enumerate(lens):
        left[row, LENGTH - num :] = right[row, :num] = ids[0, :num]
    singles = [model.generate(ids[:1, :num], max_new_tokens=20, do_sample=False) for num in lens]
    for options in ({}, {"cache_implementation": "static"}):
        both = model.generate(
            left, attention_mask=(left > 0).long(), max_new_tokens=20, do_sample=False, **options
        )
        for row, num in enumerate(lens):
            assert torch.equal(both[row, LENGTH:], singles[row][0, num:]), (row, options)
    for padded in (left, right):
        mask = padded > 0
        places = (mask.cumsum(1) - 1).clamp(min=0)
        labels = padded.masked_fill(~mask, -100)
        labels[:, 0] = -100  # not a target of the single rows either
        logits = model(padded, attention_mask=mask.long(), position_ids=places).logits
        for row, num in enumerate(lens):
            single = model(ids[:1, :num]).logits[0]
            torch.testing.assert_close(logits[row, mask[row]], single, rtol=0, atol=1e-5)


def test_parts_of_padded_rows_through_a_cache_are_the_rows(llama: Any, ids: Tensor) -> None:
    """Many tokens, then one, then many: queries at another offset in each row."""
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache, parts, start = transformers.DynamicCache(config=llama.config), [], 0
    for num in (70, 3, 1, 76):
        stop = start + num
        part = llama(
            ids[:, start:stop], attention_mask=mask[:, :stop],
            position_ids=places[:, start:stop], past_key_values=cache,
        )  # fmt: skip
        parts.append(part.logits)
        start = stop
    found = torch.cat(parts, dim=1)
    for row, first in ((0, 33), (1, 0)):
        alone = llama(ids[row : row + 1, first:]).logits[0]
        torch.testing.assert_close(found[row, first:], alone, rtol=0, atol=1e-5)


def test_a_compiled_model_is_itself(llama: Any, ids: Tensor) -> None:
    mask = (torch.arange(LENGTH) > 20).long().expand(2, -1)
    with torch.no_grad():
        plain = llama(ids, attention_mask=mask, use_cache=False).logits
        found = torch.compile(llama, backend="eager")(ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(found.logits, plain, rtol=0, atol=1e-5)


def test_padding_has_no_gradient_and_changes_none(llama: Any, ids: Tensor) -> None:
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), ids[:1, :90]], dim=1)
    mask = (padded > 0).long()
    alone = logits_and_gradients(llama, ids[:1, :90])
    llama.zero_grad()
    labels = padded.masked_fill(mask == 0, -100)
    labels[:, 30] = -100  # its prediction would come from padding
    out = llama(padded, attention_mask=mask, labels=labels, position_ids=(mask.cumsum(1) - 1))
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in llama.named_parameters()}
    assert_alike(alone, (out.logits[:, 30:].detach(), grads))


def test_packed_documents_do_not_see_each_other(llama: Any, ids: Tensor) -> None:
    """By position_ids, with and without a cache, and by the bounds of flash attention."""
    lens = (70, 48, 32)
    places = torch.cat([torch.arange(num) for num in lens])[None]
    bounds = torch.tensor([0, 70, 118, 150], dtype=torch.int32)
    alone = torch.cat([llama(doc).logits for doc in ids[:1].split(lens, dim=1)], dim=1)
    by_bounds = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    cases: list[dict[str, Any]] = [
        {"use_cache": False},
        {"use_cache": True},
        {"use_cache": False, **by_bounds, "max_length_q": 70, "max_length_k": 70},
    ]
    for case in cases:
        packed = llama(ids[:1], position_ids=places, **case).logits
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5, msg=str(case))
    other = torch.cat([llama(doc).logits for doc in ids[1:].split(lens, dim=1)], dim=1)
    for use_cache in (False, True):
        rows = llama(ids, position_ids=places, use_cache=use_cache).logits
        torch.testing.assert_close(rows, torch.cat([alone, other]), rtol=0, atol=1e-5)


def test_sizes_come_from_the_context_then_the_config_then_the_defaults() -> None:
    config = MODELS["llama"]()
    assert sizes_of(config) == Sizes(block=16, n=4, pool=16, stride=8, moba_block=32)
    with nsa.hf.sizes(n=7, block=32), nsa.hf.sizes(n=9):
        assert (sizes_of(config).n, sizes_of(config).block, sizes_of(None).pool) == (9, 32, 32)
    assert sizes_of(config).n == 4
    message = "sizes\\(blocks=.*unknown; the sizes are block, .*use"
    with pytest.raises(ValueError, match=message), nsa.hf.sizes(blocks=3):
        pass


def test_sizes_are_saved_with_the_model(llama: Any, ids: Tensor, tmp_path: Any) -> None:
    llama.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="nsa-pooled"
    )
    assert sizes_of(again.config) == sizes_of(llama.config)
    assert torch.equal(again.eval()(ids).logits, llama(ids).logits)


def test_heads_whose_values_have_another_size(ids: Tensor) -> None:
    """Multi-head latent attention: Dk = 24, Dv = 16."""
    config = transformers.DeepseekV3Config(
        **TINY | {"num_key_value_heads": 4, "head_dim": 8}, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=2,
    )  # fmt: skip
    model = model_of(config)
    dense = logits_and_gradients(model, ids)
    model.set_attn_implementation("nsa-pooled")
    with nsa.hf.sizes(**EVERY):
        assert_alike(dense, logits_and_gradients(model, ids))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a ready mask": (
        lambda model, ids: model(ids, attention_mask=torch.zeros(2, 1, LENGTH, LENGTH)),
        "a ready mask .*; it takes padding .*: pass these",
    ),
    "attention weights": (
        lambda model, ids: model(ids, output_attentions=True),
        "output_attentions=True; it takes False.*: call .*eager",
    ),
    "not causal": (
        lambda model, ids: model(ids, is_causal=False),
        "attention that is not causal; it takes causal attention within documents: use",
    ),
    "a layer that is not causal": (
        lambda model, ids: attend(
            "nsa-pooled", model.model.layers[0].self_attn, *(torch.zeros(1, 2, 8, 16),) * 3, None,
            is_causal=False,
        ),
        "is_causal=False; it takes causal attention: use",
    ),
    "an argument that nobody knows": (
        lambda model, ids: model(ids, position_bias=torch.zeros(3)),
        "the argument position_bias=a tensor of shape \\[3\\]; it takes .*: use",
    ),
    "padding and documents": (
        lambda model, ids: model(
            ids, attention_mask=(torch.arange(LENGTH) < 140).long().expand(2, -1),
            position_ids=(torch.arange(LENGTH) % 60)[None], use_cache=False,
        ),
        "position_ids of packed documents and an attention_mask.*; it takes one.*: leave",
    ),
    "a mask of the new tokens alone": (
        lambda model, ids: model(
            ids[:, -1:], attention_mask=torch.ones(2, 1),
            past_key_values=model(ids[:, :-1], use_cache=True).past_key_values,
        ),
        "1 columns for 149 tokens of the cache and 1 new.*; it takes a mask of 150.*: give",
    ),
    "documents with a cache": (
        lambda model, ids: model(
            ids[:, -20:], position_ids=(torch.arange(20) % 10)[None],
            past_key_values=model(ids[:, :-20], use_cache=True).past_key_values,
        ),
        "packed documents with keys of an earlier call; it takes .*: call",
    ),
    "bounds of other tokens": (
        lambda model, ids: model(ids[:1], cu_seq_lens_q=torch.tensor([0, 170, 120])),
        "cu_seq_lens_q \\[0, 170, 120\\] with 1 rows, 150 queries.*; it takes .*: call",
    ),
    "bounds in two rows": (
        lambda model, ids: model(ids, cu_seq_lens_q=torch.tensor([0, 70, 150])),
        "cu_seq_lens_q \\[0, 70, 150\\] with 2 rows.*; it takes .*: call",
    ),
    "positions in three coordinates": (
        lambda model, ids: attend(
            "nsa-pooled", model.model.layers[0].self_attn, *(torch.zeros(1, 2, 8, 16),) * 3, None,
            position_ids=torch.zeros(3, 1, 8),
        ),
        "position_ids of shape \\[3, 1, 8\\]; it takes \\[B, S\\].*: use",
    ),
    "only padding": (
        lambda model, ids: model(ids, attention_mask=torch.zeros(2, LENGTH)),
        "hides every token of this call; it takes at least one token: leave",
    ),
    "sizes that do not fit": (
        lambda model, ids: sized(model, ids, stride=12),
        "l=16 is not a multiple of d=12; use",
    ),
    "too few blocks": (lambda model, ids: sized(model, ids, n=2), "n_sel=2 leaves no room.*; use"),
    "a block of 20 tokens": (
        lambda model, ids: sized(model, ids, block=40),
        "block=40 is not a multiple of 16 up to 256; use",
    ),
}  # fmt: skip


def sized(model: Any, ids: Tensor, **given: Any) -> None:
    with nsa.hf.sizes(**given):
        model(ids)


@pytest.mark.parametrize("what", REFUSED)
def test_what_we_cannot_do_is_refused(what: str, llama: Any, ids: Tensor) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call(llama, ids)


def test_models_that_ask_for_more_are_refused(ids: Tensor) -> None:
    """A window, a soft cap, dropout in training, layers that look ahead; and a window that hides
    nothing is none."""
    mistral = model_of(transformers.MistralConfig(**TINY, sliding_window=64), "nsa-pooled")
    with pytest.raises(ValueError, match="a sliding window or chunk of 64 tokens for 150; .*: set"):
        mistral(ids)
    with pytest.raises(ValueError, match="a sliding window or chunk of 64 tokens for 65; .*: set"):
        mistral.generate(ids[:, :60], max_new_tokens=20, do_sample=False)
    short = mistral(ids[:, :64]).logits
    mistral.set_attn_implementation("eager")
    torch.testing.assert_close(short, mistral(ids[:, :64]).logits, rtol=0, atol=1e-5)
    gemma = model_of(transformers.Gemma2Config(**TINY, layer_types=FULL), "nsa-pooled")
    with pytest.raises(ValueError, match="the argument softcap=50.0; it takes .*: use"):
        gemma(ids)
    drops = model_of(transformers.LlamaConfig(**TINY, attention_dropout=0.1), "nsa-pooled")
    drops(ids)
    with pytest.raises(ValueError, match="attention dropout in training; it takes none.*: set"):
        drops.train()(ids)
    both_ways = model_of(transformers.LlamaConfig(**TINY, is_causal=False), "nsa-pooled")
    with pytest.raises(ValueError, match="attention that is not causal; it takes .*: use"):
        both_ways(ids)


def test_a_pattern_of_the_caller_is_refused(llama: Any, ids: Tensor) -> None:
    """What models of images ask for: blocks that see ahead, and functions of their own."""
    from transformers.masking_utils import create_causal_mask

    embeds = llama.model.embed_tokens(ids)
    given = {"config": llama.config, "inputs_embeds": embeds, "attention_mask": None}
    images = torch.full((2, LENGTH), -1)
    images[:, 40:60] = 1
    with pytest.raises(ValueError, match="attention that is not causal"):
        create_causal_mask(**given, past_key_values=None, block_sequence_ids=images)
    with pytest.raises(ValueError, match="a pattern of its own"):
        create_causal_mask(**given, past_key_values=None, or_mask_function=lambda b, h, q, k: q > k)
