"""NSAForCausalLM: TinyLM as a model of transformers, with loss, padding and cached generation.

Padding is never computed with: where a mask has zeros, the rows are packed into documents of one
long row, so that tokens see their own row alone and positions count tokens. With a cache the same
holds by `GenerationCache`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from nsa.generate.rows import GenerationCache
from nsa.hf.config import NSAConfig
from nsa.model import TinyLM
from nsa.model.folder import BadFolder

IGNORED = -100
"""Label that does not count."""
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
WITHOUT_EFFECT = ("cache_position", "tokenizer", "is_first_iteration")
"""What transformers may pass to any model, and what says nothing about the result."""


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """A TinyLM, as `model`, behind the interface of transformers."""

    config_class = NSAConfig
    config: NSAConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "SparseBlock"]  # noqa: RUF012  the base class has them so
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = TinyLM(**config.model_arguments())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, S] integer
        attention_mask: Tensor | None = None,  # [B, columns so far + S]: 0 for padding
        labels: Tensor | None = None,  # [B, S]: ids, or -100
        past_key_values: GenerationCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, S, V], 0 at padding; with `labels`, the mean loss of the next token.

        Label t is predicted by token t - 1; a padding column predicts nothing and does not count.
        `position_ids` may mark packed documents, by 0 at the first token of each. In training the
        loss includes that of the indexers, by config.index_loss.
        """
        starts = _starts(kwargs.pop("position_ids", None), use_cache, past_key_values)
        ids = self._check_inputs(input_ids, inputs_embeds, kwargs)
        real = _real(attention_mask, ids)
        index_losses: list[Tensor] = []
        if use_cache or past_key_values is not None:
            hidden, cache = self._append(ids, real, labels, past_key_values)
        else:
            hidden, cache = self._hidden(ids, real, starts, index_losses), None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(hidden[:, kept])
        loss = None
        if labels is not None:
            if isinstance(logits_to_keep, Tensor) or logits_to_keep:
                raise ValueError("logits_to_keep with labels: the loss needs all logits; pass 0")
            loss = self._loss(logits, labels, real, num_items_in_batch, index_losses)
        parts: dict[str, Any] = {"loss": loss, "logits": logits, "past_key_values": cache}
        output = CausalLMOutputWithPast(**parts)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _check_inputs(
        self, ids: Tensor | None, inputs_embeds: Tensor | None, others: dict[str, Any]
    ) -> Tensor:
        """The ids, if they are all that is asked for."""
        if inputs_embeds is not None or ids is None:
            raise ValueError(
                "inputs_embeds given, or no input_ids; this model reads token ids only: pass "
                "input_ids"
            )
        for name, value in others.items():
            if name not in WITHOUT_EFFECT and value is not None and value is not False:
                raise ValueError(
                    f"{name} is not known to this model, and would be ignored; it takes input_ids, "
                    "attention_mask, position_ids of packed documents, labels and a cache: leave "
                    f"{name} out"
                )
        return ids

    # --- without a cache: all rows at once, packed where there is padding ---

    def _hidden(
        self, ids: Tensor, real: Tensor | None, starts: Tensor | None, index_losses: list[Tensor]
    ) -> Tensor:  # [B, S, dim]
        if real is None and starts is None:
            return self.model.hidden(ids, index_losses=index_losses)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        bounds = _bounds(real, starts)
        packed = self.model.hidden(
            ids[real][None], cu_seqlens=bounds, index_losses=index_losses
        )  # [1, tokens, dim]
        out = packed.new_zeros(*ids.shape, packed.shape[-1])
        return out.index_put((real,), packed[0])

    def _loss(
        self,
        logits: Tensor,  # [B, S, V]
        labels: Tensor,  # [B, S]
        real: Tensor | None,  # [B, S] bool
        num_items: Tensor | int | None,
        index_losses: list[Tensor],
    ) -> Tensor:  # []
        """Cross-entropy as transformers computes it, plus the loss of the indexers.

        With `num_items` (targets of all micro-batches of an update) the loss is a sum over them.
        """
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if real is not None:
            targets = targets.masked_fill(~real, IGNORED)
        loss: Tensor = self.loss_function(
            logits=logits,
            labels=None,
            vocab_size=logits.shape[-1],
            num_items_in_batch=num_items,
            shift_labels=targets,
        )
        if not index_losses:
            return loss
        index = self.config.index_loss * torch.stack(index_losses).mean()
        if num_items is not None:  # as large a share as that of this micro-batch in the other loss
            index = index * (targets != IGNORED).sum() / num_items
        return loss + index

    # --- with a cache ---

    def _append(
        self, ids: Tensor, real: Tensor | None, labels: Tensor | None, cache: Any
    ) -> tuple[Tensor, GenerationCache]:
        if labels is not None or (self.training and torch.is_grad_enabled()):
            raise ValueError(
                "a cache with labels, or in training: it has no gradients; call the model without "
                "use_cache and past_key_values, or in evaluation mode under torch.no_grad()"
            )
        cache = GenerationCache() if cache is None else cache
        if not isinstance(cache, GenerationCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; this model has a cache of its own: "
                "pass nsa.hf.GenerationCache(), or use_cache=True"
            )
        return cache.append(self.model, ids, real), cache

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Give `generate()` our cache, with room for the longest text."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={kind!r}; this model has a cache of its own: leave it out"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask.any(dim=1).all():
            empty = int((~mask.bool().any(dim=1)).nonzero()[0])
            raise ValueError(
                f"row {empty} of attention_mask has no token; a prompt needs one: remove the row, "
                "or start it with the end-of-text token"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = GenerationCache(max_cache_length)

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, kwargs: Any
    ) -> None:
        if generation_mode not in MODES:
            raise ValueError(
                f"generate() by {generation_mode.value.replace('_', ' ')}; this model has greedy "
                "search and sampling: use num_beams=1 and no assistant"
            )
        GenerationMixin._validate_generation_mode(
            cast("Any", self), generation_mode, generation_config, kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: it reads keys and values of transformers' own attention."""
        raise ValueError(
            "continuous batching needs an attention of transformers, and this model has its own; "
            "use generate() with a padded batch"
        )

    # --- weights ---

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """The model of a folder, from safetensors only; missing or foreign weights are refused."""
        kwargs.setdefault("use_safetensors", True)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, found = loaded
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found.get(what):
                some = sorted(str(name) for name in found[what])
                raise BadFolder(
                    f"{args[0] if args else 'the folder'}: {len(some)} {what.replace('_', ' ')}, "
                    f"such as {some[0]}; the weights are not those of its config: use another copy"
                )
        return (model, found) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: NSAConfig writes the file that the auto_map of a folder names."""

    def _init_weights(self, module: nn.Module) -> None:
        """TinyLM has initialized itself; what a folder lacks is an error, not random."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.model.embed, self.model.vocab = value, value.num_embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where it is the embedding."""
        return self.model.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.lm_head = new_embeddings

    # --- gradient checkpointing: TinyLM's own ---

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and options.get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True; layers are checkpointed without reentrance: use "
                'gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        num_layers = len(self.model.blocks)
        self.model.checkpointed = range(0, num_layers if enable else 0, every_n_layers)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers recompute in backward."""
        return len(self.model.checkpointed) > 0


def _real(mask: Tensor | None, ids: Tensor) -> Tensor | None:  # [B, S] bool; None: no padding
    """Which of the ids are tokens. A mask also covers the columns that a cache has read."""
    if mask is None:
        return None
    num_rows, num_columns = ids.shape
    if mask.dim() != 2 or mask.shape[0] != num_rows or mask.shape[1] < num_columns:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} for ids of {list(ids.shape)}; give "
            "[batch, columns] of 0 and 1: masks between tokens are not supported"
        )
    real = mask[:, mask.shape[1] - num_columns :].bool()
    return None if real.all() else real


def _starts(position_ids: Tensor | None, use_cache: Any, cache: Any) -> Tensor | None:
    """Where documents begin [B, S] bool, from their positions; None: rows are documents."""
    if position_ids is None:
        return None
    if use_cache or cache is not None:
        raise ValueError(
            "position_ids with a cache; positions count the tokens of a row: leave them out"
        )
    begins = position_ids == 0
    goes_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if not (begins[:, 0].all() and (begins[:, 1:] | goes_on).all()):
        raise ValueError(
            "position_ids do not count 0, 1, 2, ... from the start of each document; other "
            "positions are not supported: leave them out, and mark padding in attention_mask"
        )
    return begins


def _bounds(real: Tensor, starts: Tensor | None) -> Tensor:  # [B, S] -> [documents + 1] int32
    """Bounds of the documents among the tokens that are no padding, on the host."""
    if not real.any():
        raise ValueError("attention_mask is 0 everywhere; at least one token is needed: pass one")
    before = torch.zeros_like(real)
    before[:, 1:] = real[:, :-1].cumsum(dim=1) > 0
    first = real & ~before  # the first token of each row
    if starts is not None:
        first = first | (starts & real)
    places = first[real].nonzero()[:, 0]
    return torch.cat([places, places.new_tensor([int(real.sum())])]).to("cpu", torch.int32)
