"""Products of a step's rows with a weight on CUDA, and operations fused with them; the callers choose the kernel."""
