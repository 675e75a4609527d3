"""Products of 8-bit floats by 8-bit floats, for which activations are rounded to such floats."""
