"""From logits to a token on CUDA: filters, penalties, choice, log-probabilities; never keeps a state."""
