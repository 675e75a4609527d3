"""The loop that drives a runner, and what the host does between its steps; never decides who is next."""
