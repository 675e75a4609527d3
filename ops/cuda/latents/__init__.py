"""Attention to latent vectors on CUDA: their pages, the kernels, and the operations of models that keep them."""
