"""The operator on a GPU. A file is an operation: its Triton kernels first, its launchers below."""
