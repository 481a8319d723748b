"""Triton kernels of the operator, and the code that launches them."""
