"""The operations of a decoder step on CUDA: which kernel computes what; never imports what is for the CPU."""
