"""Compiling, caching, packing and finding of kernels; knows nothing of what a kernel computes."""
