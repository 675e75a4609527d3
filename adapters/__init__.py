"""Adapters: the error tree that every layer shares; never imports the engine."""
