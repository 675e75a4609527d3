"""Choice of tokens from logits on CUDA: filters, penalties, choice, log-probabilities; keeps no state of its own."""
