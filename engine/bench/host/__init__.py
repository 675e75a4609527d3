"""Benchmarks of the host's side: scheduler, policies and event loop; never times a kernel."""
