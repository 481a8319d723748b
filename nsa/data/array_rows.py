"""Rows of S+1 tokens with random access: from memory, from mapped shards, or synthetic.

A row depends only on seed and position, so that any run can resume at any position.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.data.documents import TRAIN, VAL, fingerprint_of
from nsa.data.errors import DataError
from nsa.data.shards import Manifest, read_manifest, size_problem
from nsa.data.tokenizers import Ids, Tokenizer, id_type

# --- stateless shuffle ---

# Feistel rounds. Changing the number changes the row order of every run.
ROUNDS = 6


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Position of `index` in the permutation of range(size) that (seed, epoch) selects.

    A Feistel network permutes [0, 4^k), the smallest such range that holds `size`. Results
    outside range(size) are permuted again (cycle walking), which keeps the map one-to-one.
    """
    assert 0 <= index < size, f"index {index} is not in range({size})"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, f"{seed}/{epoch}")
        if index < size:
            return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right


# --- token streams: one or more arrays, in memory or mapped, read as one ---

CHUNK_TOKENS = 1 << 20
"""Tokens hashed at a time: a mapped stream may be larger than memory."""


class Stream:
    """A stream of token ids; only the requested part is read."""

    def __init__(self, parts: Sequence[Ids]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def copy_to(self, out: NDArray[np.int64], start: int) -> None:
        """Fill `out` with tokens from `start` on, across part boundaries."""
        assert 0 <= start <= len(self) - len(out), f"{len(out)} tokens at {start} of {len(self)}"
        part, filled = bisect_right(self._ends, start), 0
        while filled < len(out):
            begin = start + filled - (self._ends[part] - len(self._parts[part]))
            piece = self._parts[part][begin : begin + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            part, filled = part + 1, filled + len(piece)

    def sha256(self) -> str:
        """Hash all tokens; independent of how the stream is split into parts."""
        digest = hashlib.sha256("/".join(sorted({p.dtype.name for p in self._parts})).encode())
        for part in self._parts:
            for start in range(0, len(part), CHUNK_TOKENS):
                digest.update(part[start : start + CHUNK_TOKENS].tobytes())
        return digest.hexdigest()


# --- rows by global position ---

State = dict[str, int]
"""What a source needs to resume in another process; empty for random access."""


class Rows(Protocol):
    """Rows of S inputs and S targets, as S+1 tokens."""

    @property
    def num_rows(self) -> int | None:
        """Distinct rows per epoch; None if rows never repeat."""

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """The rows at global positions `position` to `position + size - 1`."""

    def fingerprint(self) -> str:
        """sha256 of everything that determines the rows; resuming on other data is refused."""

    def state_dict(self, position: int) -> State:
        """State for resuming at `position`, which must have been read recently."""

    def load_state_dict(self, state: State) -> None:
        """Resume reading at the position of this state."""


class AnyOrder:
    """Rows with random access: they need no state to resume."""

    def state_dict(self, position: int) -> State:
        """Empty: the position is enough."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""
        assert not state, f"{state} is the state of another source"


class ArrayRows(AnyOrder):
    """Rows of a token stream: row i starts at token i*S, so neighbours overlap by one token."""

    def __init__(
        self, stream: Stream | Ids, seq_len: int, seed: int, side: str, content: str = ""
    ) -> None:
        """`content` identifies the stream; if empty, all its tokens are hashed instead."""
        self._stream = stream if isinstance(stream, Stream) else Stream([stream])
        self._seq_len, self._seed, self._content = seq_len, seed, content
        self.num_rows = (len(self._stream) - 1) // seq_len
        if self.num_rows < 1:
            raise _too_short(len(self._stream), seq_len, side)

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Each epoch visits every row once, in its own shuffled order."""
        rows = np.empty((size, self._seq_len + 1), dtype=np.int64)
        for row, place in zip(rows, range(position, position + size), strict=True):
            epoch, index = divmod(place, self.num_rows)
            start = shuffled(index, self.num_rows, self._seed, epoch) * self._seq_len
            self._stream.copy_to(row, start)
        return torch.from_numpy(rows)

    def fingerprint(self) -> str:
        """Hash the content, the row length and the seed of the order."""
        self._content = self._content or self._stream.sha256()
        return fingerprint_of(
            rows="stream", content=self._content, seq_len=self._seq_len, seed=self._seed
        )


def to_stream(documents: Iterable[str], tokenizer: Tokenizer) -> Ids:
    """Concatenate the ids of the documents, each followed by EOS."""
    end: Ids = np.array([tokenizer.eos], dtype=id_type(tokenizer.vocab))
    parts = [part for text in documents for part in (tokenizer.encode(text), end)]
    return np.concatenate(parts) if parts else end[:0]


def _too_short(num_tokens: int, seq_len: int, side: str) -> DataError:
    given = f"seq_len={seq_len} needs {seq_len + 1} tokens, the {side} text has {num_tokens}"
    if num_tokens < 2:
        return DataError(f"{given}; the hash of a document decides its side; give more documents")
    return DataError(f"{given}; use a train.seq_len of at most {num_tokens - 1}")


# --- prepared shards: memory-mapped, checked when opened ---


class OpenShards(NamedTuple):
    """Both sides of a shard folder, and the hash of its manifest."""

    train: Stream
    val: Stream
    sha256: str
    manifest: Manifest


def open_shards(folder: Path, tokenizer: Tokenizer) -> OpenShards:
    """Map all shards after checking the tokenizer and the file sizes; contents are not read."""
    manifest, sha256 = read_manifest(folder)
    if manifest.fingerprint != tokenizer.fingerprint():
        raise DataError(
            f"{folder} was prepared with the tokenizer {_name(manifest)}, the config has "
            f"{tokenizer.name} of {tokenizer.vocab} ids, fingerprint {tokenizer.fingerprint()[:12]}"
            "; set data.tokenizer (and tokenizer_path, eos) to the first, or prepare again"
        )
    sides = [_map_side(folder, manifest, side) for side in (TRAIN, VAL)]
    return OpenShards(sides[0], sides[1], sha256, manifest)


def _map_side(folder: Path, manifest: Manifest, side: str) -> Stream:
    parts, dtype = [], id_type(manifest.vocab)
    for shard in manifest.of(side):
        if problem := size_problem(folder, manifest, shard):
            raise DataError(f"{problem}; copy or prepare the shards again")
        mapped = np.memmap(folder / shard.file, dtype=dtype, mode="r", shape=(shard.tokens,))
        parts.append(np.asarray(mapped))  # same pages, without the slow slicing of np.memmap
    return Stream(parts)


def _name(manifest: Manifest) -> str:
    return f"{manifest.tokenizer} of {manifest.vocab} ids, fingerprint {manifest.fingerprint[:12]}"


# --- synthetic rows: uniform random tokens, with or without a copied segment ---

COPIED_PART = 4
"""The segment is a quarter of a row; with its copy, half of the row remains noise."""


class SyntheticRows(AnyOrder):
    """Uniform random tokens, new at every position: nothing can be learned from them."""

    num_rows = None
    kind = "synthetic"

    def __init__(self, vocab: int, seq_len: int, seed: int, side: str) -> None:
        self._vocab, self._seq_len, self._key = vocab, seq_len, f"{seed}/{side}"

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Each position seeds its own generator."""
        return torch.stack([self._row(p) for p in range(position, position + size)])

    def fingerprint(self) -> str:
        """Hash everything that determines the rows."""
        return fingerprint_of(
            rows=self.kind, vocab=self._vocab, seq_len=self._seq_len, key=self._key
        )

    def _row(self, position: int) -> Tensor:  # [S+1] int64
        return self._random(self._generator(position))

    def _generator(self, position: int) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._key}/{position}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def _random(self, generator: torch.Generator) -> Tensor:  # [S+1] int64
        return torch.randint(self._vocab, (self._seq_len + 1,), generator=generator)


class CopyRows(SyntheticRows):
    """Random tokens in which one segment is repeated later, at a random distance.

    From its second token on, the copy is predictable by a model that finds the first occurrence;
    all other tokens stay at ln V nats. The copy never overlaps the segment.
    """

    kind = "synthetic_copy"

    def __init__(self, vocab: int, seq_len: int, seed: int, side: str) -> None:
        super().__init__(vocab, seq_len, seed, side)
        if seq_len < COPIED_PART:
            raise DataError(
                f"seq_len={seq_len} has no room for a copy; synthetic_copy needs {COPIED_PART} or "
                "more; use a longer train.seq_len"
            )

    def segment(self, position: int) -> tuple[int, int, int]:
        """Start of the segment, start of its copy, and their length, for the row at a position."""
        return self._place(self._generator(position))

    def _row(self, position: int) -> Tensor:  # [S+1] int64
        generator = self._generator(position)
        source, target, length = self._place(generator)
        row = self._random(generator)
        row[target : target + length] = row[source : source + length]
        return row

    def _place(self, generator: torch.Generator) -> tuple[int, int, int]:
        """Draw the distance first, so that long distances are as frequent as short ones."""
        row_len = self._seq_len + 1
        length = row_len // COPIED_PART
        distance = length + _below(row_len - 2 * length + 1, generator)
        source = _below(row_len - length - distance + 1, generator)
        return source, source + distance, length


def _below(bound: int, generator: torch.Generator) -> int:
    return int(torch.randint(bound, (1,), generator=generator))


# --- document boundaries inside rows, for attention that does not cross them ---


def document_starts(
    row: Tensor,  # [T] int64
    eos: int,
) -> Tensor:  # [number of starts] int64, ascending
    """Positions right after an EOS; an EOS in the last position starts nothing.

    Position 0 is not included: a row usually starts in the middle of a document.
    """
    return (row[:-1] == eos).nonzero().flatten() + 1


def cu_seqlens(
    tokens: Tensor,  # [S] int64, the inputs of a row
    eos: int,
) -> Tensor:  # [documents + 1] int32, on the device of the tokens
    """0, the document starts and S: the cu_seqlens of the packed operators."""
    starts = document_starts(tokens, eos)
    return torch.cat([starts.new_tensor([0]), starts, starts.new_tensor([len(tokens)])]).int()


def packed_bounds(
    batch: Tensor,  # [B, S+1] int64
    eos: int,
) -> Tensor:  # [documents + 1] int32, on the device of the batch
    """cu_seqlens of all rows of a batch concatenated; every row starts a new document."""
    seq_len = batch.shape[1] - 1
    bounds = [cu_seqlens(row[:-1], eos)[:-1] + seq_len * i for i, row in enumerate(batch)]
    return torch.cat([*bounds, bounds[0].new_tensor([seq_len * len(batch)])])
