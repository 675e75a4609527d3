"""Encoders: their files, their arithmetic, and the runner that pools their hidden states; never generates a token."""
