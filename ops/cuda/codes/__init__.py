"""Quantised weights in the order in which kernels on CUDA read them; the kernels that multiply are under products."""
