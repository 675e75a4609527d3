"""Drafts on a GPU: who guesses the tokens to come, and how a graph tells which guesses are right."""
