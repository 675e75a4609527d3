"""Adapters: the error tree that every layer shares, and how an adapter lies in memory; never imports the engine."""
