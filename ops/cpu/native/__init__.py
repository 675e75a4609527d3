"""Kernels of the CPU in C: products of quantised weights, and the rest of a step beside them."""
