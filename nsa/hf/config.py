"""NSAConfig: TinyLM's arguments as a config of transformers."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from nsa.config.schema import ModelConfig
from nsa.files import write_text
from nsa.model.folder import AUTO_MAP, CODE, CODE_TEXT, MODEL_TYPE, arguments, from_config

BYTES = 256
"""Default vocabulary: bytes."""


class NSAConfig(PreTrainedConfig):
    """The fields are TinyLM's arguments, with `vocab_size` for `vocab`.

    `index_loss` weighs the loss of indexers (rule msa) in training, as train.index_loss does.
    Sizes that are not given are those of nsa's own default config.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("past_key_values",)
    # Names under which the tools of transformers ask for the same numbers.
    attribute_map = {  # noqa: RUF012  the base class has it as a plain dict
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_groups",
        "head_dim": "d_k",
        "tie_word_embeddings": "tie_embeddings",
    }
    # TinyLM's argument is a name. The base class has a property that makes a dict of it.
    rope_scaling: Any = "linear"

    def __init__(self, vocab_size: int = BYTES, *, index_loss: float = 1.0, **given: Any) -> None:
        for theirs, ours in self.attribute_map.items():
            if theirs in given:
                given.setdefault(ours, given[theirs])
                del given[theirs]
        own = {name: given.pop(name, default) for name, default in _defaults().items()}
        given.setdefault("auto_map", dict(AUTO_MAP))
        super().__init__(**given)
        self.vocab_size, self.index_loss = vocab_size, index_loss
        for name, value in own.items():
            setattr(self, name, value)

    def model_arguments(self) -> dict[str, Any]:
        """The arguments of TinyLM; a value of the wrong type is refused."""
        return from_config(self.to_dict(), "this NSAConfig")

    def to_diff_dict(self) -> dict[str, Any]:
        """All fields, also those with default values: a later version may have others."""
        own = ("vocab_size", "index_loss", *_defaults())
        return {**super().to_diff_dict(), **{name: getattr(self, name) for name in own}}

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write config.json, and the Python file that its auto_map names."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_text(Path(save_directory) / CODE, CODE_TEXT)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: the auto_map of a folder names CODE, and no source is copied."""


def _defaults() -> dict[str, Any]:
    """Default of each field but vocab_size; sizes without one in TinyLM have ModelConfig's."""
    sizes = ModelConfig()
    return {
        name: getattr(sizes, name) if one.default is inspect.Parameter.empty else one.default
        for name, one in arguments().items()
        if name != "vocab"
    }
