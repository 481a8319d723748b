"""The operator on a GPU: one file per operation, its Triton kernels first, its launchers below."""
