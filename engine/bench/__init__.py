"""Benchmarks that a user can run; never imported by the engine."""
