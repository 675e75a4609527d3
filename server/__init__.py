"""headrace.server: the command line; never imported by the engine."""
