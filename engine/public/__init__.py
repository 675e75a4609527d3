"""The methods of `Engine` besides opening, closing and generating, a file for each of their subjects."""
