"""The files of a tokenizer in a model folder: tokenizer.json and its config, for AutoTokenizer.

What AutoTokenizer makes of them encodes a text into the ids that training used, with one exception:
the name of EOS inside a text becomes EOS, as everywhere in transformers. A NUL in a text, which the
byte tokenizer refuses, is dropped.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from nsa.data.errors import DataError
from nsa.data.tokenizers import (
    EOS_NAME,
    NUM_BYTES,
    ByteTokenizer,
    GPT2Tokenizer,
    HFTokenizer,
    Tokenizer,
    byte_letters,
)

TOKENIZER, SETTINGS, GENERATION = (
    *("tokenizer.json", "tokenizer_config.json"),
    "generation_config.json",
)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The content of each file by name."""
    if isinstance(tokenizer, ByteTokenizer):
        content, eos = _byte_level(_byte_ids(), [], tokenizer.eos, use_regex=False), EOS_NAME
    elif isinstance(tokenizer, GPT2Tokenizer):
        content, eos = _gpt2(tokenizer), EOS_NAME
    elif isinstance(tokenizer, HFTokenizer):
        content, eos = _plain(tokenizer), tokenizer.eos_name
    else:
        raise DataError(
            f"the tokenizer {tokenizer.name} cannot be written as tokenizer.json; byte, gpt2 and "
            "tokenizer.json files can: export without a tokenizer"
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    ends = {"eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.eos}
    files = {TOKENIZER: content, SETTINGS: settings, GENERATION: ends}
    return {name: json.dumps(one, ensure_ascii=False).encode() for name, one in files.items()}


def _byte_level(
    vocab: dict[str, int], merges: list[list[str]], eos: int, *, use_regex: bool
) -> dict[str, Any]:
    """A byte-pair encoding on the bytes of a text; without merges, the bytes themselves."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": eos, "content": EOS_NAME, **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": use_regex},
        "post_processor": None,
        "decoder": {**level, "use_regex": use_regex},
        "model": {"type": "BPE", "vocab": vocab | {EOS_NAME: eos}, "merges": merges},
    }


def _byte_ids() -> dict[str, int]:
    """Byte of each letter; byte 0 has none, because its id is EOS."""
    return {letter: byte for letter, byte in byte_letters().items() if byte != ByteTokenizer.eos}


def _gpt2(tokenizer: GPT2Tokenizer) -> dict[str, Any]:
    ranks = {tokenizer.token_bytes(token): token for token in range(tokenizer.eos)}
    letter_of = {byte: letter for letter, byte in byte_letters().items()}

    def spell(token: bytes) -> str:
        return "".join(letter_of[byte] for byte in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    merged = [token for token, rank in ranks.items() if rank >= NUM_BYTES]
    merges = [[spell(part) for part in _parts(token, ranks)] for token in merged]
    return _byte_level(vocab, merges, tokenizer.eos, use_regex=True)


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that merge into this one: its encoding by the merges before its own."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = found.index(min(found))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _plain(tokenizer: HFTokenizer) -> dict[str, Any]:
    """The file without what training leaves out: special tokens around a text, cuts, padding."""
    content: dict[str, Any] = json.loads(tokenizer.path.read_text(encoding="utf-8"))
    return content | {"truncation": None, "padding": None, "post_processor": None}
