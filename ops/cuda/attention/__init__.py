"""Attention over paged keys and values on CUDA, for decodes and for prefills; the callers choose the kernel."""
