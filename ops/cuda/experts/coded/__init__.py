"""Products with weights of experts in codes."""
