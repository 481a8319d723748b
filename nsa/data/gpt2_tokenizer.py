"""GPT-2's byte-pair encoding, through tiktoken: 50257 ids, the last of which ends a document."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.config import ConfigError
from nsa.data.errors import DataError
from nsa.data.gpt2_files import EOS_NAME, FILE_NAMES, NUM_RANKS, read_ranks
from nsa.data.optional import need

PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2 cuts a text into these before it merges bytes."""
DOWNLOAD_LIMIT_S = 60.0
"""tiktoken downloads without a time limit of its own."""


class GPT2Tokenizer:
    """The encoding of a local folder, or else the one that tiktoken finds."""

    name = "gpt2"
    vocab = NUM_RANKS + 1
    eos = NUM_RANKS

    def __init__(self, folder: Path | None = None) -> None:
        tiktoken = need("tiktoken", "data.tokenizer=gpt2")
        if folder is None:
            self._encoding: Any = _from_tiktoken(tiktoken)
        else:
            self._encoding = tiktoken.Encoding(
                self.name,
                pat_str=PATTERN,
                mergeable_ranks=read_ranks(folder),
                special_tokens={EOS_NAME: self.eos},
                explicit_n_vocab=self.vocab,
            )

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of `text`; "<|endoftext|>" in it is text like any other."""
        return np.array(self._encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self._encoding.decode(list(ids), errors="replace"))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id."""
        return bytes(self._encoding.decode_single_token_bytes(token))

    def fingerprint(self) -> str:
        """Hash the bytes of every id, wherever they were read from."""
        digest = hashlib.sha256(f"gpt2/{self.vocab}/{self.eos}".encode())
        for token in range(NUM_RANKS):
            value: bytes = self._encoding.decode_single_token_bytes(token)
            digest.update(len(value).to_bytes(4, "little") + value)
        return digest.hexdigest()


def _from_tiktoken(tiktoken: Any) -> Any:
    """Ask tiktoken, which looks into its cache and only then at the network."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(tiktoken.get_encoding("gpt2"))
        except (OSError, ValueError, AssertionError) as error:  # network, wrong hash, torn file
            answers.append(error)

    # A thread that nobody waits for: a download that hangs must neither stall nor outlive the run.
    thread = threading.Thread(target=ask, daemon=True, name="gpt2-download")
    thread.start()
    thread.join(DOWNLOAD_LIMIT_S)
    answer = answers[0] if answers else TimeoutError(f"no answer in {DOWNLOAD_LIMIT_S:g} s")
    if isinstance(answer, Exception):
        raise _not_found(answer)
    return answer


def _not_found(error: Exception) -> ConfigError:
    pairs = " or ".join(" and ".join(pair) for pair in FILE_NAMES)
    return DataError(
        "data.tokenizer=gpt2: GPT-2's vocabulary is neither in tiktoken's cache "
        "(TIKTOKEN_CACHE_DIR, or data-gym-cache in the folder for temporary files) nor could it be "
        f"downloaded ({type(error).__name__}); set data.tokenizer_path to a folder with {pairs}, "
        "or TIKTOKEN_CACHE_DIR to a filled cache"
    )
