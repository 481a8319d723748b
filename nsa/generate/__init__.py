"""Generation: prompts to text through prefill and the decode cache."""

from nsa.generate.complete import Completion, Completions, Limits
from nsa.generate.decode import generate, next_tokens, sample_text
from nsa.generate.sampling import Sampling, choose_tokens
from nsa.generate.stream import StopStrings, TextStream

__all__ = [
    "Completion",
    "Completions",
    "Limits",
    "Sampling",
    "StopStrings",
    "TextStream",
    "choose_tokens",
    "generate",
    "next_tokens",
    "sample_text",
]
