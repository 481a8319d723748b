"""Attention to chosen blocks: block by block with the queries that chose it, or query by query."""
