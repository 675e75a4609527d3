"""Carries committed tokens to the readers of streams; never waits for a reader and never plans a step."""
