"""Generation: prompts to text, through prefill and the decode cache."""

from nsa.generate.complete import Completion, Completions, Limits, StopStrings, TextStream
from nsa.generate.decode import generate, next_tokens, sample_text
from nsa.generate.sampling import Sampling, choose_tokens

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
