"""Any Hugging Face `tokenizer.json`, through the package `tokenizers`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nsa.config.tokenizer_json import count_ids, find_tokenizer_json
from nsa.data.errors import DataError
from nsa.data.fingerprint import fingerprint_of
from nsa.data.optional import need
from nsa.data.tokenizer import Ids, id_type

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""Usual names of the end mark, the first that exists is taken; [SEP] also has other uses."""


class HFTokenizer:
    """The tokenizer of a file; nothing is added to a text, cut from it or padded."""

    name = "hf"

    def __init__(self, path: Path, eos: str = "") -> None:
        tokenizers = need("tokenizers", f"data.tokenizer={path}")
        self._path = find_tokenizer_json(path)
        self.vocab = count_ids(self._path)
        content = self._path.read_bytes()
        with _named_errors(f"{self._path}: not a tokenizer that this version can load"):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Otherwise "<|endoftext|>" in a web page would end the document there.
        self._tokenizer.encode_special_tokens = True
        self.eos = self._find_eos(eos)
        self._sha256 = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> Ids:
        """Return the ids of `text`; a text that makes the end mark itself is refused."""
        with _named_errors("the tokenizer refuses the text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.eos in ids:
            mark = self._tokenizer.id_to_token(self.eos)
            raise DataError(
                f"the text holds the end mark {mark!r} itself; remove it or set data.eos"
            )
        return np.array(ids, dtype=id_type(self.vocab))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return str(self._tokenizer.decode(list(ids)))

    def token_bytes(self, token: int) -> None:
        """Return None: the decoder of the file may join tokens in any way."""
        return None

    def fingerprint(self) -> str:
        """Hash the file and the end mark."""
        return fingerprint_of(tokenizer=self.name, file=self._sha256, eos=self.eos)

    def _find_eos(self, wanted: str) -> int:
        for name in [wanted] if wanted else EOS_NAMES:
            found = self._tokenizer.token_to_id(name)
            if found is not None:
                return int(found)
        tried = repr(wanted) if wanted else " or ".join(EOS_NAMES)
        raise DataError(
            f"{self._path} has no token {tried} to end a document; set data.eos to one it has"
        )


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  `tokenizers` raises bare Exception for everything
        raise DataError(f"{what} ({error}); choose another tokenizer or correct it") from None
