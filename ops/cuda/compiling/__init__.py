"""How kernels are compiled, kept, packed into a wheel and found again; never knows what one computes."""
