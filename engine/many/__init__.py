"""Runs many prompts, texts or pairs through one engine, as rows become free; never plans a step."""
