"""Checkpoints: finding, reading, writing, and the rules of resuming from one."""
