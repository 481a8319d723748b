"""Checkpoints: writing, finding, verifying and reading them, and the rules for resuming."""
