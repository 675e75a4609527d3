"""The runner of the CPU and what it keeps for rows, adapters and grammars; never imports what is for CUDA."""
