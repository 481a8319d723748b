"""The window branch on GPUs of compute capability 9.0: kernels in Gluon."""
