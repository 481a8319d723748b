"""Attention implementations for models of transformers: the rules that need no weights.

    nsa.hf.register()
    model.set_attn_implementation("nsa-pooled")

Any causal model whose attention goes through transformers' AttentionInterface can be switched, and
back. A layer's keys are summarized, each query chooses blocks by them, and reads those blocks
alone. What the model asks for beyond that is honoured, or refused; nothing is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from nsa.hf.layout import Layout, Packed, Sizes, check_window, mask, refuse, sizes_of
from nsa.model.rules import InfLLMRule, MoBARule, NSARule, Rule, Span
from nsa.ops import sparse_attention

RULES: dict[str, Callable[[Sizes], Rule]] = {
    "nsa-pooled": lambda sizes: InfLLMRule(sizes.spec()),
    "nsa-mean": lambda sizes: NSARule(sizes.spec()),
    "nsa-moba": lambda sizes: MoBARule(sizes.spec(), sizes.moba_block),
}
"""Names of the implementations. A block's score: the largest of its pools (InfLLM-V2), their sum
(NSA), or the mean key of a large block, for each query head (MoBA)."""

HARMLESS = {
    "cache_position", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
}  # fmt: skip
"""Arguments that models pass on and that do not change what attention computes."""


def register() -> tuple[str, ...]:
    """Make the implementations known to transformers; returns their names."""
    # torch.compile leaves both as they are: they read lengths and documents on the host.
    as_it_is = torch.compiler.disable
    for name in RULES:
        AttentionInterface.register(name, as_it_is(partial(attend, name)))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, as_it_is(mask))
    return tuple(RULES)


def attend(
    name: str,
    module: torch.nn.Module,
    query: Tensor,  # [B, Hq, Sq, Dk]
    key: Tensor,  # [B, Hkv, Sk, Dk]
    value: Tensor,  # [B, Hkv, Sk, Dv]
    attention_mask: Layout | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,  # [Hq]: logits of the attention sinks
    position_ids: Tensor | None = None,  # [B, Sq]
    cu_seq_lens_q: Tensor | None = None,  # [docs + 1]
    cu_seq_lens_k: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:  # [B, Sq, Hq, Dv]
    """An attention function of transformers: choose blocks by the rule, and read them."""
    layout = _layout(module, query, key, attention_mask)
    _check_asked(module, asked, layout)
    same = cu_seq_lens_k is None or cu_seq_lens_q is None or cu_seq_lens_k.equal(cu_seq_lens_q)
    if not same:
        refuse("cu_seq_lens_k that differ from cu_seq_lens_q", "the same", "leave them out")
    packed = layout.documents(position_ids, cu_seq_lens_q)
    # [B, S, H, D]; a static cache ends in columns without tokens.
    q = query.transpose(1, 2)
    k, v = (x.transpose(1, 2)[:, : layout.num_keys] for x in (key, value))
    rule, scale = _rule(name, layout.sizes), scaling or 1 / math.sqrt(query.shape[-1])
    options: dict[str, Any] = {"scale": scale, "block": layout.sizes.block}
    options |= {"backend": layout.sizes.backend, "sink": s_aux}
    if packed is None:
        out = _read_rows(rule, q, k, v, layout.first, options)
    else:
        out = _read_documents(rule, q, k, v, packed, options)
    return out, None


@lru_cache(maxsize=64)
def _rule(name: str, sizes: Sizes) -> Rule:
    rule = RULES[name](sizes)
    rule.backend = sizes.backend
    return rule


def _read_rows(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, first: int, options: dict[str, Any]
) -> Tensor:
    """Rows without padding whose queries begin at position `first`."""
    index = _choose(rule, q, k, Span(first), options["scale"])
    return sparse_attention(q, k, v, index, q_offset=first, **_for_step(options, q.shape[1]))


def _read_documents(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, packed: Packed, options: dict[str, Any]
) -> Tensor:
    """Documents in one row; a query that is padding gives 0."""
    shape = (*q.shape[:3], v.shape[3])
    q = q.flatten(0, 1)[packed.query_rows][None]
    k, v = (x.flatten(0, 1)[packed.key_rows][None] for x in (k, v))
    parts = zip(
        q.split(packed.query_lens, 1), k.split(packed.key_lens, 1), packed.firsts, strict=True
    )
    chosen = [
        _choose(rule, queries, keys, Span(first), options["scale"])
        for queries, keys, first in parts
    ]
    read = sparse_attention(
        q, k, v, torch.cat(chosen, dim=1),
        q_offset=torch.tensor(packed.firsts, dtype=torch.int32),
        cu_seqlens=_bounds(packed.query_lens), cu_seqlens_k=_bounds(packed.key_lens),
        **_for_step(options, max(packed.query_lens)),
    )  # fmt: skip
    out = read.new_zeros(shape[0] * shape[1], *shape[2:])
    return out.index_copy(0, packed.query_rows, read[0]).unflatten(0, shape[:2])


def _choose(rule: Rule, q: Tensor, k: Tensor, span: Span, scale: float) -> Tensor:
    """The blocks of every query: [B, Sq, H, n] int32. Summaries are those of all keys.

    Rules score by 1/sqrt(Dk); a model with another scale has other probabilities.
    """
    factor = scale * math.sqrt(q.shape[-1])
    q = q.detach() if math.isclose(factor, 1.0) else q.detach() * factor
    summary = rule.summarize(k, k, Span(0))
    return rule.choose(q, summary, k.shape[2], span)


def _for_step(options: dict[str, Any], num_queries: int) -> dict[str, Any]:
    """The kernels take an index of where queries lie, as long as the past and made on the host."""
    if num_queries == 1 and options["backend"] != "reference":
        return options | {"backend": "torch"}
    return options


def _bounds(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def _layout(module: torch.nn.Module, query: Tensor, key: Tensor, given: Any) -> Layout:
    """What the mask function found. A model that makes no mask has rows without padding."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if given is None:
        if 1 < num_queries != num_keys:
            refuse(
                f"{num_queries} queries, {num_keys} keys and no mask",
                "a mask function's word on where queries are",
                "use another attn_implementation for this model",
            )
        first = num_keys - num_queries
        sizes = sizes_of(getattr(module, "config", None))
        return Layout(sizes, len(query), first, num_queries, num_keys)
    if not isinstance(given, Layout):
        refuse(
            f"a ready mask ({type(given).__name__} of shape {list(getattr(given, 'shape', []))})",
            "padding as attention_mask [B, S], and documents as position_ids",
            "pass these, or use another attn_implementation",
        )
    check_window(given.window, given.num_keys)
    found = (len(query), num_queries)
    if found != (given.batch, given.num_queries) or num_keys < given.num_keys:
        refuse(
            f"{num_queries} queries and {num_keys} keys in {len(query)} rows, and a mask of "
            f"{given.num_queries} and {given.num_keys} in {given.batch}",
            "the tokens that the mask was made for",
            "use another attn_implementation for this model",
        )
    return given


def _check_asked(module: torch.nn.Module, asked: dict[str, Any], layout: Layout) -> None:
    """Refuse what the model asks for and we cannot do; unknown arguments, too."""
    causal = asked.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal:
        refuse("is_causal=False", "causal attention", "use another attn_implementation")
    if asked.pop("dropout", 0.0):
        refuse(
            "attention dropout in training",
            "none: no probability is ever stored",
            "set config.attention_dropout = 0.0 and the layers' attention_dropout, or train "
            "with another attn_implementation",
        )
    if asked.pop("output_attentions", False):
        refuse(
            "output_attentions=True",
            "False: there is no matrix of probabilities",
            "call model.set_attn_implementation('eager') first",
        )
    check_window(asked.pop("sliding_window", None), layout.num_keys)
    for name, value in asked.items():
        if name not in HARMLESS and value is not None and value is not False:
            refuse(
                f"the argument {name}={_short(value)}",
                "what causal attention with GQA and sinks needs",
                "use another attn_implementation for this model",
            )


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return str(value)[:60]
