"""From the data section of a config to its tokenizer."""

from __future__ import annotations

from pathlib import Path

from nsa.config import DataConfig
from nsa.data.gpt2_tokenizer import GPT2Tokenizer
from nsa.data.hf_tokenizer import HFTokenizer
from nsa.data.tokenizer import ByteTokenizer, Tokenizer


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Open the tokenizer that the config names; the schema has refused any other name."""
    if config.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    if config.tokenizer == GPT2Tokenizer.name:
        return GPT2Tokenizer(Path(config.tokenizer_path) if config.tokenizer_path else None)
    tokenizer = HFTokenizer(config.tokenizer_file, config.eos)
    assert tokenizer.vocab == config.vocab, "the model is built for another vocabulary"
    return tokenizer
