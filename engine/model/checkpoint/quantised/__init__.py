"""Quantised weights in safetensors: one file for each family of layouts, and the reader that asks them."""
