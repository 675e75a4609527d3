"""Writes a quantised copy of a model folder in the layout of compressed-tensors, with or without calibration data."""
