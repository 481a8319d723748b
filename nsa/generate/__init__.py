"""Generation: prompts to text, through prefill and the decode cache."""

from nsa.generate.complete import Completion, Completions, Limits, StopStrings, TextStream
from nsa.generate.decode import Sampling, choose_tokens, generate, next_tokens, sample_text

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
