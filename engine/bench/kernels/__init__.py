"""CUDA kernels alone and in chains of layers, against the memory's bandwidth; never opens an engine."""
