"""The runner of the CPU and its state of rows, adapters and grammars; never imports CUDA code."""
