"""Guesses of the tokens that a row may choose next, and the formats of what makes them."""
