"""One decode step in four launches: launch.py has their order, the kernels are beside it."""
