"""Generation: prefill, then one token at a time through the decode cache."""

from nsa.generate.decode import generate, sample_text
from nsa.generate.sampling import sample_token

__all__ = ["generate", "sample_text", "sample_token"]
