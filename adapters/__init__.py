"""Adapters: the error tree that every layer shares, and the memory layout of an adapter; never imports the engine."""
