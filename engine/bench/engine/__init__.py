"""Benchmarks of an engine over a real device; never imports a server."""
