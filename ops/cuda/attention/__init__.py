"""Attention over paged keys and values on CUDA, for decodes and for prefills; never chooses the kernel."""
