"""The operations of a decoder step on the CPU, in torch; without GPU kernels."""
