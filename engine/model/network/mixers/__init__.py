"""Mixers: the half of a layer that lets a token see those before it; one file each."""
