"""Tokenizers: bytes, GPT-2 (tiktoken) and Hugging Face `tokenizer.json`, behind one protocol."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.config import ConfigError, DataConfig
from nsa.config.check import count_ids, find_tokenizer_json
from nsa.data.documents import fingerprint_of
from nsa.data.errors import DataError, need
from nsa.data.shards import id_bytes

Ids = NDArray[np.unsignedinteger[Any]]
"""Token ids in the smallest dtype that holds the vocabulary."""


# --- the protocol and the byte tokenizer ---


class Tokenizer(Protocol):
    """Text to ids and back. Encoding a text never produces EOS."""

    @property
    def name(self) -> str:
        """Kind of tokenizer: byte, gpt2 or hf."""

    @property
    def vocab(self) -> int:
        """Number of ids; all ids are smaller."""

    @property
    def eos(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> Ids:
        """The ids of `text`, without EOS; names of special tokens are encoded as plain text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one id, possibly part of a character; None if the tokenizer has none."""

    def fingerprint(self) -> str:
        """sha256 of everything that determines the ids of a text."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes; id 0, which no text contains, is EOS."""

    name = "byte"
    vocab = 256
    eos = 0

    def encode(self, text: str) -> NDArray[np.uint8]:
        """The UTF-8 bytes of `text`, without EOS."""
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        if (ids == self.eos).any():
            at = int(np.argmax(ids == self.eos))
            raise DataError(f"the text has a NUL at byte {at}; byte 0 is EOS; remove it")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte itself."""
        return bytes([token])

    def fingerprint(self) -> str:
        """sha256 of the name, which determines everything."""
        return fingerprint_of(tokenizer=self.name, vocab=self.vocab, eos=self.eos)


def id_type(vocab: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest little-endian dtype that holds every id below `vocab`."""
    return np.dtype(f"<u{id_bytes(vocab)}")


# --- GPT-2 vocabulary files: vocab.json and merges.txt, or encoder.json and vocab.bpe ---

EOS_NAME = "<|endoftext|>"
NUM_BYTES = 256
NUM_MERGES = 50_000
NUM_RANKS = NUM_BYTES + NUM_MERGES
FILE_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
"""The same two files under the names of two publishers."""


def read_ranks(folder: Path) -> dict[bytes, int]:
    """The bytes of each id; rejects files that differ from GPT-2 in size or order.

    An id is also the priority of its merge, so that both files must have the same order.
    """
    vocab_file, merges_file = _find(folder)
    vocab, letters = _read_vocab(vocab_file), byte_letters()
    expected = {letter: rank for rank, letter in enumerate(letters)}
    for rank, merge in enumerate(_read_merges(merges_file), start=NUM_BYTES):
        expected[merge] = rank
    expected[EOS_NAME] = NUM_RANKS
    if vocab != expected:
        odd = next(iter(vocab.items() ^ expected.items()))[0]
        raise DataError(
            f"{vocab_file.name} and {merges_file.name} in {folder} do not agree on {odd!r}, or are "
            f"not GPT-2's: 256 bytes, {NUM_MERGES} merges in order, then {EOS_NAME}; use its files"
        )
    return {
        bytes(letters[letter] for letter in text): rank
        for text, rank in expected.items()
        if text != EOS_NAME
    }


def byte_letters() -> dict[str, int]:
    """Byte of each letter used in the vocabulary files, in id order.

    Printable bytes stand for themselves; all others use letters from U+0100 on.
    """
    plain = [b for b in range(NUM_BYTES) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(NUM_BYTES) if b not in plain]
    return {chr(b): b for b in plain} | {chr(NUM_BYTES + n): b for n, b in enumerate(others)}


def _find(folder: Path) -> tuple[Path, Path]:
    for first, second in FILE_NAMES:
        if (folder / first).is_file() and (folder / second).is_file():
            return folder / first, folder / second
    pairs = " or ".join(" and ".join(pair) for pair in FILE_NAMES)
    raise DataError(
        f"data.tokenizer_path={folder} is not a folder with {pairs}; put GPT-2's files there"
    )


def _read_vocab(path: Path) -> dict[str, Any]:
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); use GPT-2's file") from None
    if not isinstance(vocab, dict):
        raise DataError(
            f"{path}: is a {type(vocab).__name__}, not a map of ids by token; use GPT-2's file"
        )
    return vocab


def _read_merges(path: Path) -> list[str]:
    """The result of each merge; the first line of the file is its version."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); use GPT-2's file") from None
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if len(pairs) != NUM_MERGES or any(len(pair) != 2 for pair in pairs):
        raise DataError(
            f"{path}: {len(pairs)} merges, GPT-2 has {NUM_MERGES} of two words each; use its file"
        )
    return ["".join(pair) for pair in pairs]


# --- GPT-2 byte-pair encoding through tiktoken: 50257 ids, the last one is EOS ---

PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pre-tokenization pattern; merges never cross its matches."""
DOWNLOAD_LIMIT_S = 60.0
"""tiktoken downloads without a timeout of its own."""


class GPT2Tokenizer:
    """GPT-2's encoding from a local folder, else from tiktoken's cache or download."""

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
        """The ids of `text`; "<|endoftext|>" is encoded as plain text."""
        return np.array(self._encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return str(self._encoding.decode(list(ids), errors="replace"))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id."""
        return bytes(self._encoding.decode_single_token_bytes(token))

    def fingerprint(self) -> str:
        """Hash the bytes of every id, independent of where they were read from."""
        digest = hashlib.sha256(f"gpt2/{self.vocab}/{self.eos}".encode())
        for token in range(NUM_RANKS):
            value: bytes = self._encoding.decode_single_token_bytes(token)
            digest.update(len(value).to_bytes(4, "little") + value)
        return digest.hexdigest()


def _from_tiktoken(tiktoken: Any) -> Any:
    """Load from tiktoken's cache, else download, with a time limit."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(tiktoken.get_encoding("gpt2"))
        except (OSError, ValueError, AssertionError) as error:  # network, wrong hash, torn file
            answers.append(error)

    # Daemon thread: a download that hangs must neither stall the run nor keep the process alive.
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


# --- Hugging Face `tokenizer.json` through the package `tokenizers` ---

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""Common EOS names; the first one that exists is used. [SEP] comes last, it has other uses."""


class HFTokenizer:
    """The tokenizer of a file; adds no special tokens, no truncation, no padding."""

    name = "hf"

    def __init__(self, path: Path, eos: str = "") -> None:
        tokenizers = need("tokenizers", f"data.tokenizer={path}")
        self.path = find_tokenizer_json(path)
        self.vocab = count_ids(self.path)
        content = self.path.read_bytes()
        with _named_errors(f"{self.path}: not a tokenizer that this version can load"):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Otherwise "<|endoftext|>" inside a web page would become EOS.
        self._tokenizer.encode_special_tokens = True
        self.eos = self._find_eos(eos)
        self._sha256 = hashlib.sha256(content).hexdigest()

    @property
    def eos_name(self) -> str:
        """The token that ends a document."""
        return str(self._tokenizer.id_to_token(self.eos))

    def encode(self, text: str) -> Ids:
        """The ids of `text`; a text that encodes to EOS itself is refused."""
        with _named_errors("the tokenizer cannot encode the text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.eos in ids:
            raise DataError(
                f"the text contains the EOS token {self.eos_name!r}; remove it or set data.eos"
            )
        return np.array(ids, dtype=id_type(self.vocab))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        return str(self._tokenizer.decode(list(ids)))

    def token_bytes(self, token: int) -> None:
        """None: the decoder in the file may join tokens in any way."""
        return None

    def fingerprint(self) -> str:
        """Hash the file and EOS."""
        return fingerprint_of(tokenizer=self.name, file=self._sha256, eos=self.eos)

    def _find_eos(self, wanted: str) -> int:
        for name in [wanted] if wanted else EOS_NAMES:
            found = self._tokenizer.token_to_id(name)
            if found is not None:
                return int(found)
        tried = repr(wanted) if wanted else " or ".join(EOS_NAMES)
        raise DataError(
            f"{self.path} has no token {tried} to end a document; set data.eos to one it has"
        )


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  `tokenizers` raises bare Exception for everything
        raise DataError(f"{what} ({error}); choose another tokenizer or correct it") from None


# --- choosing a tokenizer ---


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Open the tokenizer named by the config; the schema has rejected unknown names."""
    if config.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    if config.tokenizer == GPT2Tokenizer.name:
        return GPT2Tokenizer(Path(config.tokenizer_path) if config.tokenizer_path else None)
    tokenizer = HFTokenizer(config.tokenizer_file, config.eos)
    assert tokenizer.vocab == config.vocab, "the model is built for another vocabulary"
    return tokenizer
