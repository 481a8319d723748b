"""The branches on GPUs of compute capability 9.0: kernels in Gluon, the level below Triton."""
