"""The operations of a decoder step on CUDA, and the choice of their kernels; never imports CPU-only code."""
