"""The choice of blocks: their scores, the best of them, and selections that are given."""
