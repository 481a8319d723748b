"""Text to text: continue prompts until a token limit, EOS or a stop string; stream the text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from nsa.data import Tokenizer
from nsa.generate.decode import Prefill, Sampling, next_tokens
from nsa.model import TinyLM

VERSION = 1
MOST_TOKENS = 1 << 24
"""Upper bound for lengths: larger values are typing errors, not lengths."""
LONGEST_TOKEN_BYTES = 256
"""Longest token in bytes (GPT-2: 128); a prompt with more bytes per token cannot exist."""


# --- completions ---


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a text ends, and how many run at once."""

    max_new_tokens: int = 128
    max_len: int = 65536
    """Maximum of prompt plus new tokens; the cache is allocated for this length at most."""
    stops: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    ignore_eos: bool = False
    """Continue after EOS."""
    batch_size: int = 32
    """Prompts of equal length that are batched together."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_len", "batch_size"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_TOKENS:
                raise ValueError(
                    f"{name}={value} is not allowed; use a whole number from 1 to {MOST_TOKENS}"
                )
        StopStrings(self.stops)

    @property
    def max_prompt_bytes(self) -> int:
        """A longer prompt is too long under any tokenizer, so it need not be read."""
        return self.max_len * LONGEST_TOKEN_BYTES


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The result for one prompt."""

    prompt: str
    text: str
    """Without the prompt, EOS and the stop string."""
    tokens: list[int]
    """All generated tokens."""
    num_prompt_tokens: int
    finish: str
    """length, eos or stop."""

    def as_json(self) -> dict[str, object]:
        """Schema version 1: these fields, and the number of tokens."""
        return {"version": VERSION, **asdict(self), "num_tokens": len(self.tokens)}


class Completions:
    """A model and its tokenizer, ready to continue texts."""

    def __init__(
        self,
        model: TinyLM,
        tokenizer: Tokenizer,
        sampling: Sampling,
        limits: Limits,
        prefill: Prefill | None = None,
    ) -> None:
        if tokenizer.vocab != model.vocab:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab} ids, the model has "
                f"{model.vocab}; use the tokenizer that the model was trained with"
            )
        self.model, self.tokenizer, self.sampling, self.limits = model, tokenizer, sampling, limits
        self.prefill = prefill

    def complete(
        self, prompts: Sequence[str], show: Callable[[str], None] | None = None
    ) -> list[Completion]:
        """Continue every prompt; all are validated before the first starts.

        `show` receives the text of a single prompt in pieces, while it is generated.
        """
        assert show is None or len(prompts) == 1, "several texts cannot be shown at once"
        # Encode all first: a bad prompt at the end must not waste the work before it.
        ids = [self.encode(prompt, place) for place, prompt in enumerate(prompts, start=1)]
        done: dict[int, Completion] = {}
        for batch in batches([len(one) for one in ids], self.limits.batch_size):
            texts = [_Text(self, prompts[i], len(ids[i])) for i in batch]
            self._fill(texts, torch.tensor([ids[i] for i in batch]), show)
            done |= {i: text.result() for i, text in zip(batch, texts, strict=True)}
        return [done[i] for i in range(len(prompts))]

    def encode(self, prompt: str, place: int = 1) -> list[int]:
        """Token ids of a valid prompt; `place` is its number in error messages."""
        if not prompt:
            raise ValueError(f"prompt {place} is empty; it needs at least one character")
        size = len(_utf8(prompt, place))
        # Cheap test before tokenizing, which takes long for a huge text.
        if size > self.limits.max_prompt_bytes:
            raise ValueError(_too_long(place, f"{size:,} bytes", self.limits))
        ids: list[int] = self.tokenizer.encode(prompt).tolist()
        if not ids:
            raise ValueError(
                f"prompt {place} has no token in the tokenizer {self.tokenizer.name}; use a text "
                "that it knows"
            )
        if len(ids) + self.limits.max_new_tokens > self.limits.max_len:
            raise ValueError(_too_long(place, f"{len(ids):,} tokens", self.limits))
        return ids

    def _fill(
        self, texts: list[_Text], prompt: torch.Tensor, show: Callable[[str], None] | None
    ) -> None:
        """Generate for prompts of equal length until all texts have ended."""
        num_new = self.limits.max_new_tokens
        steps = next_tokens(self.model, prompt, num_new, self.sampling, self.prefill)
        for tokens in steps:
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text.push(token)
            if show is not None:
                show(texts[0].new_text())
            if all(text.finish for text in texts):
                break
        for text in texts:
            text.end()
        if show is not None:
            show(texts[0].new_text())


class _Text:
    """One text while it is generated."""

    def __init__(self, parent: Completions, prompt: str, num_prompt_tokens: int) -> None:
        self.prompt, self.num_prompt_tokens = prompt, num_prompt_tokens
        self.finish = ""
        self._eos = None if parent.limits.ignore_eos else parent.tokenizer.eos
        self._stream = TextStream(parent.tokenizer)
        self._stops = StopStrings(parent.limits.stops)
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._num_shown = 0

    def push(self, token: int) -> None:
        if self.finish:
            return  # ended, while others in the batch continue
        self._tokens.append(token)
        if token == self._eos:
            self.finish = "eos"
            return
        self._pieces.append(self._stops.push(self._stream.push(token)))
        if self._stops.found:
            self.finish = "stop"

    def end(self) -> None:
        """Flush held-back text: an incomplete character, the start of a stop string."""
        if self.finish == "stop":
            return
        self._pieces.append(self._stops.push(self._stream.finish()))
        if self._stops.found:
            self.finish = "stop"
        self._pieces.append(self._stops.finish())
        self.finish = self.finish or "length"

    def new_text(self) -> str:
        """Text added since the last call."""
        text = "".join(self._pieces[self._num_shown :])
        self._num_shown = len(self._pieces)
        return text

    def result(self) -> Completion:
        return Completion(
            prompt=self.prompt,
            text="".join(self._pieces),
            tokens=self._tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            finish=self.finish,
        )


def batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Group indices by equal length, at most `batch_size` each: a cache has one length."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for indices in by_length.values():
        for first in range(0, len(indices), batch_size):
            yield indices[first : first + batch_size]


def _utf8(prompt: str, place: int) -> bytes:
    try:
        return prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt {place} is not valid UTF-8 at character {error.start}; convert it"
        ) from None


def _too_long(place: int, size: str, limits: Limits) -> str:
    return (
        f"prompt {place} has {size}, which with max_new_tokens={limits.max_new_tokens} do not fit "
        f"a cache of max_len={limits.max_len} tokens; shorten it, or set a larger max_len, which "
        "takes memory in proportion"
    )


# --- streaming: whole characters only, never the start of a stop string ---

HELD_TOKENS = 16
"""For a tokenizer without bytes: most tokens held back for one character; then it is shown."""
UNFINISHED = "\ufffd"


class TextStream:
    """Incremental decoder; text once returned is never revised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown: list[int] = []  # latest tokens already returned: decoding context for the next
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text completed by this token; may be empty."""
        content = self._tokenizer.token_bytes(token)
        if content is not None:
            return self._utf8.decode(content)
        self._held.append(token)
        text = self._held_text()
        # U+FFFD at the end: the next token may complete the character.
        if text.endswith(UNFINISHED) and len(self._held) < HELD_TOKENS:
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True) + (self._held_text() if self._held else "")

    def _held_text(self) -> str:
        """Decode with context: at the start of a text some decoders drop a space."""
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._held])[len(before) :]


class StopStrings:
    """Cuts the text before the first stop string; holds back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError(
                "a stop string is empty and would end every text at once; give at least one "
                "character, or leave it out"
            )
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self.found = bool(starts)
        kept = 0 if starts else self._possible_start(text)
        # The stop string that starts first ends the text, not the one listed first.
        cut = min(starts) if starts else len(text) - kept
        self._held = text[cut:] if kept else ""
        return text[:cut]

    def finish(self) -> str:
        """The held-back text, if it did not become a stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
