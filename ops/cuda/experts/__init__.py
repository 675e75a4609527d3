"""Mixtures of experts on CUDA (Triton): choices, products with the weights of the chosen experts, and their sums."""
