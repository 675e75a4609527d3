"""The operations of a decoder step on the CPU, in torch; never a kernel of a GPU."""
