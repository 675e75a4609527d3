"""Families whose feeds are mixtures of experts, one file each, and what their configurations share (reading.py)."""
