"""Encoders, from their files to the runner that pools their hidden states; never generates a token."""
