"""Products of a step's rows with a weight on CUDA, and what is fused with them; never chooses the kernel."""
