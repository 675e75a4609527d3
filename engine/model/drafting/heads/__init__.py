"""Trained draft heads: what their checkpoints say, their weights, and the tokens that they guess from hidden states."""
