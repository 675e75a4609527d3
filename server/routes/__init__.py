"""headrace.server.routes: one file for each endpoint, which turns a body into a call of the engine."""
