"""How deep steps speculate, and what came of it."""
