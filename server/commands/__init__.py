"""The commands of `headrace`: flags, what they open and what they print; never hold logic of the engine."""
