"""The step loop that drives a runner, and the host's part between its steps; never decides who is next."""
