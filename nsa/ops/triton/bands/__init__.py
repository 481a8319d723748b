"""Attention to a band of keys, for the compressed branch, the window, and a masked past."""
