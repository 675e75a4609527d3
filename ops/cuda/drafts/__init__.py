"""Kernels of steps that verify drafts: their lines, which tokens are right, and guesses by a row's own tokens."""
