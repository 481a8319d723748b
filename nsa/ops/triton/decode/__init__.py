"""One decode step in four launches or in one: launch.py has their order, kernels are beside it."""
